"""The command `deep-ep tune`."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import click
import torch

from deep_ep import tuned
from deep_ep.bench import facts
from deep_ep.bench.case import CASES, Case
from deep_ep.bench.ranks import Rank, choose_device, run_ranks
from deep_ep.errors import ConfigError
from deep_ep.screen import Screen
from deep_ep.tune.search import SPACES, Outcome, Trial, enough_sms, kind_of, search, sweep_sms
from deep_ep.tuning import GpuTuning

DEFAULT_CASES = {"cpu": ("tiny", "medium", "chat"), "cuda": ("train", "mixtral", "decode", "decode-8")}
_MIN_LIMIT_S = 120.0


@click.command
@click.argument("names", nargs=-1, metavar="[CASE]...")
@click.option("--ranks", "num_ranks", type=click.IntRange(min=1), help="How many  [default: 2, or one for each GPU]")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="What ranks run on  [default: GPUs, if any]")
@click.option("--iterations", type=click.IntRange(min=4), default=40, show_default=True, help="Times of each call.")
@click.option(
    "--budget-s",
    type=click.FloatRange(min=0),
    default=300.0,
    show_default=True,
    help="Begin no candidate after so many seconds, of each kind of tuning.",
)
@click.option("--reset", is_flag=True, help="Remove what was found for this device, and search nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print lines of JSON.")
def command(
    names: tuple[str, ...],
    num_ranks: int | None,
    device: str | None,
    iterations: int,
    budget_s: float,
    reset: bool,
    as_json: bool,
) -> None:
    """Search for the fastest launch parameters of this device, and keep them for the next start.

    Parameters are searched for the CASEs named (see `deep-ep bench --list`), or a few that suit the device. Results of
    a candidate are verified before it can win, and what does not beat the default beyond noise is not kept. The
    outcome is a file in DEEP_EP_CACHE_DIR, for this device and this number of ranks; `deep-ep check` says what is used.
    """
    screen = Screen()
    device = choose_device(device)
    name = tuned.cpu_device() if device == "cpu" else torch.cuda.get_device_name()
    if reset:
        path = tuned.remove(name)
        screen.line(f"Removed {path}." if path else f"Nothing was found for {name} so far.")
        return
    unknown = [word for word in names if word not in CASES]
    if unknown:
        raise ConfigError(f"there is no case {unknown[0]!r}", hint=f"one of {', '.join(CASES)}")
    cases = [CASES[word] for word in names or DEFAULT_CASES[device]]
    num_ranks = num_ranks or (2 if device == "cpu" else torch.cuda.device_count())
    kinds = list(dict.fromkeys(kind_of(case, device) for case in cases))
    screen.note(f"Bringing up {num_ranks} {'rank' if num_ranks == 1 else 'ranks'} on {name}.")
    num_trials = sum(len(values) for kind in kinds for values in SPACES[kind].values())
    with screen.progress("candidates", num_trials) as advance:

        def on_report(trial: Trial) -> None:
            _note(screen, trial)
            advance()

        outcomes = run_ranks(
            num_ranks,
            tune_on_rank,
            cases,
            device,
            iterations,
            budget_s,
            device=device,
            timeout_s=len(kinds) * (2 * budget_s + _MIN_LIMIT_S),
            on_report=on_report,
        )[0]
    for kind, outcome in zip(kinds, outcomes, strict=True):
        chosen = [case for case in cases if kind_of(case, device) is kind]
        entry = make_entry(outcome, chosen, num_ranks)
        path = tuned.save(name, entry)
        if as_json:
            screen.record({"device": name, "file": str(path), **entry})
        else:
            _show(screen, outcome, chosen)
            screen.line(f"Kept in {path}.")


def tune_on_rank(rank: Rank, cases: Sequence[Case], device: str, num_iterations: int, budget_s: float) -> list[Outcome]:
    """Search each kind of tuning that the cases depend on."""
    outcomes = []
    for kind in dict.fromkeys(kind_of(case, device) for case in cases):
        chosen = [case for case in cases if kind_of(case, device) is kind]
        outcome = search(rank, kind(), SPACES[kind], chosen, num_iterations, budget_s)
        if kind is GpuTuning:
            outcome.sms = sweep_sms(rank, outcome.tuning, chosen, num_iterations)
        outcomes.append(outcome)
    return outcomes


def make_entry(outcome: Outcome, cases: Sequence[Case], num_ranks: int) -> dict[str, Any]:
    """Return what is kept in the file: parameters, gain and times, what was tried, date and versions."""
    return {
        "kind": type(outcome.tuning).__name__,
        "num_ranks": num_ranks,
        "parameters": tuned.parameters_of(outcome.tuning),
        "gain": round(outcome.gain, 3),
        "noise": round(outcome.noise, 3),
        "cases": [f"{case.mode}: {case.shape}" for case in cases],
        "default_us": [round(us, 1) for us in outcome.default_us],
        "tuned_us": [round(us, 1) for us in outcome.tuned_us],
        "num_trials": len(outcome.trials),
        "is_complete": outcome.is_complete,
        "us_by_num_sms": outcome.sms,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **facts.versions(),
    }


def _note(screen: Screen, trial: Trial) -> None:
    parameters = ", ".join(f"{name}={value}" for name, value in trial.parameters.items()) or "defaults"
    ratio = f"{trial.ratio:.2f} x the time of the best so far"
    screen.note(f"{parameters}: {ratio}, {trial.verdict}{f' ({trial.reason})' if trial.reason else ''}")


def _show(screen: Screen, outcome: Outcome, cases: Sequence[Case]) -> None:
    kind = type(outcome.tuning)
    changed = {
        name: value
        for name, value in tuned.parameters_of(outcome.tuning).items()
        if value != tuned.parameters_of(kind())[name]
    }
    words = ", ".join(f"{name}={value}" for name, value in changed.items())
    screen.line(f"{kind.__name__}: {words or 'the defaults are best'} ({len(outcome.trials)} candidates tried)")
    rows = [
        [case.name, case.shape, f"{default_us:,.1f}", f"{tuned_us:,.1f}", f"{default_us / tuned_us:.2f} x"]
        for case, default_us, tuned_us in zip(cases, outcome.default_us, outcome.tuned_us, strict=True)
    ]
    screen.table(["case", "shape", "default us>", "tuned us>", "gain>"], rows)
    if outcome.sms:
        num_sms = enough_sms(outcome.sms, outcome.noise)
        times = ", ".join(f"{count} SMs {us:,.1f} us" for count, us in outcome.sms.items())
        screen.line(f"{times}: Buffer.set_num_sms({num_sms}) is enough, and leaves the others to the model.")
    if not outcome.is_complete:
        screen.note("Time was up before all candidates were tried; --budget-s gives more.")
