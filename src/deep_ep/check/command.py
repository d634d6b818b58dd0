"""The command `deep-ep check`."""

from __future__ import annotations

from dataclasses import asdict

import click

from deep_ep import env, tuned
from deep_ep.bench import facts
from deep_ep.bench.ranks import choose_device
from deep_ep.check import first_call as first_calls
from deep_ep.check.exchange import Outcome, paths, try_path
from deep_ep.check.findings import Finding, Status, judge
from deep_ep.errors import ConfigError
from deep_ep.extras import require
from deep_ep.phases import PHASES
from deep_ep.screen import Screen

_EPILOG = """\b
When something is wrong:
  NVSHMEM is not found    this version needs none; NVSHMEM_DIR is looked at here
  connection times out    deep-ep check --ranks N, on each host
  overlap is not there    deep-ep bench --overlap
  many experts are slow   deep-ep bench --mode low-latency --experts 32,64,256
  is it worth it          deep-ep bench compares with torch.distributed
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--ranks",
    "num_ranks",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Bring up so many ranks and do a verified exchange on every path that there is.",
)
@click.option(
    "--timeout-s", type=click.FloatRange(min=1), default=120.0, show_default=True, help="Time limit of each exchange."
)
@click.option("--first-call", is_flag=True, help="Measure what the first call costs, with and without warming.")
@click.option("--plot", type=click.Path(dir_okay=False), help="With --first-call, draw the result to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print lines of JSON.")
def command(num_ranks: int, timeout_s: float, first_call: bool, plot: str | None, as_json: bool) -> None:
    """Tell whether this machine is right for deep_ep, and what to do if it is not.

    Exit code 1 if there is a problem; warnings are no problem.
    """
    screen = Screen()
    if plot and not first_call:
        raise ConfigError("--plot draws what --first-call measures, and that was not asked for")
    if first_call:
        _show_first_calls(screen, num_ranks or 2, plot, as_json=as_json)
        return
    machine = facts.look()
    findings = judge(machine)
    _show_findings(screen, findings, as_json=as_json)
    _show_variables(screen, as_json=as_json)
    _show_tunings(screen, machine.gpus[0].name if machine.gpus else tuned.cpu_device(), as_json=as_json)
    outcomes = []
    found = paths(len(machine.gpus), num_ranks) if num_ranks else []
    with screen.progress("exchanges", len(found)) as advance:
        for path in found:
            outcomes.append(try_path(path, num_ranks, timeout_s))
            advance()
    if outcomes:
        _show_outcomes(screen, outcomes, as_json=as_json)
    num_problems = sum(finding.status is Status.PROBLEM for finding in findings)
    num_problems += sum(outcome.error is not None for outcome in outcomes)
    num_warnings = sum(finding.status is Status.WARNING for finding in findings)
    status = Status.PROBLEM if num_problems else Status.WARNING if num_warnings else Status.OK
    if as_json:
        totals = {"status": status, "num_problems": num_problems, "num_warnings": num_warnings}
        screen.record({"kind": "summary", **totals})
    else:
        screen.line(
            f"{machine.device}:", status, f"({_count(num_problems, 'problem')}, {_count(num_warnings, 'warning')})"
        )
        if not num_ranks:
            screen.note("`deep-ep check --ranks 2` also does a verified exchange on every path.")
    raise SystemExit(1 if num_problems else 0)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _show_findings(screen: Screen, findings: list[Finding], *, as_json: bool) -> None:
    if as_json:
        for finding in findings:
            screen.record({"kind": "finding", **asdict(finding)})
        return
    rows = [[f.name, f.found, f.minimum, f.recommended, f.status, f.advice] for f in findings]
    screen.table(["what", "found", "needed", "recommended", "", "advice"], rows)


def _show_variables(screen: Screen, *, as_json: bool) -> None:
    rows = []
    for variable in env.ALL_VARIABLES:
        try:
            value = str(variable.get())
        except ConfigError:
            value = "unreadable"
        rows.append([variable.name, variable.text or "not set", value, variable.meaning])
    columns = ["variable", "set to", "in force", "meaning"]
    if not as_json:
        screen.table(columns, rows)
        return
    for name, text, value, meaning in rows:
        is_set = text != "not set"
        fields = {"name": name, "text": text if is_set else None, "in_force": value, "meaning": meaning}
        screen.record({"kind": "variable", **fields})


def _show_tunings(screen: Screen, device: str, *, as_json: bool) -> None:
    """Tell which launch parameters will be used, and where they come from."""
    entries = tuned.find_all(device)
    for entry, path in entries:
        if as_json:
            screen.record({"kind": "tuning", "device": device, "file": str(path), "entry": entry})
            continue
        parameters = ", ".join(f"{name}={value}" for name, value in entry.get("parameters", {}).items())
        gain = 100 * (entry.get("gain", 1) - 1)
        words = f"{gain:.0f} % faster than the defaults when it was found" if gain > 0 else "nothing was found faster"
        screen.line(f"Tuning of {entry.get('num_ranks')} ranks: {entry.get('kind')}({parameters}), {words} ({path}).")
    if not entries and not as_json:
        screen.line(f"Tuning: the defaults, as `deep-ep tune` has found nothing for {device}.")


def _show_outcomes(screen: Screen, outcomes: list[Outcome], *, as_json: bool) -> None:
    if as_json:
        for outcome in outcomes:
            screen.record({"kind": "exchange", **asdict(outcome)})
        return
    for outcome in outcomes:
        word = f"{outcome.path}, {_count(outcome.num_ranks, 'rank')}:"
        if outcome.error is None:
            screen.line(word, Status.OK, f"({_count(outcome.num_claims, 'claim')} verified in {outcome.seconds:.1f} s)")
            for line in outcome.topology.splitlines():
                screen.line(f"  {line}")
        else:
            screen.line(word, Status.PROBLEM, outcome.error)


def _show_first_calls(screen: Screen, num_ranks: int, plot: str | None, *, as_json: bool) -> None:
    """Measure each mode with a plain and with a preinitialized buffer."""
    if plot:
        require("plot")
    device = choose_device(None)
    shapes = first_calls.GPU_SHAPES if device == "cuda" else first_calls.CPU_SHAPES
    results = []
    with screen.progress("first calls", 2 * len(shapes)) as advance:
        for shape in shapes:
            for preinitialize in (False, True):
                results += first_calls.measure([shape], num_ranks, device, preinitialize=preinitialize)
                advance()
    if as_json:
        for result in results:
            ratio = {"first_us": result.first_us, "median_us": result.median_us, "ratio": result.ratio}
            screen.record({"kind": "first_call", "num_ranks": num_ranks, "device": device, **asdict(result), **ratio})
    else:
        rows = []
        for result in results:
            total_ms = sum(result.phases_ms.values()) or 1.0
            phases = [f"{ms:.1f} ({100 * ms / total_ms:.0f} %)" for ms in result.phases_ms.values()]
            rows.append([first_calls.label(result), f"{result.construct_ms:.1f}", *phases])
        phase_columns = [f"{name}>" for name in PHASES]
        title = f"Constructor, ms, {_count(num_ranks, 'rank')} on {device}, most of any rank"
        screen.table(["buffer", "wall>", *phase_columns], rows, title)
        calls = [[first_calls.label(r), f"{r.first_us:.0f}", f"{r.median_us:.0f}", f"{r.ratio:.2f}"] for r in results]
        screen.table(["buffer", "first>", "median>", "ratio>"], calls, "Dispatch and combine, us, slowest rank")
    if plot:
        first_calls.draw(results, plot)
