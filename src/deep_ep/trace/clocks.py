"""Clocks: how the times of several ranks, and of GPUs, come onto one.

**Ranks.** Ranks of one running kernel (same boot id) read the same monotonic clock. Between others, ranks gather each
other's clocks a few times. A rank that read `before`, got `theirs` and then read `after` knows that the other clock
showed `theirs` before it itself showed `after`; and that the other one, which read `their_after` at its end, did so
after this rank had read `before`. So the difference d, to be added to this rank's time to get the other's, lies in

    theirs - after <= d <= their_after - before

Example: before = 100, after = 140, theirs = 1120, their_after = 1160: d is from 980 to 1060. A second round that gives
1010 to 1090 leaves 1010 to 1060; 1035 is then right within 25.

**GPUs.** Events tell times between each other only. An event that was recorded on an idle stream between two readings
of the host's clock, and had happened by the second, lies between the two; several of these leave a narrow interval for
the difference, in the same way. They are taken when recording begins and when it ends, and what is between is drawn in
proportion, for the two clocks drift.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import Any, Protocol

import torch

AllGather = Callable[[Sequence[int]], list[list[int]]]
_NUM_ROUNDS = 16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Offset:
    """What to add to a time of one clock to get that of another: from `low` to `high`."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """Return the likeliest value."""
        return (self.low + self.high) / 2

    @property
    def error(self) -> float:
        """Return by how much the middle may be wrong."""
        return (self.high - self.low) / 2

    def meet(self, other: Offset) -> Offset:
        """Return what both allow; the later one where clocks have drifted apart so that nothing is."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        return Offset(low, high) if low <= high else other


def boot_id_words() -> list[int]:
    """Return what tells one running kernel from another, as two integers; zeros if that cannot be read."""
    try:
        raw = bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return [0, 0]
    return [int.from_bytes(raw[i : i + 8], "little", signed=True) for i in (0, 8)]


def offset_to_first_rank(rank: int, all_gather: AllGather, clock: Callable[[], int] = monotonic_ns) -> Offset:
    """Return what to add to this rank's clock to get that of rank 0, in ns. All ranks call it together."""
    ids = all_gather(boot_id_words())
    if all(words == ids[0] and any(words) for words in ids):
        return Offset(0, 0)
    found = Offset(float("-inf"), float("inf"))
    for _ in range(_NUM_ROUNDS):
        before = clock()
        theirs = all_gather([before])[0][0]
        after = clock()
        their_after = all_gather([after])[0][0]
        found = found.meet(Offset(theirs - after, their_after - before))
    return Offset(0, 0) if rank == 0 else found


class TimedEvent(Protocol):
    """What of `torch.cuda.Event` is used here."""

    def record(self) -> None:
        """Mark this point of the current stream."""

    def query(self) -> bool:
        """Return whether the point has been passed."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the time from this point to another, in ms."""


def new_cuda_event() -> TimedEvent:
    """Return an event that can tell times."""
    event: TimedEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


class DeviceClock:
    """Turns events of a GPU into times of the host.

    An event's time since another is a float of 24 bits, so it is measured from a near one: from the last anchor.

    Args:
        new_event: Makes events.
        clock: The host's clock, in ns.
    """

    def __init__(
        self, new_event: Callable[[], TimedEvent] = new_cuda_event, clock: Callable[[], int] = monotonic_ns
    ) -> None:
        self._new_event, self._clock = new_event, clock
        self._anchor = new_event()
        self._anchor.record()
        self._anchors: list[TimedEvent] = [self._anchor]
        self._device_ns: list[float] = [0.0]
        self._begin = self._compare(0.0)
        self._end, self._end_ns = self._begin, 0.0

    def drop_anchor(self) -> int:
        """Record an anchor on the current stream; return its number, for events that come after it."""
        anchor = self._new_event()
        anchor.record()
        self._anchors.append(anchor)
        return len(self._anchors) - 1

    def stop(self) -> None:
        """Take the last comparison. What was recorded must have happened."""
        for before, anchor in zip(self._anchors, self._anchors[1:], strict=False):
            self._device_ns.append(self._device_ns[-1] + before.elapsed_time(anchor) * 1e6)
        self.drop_anchor()
        last = self._anchors[-1]
        while not last.query():
            pass
        self._end_ns = self._device_ns[-1] + self._anchors[-2].elapsed_time(last) * 1e6
        self._device_ns.append(self._end_ns)
        self._end = self._compare(self._end_ns)

    def host_ns(self, event: TimedEvent, anchor: int) -> float:
        """Return when an event was, on the clock of the host; after `stop`."""
        device_ns = self._device_ns[anchor] + self._anchors[anchor].elapsed_time(event) * 1e6
        share = device_ns / self._end_ns if self._end_ns else 0.0
        return device_ns + self._begin.middle + share * (self._end.middle - self._begin.middle)

    @property
    def error_ns(self) -> float:
        """Return by how much times may be off."""
        return max(self._begin.error, self._end.error)

    def _compare(self, base_ns: float) -> Offset:
        """Return what to add to a time of the device to get the host's; the stream must be idle."""
        base = self._anchors[-1]
        found = Offset(float("-inf"), float("inf"))
        for _ in range(_NUM_ROUNDS):
            event = self._new_event()
            before = self._clock()
            event.record()
            while not event.query():
                pass
            after = self._clock()
            device_ns = base_ns + base.elapsed_time(event) * 1e6
            found = found.meet(Offset(before - device_ns, after - device_ns))
        return found
