"""What of the metrics is shown: a line for each rank and operation, and one for each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deep_ep.monitor.ranks import Process


@dataclass
class Reading:
    """The metrics of one buffer at one time."""

    pid: int
    rank: int
    buffer: int
    num_ranks: int = 0
    device: str = ""
    calls: Counter[str] = field(default_factory=Counter)
    median_s: dict[str, float] = field(default_factory=dict)
    p99_s: dict[str, float] = field(default_factory=dict)
    moved_bytes: Counter[str] = field(default_factory=Counter)
    wait_s: Counter[int] = field(default_factory=Counter)
    expert_tokens: Counter[int] = field(default_factory=Counter)


Key = tuple[int, int]
"""Process id and number of the buffer."""


def read(scraped: Iterable[tuple[Process, list[Any]]]) -> dict[Key, Reading]:
    """Return what processes say, by buffer."""
    readings: dict[Key, Reading] = {}
    for process, families in scraped:
        for sample in (sample for family in families for sample in family.samples):
            labels = sample.labels
            if "buffer" in labels:
                key = (process.pid, int(labels["buffer"]))
                reading = readings.setdefault(key, Reading(*key[:1], int(labels["rank"]), key[1]))
                _take(reading, sample.name.removeprefix("deep_ep_"), labels, sample.value)
    return dict(sorted(readings.items(), key=lambda item: (item[1].rank, item[0])))


def _take(reading: Reading, name: str, labels: dict[str, str], value: float) -> None:
    if name == "buffer_info":
        reading.num_ranks, reading.device = int(labels["num_ranks"]), labels["device"]
    elif name == "calls_total":
        reading.calls[labels["operation"]] = int(value)
    elif name == "call_median_seconds":
        reading.median_s[labels["operation"]] = value
    elif name == "call_p99_seconds":
        reading.p99_s[labels["operation"]] = value
    elif name == "moved_bytes_total":
        reading.moved_bytes[labels["operation"]] = int(value)
    elif name == "peer_wait_seconds_total":
        reading.wait_s[int(labels["peer"])] = value  # type: ignore[assignment]
    elif name == "expert_tokens_total":
        reading.expert_tokens[int(labels["expert"])] = int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationLine:
    """One operation of one rank. Rates are None until there are two readings."""

    rank: int
    pid: int
    buffer: int
    operation: str
    num_calls: int
    calls_per_s: float | None
    median_us: float
    p99_us: float
    gb_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLine:
    """One rank: what it waits for, and how its experts are loaded, since the reading before, or since it began."""

    rank: int
    pid: int
    buffer: int
    num_ranks: int
    device: str
    wait_s: float
    wait_share: float | None
    late_rank: int | None
    num_tokens: int
    busiest_expert: int | None
    imbalance: float | None


def operation_lines(now: dict[Key, Reading], before: dict[Key, Reading], interval_s: float) -> list[OperationLine]:
    """Return the lines of all operations, with the rates between two readings."""
    lines = []
    for key, reading in now.items():
        old = before.get(key)
        for operation, num_calls in reading.calls.items():
            calls_per_s = gb_per_s = None
            if old is not None:
                calls_per_s = (num_calls - old.calls[operation]) / interval_s
                if operation in reading.moved_bytes:
                    gb_per_s = (reading.moved_bytes[operation] - old.moved_bytes[operation]) / interval_s / 1e9
            lines.append(
                OperationLine(
                    rank=reading.rank,
                    pid=reading.pid,
                    buffer=reading.buffer,
                    operation=operation,
                    num_calls=num_calls,
                    calls_per_s=calls_per_s,
                    median_us=reading.median_s[operation] * 1e6,
                    p99_us=reading.p99_s[operation] * 1e6,
                    gb_per_s=gb_per_s,
                )
            )
    return lines


def rank_lines(now: dict[Key, Reading], before: dict[Key, Reading], interval_s: float) -> list[RankLine]:
    """Return a line for each buffer."""
    lines = []
    for key, reading in now.items():
        old = before.get(key)
        waits, tokens = reading.wait_s, reading.expert_tokens
        if old is not None:
            waits, tokens = _since(waits, old.wait_s), _since(tokens, old.expert_tokens)
        late_rank, wait_s = max(waits.items(), key=lambda item: item[1], default=(None, 0.0))
        num_tokens = sum(tokens.values())
        lines.append(
            RankLine(
                rank=reading.rank,
                pid=reading.pid,
                buffer=reading.buffer,
                num_ranks=reading.num_ranks,
                device=reading.device,
                wait_s=wait_s,
                wait_share=None if old is None else min(wait_s / interval_s, 1.0),
                late_rank=late_rank if wait_s > 0 else None,
                num_tokens=num_tokens,
                busiest_expert=max(tokens, key=tokens.__getitem__) if num_tokens else None,
                imbalance=max(tokens.values()) * len(tokens) / num_tokens if num_tokens else None,
            )
        )
    return lines


def _since(now: Counter[int], before: Counter[int]) -> Counter[int]:
    return Counter({key: value - before[key] for key, value in now.items()})


OPERATION_COLUMNS = ("rank>", "operation", "calls>", "calls/s>", "median us>", "p99 us>", "GB/s>")
RANK_COLUMNS = ("rank>", "of>", "pid>", "device", "waits>", "longest for", "tokens>", "busiest expert>", "imbalance>")


def operation_rows(lines: Sequence[OperationLine]) -> list[tuple[str, ...]]:
    """Return lines as cells."""
    return [
        (
            str(line.rank),
            line.operation,
            f"{line.num_calls:,}",
            _number(line.calls_per_s, ",.1f"),
            f"{line.median_us:,.0f}",
            f"{line.p99_us:,.0f}",
            _number(line.gb_per_s, ".3f"),
        )
        for line in lines
    ]


def rank_rows(lines: Sequence[RankLine]) -> list[tuple[str, ...]]:
    """Return lines as cells."""
    return [
        (
            str(line.rank),
            str(line.num_ranks),
            str(line.pid),
            line.device,
            f"{line.wait_s:.1f} s" if line.wait_share is None else f"{line.wait_share:.0%}",
            "" if line.late_rank is None else f"rank {line.late_rank}",
            f"{line.num_tokens:,}",
            _number(line.busiest_expert, "d"),
            _number(line.imbalance, ".2f"),
        )
        for line in lines
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
