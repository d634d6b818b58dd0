"""Recorder: takes down the calls of a buffer and the work between them, on one rank; then gathers those of all."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic_ns
from typing import Any

import torch
import torch.distributed as dist

from deep_ep.buffer import Buffer
from deep_ep.engines.exchange import Exchanger
from deep_ep.errors import ConfigError
from deep_ep.memory.rendezvous import AllGather, Rendezvous
from deep_ep.trace.clocks import DeviceClock, TimedEvent, new_cuda_event, offset_to_first_rank
from deep_ep.trace.timeline import Kind, Span, Timeline

_MAIN_THREAD = "host"


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """A span between two events of a stream, the times of which are not known yet."""

    lane: str
    kind: Kind
    name: str
    step: int
    anchor: int
    begin: TimedEvent
    end: TimedEvent


@contextmanager
def record(buffer: Buffer) -> Iterator[Recorder]:
    """Record a buffer on this rank until the end of the block. All ranks do so together.

    Args:
        buffer: The buffer; on a GPU, the device is idle when recording begins and ends.

    Example:
        >>> with record(buffer) as recorder, recorder.step():
        ...     train_step()
        >>> recorder.timeline().save_picture("trace.png")
    """
    recorder = Recorder(buffer)
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.stop()


class Recorder:
    """Records one rank; made by `record`. Before and after that block its steps and spans cost and record nothing.

    Calls that a CUDA graph replays cannot be told apart: put a span around the replay.

    Args:
        buffer: The buffer.
    """

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._spans: list[Span] = []
        self._on_device: list[_OnDevice] = []
        self._step = -1
        self._num_steps = 0
        self._device = torch.device(buffer.runtime.device) if buffer.runtime is not None else torch.device("cpu")
        self._clock: DeviceClock | None = None
        self._anchor = 0
        self._in_flight: dict[int, tuple[Any, int]] = {}
        self._streams: dict[int, str] = {}
        self._main_thread = threading.get_ident()
        self._is_running = False

    def start(self) -> None:
        """Begin. Waits until the GPU is idle."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._clock = DeviceClock()
            self._streams[torch.cuda.default_stream(self._device).cuda_stream] = "stream: default"
            self._streams[self._buffer.get_comm_stream().cuda_stream] = "stream: communication"
        self._buffer.latency.add_observer(self._observe)
        for exchanger in _exchangers(self._buffer):
            exchanger.control.observe_waits(self._observe_wait)
        self._is_running = True

    def stop(self) -> None:
        """End. Waits until the GPU is idle."""
        self._is_running = False
        self._buffer.latency.remove_observer(self._observe)
        for exchanger in _exchangers(self._buffer):
            exchanger.control.observe_waits(None)
        self._in_flight.clear()
        self._spans = _spread_flights(self._spans)
        if self._clock is not None:
            torch.cuda.synchronize(self._device)
            self._clock.stop()
            self._spans += [_on_host(span, self._clock, self._buffer.rank) for span in self._on_device]
            self._on_device.clear()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Be a step of the program: what the pictures are cut into."""
        if self._is_running:
            self._step, self._num_steps = self._num_steps, self._num_steps + 1
        if self._is_running and self._clock is not None:
            self._anchor = self._clock.drop_anchor()
        try:
            with self._spanning(Kind.STEP, "step", on_device=False):
                yield
        finally:
            self._step = -1

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Be a piece of work of the program, such as its experts; on a GPU, what it puts on the current stream."""
        with self._spanning(Kind.WORK, name, on_device=self._clock is not None):
            yield

    def timeline(self) -> Timeline:
        """Gather what all ranks have recorded; all ranks call it together, and all get all of it.

        Raises:
            ConfigError: If recording goes on.
        """
        if self._is_running:
            raise ConfigError("a timeline is made of what was recorded, but recording goes on: leave the block first")
        rendezvous = _rendezvous_of(self._buffer)
        offset = offset_to_first_rank(rendezvous.rank, rendezvous.all_gather)
        own_error_ns = offset.error + (self._clock.error_ns if self._clock is not None else 0.0)
        shift_us = offset.middle / 1e3
        mine = Timeline(
            num_ranks=rendezvous.num_ranks,
            device=_device_name(self._device),
            spans=tuple(
                replace(span, start_us=span.start_us + shift_us, end_us=span.end_us + shift_us) for span in self._spans
            ),
            clock_error_us=(own_error_ns / 1e3,),
        )
        ranks = [Timeline.from_json(text) for text in _gather_texts(mine.to_json(), rendezvous.all_gather)]
        spans = [span for rank in ranks for span in rank.spans]
        zero_us = min((span.start_us for span in spans), default=0.0)
        spans = [replace(span, start_us=span.start_us - zero_us, end_us=span.end_us - zero_us) for span in spans]
        return Timeline(
            num_ranks=rendezvous.num_ranks,
            device=ranks[0].device,
            spans=tuple(sorted(spans, key=lambda span: (span.rank, span.start_us, -span.end_us))),
            clock_error_us=tuple(rank.clock_error_us[0] for rank in ranks),
        )

    def _observe(self, run: Callable[..., Any], operation: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call of the buffer, and take down when it was."""
        if operation.endswith("_recv"):
            self._end_flight(operation.removesuffix("_recv"), call)
        with self._spanning(Kind.CALL, operation, on_device=self._clock is not None):
            result = run(operation, call, *args)
        if operation.endswith("_send"):
            self._in_flight[id(result.finish)] = result.finish, monotonic_ns()
        return result

    def _end_flight(self, operation: str, finish: Callable[..., Any]) -> None:
        _, start_ns = self._in_flight.pop(id(finish), (None, None))
        if start_ns is not None:
            self._add("in flight", Kind.IN_FLIGHT, operation, start_ns, monotonic_ns())

    def _observe_wait(self, call: str, awaited: str, start_ns: int, waited_ns: list[int]) -> None:
        if any(waited_ns):
            waits = [0.0] * self._buffer.group_size
            for peer, waited in zip(self._buffer.topology.local_ranks, waited_ns, strict=True):
                waits[peer] = waited / 1e3
            waits_us = tuple(waits)
            end_ns = start_ns + max(waited_ns)
            self._add(self._thread(), Kind.WAIT, f"wait for {awaited} ({call})", start_ns, end_ns, waits_us)

    @contextmanager
    def _spanning(self, kind: Kind, name: str, *, on_device: bool) -> Iterator[None]:
        if not self._is_running:
            yield
            return
        lane, step = self._thread(), self._step
        on_device = on_device and not torch.cuda.is_current_stream_capturing()
        if on_device:
            begin, end, stream = new_cuda_event(), new_cuda_event(), self._stream()
            begin.record()
        start_ns = monotonic_ns()
        try:
            yield
        finally:
            self._add(lane, kind, name, start_ns, monotonic_ns(), step=step)
            if on_device:
                end.record()
                self._on_device.append(_OnDevice(stream, kind, name, step, self._anchor, begin, end))

    def _add(
        self,
        lane: str,
        kind: Kind,
        name: str,
        start_ns: float,
        end_ns: float,
        waits_us: tuple[float, ...] = (),
        step: int | None = None,
    ) -> None:
        self._spans.append(
            Span(
                rank=self._buffer.rank,
                lane=lane,
                kind=kind,
                name=name,
                step=self._step if step is None else step,
                start_us=start_ns / 1e3,
                end_us=end_ns / 1e3,
                waits_us=waits_us,
            )
        )

    def _thread(self) -> str:
        if threading.get_ident() == self._main_thread:
            return _MAIN_THREAD
        return f"{_MAIN_THREAD}: {threading.current_thread().name}"

    def _stream(self) -> str:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        return self._streams.setdefault(stream, f"stream: {len(self._streams)}")


def _spread_flights(spans: list[Span]) -> list[Span]:
    """Give what is in flight at the same time lanes of its own: spans of a lane must not cross."""
    lane_ends: list[float] = []
    spread = []
    for span in sorted(spans, key=lambda span: span.start_us):
        if span.kind == Kind.IN_FLIGHT:
            free = [lane for lane, end_us in enumerate(lane_ends) if end_us <= span.start_us]
            lane = free[0] if free else len(lane_ends)
            lane_ends[lane : lane + 1] = [span.end_us]
            spread.append(replace(span, lane=f"{span.lane} {lane + 1}" if lane else span.lane))
        else:
            spread.append(span)
    return spread


def _on_host(span: _OnDevice, clock: DeviceClock, rank: int) -> Span:
    return Span(
        rank=rank,
        lane=span.lane,
        kind=span.kind,
        name=span.name,
        step=span.step,
        start_us=clock.host_ns(span.begin, span.anchor) / 1e3,
        end_us=clock.host_ns(span.end, span.anchor) / 1e3,
    )


def _exchangers(buffer: Buffer) -> Iterator[Exchanger]:
    """Go through what waits on the host, where the engine of the buffer has such."""
    exchanger = getattr(buffer.runtime, "exchanger", None)
    if isinstance(exchanger, Exchanger):
        yield exchanger


def _rendezvous_of(buffer: Buffer) -> Rendezvous:
    is_torch_group = isinstance(buffer.group, dist.ProcessGroup)
    return Rendezvous(buffer.group, None) if is_torch_group else Rendezvous(None, buffer.group)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _gather_texts(text: str, all_gather: AllGather) -> list[str]:
    """Give every rank the texts of all; they travel as integers, eight bytes each."""
    content = text.encode()
    sizes = [size for (size,) in all_gather([len(content)])]
    words = array("q", content.ljust(-(-max(sizes) // 8) * 8, b"\0"))
    everyone = all_gather(words)
    return [array("q", words).tobytes()[:size].decode() for words, size in zip(everyone, sizes, strict=True)]
