"""Who waits for whom: the reports of ranks that have waited in vain, gathered from their logs into one table.

Each `PeerTimeoutError` tells what one rank knows. What has happened shows when they are laid side by side: the rank
that others wait for and that has reported nothing itself is the one to look at, and two ranks that wait for each other
are in different calls. `deep-ep waits rank*.log` does that.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click

from deep_ep.screen import Screen

_CPU = re.compile(
    r"rank (?P<rank>\d+): no sign of (?P<awaited>.+?) in (?P<call>.+?) from ranks \[(?P<missing>[\d, ]+)\] "
    r"after (?P<after>[\d.]+) s \((?P<kind>step|call) (?P<number>\d+) is awaited; (?P<seen>.*?)\)"
)
_GPU = re.compile(
    r"rank (?P<rank>\d+): waited (?P<after>[\d.]+) s for rank (?P<missing>\d+) and its (?P<awaited>.+?) "
    r"\((?P<kind>launch|low-latency call) (?P<number>\d+), last seen (?P<seen>-?\d+)\)"
)


@dataclass(frozen=True, slots=True)
class Wait:
    """What one rank has waited for in vain.

    Attributes:
        rank: The rank.
        missing: The ranks that it waited for.
        call: The call it was in.
        number: The number of the step, call or launch.
        awaited: What it waited for.
        seen: How far it saw the missing ranks.
        after_s: How long it waited.
    """

    rank: int
    missing: tuple[int, ...]
    call: str
    number: str
    awaited: str
    seen: str
    after_s: float


def find_waits(text: str) -> list[Wait]:
    """Find all reports in a text, each once, in the order of ranks."""
    waits = set()
    for pattern in (_CPU, _GPU):
        for match in pattern.finditer(text):
            fields = match.groupdict()
            missing = tuple(int(rank) for rank in fields["missing"].split(","))
            seen = fields["seen"] if pattern is _CPU else f"rank {missing[0]} is at {fields['seen']}"
            number = f"{fields['kind']} {fields['number']}"
            call = fields.get("call") or ("low latency" if "low-latency" in fields["kind"] else "normal mode")
            waits.add(Wait(int(fields["rank"]), missing, call, number, fields["awaited"], seen, float(fields["after"])))
    return sorted(waits, key=lambda wait: (wait.rank, wait.number))


def conclude(waits: Iterable[Wait]) -> list[str]:
    """Say what follows from the reports of all ranks together."""
    awaited_by: dict[int, set[int]] = {}
    for wait in waits:
        for peer in wait.missing:
            awaited_by.setdefault(peer, set()).add(wait.rank)
    reporters = {rank for ranks in awaited_by.values() for rank in ranks}
    told = [
        f"rank {peer} is awaited by ranks {sorted(ranks)} and has reported nothing: look there first"
        for peer, ranks in sorted(awaited_by.items())
        if peer not in reporters
    ]
    pairs = [
        (rank, peer)
        for peer, ranks in awaited_by.items()
        for rank in ranks
        if rank < peer and peer in awaited_by.get(rank, set())
    ]
    return told + [
        f"ranks {rank} and {peer} wait for each other: they make different calls, or use two buffers in opposite order"
        for rank, peer in sorted(pairs)
    ]


@click.command()
@click.argument("logs", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def command(logs: tuple[Path, ...]) -> None:
    """Show who waited for whom, and in which call, from the logs of all ranks (or from stdin)."""
    texts = [log.read_text(errors="replace") for log in logs] or [sys.stdin.read()]
    waits = find_waits("\n".join(texts))
    screen = Screen()
    if not waits:
        screen.line("No rank has reported that it waited in vain.")
        return
    rows = [
        (str(w.rank), w.call, w.number, w.awaited, ", ".join(map(str, w.missing)), w.seen, f"{w.after_s:g}")
        for w in waits
    ]
    screen.table(("rank>", "in", "number", "waited for", "of ranks", "seen", "s>"), rows)
    for sentence in conclude(waits):
        screen.line(sentence)
    raise SystemExit(1)
