"""How long calls take, with the names and results of DeepEP's module."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from deep_ep.errors import ConfigError

_FLUSH_BYTES = 256 << 20

Durations = float | list[float]


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Time a function on the current stream, or on the CPU where there is no GPU.

    Args:
        fn: What to time.
        num_warmups: Calls before.
        num_tests: Calls that are timed; the first of them does not count.
        post_fn: Called after each of them, not timed.
        flush_l2: Whether to write 256 MB before each on a GPU, so that nothing is left in its cache.

    Returns:
        Mean, least and most seconds.
    """
    for _ in range(num_warmups):
        fn()
    has_gpu = torch.cuda.is_available()
    times_s = (_time_on_gpu if has_gpu else _time_on_cpu)(fn, max(num_tests, 2), post_fn, flush_l2)[1:]
    return sum(times_s) / len(times_s), min(times_s), max(times_s)


def bench_kineto(  # noqa: PLR0913 (the signature is DeepEP's)
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
) -> Durations | tuple[Durations, ...]:
    """Time kernels by their names, with the profiler of torch; on the CPU, operators.

    Args:
        fn: What launches them.
        kernel_names: Parts of names; each may be part of one kernel's name only.
        num_tests: Calls of `fn` that are profiled, after one that is not.
        suppress_kineto_output: Accepted; the profiler prints nothing here.
        trace_path: Where to write the timeline for Perfetto, or None.
        flush_l2: As in `bench`.
        barrier_comm_profiling: Whether ranks meet before each call, so that none waits for another in the kernel.
        num_kernels_per_period: How many kernels of a name one call launches.
        barrier: How ranks meet; None takes a barrier of the default group.

    Returns:
        Mean seconds per kernel, or a list of them in the order of launches if there are several per call; a tuple of
        these if several names were given. A kernel that did not run took 0.0.

    Raises:
        ConfigError: If a name is part of several kernels' names.
    """
    del suppress_kineto_output
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    has_gpu = torch.cuda.is_available()
    fn()
    _synchronize()
    with profile(activities=[ProfilerActivity.CUDA if has_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(num_tests):
            if flush_l2:
                _flush()
            if barrier_comm_profiling:
                (barrier or dist.barrier)()
            fn()
        _synchronize()
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    durations = tuple(_durations(profiler, name, num_kernels_per_period) for name in names)
    return durations[0] if isinstance(kernel_names, str) else durations


def _durations(profiler: Any, name: str, num_per_period: int) -> Durations:
    device = DeviceType.CUDA if torch.cuda.is_available() else DeviceType.CPU
    events = [event for event in profiler.events() if name in event.name and event.device_type == device]
    found = sorted({event.name for event in events})
    if len(found) > 1:
        raise ConfigError(f"kernel name {name!r} must be part of one kernel's name, but is part of {found}")
    events.sort(key=lambda event: event.time_range.start)
    times_s = [event.time_range.elapsed_us() * 1e-6 for event in events]
    means = [
        sum(part) / len(part) if part else 0.0 for part in (times_s[i::num_per_period] for i in range(num_per_period))
    ]
    return means[0] if num_per_period == 1 else means


def _time_on_gpu(
    fn: Callable[[], Any], num_tests: int, post_fn: Callable[[], Any] | None, flush_l2: bool
) -> list[float]:
    marks: list[tuple[Any, Any]] = []
    for _ in range(num_tests):
        if flush_l2:
            _flush()
        marks.append(tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)))  # type: ignore[no-untyped-call, arg-type]
        marks[-1][0].record()
        fn()
        marks[-1][1].record()
        if post_fn is not None:
            post_fn()
    _synchronize()
    return [begin.elapsed_time(end) * 1e-3 for begin, end in marks]


def _time_on_cpu(
    fn: Callable[[], Any],
    num_tests: int,
    post_fn: Callable[[], Any] | None,
    flush_l2: bool,  # noqa: ARG001
) -> list[float]:
    times_s = []
    for _ in range(num_tests):
        begin_s = time.perf_counter()
        fn()
        times_s.append(time.perf_counter() - begin_s)
        if post_fn is not None:
            post_fn()
    return times_s


def _flush() -> None:
    if torch.cuda.is_available():
        torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda").zero_()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
