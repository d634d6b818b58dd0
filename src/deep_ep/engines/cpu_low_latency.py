"""Low-latency mode on CPU ranks: the same two steps as normal mode (`deep_ep.engines.exchange`), fixed capacity.

Both directions rest on one order, that of a rank's (token, expert) pairs sorted by expert, then by token:

- *Dispatch.* Every rank tells how many pairs it has for each expert. Row i of a source's pairs for an expert belongs
  behind the rows that lower source ranks have for it, so each sender can put its rows where they stay.
- *Combine.* A rank returns the rows of a source expert by expert, in the order in which they came. So what a source
  gets back, rank after rank, is its pairs in that same order, and it knows which slot of which token each row is.

Example: token 0 of rank 0 names experts 1 and 0, token 1 names expert 0. In order, the pairs are (expert 0, token 0),
(expert 0, token 1) and (expert 1, token 0). Expert 0 gets tokens 0 and 1, expert 1 gets token 0, and the rows come back
in that order.

*Masked ranks* send and get nothing, and the top-k slots that name their experts count for nothing. If ranks can be
masked at all, the rows of a dispatch are copied out of the shared memory at the end: a rank that was masked in the
middle of a call may still write there, and those behind its rows move up (`deep_ep.engines.masked_rows`).

A split call waits for the peers' rows in `finish`, and does the rest at once. Calls may be finished in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from deep_ep.engines import fp8, rows
from deep_ep.engines.base import (
    LowLatencyCombineRequest,
    LowLatencyDispatchRequest,
    LowLatencyDispatchResult,
    LowLatencyHandle,
    Pending,
    RowFormat,
)
from deep_ep.engines.exchange import CALLS, DTYPES, Exchange, Exchanger, Header, combine_layout
from deep_ep.engines.masked_rows import copy_out, private_copy
from deep_ep.engines.routing import expert_range
from deep_ep.errors import MismatchError
from deep_ep.layout import CombineLayout, LowLatencyDispatchLayout
from deep_ep.shapes import ExchangeShape

_FORMATS = tuple(RowFormat)
R = TypeVar("R")


class CpuLowLatencyEngine:
    """Low-latency exchanges between processes of one host (`deep_ep.engines.base.LowLatencyEngine`).

    Args:
        exchanger: The memory and steps of the ranks, shared with normal mode.
    """

    def __init__(self, exchanger: Exchanger) -> None:
        self._exchanger = exchanger
        self.rank, self.num_ranks = exchanger.rank, exchanger.num_ranks

    def dispatch(self, request: LowLatencyDispatchRequest, *, split: bool) -> Pending[LowLatencyDispatchResult]:
        """Send each token to each of its experts; split in two halves, or as one."""
        num_experts, row_format = request.num_experts, request.row_format
        data, scales = request.x, None
        if row_format is not RowFormat.BF16:
            data, scales = fp8.cast_rows(request.x, row_format)
        pairs = _sort_pairs(request.topk_idx, num_experts)
        header = Header(
            call=CALLS.index("low-latency dispatch"),
            dtype=DTYPES.index(data.dtype),
            hidden=data.size(1),
            scale_row_bytes=0 if scales is None else scales.size(1) * 4,
            num_experts=num_experts,
            num_max_tokens_per_rank=request.num_max_tokens_per_rank,
            row_format=_FORMATS.index(row_format),
        )
        no_counts = [[0] * self.num_ranks] * self.num_ranks  # every slot that could be needed is there
        exchange = self._exchanger.begin(header, self._dispatch_layout, pairs.counts, no_counts)
        self._add_stats(request.wait_stats)
        result = arrived = self._take_result(request, exchange, data, scales)
        if self._exchanger.control.membership is not None:
            result = private_copy(arrived)
        with self._exchanger.writing(exchange):
            self._write_pairs(exchange, pairs, data, scales)

        def finish() -> None:
            lost = self._exchanger.finish(exchange)
            self._add_stats(request.wait_stats)
            if result is not arrived:
                copy_out(arrived, result, lost, request.recv_stats)

        return _pend(result, finish, split)

    def combine(self, request: LowLatencyCombineRequest, *, split: bool) -> Pending[Tensor]:
        """Bring rows back and add them, weighted; split in two halves, or as one."""
        x, handle = request.x, request.handle
        ranges = handle.layout_range.tolist()
        counts_by_source = [sum(line[src] & 0xFFFFFFFF for line in ranges) for src in range(self.num_ranks)]
        header = Header(
            call=CALLS.index("low-latency combine"),
            dtype=DTYPES.index(x.dtype),
            hidden=x.size(2),
            num_experts=handle.num_experts,
            num_max_tokens_per_rank=handle.num_max_dispatch_tokens_per_rank,
        )
        exchange = self._exchanger.begin(header, combine_layout, counts_by_source)
        self._add_stats(request.wait_stats)
        (table,) = self._exchanger.take_sections(exchange, [exchange.layouts[self.rank].num_bytes])
        topk_idx = self._without(request.topk_idx, handle.num_experts, exchange.masked)
        pairs = _sort_pairs(topk_idx, handle.num_experts)
        with self._exchanger.writing(exchange):
            self._check_counts(exchange, pairs.counts)
            self._write_back(exchange, x, ranges)
        out = request.out
        if out is None:
            out = torch.empty(request.topk_idx.size(0), x.size(2), dtype=x.dtype)

        def finish() -> None:
            lost = self._exchanger.finish(exchange)
            self._add_stats(request.wait_stats)
            shape = (pairs.tokens.size(0), x.size(2))
            num_bytes = shape[0] * shape[1] * x.element_size()
            used = pairs
            if lost:
                is_there = self._without(topk_idx, handle.num_experts, lost).reshape(-1)[pairs.slots] >= 0
                used = pairs._replace(slots=pairs.slots[is_there], pair_of_slot=pairs.pair_of_slot[is_there])
            _sum_weighted(table[:num_bytes].view(x.dtype).view(shape), used, request.topk_weights, out)

        return _pend(out, finish, split)

    def reserve(self, shape: ExchangeShape) -> None:
        """Get memory for calls of a shape, two dispatched results and a combine; all ranks do so together."""
        num_tokens = shape.num_max_tokens_per_rank
        dispatch = LowLatencyDispatchLayout(
            num_slots=self._num_slots(shape.num_experts, num_tokens),
            row_bytes=shape.hidden * (1 if shape.use_fp8 else 2),
            scale_row_bytes=4 * shape.num_scales,
        )
        combine = CombineLayout(
            num_rows=num_tokens * shape.num_topk, row_bytes=2 * shape.hidden, num_topk=0, num_bias_rows=0
        )
        self._exchanger.reserve(2 * dispatch.num_bytes + max(dispatch.num_bytes, combine.num_bytes))

    def mask(self, rank: int, *, is_masked: bool) -> None:
        """Mask a rank or take it in again, for normal calls too."""
        self._exchanger.mask(rank, is_masked=is_masked)

    def unmask_all(self) -> None:
        """Take all ranks in again, this one first: the others may be ahead of it."""
        for rank in sorted(range(self.num_ranks), key=lambda rank: rank != self.rank):
            self.mask(rank, is_masked=False)

    def write_masked(self, mask_status: Tensor) -> None:
        """Write 1 for each masked rank and 0 for the others to `[R]` int32."""
        masked = self._exchanger.masked()
        mask_status.copy_(torch.tensor([int(rank in masked) for rank in range(self.num_ranks)], dtype=torch.int32))

    def set_timeout(self, timeout_s: float) -> None:
        """Wait so long for a peer from now on."""
        self._exchanger.control.timeout_s = timeout_s

    def local_bytes(self) -> Tensor:
        """Return the first segment of this rank's shared memory, which normal mode uses too."""
        return self._exchanger.local_bytes()

    def close(self) -> None:
        """Nothing to let go of: the memory is the normal engine's."""

    def _dispatch_layout(self, header: Header, _: int) -> LowLatencyDispatchLayout:
        return LowLatencyDispatchLayout(
            num_slots=self._num_slots(header.num_experts, header.num_max_tokens_per_rank),
            row_bytes=header.hidden * DTYPES[header.dtype].itemsize,
            scale_row_bytes=header.scale_row_bytes,
        )

    def _num_slots(self, num_experts: int, num_max_tokens_per_rank: int) -> int:
        return -(-num_experts // self.num_ranks) * self.num_ranks * num_max_tokens_per_rank

    def _take_result(
        self,
        request: LowLatencyDispatchRequest,
        exchange: Exchange[LowLatencyDispatchLayout],
        data: Tensor,
        scales: Tensor | None,
    ) -> LowLatencyDispatchResult:
        """Keep this rank's extent and describe it: everything but the rows is known from the counts."""
        begin, end = expert_range(self.rank, request.num_experts, self.num_ranks)
        num_experts, num_rows = end - begin, self.num_ranks * request.num_max_tokens_per_rank
        num_slots = self._num_slots(request.num_experts, request.num_max_tokens_per_rank)
        scale_columns = 0 if scales is None else scales.size(1)
        sizes = [num_slots * data.size(1) * data.element_size(), num_slots * scale_columns * 4, num_slots * 4]
        recv_x, recv_scales, src_info = self._exchanger.take_sections(exchange, sizes)
        counts = [told[begin:end] for told in exchange.told]
        recv_counts = torch.tensor(counts, dtype=torch.int64).view(self.num_ranks, num_experts).t()
        begins = recv_counts.cumsum(1) - recv_counts
        recv_count = recv_counts.sum(1, dtype=torch.int32)
        if request.recv_stats is not None:
            request.recv_stats.add_(recv_count)
        src_info = src_info.view(torch.int32).view(-1, num_rows)[:num_experts] if num_rows else src_info.view(0, 0)
        return LowLatencyDispatchResult(
            x=_rows_of_experts(recv_x, data.dtype, num_experts, num_rows, data.size(1)),
            # In memory, the rows of a scale column are neighbours.
            scales=None
            if scales is None
            else _rows_of_experts(recv_scales, scales.dtype, num_experts, scale_columns, num_rows).transpose(1, 2),
            recv_count=recv_count,
            handle=LowLatencyHandle(
                src_info=src_info,
                layout_range=(begins << 32 | recv_counts).contiguous(),
                num_max_dispatch_tokens_per_rank=request.num_max_tokens_per_rank,
                hidden=request.x.size(1),
                num_experts=request.num_experts,
            ),
        )

    def _write_pairs(
        self, exchange: Exchange[LowLatencyDispatchLayout], pairs: _Pairs, data: Tensor, scales: Tensor | None
    ) -> None:
        """Copy this rank's rows to the slots of their experts."""
        header = exchange.headers[self.rank]
        num_experts, num_rows = header.num_experts, self.num_ranks * header.num_max_tokens_per_rank
        num_slots = self._num_slots(num_experts, header.num_max_tokens_per_rank)
        before = [sum(column) for column in zip(*exchange.told[: self.rank], strict=True)] or [0] * num_experts
        segment_begins = [0, *accumulate(pairs.counts)]
        words = rows.as_words(data)
        for dst in exchange.receivers():
            first, end = expert_range(dst, num_experts, self.num_ranks)
            pair_begin, pair_end = segment_begins[first], segment_begins[end]
            if pair_begin == pair_end:
                continue
            # Pair j of expert e goes to slot (e - first) * num_rows + before[e] + (j - segment_begins[e]).
            shifts = [(e - first) * num_rows + before[e] - segment_begins[e] for e in range(first, end)]
            counts = torch.tensor(pairs.counts[first:end])
            slot = torch.arange(pair_begin, pair_end) + torch.tensor(shifts).repeat_interleave(counts)
            token = pairs.tokens[pair_begin:pair_end]
            memory, at, offset = exchange.memories[dst], exchange.layouts[dst], exchange.places[dst].offset
            rows.scatter(words, token, memory, offset + at.x, slot, num_slots)
            rows.scatter(token.to(torch.int32).unsqueeze(1), _all(token), memory, offset + at.src_info, slot, num_slots)
            if scales is not None:
                shape = (num_slots // num_rows, scales.size(1), num_rows)
                target = memory.rows(offset + at.scales, shape[0] * shape[1], num_rows, scales.dtype).view(shape)
                target.transpose(1, 2)[slot // num_rows, slot % num_rows] = scales[token]

    def _without(self, topk_idx: Tensor, num_experts: int, masked: frozenset[int]) -> Tensor:
        """Name no expert of a masked rank."""
        for rank in masked:
            begin, end = expert_range(rank, num_experts, self.num_ranks)
            topk_idx = topk_idx.masked_fill((topk_idx >= begin) & (topk_idx < end), -1)
        return topk_idx

    def _check_counts(self, exchange: Exchange[CombineLayout], expert_counts: list[int]) -> None:
        """Compare what the peers return with what this rank's `topk_idx` says they got."""
        num_experts = len(expert_counts)
        for src, counts in enumerate(exchange.counts):
            if src in exchange.masked:
                continue
            begin, end = expert_range(src, num_experts, self.num_ranks)
            expected = sum(expert_counts[begin:end])
            if counts[self.rank] != expected:
                raise MismatchError(
                    f"rank {self.rank}: by topk_idx rank {src} has {expected} rows to return, but it returns "
                    f"{counts[self.rank]}",
                    hint="pass the topk_idx of the dispatch, and its handle, on all ranks",
                )

    def _write_back(self, exchange: Exchange[CombineLayout], x: Tensor, ranges: list[list[int]]) -> None:
        """Copy each source's rows to the source, expert by expert."""
        num_rows = x.size(1)
        words = rows.as_words(x.view(-1, x.size(2)))
        for dst in exchange.receivers():
            counts = [line[dst] & 0xFFFFFFFF for line in ranges]
            if sum(counts) == 0:
                continue
            ends = list(accumulate(counts))
            shifts = [
                expert * num_rows + (line[dst] >> 32) - (end - count)
                for expert, (line, end, count) in enumerate(zip(ranges, ends, counts, strict=True))
            ]
            slot = torch.arange(ends[-1]) + torch.tensor(shifts).repeat_interleave(torch.tensor(counts))
            row_bytes = x.size(2) * x.element_size()
            offset = exchange.places[dst].offset + exchange.layouts[dst].x + exchange.first_row(dst) * row_bytes
            rows.gather(words, slot, exchange.memories[dst], offset)

    def _add_stats(self, wait_stats: Tensor | None) -> None:
        if wait_stats is not None:
            wait_stats.add_(torch.tensor(self._exchanger.control.last_wait_ns))


class _Pairs(NamedTuple):
    """A rank's (token, expert) pairs in order: by expert, then by token. A pair that a token names twice is one pair.

    Attributes:
        tokens: `[P]` int64; the token of each pair.
        counts: Pairs of each expert.
        slots: `[Q]` int64; the slots of the flattened `topk_idx` that name an expert.
        pair_of_slot: `[Q]` int64; the pair of each.
    """

    tokens: Tensor
    counts: list[int]
    slots: Tensor
    pair_of_slot: Tensor


def _sort_pairs(topk_idx: Tensor, num_experts: int) -> _Pairs:
    num_tokens, num_topk = topk_idx.shape
    flat = topk_idx.reshape(-1).to(torch.int64)
    used = (flat >= 0).nonzero()[:, 0]
    key, order = torch.sort(flat[used] * num_tokens + used // max(num_topk, 1))
    is_new = torch.ones_like(key, dtype=torch.bool)
    is_new[1:] = key[1:] != key[:-1]
    pairs = key[is_new]
    counts = torch.bincount(pairs // max(num_tokens, 1), minlength=num_experts)
    return _Pairs(pairs % max(num_tokens, 1), counts.tolist(), used[order], is_new.cumsum(0) - 1)


def _sum_weighted(table: Tensor, pairs: _Pairs, weights: Tensor, out: Tensor) -> None:
    """Add up `weights[t, k] * row` in float32, in ascending k, round once, and put the sums into `out`.

    Args:
        table: `[P, H]` bfloat16; the row of each pair.
        pairs: The pairs.
        weights: `[T, K]` float32.
        out: `[T, H]` bfloat16.
    """
    if table.numel() == 0:
        out.zero_()
        return
    num_tokens, num_topk = weights.shape
    slot, order = torch.sort(pairs.slots)
    row = pairs.pair_of_slot[order]
    begins = torch.searchsorted(slot, torch.arange(num_tokens + 1) * num_topk)
    weight = weights.view(-1)[slot]
    # Mode 0 sums; the last argument says that `begins` has one item more than there are tokens.
    out.copy_(torch.embedding_bag(table.float(), row, begins, False, 0, False, weight, True)[0])


def _rows_of_experts(data: Tensor, dtype: torch.dtype, num_experts: int, num_rows: int, num_columns: int) -> Tensor:
    num_items = num_experts * num_rows * num_columns
    return data.view(dtype)[:num_items].view(num_experts, num_rows, num_columns)


def _all(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.size(0))


def _pend(result: R, finish: Callable[[], None], split: bool) -> Pending[R]:
    if split:
        return Pending(result, finish)
    finish()
    return Pending(result, lambda: None)
