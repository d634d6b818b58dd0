"""Streams: which stream a call runs on, and who waits for whom.

The rules are DeepEP V1's, seen from the program:

- a call begins after `previous_event` if it is given, otherwise after what the current stream holds;
- with `async_finish=True` it returns an event, and the current stream goes on; otherwise the current stream waits;
- calls on one buffer follow each other, whatever streams they are made from.

A call that nobody could overlap with (no `previous_event`, not asynchronous) runs on the current stream itself: that
is the same order with fewer events. Any other runs on the buffer's communication stream, which has high priority.
Memory that a call returns belongs to the stream it ran on and is marked as used by the current one, so
`allocate_on_comm_stream` may be given or not, in any combination.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from deep_ep.events import EventHandle, EventOverlap

R = TypeVar("R")
Event = EventOverlap | EventHandle | None


class Streams(Protocol):
    """Runs calls in order."""

    def run(
        self, call: Callable[[], R], arguments: Iterable[object], previous_event: Event, async_finish: bool
    ) -> tuple[R, EventOverlap]:
        """Run a call; return its result and an event, which holds one only with `async_finish`."""

    def bind(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return a call that will run on the stream that is current now."""

    def comm_stream(self) -> Any:
        """Return the communication stream."""


class CpuStreams:
    """On a CPU a call is done when it returns."""

    def run(
        self,
        call: Callable[[], R],
        arguments: Iterable[object],  # noqa: ARG002
        previous_event: Event,
        async_finish: bool,
    ) -> tuple[R, EventOverlap]:
        """Run a call; return its result and an event that has passed."""
        event = _event_of(previous_event)
        if event is not None:
            event.current_stream_wait()
        return call(), EventOverlap(EventHandle() if async_finish else None)

    def bind(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return the call."""
        return call

    def comm_stream(self) -> Any:
        """Return the one stream that a CPU has."""
        return torch.cpu.current_stream()


class CudaStreams:
    """The communication stream of one buffer, and the order of calls on it and on the program's streams.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._comm = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._last: torch.cuda.Stream | None = None

    def run(
        self, call: Callable[[], R], arguments: Iterable[object], previous_event: Event, async_finish: bool
    ) -> tuple[R, EventOverlap]:
        """Run a call; return its result and an event, which holds one only with `async_finish`."""
        current, event = torch.cuda.current_stream(), _event_of(previous_event)
        if event is None and not async_finish:
            self._follow_last_call(current)
            return call(), EventOverlap(None)
        if event is None:
            self._comm.wait_stream(current)
        with torch.cuda.stream(self._comm):
            if event is not None:
                event.current_stream_wait()
            self._follow_last_call(self._comm)
            result = call()
            done = EventHandle()
        for tensor in _tensors_in(arguments):
            tensor.record_stream(self._comm)
        for tensor in _tensors_in((result,)):
            tensor.record_stream(current)
        if async_finish:
            return result, EventOverlap(done)
        done.current_stream_wait()
        return result, EventOverlap(None)

    def bind(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return a call that will run on the stream that is current now."""
        stream = torch.cuda.current_stream()

        def bound() -> None:
            with torch.cuda.stream(stream):
                call()

        return bound

    def comm_stream(self) -> Any:
        """Return the communication stream."""
        return self._comm

    def _follow_last_call(self, stream: torch.cuda.Stream) -> None:
        """Make a stream wait for the last call, if that ran on another.

        A stream that is being captured cannot wait for work that was not captured; that work is over by the time the
        graph is replayed, for the beginning of a capture waits for the device.
        """
        if self._last is not None and self._last != stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._last)
        self._last = stream


def _event_of(previous_event: Event) -> EventHandle | None:
    return previous_event.event if isinstance(previous_event, EventOverlap) else previous_event


def _tensors_in(values: Iterable[object]) -> Iterable[Tensor]:
    """Go through the tensors on a GPU among values, and within tuples and results."""
    for value in values:
        if isinstance(value, Tensor):
            if value.is_cuda:
                yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors_in(value)
        elif hasattr(value, "__dataclass_fields__"):
            yield from _tensors_in(getattr(value, name) for name in value.__dataclass_fields__)
