"""The rows of a low-latency dispatch in memory that no peer can reach, without those of ranks that were masked."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from deep_ep.engines.base import LowLatencyDispatchResult


def private_copy(arrived: LowLatencyDispatchResult) -> LowLatencyDispatchResult:
    """Return a result of the same shape in memory of its own, yet without rows."""
    return replace(
        arrived,
        x=torch.empty_like(arrived.x),
        scales=None if arrived.scales is None else torch.empty_like(arrived.scales),
        recv_count=arrived.recv_count.clone(),
        handle=arrived.handle._replace(
            src_info=torch.empty_like(arrived.handle.src_info), layout_range=arrived.handle.layout_range.clone()
        ),
    )


def copy_out(
    arrived: LowLatencyDispatchResult,
    result: LowLatencyDispatchResult,
    lost: frozenset[int],
    recv_stats: Tensor | None,
) -> None:
    """Copy the rows that have arrived to a result; those of lost ranks are left out, and the counts corrected.

    Example: an expert has rows from ranks 0, 1 and 2, with ranges (0, 2), (2, 3) and (5, 1). Rank 1 is lost: rows 0, 1
    and 5 are copied to rows 0, 1 and 2, and the ranges become (0, 2), (2, 0) and (2, 1).

    Args:
        arrived: What is in shared memory.
        result: Where it goes, in place.
        lost: The ranks that were masked before they had written all rows.
        recv_stats: Where the rows of each expert have been counted, to be corrected too.
    """
    if lost:
        ranges = arrived.handle.layout_range
        counts = ranges & 0xFFFFFFFF
        counts[:, sorted(lost)] = 0
        begins = counts.cumsum(1) - counts
        result.handle.layout_range.copy_(begins << 32 | counts)
        result.recv_count.copy_(counts.sum(1))
        if recv_stats is not None:
            recv_stats.add_(result.recv_count - arrived.recv_count)
    old, new = arrived.handle.layout_range.tolist(), result.handle.layout_range.tolist()
    for expert, (from_ranges, to_ranges) in enumerate(zip(old, new, strict=True)):
        num_rows = int(result.recv_count[expert])
        if not lost:
            _copy_rows(arrived, result, expert, (0, 0, num_rows))
            continue
        for from_range, to_range in zip(from_ranges, to_ranges, strict=True):
            _copy_rows(arrived, result, expert, (from_range >> 32, to_range >> 32, to_range & 0xFFFFFFFF))


def _copy_rows(
    arrived: LowLatencyDispatchResult, result: LowLatencyDispatchResult, expert: int, run: tuple[int, int, int]
) -> None:
    begin, to, count = run
    source, target = slice(begin, begin + count), slice(to, to + count)
    result.x[expert, target] = arrived.x[expert, source]
    result.handle.src_info[expert, target] = arrived.handle.src_info[expert, source]
    if result.scales is not None and arrived.scales is not None:
        result.scales[expert, target] = arrived.scales[expert, source]
