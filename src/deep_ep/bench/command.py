"""The command `deep-ep bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import click

from deep_ep import extras
from deep_ep.bench import facts, oracle
from deep_ep.bench.case import CASES, DEFAULT_CASES, Case, with_routing
from deep_ep.bench.launcher import find_place
from deep_ep.bench.measure import Record, measure, time_sms
from deep_ep.bench.overlap import measure_overlap
from deep_ep.bench.ranks import Rank, choose_device, joined, run_ranks
from deep_ep.errors import ConfigError
from deep_ep.screen import Screen

_MAX_SMS = 1024


class Numbers(click.ParamType[list[int]]):
    """Whole numbers with commas between them."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """Read the text."""
        if isinstance(value, list):
            return value
        try:
            return [int(word) for word in value.split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers like 64,256", param, ctx)


def _list_cases(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        rows = [[case.name, case.mode, case.shape] for case in CASES.values()]
        Screen().table(["name", "mode", "shape"], rows)
        ctx.exit()


@click.command
@click.argument("names", nargs=-1, metavar="[CASE]...")
@click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=_list_cases, help="List named cases.")
@click.option("--mode", type=click.Choice(["normal", "low-latency"]), help="Which calls.")
@click.option("--tokens", type=Numbers(), help="Tokens of each rank.")
@click.option("--hidden", type=Numbers(), help="Size of a token's row.")
@click.option("--topk", type=Numbers(), help="Experts of a token.")
@click.option("--experts", type=Numbers(), help="Experts on all ranks.")
@click.option("--dtype", type=click.Choice(["bf16", "fp8"]), help="Of the rows that a dispatch sends.")
@click.option(
    "--routing",
    default="uniform",
    show_default=True,
    help="uniform, zipf (popular experts), one-hot (all tokens to one expert), or a file that torch.save wrote.",
)
@click.option("--ranks", "num_ranks", type=click.IntRange(min=1), help="How many  [default: 2, or one for each GPU]")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="What ranks run on  [default: GPUs, if any]")
@click.option("--iterations", type=click.IntRange(min=1), default=30, show_default=True, help="Times of each call.")
@click.option("--overlap", is_flag=True, help="Also measure how much hides behind a matrix product.")
@click.option("--sms", type=Numbers(), help="Also time normal mode with so many SMs. For GPUs.")
@click.option("--plot", type=click.Path(dir_okay=False, writable=True), help="Draw latency and bandwidth to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each case.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=1),
    default=1800.0,
    show_default=True,
    help="Time limit of ranks that it starts.",
)
def command(
    names: tuple[str, ...], routing: str, num_ranks: int | None, device: str | None, plot: str | None, **options: Any
) -> None:
    r"""Verify exchanges against the specification, then time them beside torch.distributed in the same run.

    A CASE is a name (see --list); flags change its numbers, and lists of numbers make several cases of one. Without a
    name, flags make a case of their own; without either, a few cases that suit the device are timed. Started by
    torchrun or mpirun, the ranks are theirs.

    \b
    deep-ep bench
    deep-ep bench train --ranks 8 --sms 8,16,24
    deep-ep bench --tokens 16,64,256,1024 --plot curve.png
    deep-ep bench --mode low-latency --experts 32,64,256 --overlap
    """
    screen = Screen()
    if plot:
        extras.require("plot")
    device = choose_device(device)
    if options["sms"] and device == "cpu":
        raise ConfigError("--sms is for GPUs, but ranks run on the CPU, which has no SMs to choose")
    if options["sms"] and not all(0 < num_sms <= _MAX_SMS and num_sms % 2 == 0 for num_sms in options["sms"]):
        raise ConfigError(f"--sms must be even numbers from 2 to {_MAX_SMS}, got {options['sms']}")
    cases = [with_routing(case, routing) for case in choose_cases(names, device, options)]
    measured = (cases, options["iterations"], options["overlap"], options["sms"] or [])
    place = find_place()
    machine = facts.look()
    records: list[Record] = []
    if place is not None:
        if num_ranks not in (None, place.num_ranks):
            raise ConfigError(f"--ranks is {num_ranks}, but the launcher started {place.num_ranks} ranks")
        with joined(place, device) as rank:
            rank.report = records.append
            run_cases(rank, *measured)
        if place.rank:
            return
    else:
        num_ranks = num_ranks or (2 if device == "cpu" else max(len(machine.gpus), 1))
        screen.note(f"Bringing up {num_ranks} {'rank' if num_ranks == 1 else 'ranks'} on {machine.device}.")
        with screen.progress("cases", len(cases)) as advance:
            run_ranks(
                num_ranks,
                run_cases,
                *measured,
                device=device,
                timeout_s=options["timeout_s"],
                on_report=_collect(screen, records, advance),
            )
    told = {"machine": machine.device, "driver": machine.driver, **facts.versions()}
    if options["as_json"]:
        for record in records:
            screen.record(record | told)
    else:
        _show(screen, records)
    if plot:
        from deep_ep.bench.plot import draw

        draw(records, _title(records, told), plot)
        screen.note(f"The picture is in {plot}.")


def choose_cases(names: tuple[str, ...], device: str, options: dict[str, Any]) -> list[Case]:
    """Return the cases that names and flags mean.

    Raises:
        ConfigError: If a name is unknown.
    """
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise ConfigError(f"there is no case {unknown[0]!r}", hint=f"one of {', '.join(CASES)}")
    flags = {"num_tokens": "tokens", "hidden": "hidden", "num_topk": "topk", "num_experts": "experts"}
    lists = {field: options[flag] for field, flag in flags.items() if options[flag] is not None}
    words = {field: options[field] for field in ("mode", "dtype") if options[field] is not None}
    is_custom = not names and bool(lists or words)
    chosen = [Case()] if is_custom else [CASES[name] for name in names or DEFAULT_CASES[device]]
    return [
        replace(case, **words, **dict(zip(lists, numbers, strict=True)))
        for case in chosen
        for numbers in product(*lists.values())
    ]


def run_cases(rank: Rank, cases: list[Case], num_iterations: int, has_overlap: bool, sms: list[int]) -> None:
    """Measure cases on this rank; rank 0 reports a record for each."""
    for case in cases:
        buffer = oracle.make_buffer(rank, case)
        try:
            record = measure(rank, buffer, case, num_iterations)
            if has_overlap and (case.mode != "normal" or rank.device.type == "cuda"):
                times = measure_overlap(rank, buffer, case, num_iterations)
                record["overlap"] = {name: float(f"{value:.3g}") for name, value in times.items()}
            if sms and case.mode == "normal":
                record["sms"] = [
                    {"num_sms": num_sms, **time_sms(rank, buffer, case, num_sms, num_iterations)} for num_sms in sms
                ]
        finally:
            buffer.destroy()
        if rank.rank == 0:
            rank.report(record)


def _collect(screen: Screen, records: list[Record], advance: Callable[[], None]) -> Callable[[Record], None]:
    def collect(record: Record) -> None:
        records.append(record)
        screen.note(
            f"{record['name']}, {record['num_tokens']} tokens: {record['num_claims']} claims verified, then timed."
        )
        advance()

    return collect


def _show(screen: Screen, records: list[Record]) -> None:
    columns = ["case", "shape", "routing", "call", "us>", "GB/s>", "torch us>", "ratio>"]
    screen.table(columns, [row for record in records for row in _rows(record)])
    for record in records:
        if "overlap" in record:
            overlap = (
                "{overlap:.0%} (exchange {exchange_us:.0f} us, compute {compute_us:.0f} us, both {both_us:.0f} us)"
            )
            screen.line(f"Overlap of {record['name']}: {overlap.format(**record['overlap'])}")
    swept = [record for record in records if "sms" in record]
    if swept:
        rows = [
            [record["name"], str(line["num_sms"]), *(_us(line[f"{call}_us"]) for call in _SWEPT)]
            for record in swept
            for line in record["sms"]
        ]
        screen.table(["case", "SMs>", "dispatch us>", "cached dispatch us>", "combine us>"], rows)


_SWEPT = ("dispatch", "dispatch_cached", "combine")


def _rows(record: Record) -> Iterator[list[str]]:
    """Make the lines of a case: one for each call."""
    num_tokens, hidden = record["num_tokens"], record["hidden"]
    shape = f"{num_tokens} x {hidden}, top-{record['num_topk']} of {record['num_experts']}, {record['dtype']}"
    routing = record["routing"] if "/" not in record["routing"] else Path(record["routing"]).name
    names = [record["name"], shape, routing]
    for call in ("dispatch", "dispatch_cached", "combine", "pair"):
        if f"{call}_us" not in record:
            continue
        cells = [_us(record[f"{call}_us"])]
        cells += [f"{record[f'{call}_gb_per_s']:.2f}"] if f"{call}_gb_per_s" in record else [""]
        has_rival = f"torch_{call}_us" in record
        cells += [_us(record[f"torch_{call}_us"]), f"{record[f'{call}_ratio']:.2f} x"] if has_rival else ["", ""]
        yield [*names, {"dispatch_cached": "cached dispatch"}.get(call, call), *cells]
        names = ["", "", ""]


def _us(us: float) -> str:
    return f"{us:,.0f}" if us >= 1000 else f"{us:.1f}"


def _title(records: list[Record], told: dict[str, Any]) -> str:
    kind = "GPU" if records[0]["device"] == "cuda" else "CPU"
    version = f" {told['deep_ep']}" if told["deep_ep"] else ""
    num_ranks = records[0]["num_ranks"]
    ranks = f"{num_ranks} {kind} rank{'' if num_ranks == 1 else 's'}"
    return f"deep_ep{version}, {ranks} on {told['machine']}, torch {told['torch']}"
