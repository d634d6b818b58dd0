"""Phases of start-up: a clock that tells where the time of a piece of work went.

The names are the same everywhere:

    allocate     memory of this rank is had, and is zero
    map_peers    memory of the peers is made addressable
    compile      kernels are compiled, or waited for while another process does so
    load         compiled kernels are read and put on the device, modules are imported
    handshake    ranks tell each other what they must know, and wait for each other
    touch        memory that results will need is had once, so that it is there later
    dummy        exchanges are made that nobody asked for

Phases may lie within each other; time counts for the innermost one, so all of them together are the whole time. Code
that belongs to a phase says so with `phase`, and need not know whether a clock is running.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns

PHASES = ("allocate", "map_peers", "compile", "load", "handshake", "touch", "dummy")


class PhaseClock:
    """Adds up the time of each phase. One thread uses it.

    Attributes:
        ns: Nanoseconds of each phase.
    """

    def __init__(self) -> None:
        self.ns = dict.fromkeys(PHASES, 0)
        self._open: list[str] = []
        self._begin_ns = self._since_ns = 0

    @property
    def wall_ns(self) -> int:
        """Return the time from the beginning of the first phase to the end of the last one."""
        return self._since_ns - self._begin_ns

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the phases that begin in this block, in this thread."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def enter(self, name: str) -> None:
        """Begin a phase, within the one that is open."""
        self._charge()
        self._open.append(name)

    def leave(self) -> None:
        """End the innermost phase."""
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        now_ns = perf_counter_ns()
        if self._open:
            self.ns[self._open[-1]] += now_ns - self._since_ns
        elif not self._begin_ns:
            self._begin_ns = now_ns
        self._since_ns = now_ns


_current: contextvars.ContextVar[PhaseClock | None] = contextvars.ContextVar("deep_ep_phase_clock", default=None)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count this block as a phase, if a clock is running in this thread.

    Example:
        >>> clock = PhaseClock()
        >>> with clock.running(), phase("load"):
        ...     with phase("compile"):
        ...         compile_it()     # is not counted as "load"
    """
    clock = _current.get()
    if clock is None:
        yield
        return
    clock.enter(name)
    try:
        yield
    finally:
        clock.leave()
