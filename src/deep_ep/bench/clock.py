"""How long calls take: they take turns, the ranks meet before each run, and of the ranks the slowest counts."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from deep_ep.bench.ranks import Rank

CLOCKS = {
    "cpu": "time.perf_counter around one call in a run of calls, median, slowest rank",
    "cuda": "CUDA events around one call after the ranks have met and L2 was flushed, median, slowest rank",
    "graph": "CUDA events around the replay of a CUDA graph of 20 calls, per call, median, slowest rank",
}
_RUN_LENGTH = 5
_GRAPH_CALLS = 20
_L2_BYTES = 256 << 20
Call = Callable[[], Any]
# torch does not type their constructors.
_Event: Any = torch.cuda.Event
_Stream: Any = torch.cuda.Stream


def time_calls(rank: Rank, calls: dict[str, Call], num_iterations: int) -> dict[str, float]:
    """Return the median time of each call in us, of the slowest rank.

    Args:
        rank: Where; all ranks together.
        calls: By name; the order is the same on all ranks.
        num_iterations: How many times of each count, at least.
    """
    clock = _time_on_gpu if rank.device.type == "cuda" else _time_on_cpu
    gc.collect()
    samples = clock(rank, calls, num_iterations)
    return rank.slowest({name: statistics.median(times) for name, times in samples.items()})


def _time_on_cpu(_: Rank, calls: dict[str, Call], num_iterations: int) -> dict[str, list[float]]:
    """Time runs of five calls. The first of a run, which also waits for the ranks to meet, does not count."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-(-num_iterations // (_RUN_LENGTH - 1)) + 1):
        for name, call in calls.items():
            dist.barrier()
            for i in range(_RUN_LENGTH):
                begin = time.perf_counter()
                result = call()
                end = time.perf_counter()
                del result
                if i and turn:
                    samples[name].append((end - begin) * 1e6)
    return samples


def _time_on_gpu(rank: Rank, calls: dict[str, Call], num_iterations: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    flush = torch.empty(_L2_BYTES, dtype=torch.uint8, device=rank.device)
    one = torch.ones(1, device=rank.device if rank.has_nccl else "cpu")
    for turn in range(num_iterations + 3):
        for name, call in calls.items():
            flush.zero_()
            dist.all_reduce(one)
            begin, end = _Event(enable_timing=True), _Event(enable_timing=True)
            begin.record()
            result = call()
            end.record()
            end.synchronize()
            del result
            if turn >= 3:
                samples[name].append(begin.elapsed_time(end) * 1e3)
    return samples


def time_graphs(rank: Rank, calls: dict[str, Call], num_iterations: int) -> dict[str, float]:
    """Return the time per call, in us, of calls back to back in a CUDA graph; median, slowest rank."""
    return rank.slowest({name: _time_graph(call, num_iterations) for name, call in calls.items()})


def _time_graph(call: Call, num_iterations: int) -> float:
    stream = _Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(_GRAPH_CALLS):
            call()
    times: list[float] = []
    for _ in range(num_iterations + 3):
        torch.cuda.synchronize()
        dist.barrier()
        graph.replay()  # after it the ranks begin together, whatever the barrier's own spread was
        begin, end = _Event(enable_timing=True), _Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / _GRAPH_CALLS)
    return statistics.median(times[3:])
