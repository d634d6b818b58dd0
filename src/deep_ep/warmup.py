"""Warming a buffer: everything that a first call would have to do, done before it.

What is done, in this order, for each shape of calls that is to be prepared for:

1. **Kernels** are compiled, or read from the cache, and loaded (GPUs only). This rank does so on its own.
2. **Memory** that the calls need is had on all ranks and mapped by all ranks.
3. **Exchanges** are made: the calls of a layer, with as many tokens as the shape says, evenly routed, then with none,
   and with all again. They take the way of any call, so whatever else is done once is done then.

`Buffer(preinitialize=True)` does all that before the constructor returns. `warmup_async` does it in a thread, with its
own steps between the ranks (`deep_ep.memory.control`), so the program's process group is left alone.

**Calls that come earlier.** Exchanges must come in the same order on all ranks, so before step 2 the threads of all
ranks vote. A rank that has made a call by then votes no; if any does, steps 2 and 3 are left to the calls, on all
ranks. A rank votes yes at a time when it has made no call, and lets none begin until the votes are counted and the
exchanges, if they come to that, are over. Hence a call waits

- for the kernels that it launches, if the thread is at them just now, in step 1, and for nothing else;
- for the end of the warm-up, after step 1.

Example: rank 0 dispatches while its thread compiles; rank 1 has voted yes and waits. Rank 0's call goes on, and waits
for rank 1 as any call does. Rank 0's thread ends its compiling and votes no. Now rank 1's calls may begin.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any, ClassVar, ParamSpec

import torch

from deep_ep import kernel_cache
from deep_ep.config import Config
from deep_ep.engines.gpu import GpuEngine
from deep_ep.engines.gpu_kernels import load_kernels
from deep_ep.engines.gpu_low_latency import GpuLowLatencyEngine
from deep_ep.engines.network import NetworkEngine
from deep_ep.engines.network_low_latency import NetworkLowLatencyEngine
from deep_ep.errors import ConfigError, MismatchError, PeerTimeoutError
from deep_ep.latency import LatencyMonitor
from deep_ep.memory.control import Control
from deep_ep.memory.rendezvous import AllGather, Rendezvous
from deep_ep.phases import PHASES, PhaseClock, phase
from deep_ep.shapes import ExchangeShape

logger = logging.getLogger("deep_ep")

P = ParamSpec("P")
Shapes = Sequence[ExchangeShape | Mapping[str, Any]]
_NUM_MAX_SHAPES = 8
_NUM_SHAPE_WORDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class InitReport:
    """Where the time of starting up went; `str` of it is a table.

    Attributes:
        phases_ms: Milliseconds of each phase of `deep_ep.phases` on this rank.
        max_phases_ms: The most that any rank had.
        wall_ms: From beginning to end on this rank.
        max_wall_ms: The most that any rank had.
    """

    phases_ms: Mapping[str, float]
    max_phases_ms: Mapping[str, float]
    wall_ms: float
    max_wall_ms: float

    def percent(self, name: str) -> float:
        """Return how much of this rank's time a phase had."""
        return 100 * self.phases_ms[name] / self.wall_ms if self.wall_ms else 0.0

    def __str__(self) -> str:
        lines = [f"{'phase':<12}{'ms':>10}{'percent':>10}{'most ms':>10}"]
        for name in PHASES:
            ms, most_ms = self.phases_ms[name], self.max_phases_ms[name]
            lines.append(f"{name:<12}{ms:>10.1f}{self.percent(name):>10.1f}{most_ms:>10.1f}")
        lines.append(f"{'wall':<12}{self.wall_ms:>10.1f}{'':>10}{self.max_wall_ms:>10.1f}")
        return "\n".join(lines)


class Warmup:
    """A warm-up under way in the background, as `warmup_async` returns it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._is_done = self._has_call = self.is_closed = False
        self._lets_calls_in = True
        self._error: BaseException | None = None
        self._report: InitReport | None = None
        self._thread: threading.Thread | None = None

    def done(self) -> bool:
        """Return whether it is over."""
        return self._is_done

    def wait(self, timeout_s: float | None = None) -> InitReport:
        """Wait until it is over.

        Args:
            timeout_s: For how long; None for as long as it takes, which the time limit of the buffer bounds where it
                waits for peers.

        Returns:
            Where its time went.

        Raises:
            PeerTimeoutError: If it is not over by then, or a peer did not take part in time.
            DeepEPError: If something went wrong in it.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: self._is_done, timeout_s):
                raise PeerTimeoutError(f"the warm-up has not ended within {timeout_s} s", missing_ranks=[])
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    @property
    def report(self) -> InitReport | None:
        """Where its time went, None until it is over."""
        return self._report

    def let_call_in(self) -> None:
        """Let a call of the program begin, once it may."""
        with self._condition:
            self._condition.wait_for(lambda: self._lets_calls_in or self._is_done)
            self._has_call = True

    def keep_calls_out(self) -> bool:
        """Let no call begin from now on; return false if one has begun already, or none will."""
        with self._condition:
            self._lets_calls_in = self._has_call or self.is_closed
            return not self._lets_calls_in

    def start(self, work: Callable[[Warmup], InitReport]) -> None:
        """Do the work in a thread."""

        def run() -> None:
            try:
                self._report = work(self)
            except BaseException as error:  # whatever it is, `wait` raises it
                self._error = error
                logger.warning("warming in the background failed: %s", error)
            with self._condition:
                self._is_done = True
                self._condition.notify_all()

        self._thread = threading.Thread(target=run, name="deep_ep warm-up", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it as soon as may be, and wait for that: its peers have its vote, which is no."""
        self.is_closed = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


class WarmupCalls:
    """What a `Buffer` does before its first call.

    Attributes:
        init_report: Where the time of the constructor went.
    """

    rank: int
    group_size: int
    low_latency_mode: bool
    num_sms: ClassVar[int]
    init_report: InitReport
    latency: LatencyMonitor
    _device: torch.device
    _engine: Any
    _low_latency: Any
    _warmup: Warmup | None = None
    _background: Control | None = None
    _noted: set[tuple[int, ...]] | None = None
    _shapes: tuple[ExchangeShape, ...] = ()

    def warmup_async(self, shapes: Shapes | None = None) -> Warmup:
        """Prepare for calls in the background; return at once. All ranks call this, with the same shapes.

        A call that is made meanwhile waits for just what it needs. While it runs, other threads can go on, but no CUDA
        graph may be captured.

        Args:
            shapes: What the calls will look like. None takes the shapes that the constructor was told; without those,
                the ones that programs on this machine have used (`deep_ep.kernel_cache`).

        Returns:
            An object with `wait()`, `done()` and `report`.

        Raises:
            ConfigError: If a shape is wrong, or a warm-up is under way.
            MismatchError: Raised by `wait()`, if the ranks named different shapes.
        """
        self._running()
        if self._warmup is not None and not self._warmup.done():
            raise ConfigError("a warm-up of this buffer is under way already, wait() for it first")
        chosen = self._choose(shapes)
        warmup, is_told = Warmup(), shapes is not None or bool(self._shapes)
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def work(warmup: Warmup) -> InitReport:
            if stream is None:
                return self._warm_in_background(warmup, chosen, is_told=is_told)
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                return self._warm_in_background(warmup, chosen, is_told=is_told)

        self._warmup = warmup
        warmup.start(work)
        return warmup

    def execute_dummy_operation(self) -> None:
        """Make one real, empty dispatch and combine on all ranks, in each mode of the buffer, and wait for its end.

        Raises:
            PeerTimeoutError: If a rank does not take part in time; then something is not up.
        """
        self._running()
        with _apart(self) as apart:
            for is_low_latency in (False, True)[: 1 + self.low_latency_mode]:
                matching = [shape for shape in self._shapes if shape.is_low_latency == is_low_latency]
                shape = matching[0] if matching else _smallest_shape(self.group_size, is_low_latency)
                _exchange(apart, replace(shape, num_sms=shape.num_sms or self.num_sms), 0)
            _wait_for_device(self._device)

    def _running(self) -> Any:
        raise NotImplementedError

    def _choose(self, shapes: Shapes | None) -> tuple[ExchangeShape, ...]:
        """Return the shapes to prepare for, as far as this rank knows."""
        if shapes is not None:
            chosen = [ExchangeShape.of(shape) for shape in shapes]
            if any(shape.is_low_latency for shape in chosen) and not self.low_latency_mode:
                raise ConfigError("a shape with is_low_latency=True needs a buffer made with low_latency_mode=True")
            return tuple(replace(shape, num_sms=shape.num_sms or self.num_sms) for shape in chosen)
        if self._shapes:
            return self._shapes
        found = []
        for fields in kernel_cache.seen():
            try:
                shape = ExchangeShape.of(fields)
            except ConfigError:
                continue  # of another version
            if self.low_latency_mode or not shape.is_low_latency:
                found.append(shape)
        return tuple(found[:_NUM_MAX_SHAPES])

    def _start_up(
        self, rendezvous: Rendezvous, timeout_s: float, shapes: Shapes | None, *, preinitialize: bool, num_hosts: int
    ) -> None:
        """End the constructor: make what a warm-up needs, and warm if that is wanted now."""
        if num_hosts == 1:
            self._background = Control(self.rank, self.group_size, rendezvous.all_gather, timeout_s, rendezvous.ranks)
        if shapes is not None:
            self._shapes = self._choose(shapes)
        if self.rank == 0:
            self._noted = set()
            weakref.finalize(self, _remember, self._noted)
        if preinitialize:
            self._shapes = _agree(rendezvous.all_gather, self._choose(None), is_told=shapes is not None)
            for shape in self._shapes:
                self._prepare(shape)
            self._connect(self._shapes)
            self.execute_dummy_operation()
        self._gather_report = rendezvous.all_gather

    def _warm_in_background(self, warmup: Warmup, shapes: tuple[ExchangeShape, ...], *, is_told: bool) -> InitReport:
        clock = PhaseClock()
        background = self._background
        with clock.running(), phase("handshake"):
            if background is not None:
                shapes = _agree(background.all_gather, shapes, is_told=is_told)
            for shape in shapes:
                if not warmup.is_closed:
                    self._prepare(shape)
            if background is not None:
                votes = background.all_gather([int(warmup.keep_calls_out())])
                if all(vote for (vote,) in votes):
                    self._shapes = shapes
                    self._connect(shapes)
            with phase("handshake"):  # what was open until here is counted now
                everyone = [] if background is None else background.all_gather(_words(clock))
        return _make_report(clock, everyone)

    def _prepare(self, shape: ExchangeShape) -> None:
        """Do what this rank can do on its own."""
        engine = self._low_latency if shape.is_low_latency else self._engine
        if not isinstance(engine, GpuEngine | GpuLowLatencyEngine):
            return
        with phase("load"):
            prepare = load_kernels().prepare
            for variant in engine.variants(shape):
                prepare(*variant)

    def _connect(self, shapes: Sequence[ExchangeShape]) -> None:
        """Do what all ranks do together."""
        for shape in shapes:
            engine = self._low_latency if shape.is_low_latency else self._engine
            if not isinstance(engine, NetworkEngine | NetworkLowLatencyEngine):  # they grow in the exchanges below
                with phase("handshake"):
                    engine.reserve(shape)
            with phase("touch"):
                _touch_outputs(shape, self.group_size, self._device)
        with phase("dummy"), _apart(self) as apart:
            for shape in shapes:
                for num_tokens in (shape.num_max_tokens_per_rank, 0, shape.num_max_tokens_per_rank):
                    _exchange(apart, shape, num_tokens)
            _wait_for_device(self._device)

    def _note_shape(self, fields: tuple[int, ...]) -> None:
        """Keep in mind the shape of a call, the fields of an `ExchangeShape` in order, to remember it in the end."""
        if self._noted is not None:
            self._noted.add(fields)

    def _let_call_in(self, warmup: Warmup) -> None:
        """Let a call begin, once the warm-up that is under way lets it."""
        warmup.let_call_in()
        if warmup.done():
            self._warmup = None

    def _stop_warming(self) -> None:
        """Let go of what warming needs."""
        if self._warmup is not None:
            self._warmup.close()
            self._warmup = None
        if self._background is not None:
            self._background.close()
            self._background = None


def timed_start_up(init: Callable[P, None]) -> Callable[P, None]:
    """Make a constructor of `WarmupCalls` leave a report of its time."""

    @functools.wraps(init)
    def timed(*args: P.args, **kwargs: P.kwargs) -> None:
        clock = PhaseClock()
        with clock.running(), phase("handshake"):
            init(*args, **kwargs)
            self: Any = args[0]
            with phase("handshake"):  # what was open until here is counted now
                everyone = self.__dict__.pop("_gather_report")(_words(clock))
        self.init_report = _make_report(clock, everyone)

    return timed


def _words(clock: PhaseClock) -> list[int]:
    return [*clock.ns.values(), clock.wall_ns]


def _make_report(clock: PhaseClock, everyone: list[list[int]]) -> InitReport:
    """Return a report; what the ranks told each other lacks the time that the telling took."""
    own = _words(clock)
    most = [max(column) for column in zip(own, *everyone, strict=True)]
    return InitReport(
        phases_ms={name: ns / 1e6 for name, ns in zip(PHASES, own, strict=False)},
        max_phases_ms={name: ns / 1e6 for name, ns in zip(PHASES, most, strict=False)},
        wall_ms=own[-1] / 1e6,
        max_wall_ms=most[-1] / 1e6,
    )


def _agree(all_gather: AllGather, shapes: Sequence[ExchangeShape], *, is_told: bool) -> tuple[ExchangeShape, ...]:
    """Return the shapes that all ranks prepare for: the same that each was told, or those that rank 0 has seen.

    Raises:
        MismatchError: If they were told different ones.
    """
    words = [int(is_told), len(shapes)]
    for shape in shapes[:_NUM_MAX_SHAPES]:
        words += [int(value) for value in astuple(shape)]
    everyone = all_gather(words + [0] * (2 + _NUM_MAX_SHAPES * _NUM_SHAPE_WORDS - len(words)))
    for rank, told in enumerate(everyone):
        if (is_told or told[0]) and told != everyone[0]:
            raise MismatchError(
                f"all ranks must be told the same shapes, but ranks 0 and {rank} were told different ones",
                hint="pass the same shapes on all ranks, or none on any",
            )
    if is_told:
        return tuple(shapes)
    numbers = everyone[0][2:]
    rows = [numbers[_NUM_SHAPE_WORDS * i : _NUM_SHAPE_WORDS * (i + 1)] for i in range(everyone[0][1])]
    return tuple(map(_shape_of, rows))


@contextmanager
def _apart(buffer: WarmupCalls) -> Iterator[Any]:
    """Make a buffer over the same engines, whose calls are not timed, not remembered, and wait for no warm-up."""
    apart = copy.copy(buffer)
    apart.latency = LatencyMonitor(buffer.rank, buffer.group_size, buffer._device)
    apart._warmup = apart._noted = None
    try:
        yield apart
    finally:
        apart._engine = apart._low_latency = None  # they are not its own


def _exchange(buffer: Any, shape: ExchangeShape, num_tokens: int) -> None:
    """Make the calls of a layer, with tokens that go evenly to all experts."""
    device = buffer._device
    num_tokens = min(num_tokens, shape.num_max_tokens_per_rank)
    stride = max(shape.num_experts // shape.num_topk, 1)
    token, slot = torch.arange(num_tokens, device=device)[:, None], torch.arange(shape.num_topk, device=device)
    topk_idx = (token + buffer.rank + slot * stride) % shape.num_experts
    weights = torch.ones(num_tokens, shape.num_topk, device=device)
    x = torch.ones(num_tokens, shape.hidden, dtype=torch.bfloat16, device=device)
    if shape.is_low_latency:
        for has_hook in (False, True):
            recv_x, _, handle, _, hook = buffer.low_latency_dispatch(
                x,
                topk_idx,
                shape.num_max_tokens_per_rank,
                shape.num_experts,
                use_fp8=shape.use_fp8,
                return_recv_hook=has_hook,
            )
            if has_hook:
                hook()
            rows = recv_x[0] if shape.use_fp8 else recv_x
            y = torch.empty(rows.shape, dtype=torch.bfloat16, device=device)
            _, _, hook = buffer.low_latency_combine(y, topk_idx, weights, handle, return_recv_hook=has_hook)
            if has_hook:
                hook()
        return
    rows = x
    if shape.use_fp8:
        rows = (x.to(torch.float8_e4m3fn), torch.ones(num_tokens, shape.num_scales, device=device))
    config = Config(num_sms=shape.num_sms)
    per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, shape.num_experts)
    recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(
        rows,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=weights,
        config=config,
    )
    num_recv = (recv_x[0] if shape.use_fp8 else recv_x).size(0)
    del recv_x
    buffer.dispatch(rows, handle=handle, config=config)
    y = torch.empty(num_recv, shape.hidden, dtype=torch.bfloat16, device=device)
    buffer.combine(y, handle, config=config)
    buffer.combine(y, handle, topk_weights=recv_weights, config=config)


def _touch_outputs(shape: ExchangeShape, num_ranks: int, device: torch.device) -> None:
    """Have the memory of the largest results once, so that torch keeps it for later."""
    num_own = -(-shape.num_experts // num_ranks) if shape.is_low_latency else 1
    num_rows = num_own * num_ranks * shape.num_max_tokens_per_rank
    kept = [torch.empty(num_rows, shape.hidden, dtype=torch.bfloat16, device=device) for _ in range(2)]
    del kept


def _smallest_shape(num_ranks: int, is_low_latency: bool) -> ExchangeShape:
    return ExchangeShape(
        hidden=128, num_topk=1, num_experts=num_ranks, num_max_tokens_per_rank=1, is_low_latency=is_low_latency
    )


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _remember(noted: set[tuple[int, ...]]) -> None:
    for fields in noted:
        kernel_cache.remember(_shape_of(fields).to_dict())


def _shape_of(fields: Sequence[int]) -> ExchangeShape:
    hidden, num_topk, num_experts, num_max_tokens_per_rank, is_low_latency, use_fp8, num_sms = fields
    return ExchangeShape(
        hidden=hidden,
        num_topk=num_topk,
        num_experts=num_experts,
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        is_low_latency=bool(is_low_latency),
        use_fp8=bool(use_fp8),
        num_sms=num_sms,
    )
