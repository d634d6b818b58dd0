"""How long the calls of a buffer take: `buffer.latency`.

**What is timed.** On CPU ranks every call, by the clock of the host. On GPUs the time between two CUDA events around
what the call puts on its stream; one call in eight is timed, and the first, because two events cost the host more than
a call may. Events are looked at later, when they have happened; nothing ever waits for them. Calls that a CUDA graph
replays are not seen.

The first call of an operation, which may have to compile or to map memory, is kept apart: last, median and p99 are
those of later calls. An operation has the name of its method; halves of a call with a hook are operations of their own:

    get_dispatch_layout, dispatch, cached_dispatch, combine, low_latency_dispatch, low_latency_dispatch_send,
    low_latency_dispatch_recv, low_latency_combine, low_latency_combine_send, low_latency_combine_recv
"""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeVar

import torch
from torch import Tensor

from deep_ep.errors import ConfigError

logger = logging.getLogger("deep_ep")

R = TypeVar("R")

OPERATIONS = (
    "get_dispatch_layout",
    "dispatch",
    "cached_dispatch",
    "combine",
    "low_latency_dispatch",
    "low_latency_dispatch_send",
    "low_latency_dispatch_recv",
    "low_latency_combine",
    "low_latency_combine_send",
    "low_latency_combine_recv",
)
Observer = Callable[..., Any]
"""Is given `run`, an operation, a call and its arguments; it makes the call and returns what that returned, by
`run(operation, call, *args)`."""

LOW_LATENCY_THRESHOLD_US = 500.0
"""Above this a low-latency call between GPUs is worth a warning."""
NUM_KEPT = 1024
HISTOGRAM_BOUNDS_US = tuple(mantissa * 10.0**exponent for exponent in range(7) for mantissa in (1, 1.5, 2, 3, 5, 7))
"""What `LatencyStats.histogram` counts by: from 1 us to 7 s."""
_BOUNDS_NS = tuple(int(bound * 1000) for bound in HISTOGRAM_BOUNDS_US)
_CALLS_PER_TIMING = 8
_WARNING_INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyStats:
    """How long the calls of one operation took.

    Attributes:
        num_calls: Calls that have returned.
        num_timed: Those of them that were timed and whose work is done.
        sum_us: The time of all of these together.
        first_us: The first call.
        last_us: The last one that was timed, like the next two without the first unless there is no other.
        median_us: Of the last 1024.
        p99_us: Of the last 1024: 99 in 100 took no longer.
        histogram: Of all that were timed, how many took longer than the bound before and no longer than each bound of
            `HISTOGRAM_BOUNDS_US`; the last item counts what took longer than any.
    """

    num_calls: int
    num_timed: int
    sum_us: float
    first_us: float
    last_us: float
    median_us: float
    p99_us: float
    histogram: tuple[int, ...]


class LatencyMonitor:
    """Times the calls of one buffer. Reading it is safe from any thread and never waits for a GPU.

    Args:
        rank: This rank.
        num_ranks: Ranks of the group.
        device: Where calls run.
        waited_ns: For how long this rank has waited for each peer, a list that the engine goes on counting in; None
            if the engine does not know.

    Example:
        >>> buffer.latency.snapshot()["dispatch"].median_us
        812.4
        >>> buffer.latency.set_threshold_us("dispatch", 2000.0)
    """

    def __init__(self, rank: int, num_ranks: int, device: torch.device, waited_ns: list[int] | None = None) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._waited_ns = waited_ns or [0] * num_ranks
        self._knows_waits = waited_ns is not None
        self._device = device if device.type == "cuda" else None
        self._timers: dict[str, _Timer] = {operation: _Timer(operation) for operation in OPERATIONS}
        if self._device is not None:
            for operation, timer in self._timers.items():
                if operation.startswith("low_latency"):
                    timer.watch(LOW_LATENCY_THRESHOLD_US)
        self._wait_stats: Tensor | None = None
        self._seen_waits = [0] * num_ranks
        self._observers: list[Observer] = []

    def run(self, operation: str, call: Callable[..., R], *args: Any) -> R:
        """Make a call, and time it if it is its turn.

        Args:
            operation: One of `OPERATIONS`.
            call: What to call; on a GPU it puts its work on the current stream.
            *args: Its arguments.
        """
        # Every line here is paid for by every call.
        timer = self._timers[operation]
        if self._device is not None:
            return self._run_on_device(timer, call, *args)
        before = self._waited_ns[:] if timer.is_watched else []
        start_ns = perf_counter_ns()
        result = call(*args)
        took_ns = perf_counter_ns() - start_ns
        new_ns = timer.new_ns
        new_ns.append(took_ns)
        if len(new_ns) >= NUM_KEPT:
            timer.fold()
        if timer.is_watched and took_ns > timer.threshold_ns and timer.may_warn():
            self._warn(timer, took_ns, [now - then for now, then in zip(self._waited_ns, before, strict=True)])
        return result

    def _run_on_device(self, timer: _Timer, call: Callable[..., R], *args: Any) -> R:
        if timer.num_untimed_left or _is_capturing():
            result = call(*args)
            timer.num_untimed += 1
            timer.num_untimed_left = max(timer.num_untimed_left - 1, 0)
            return result
        self._collect(timer)
        begin, end = timer.free_events.pop() if timer.free_events else (_new_event(), _new_event())
        begin.record()
        result = call(*args)
        end.record()
        timer.under_way.append((begin, end))
        timer.num_untimed_left = _CALLS_PER_TIMING - 1
        return result

    def _collect(self, timer: _Timer) -> None:
        """Read the events that have happened."""
        if not timer.under_way or not timer.events_lock.acquire(blocking=False):
            return
        try:
            with apart_from_captures():
                while timer.under_way and timer.under_way[0][1].query():
                    begin, end = timer.under_way.popleft()
                    took_ns = int(begin.elapsed_time(end) * 1e6)
                    timer.free_events.append((begin, end))
                    timer.new_ns.append(took_ns)
                    timer.fold()
                    if timer.is_watched and took_ns > timer.threshold_ns and timer.may_warn():
                        self._warn(timer, took_ns, self._new_device_waits())
        finally:
            timer.events_lock.release()

    def snapshot(self) -> dict[str, LatencyStats]:
        """Return what is known now, of each operation that has been timed."""
        found = {}
        for operation, timer in self._timers.items():
            self._collect(timer)
            stats = timer.stats()
            if stats is not None:
                found[operation] = stats
        return found

    def set_threshold_us(self, operation: str, threshold_us: float | None) -> None:
        """Set above which time a call of an operation is worth a warning, which comes once a minute at most.

        At first it is 500 us for low-latency calls between GPUs and none for others.

        Args:
            operation: One of `OPERATIONS`.
            threshold_us: The time; None for no warnings.

        Raises:
            ConfigError: If there is no such operation, or the time is not positive.
        """
        if operation not in self._timers:
            raise ConfigError(f"operation must be one of {', '.join(OPERATIONS)}, got {operation!r}")
        if threshold_us is not None and not threshold_us > 0:
            raise ConfigError(f"threshold_us must be positive or None, got {threshold_us}")
        self._timers[operation].watch(threshold_us)

    def add_observer(self, observer: Observer) -> None:
        """Let an observer make every call from now on, around the timing. Without one, calls cost no more than before.

        Args:
            observer: Runs in the thread and on the stream of the call, also while a CUDA graph is captured.
        """
        self._observers.append(observer)
        self._chain_observers()

    def remove_observer(self, observer: Observer) -> None:
        """Undo `add_observer`."""
        self._observers.remove(observer)
        self._chain_observers()

    def _chain_observers(self) -> None:
        run: Callable[..., Any] = partial(type(self).run, self)
        for observer in self._observers:
            run = partial(observer, run)
        self.run = run  # type: ignore[method-assign]
        if not self._observers:
            del self.run  # the method again

    def peer_waits_us(self) -> list[float] | None:
        """Return for how long this rank has waited for each peer since the buffer was made, None if nobody knows.

        CPU ranks know. Between GPUs kernels count for `dispatch_wait_recv_cost_stats`, in cycles of a clock.
        """
        return [waited / 1e3 for waited in self._waited_ns] if self._knows_waits else None

    def wait_stats(self, operation: str) -> Tensor | None:
        """Return where the kernels of the next call may count their waits, `[num_ranks]` int64; None if not timed."""
        if self._device is None or self._timers[operation].num_untimed_left or _is_capturing():
            return None
        if self._wait_stats is None:
            self._wait_stats = torch.zeros(self.num_ranks, dtype=torch.int64, device=self._device)
        return self._wait_stats

    def _warn(self, timer: _Timer, took_ns: int, waits: list[int]) -> None:
        peer = max(range(self.num_ranks), key=waits.__getitem__)
        slowest = f"it waited longest for rank {peer}" if waits[peer] > 0 else "no wait for a peer was seen"
        took_us, threshold_us = took_ns / 1e3, timer.threshold_ns / 1e3
        logger.warning(
            "rank %d: %s took %.0f us, more than %.0f us; %s",
            self.rank,
            timer.operation,
            took_us,
            threshold_us,
            slowest,
        )

    def _new_device_waits(self) -> list[int]:
        """Return what kernels have counted since the last time, without waiting for those under way."""
        if self._wait_stats is None:
            return [0] * self.num_ranks
        with torch.cuda.stream(torch.cuda.Stream(self._device)):  # type: ignore[no-untyped-call]
            total = self._wait_stats.tolist()
        waits = [now - before for now, before in zip(total, self._seen_waits, strict=True)]
        self._seen_waits = total
        return waits


class _Timer:
    """The times of one operation: the first, and the last `NUM_KEPT` after it.

    Attributes:
        operation: Its name.
        is_watched: Whether a call can be worth a warning.
        threshold_ns: Above which time it is.
        new_ns: Times that have not been folded into the others yet.
        num_untimed: Calls that were not timed.
        num_untimed_left: How many calls of the device are not to be timed now.
        under_way: Pairs of events around calls, which may not have happened yet.
        free_events: Pairs of events to use again.
        events_lock: Of whoever looks at `under_way`.
    """

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.watch(None)
        self.new_ns: list[int] = []
        self.num_untimed = self.num_untimed_left = 0
        self.under_way: deque[tuple[Any, Any]] = deque(maxlen=NUM_KEPT)
        self.free_events: list[tuple[Any, Any]] = []
        self.events_lock = threading.Lock()
        self._fold_lock = threading.Lock()
        self._first_ns = -1
        self._recent_ns: deque[int] = deque(maxlen=NUM_KEPT)
        self._num_folded = self._sum_ns = 0
        self._histogram = [0] * (len(_BOUNDS_NS) + 1)
        self._next_warning_s = -math.inf

    def watch(self, threshold_us: float | None) -> None:
        """Set above which time a call is worth a warning."""
        self.is_watched = threshold_us is not None
        self.threshold_ns = 0.0 if threshold_us is None else threshold_us * 1e3

    def fold(self) -> None:
        """Take new times among the others."""
        with self._fold_lock:
            times_ns = self.new_ns[:]
            del self.new_ns[: len(times_ns)]  # another thread may have appended meanwhile
            self._num_folded += len(times_ns)
            self._sum_ns += sum(times_ns)
            for took_ns in times_ns:
                self._histogram[bisect_left(_BOUNDS_NS, took_ns)] += 1
            if times_ns and self._first_ns < 0:
                self._first_ns = times_ns.pop(0)
            self._recent_ns.extend(times_ns)

    def may_warn(self) -> bool:
        """Return whether to warn now: not of the first call, and not within a minute of the last warning."""
        now_s = time.monotonic()
        if self._num_folded + len(self.new_ns) < 2 or now_s < self._next_warning_s:
            return False
        self._next_warning_s = now_s + _WARNING_INTERVAL_S
        return True

    def stats(self) -> LatencyStats | None:
        """Return what is known, None if nothing is."""
        self.fold()
        with self._fold_lock:
            if self._first_ns < 0:
                return None
            recent_ns = list(self._recent_ns) or [self._first_ns]
            in_order = sorted(recent_ns)
            return LatencyStats(
                num_calls=self._num_folded + self.num_untimed,
                num_timed=self._num_folded,
                sum_us=self._sum_ns / 1e3,
                first_us=self._first_ns / 1e3,
                last_us=recent_ns[-1] / 1e3,
                median_us=in_order[len(in_order) // 2] / 1e3,
                p99_us=in_order[-(-len(in_order) * 99 // 100) - 1] / 1e3,
                histogram=tuple(self._histogram),
            )


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


@contextmanager
def apart_from_captures() -> Iterator[None]:
    """Look at events in a way that does not spoil the capture of a CUDA graph, which another thread may be at."""
    from cuda.bindings import runtime

    relaxed = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    _, before = runtime.cudaThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        runtime.cudaThreadExchangeStreamCaptureMode(before)
