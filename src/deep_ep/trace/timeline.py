"""Timeline: the spans of all ranks on one clock, and what can be read off them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class Kind(StrEnum):
    """What a span is."""

    STEP = "step"
    """One step of the program."""
    CALL = "call"
    """A call of the buffer: on a lane of the host while it runs there, on a stream while its kernels do."""
    IN_FLIGHT = "in flight"
    """Between the halves of a low-latency call with a hook: rows travel, and the rank is free to work."""
    WORK = "work"
    """What the program named with `recorder.span`."""
    WAIT = "wait"
    """Inside a call: nothing to do until a peer has done its part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that took time on one lane of one rank.

    Attributes:
        rank: The rank.
        lane: Where: a thread of the host, a stream of the GPU, or "in flight".
        kind: What it is.
        name: The operation, the name that the program gave, or what was awaited.
        step: The step it began in, -1 outside of steps.
        start_us: When it began, on the clock of rank 0, since recording began there.
        end_us: When it ended.
        waits_us: Of a wait: for how long it was for each rank.
    """

    rank: int
    lane: str
    kind: Kind
    name: str
    step: int
    start_us: float
    end_us: float
    waits_us: tuple[float, ...] = ()

    @property
    def duration_us(self) -> float:
        """Return how long it took."""
        return self.end_us - self.start_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the spans of one name were on one rank.

    Attributes:
        rank: The rank.
        lane: The lane.
        name: The operation or the name of the work.
        num_spans: How many there were.
        total_us: How long they took together.
        wait_us: How much of that was waiting for peers, so far as the engine can tell: on CPU ranks.
        overlap_us: How much of that other lanes of the rank were at work of the program.
        late_rank: The rank that was waited for longest, None if nobody was.
    """

    rank: int
    lane: str
    name: str
    num_spans: int
    total_us: float
    wait_us: float
    overlap_us: float
    late_rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The spans of all ranks.

    Attributes:
        num_ranks: How many ranks there are.
        device: "cpu" or the name of the GPU of rank 0.
        spans: All spans, by rank and start.
        clock_error_us: For each rank, by how much its times may be off against those of rank 0, at most.
    """

    num_ranks: int
    device: str
    spans: tuple[Span, ...]
    clock_error_us: tuple[float, ...] = field(default=())

    @property
    def num_steps(self) -> int:
        """Return how many steps were recorded."""
        return 1 + max((span.step for span in self.spans), default=-1)

    def lanes(self, rank: int) -> list[str]:
        """Return the lanes of a rank: the host's first, then its streams, then what is in flight."""
        found = dict.fromkeys(span.lane for span in self.spans if span.rank == rank)
        return sorted(found, key=lambda lane: (lane.startswith("in flight"), not lane.startswith("host"), lane))

    def of_steps(self, steps: Iterable[int]) -> Timeline:
        """Return the part of some steps."""
        chosen = set(steps)
        spans = tuple(span for span in self.spans if span.step in chosen)
        return Timeline(num_ranks=self.num_ranks, device=self.device, spans=spans, clock_error_us=self.clock_error_us)

    def summarise(self) -> list[Summary]:
        """Return what calls and works took, by rank, lane and name."""
        groups: dict[tuple[int, str, str], list[Span]] = {}
        for span in self.spans:
            if span.kind in (Kind.CALL, Kind.WORK, Kind.IN_FLIGHT):
                groups.setdefault((span.rank, span.lane, span.name), []).append(span)
        return [self._summarise(*key, spans) for key, spans in groups.items()]

    def _summarise(self, rank: int, lane: str, name: str, group: list[Span]) -> Summary:
        mine = [span for span in self.spans if span.rank == rank]
        waits = [
            wait
            for wait in mine
            if wait.kind == Kind.WAIT and wait.lane == lane and any(_holds(span, wait) for span in group)
        ]
        works = [span for span in mine if span.kind == Kind.WORK and span.lane != lane]
        per_peer = [sum(waited) for waited in zip(*(wait.waits_us for wait in waits), strict=True)]
        return Summary(
            rank=rank,
            lane=lane,
            name=name,
            num_spans=len(group),
            total_us=sum(span.duration_us for span in group),
            wait_us=sum(wait.duration_us for wait in waits),
            overlap_us=sum(_overlap_us(span, works) for span in group),
            late_rank=per_peer.index(max(per_peer)) if any(per_peer) else None,
        )

    def to_chrome(self) -> dict[str, Any]:
        """Return the timeline as Chrome's trace events, which ui.perfetto.dev and chrome://tracing read.

        A rank is a process there, a lane a thread; times are in microseconds.
        """
        events: list[dict[str, Any]] = []
        for rank in range(self.num_ranks):
            lanes = self.lanes(rank)
            events.append(_metadata("process_name", rank, 0, name=f"rank {rank}"))
            events.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
            for index, lane in enumerate(lanes):
                events.append(_metadata("thread_name", rank, index, name=lane))
                events.append(_metadata("thread_sort_index", rank, index, sort_index=index))
            mine = [span for span in self.spans if span.rank == rank]
            # Where two begin together, the longer one holds the other.
            mine.sort(key=lambda span: (span.start_us, -span.duration_us))
            events.extend(_chrome_event(span, lanes.index(span.lane)) for span in mine)
        other = {"device": self.device, "clock_error_us": list(self.clock_error_us)}
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}

    def save_chrome(self, path: str | Path) -> None:
        """Write `to_chrome` to a file."""
        Path(path).write_text(json.dumps(self.to_chrome()))

    def save_picture(self, path: str | Path, *, steps: Sequence[int] | None = None) -> None:
        """Draw lanes per rank, what overlaps and what waits.

        Args:
            path: The file; its ending says the format, such as .png or .svg.
            steps: Which to draw; None draws the last two.

        Raises:
            MissingExtraError: If matplotlib is not installed.
        """
        from deep_ep.trace.picture import draw

        draw(self, Path(path), steps)

    def to_json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Timeline:
        """Return what `to_json` has written."""
        fields = json.loads(text)
        spans = tuple(
            Span(**{**span, "kind": Kind(span["kind"]), "waits_us": tuple(span["waits_us"])})
            for span in fields.pop("spans")
        )
        return Timeline(spans=spans, clock_error_us=tuple(fields.pop("clock_error_us")), **fields)


def _holds(span: Span, inner: Span) -> bool:
    return span.start_us <= inner.start_us and inner.end_us <= span.end_us


def _overlap_us(span: Span, others: Iterable[Span]) -> float:
    """Return for how long at least one of the others ran during a span."""
    pieces = sorted(
        (max(other.start_us, span.start_us), min(other.end_us, span.end_us))
        for other in others
        if other.start_us < span.end_us and other.end_us > span.start_us
    )
    total, seen_until = 0.0, span.start_us
    for start, end in pieces:
        total += max(end - max(start, seen_until), 0.0)
        seen_until = max(seen_until, end)
    return total


def _metadata(what: str, rank: int, lane: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": arguments}


def _chrome_event(span: Span, lane: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {"step": span.step}
    for peer, waited_us in enumerate(span.waits_us):
        arguments[f"waited for rank {peer} (us)"] = round(waited_us, 3)
    return {
        "ph": "X",
        "name": span.name if span.kind != Kind.STEP else f"step {span.step}",
        "cat": str(span.kind),
        "pid": span.rank,
        "tid": lane,
        "ts": round(span.start_us, 3),
        "dur": round(span.duration_us, 3),
        "args": arguments,
    }
