"""The CPU engine: ranks are processes of one host, rows move through memory that all of them have mapped.

`deep_ep.engines.exchange` has the protocol; here is what each call writes, and where. A dispatch moves each row with
one vectorised copy, from the sender's tensor into the receiver's memory, and the rows it returns are tensors on that
very memory: they are not copied out (`deep_ep.memory.arena` has their lifetime).
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from deep_ep.config import buffer_size_hint
from deep_ep.engines import few, rows
from deep_ep.engines.base import CachedDispatchRequest, CombineRequest, DispatchRequest, DispatchResult, Handle, Layout
from deep_ep.engines.exchange import CALLS, DTYPES, Exchange, Exchanger, Header, L, check_worst_tokens, combine_layout
from deep_ep.engines.routing import (
    Channels,
    Tokens,
    compute_channels,
    compute_layout,
    expert_range,
    local_expert,
    local_expert_list,
    token_numbers,
    tokens_by_rank,
)
from deep_ep.errors import ConfigError
from deep_ep.layout import CombineLayout, DispatchLayout
from deep_ep.memory.rendezvous import Rendezvous
from deep_ep.shapes import ExchangeShape


class CpuEngine:
    """Exchanges between processes of one host (`deep_ep.engines.base.Engine`). All ranks construct one together.

    Args:
        rendezvous: The ranks.
        num_bytes: Bytes of shared memory to begin with; a call that needs more makes all ranks map more.
        timeout_s: How long a call waits for a peer.
        can_mask: Whether ranks may be masked.

    Attributes:
        exchanger: The memory and the steps, which low-latency calls share.
    """

    def __init__(self, rendezvous: Rendezvous, num_bytes: int, timeout_s: float, *, can_mask: bool = False) -> None:
        self.device = torch.device("cpu")
        self.rank, self.num_ranks = rendezvous.rank, rendezvous.num_ranks
        self.exchanger = Exchanger(rendezvous, num_bytes, timeout_s, can_mask=can_mask)

    def compute_layout(self, topk_idx: Tensor, num_experts: int) -> Layout:
        """Count where tokens go."""
        return compute_layout(topk_idx, num_experts, self.num_ranks)

    def dispatch(self, request: DispatchRequest) -> DispatchResult:
        """Send tokens to the ranks of their experts."""
        layout, x, topk_idx = request.layout, request.x, request.topk_idx
        if self.exchanger.acknowledged:
            layout = _without(layout, self.exchanger.acknowledged)
            request = replace(request, layout=layout)
        channels = compute_channels(layout.is_token_in_rank, request.config.num_channels)
        send_counts = _check_counts(layout, channels)
        tokens = tokens_by_rank(layout.is_token_in_rank, send_counts)
        header = Header(
            call=CALLS.index("dispatch"),
            dtype=DTYPES.index(x.dtype),
            hidden=x.size(1),
            scale_row_bytes=rows.row_bytes(request.scales),
            num_topk=0 if topk_idx is None else topk_idx.size(1),
            topk_idx_bytes=0 if topk_idx is None else topk_idx.element_size(),
            num_experts=layout.num_tokens_per_expert.numel(),
            num_channels=request.config.num_channels,
            num_worst_tokens=request.num_worst_tokens,
        )
        told = [*send_counts, *chain.from_iterable(channels.ends), *layout.num_tokens_per_expert.tolist()]
        exchange = self.exchanger.begin(header, _dispatch_layout, told)
        check_worst_tokens(exchange)
        with self.exchanger.writing(exchange):
            sections = {
                "x": x,
                "scales": request.scales,
                "topk_idx": topk_idx,
                "topk_weights": request.topk_weights,
                "src_idx": token_numbers(x.size(0)),
            }
            _write_rows(exchange, tokens, sections)
        self.exchanger.finish(exchange)
        return self._receive(request, exchange, channels)

    def dispatch_cached(self, request: CachedDispatchRequest) -> tuple[Tensor, Tensor | None]:
        """Send tokens the way of an earlier dispatch; return rows and scales."""
        x, scales, is_token_in_rank = request.x, request.scales, request.handle.is_token_in_rank
        num_rows = request.handle.recv_src_idx.numel()
        routing = _read_routing(request.handle, self.rank)
        tokens = tokens_by_rank(is_token_in_rank, routing.counts[self.rank])
        header = Header(
            call=CALLS.index("cached dispatch"),
            dtype=DTYPES.index(x.dtype),
            hidden=x.size(1),
            scale_row_bytes=rows.row_bytes(scales),
            routing=routing.checksum,
            num_worst_tokens=num_rows,
        )
        exchange = self.exchanger.begin(header, _dispatch_layout, counts=routing.counts)
        with self.exchanger.writing(exchange):
            _write_rows(exchange, tokens, {"x": x, "scales": scales})
            _clear_rows(exchange, {"x": x, "scales": scales})
        self.exchanger.finish(exchange)
        sizes = [num_rows * rows.row_bytes(x), num_rows * rows.row_bytes(scales)]
        recv_x, recv_scales = self.exchanger.take_sections(exchange, sizes)
        return rows.as_rows(recv_x, num_rows, x), None if scales is None else rows.as_rows(
            recv_scales, num_rows, scales
        )

    def combine(self, request: CombineRequest) -> tuple[Tensor, Tensor | None]:
        """Bring rows back and add them."""
        x, weights, biases = request.x, request.topk_weights, request.biases
        is_token_in_rank, num_tokens = request.handle.is_token_in_rank, request.handle.is_token_in_rank.size(0)
        routing = _read_routing(request.handle, self.rank)
        tokens = tokens_by_rank(is_token_in_rank, routing.counts[self.rank])  # a rank gets back what it sent
        counts_back = [list(column) for column in zip(*routing.counts, strict=True)]
        header = Header(
            call=CALLS.index("combine"),
            dtype=DTYPES.index(x.dtype),
            hidden=x.size(1),
            num_topk=0 if weights is None else weights.size(1),
            routing=routing.checksum,
            num_bias_rows=len(biases) * num_tokens,
        )
        exchange = self.exchanger.begin(header, combine_layout, counts=counts_back)
        own, own_at = exchange.memories[self.rank], exchange.layouts[self.rank]
        own_offset = exchange.places[self.rank].offset
        with self.exchanger.writing(exchange):
            _return_rows(exchange, {"x": x, "topk_weights": weights}, tokens)
            _clear_rows(exchange, {"x": x, "topk_weights": weights})
            for i, bias in enumerate(biases):
                rows.copy(bias, own, own_offset + own_at.biases + i * num_tokens * rows.row_bytes(x))
        self.exchanger.finish(exchange)
        token_rows = rows.TokenRows(tokens, num_tokens, len(biases))
        num_rows = token_rows.rows.size(0)
        combined_x = token_rows.sum(own.rows(own_offset + own_at.biases, num_rows, x.size(1), x.dtype))
        if weights is None:
            return combined_x, None
        if biases:
            token_rows = rows.TokenRows(tokens, num_tokens, 0)
        shape = (num_rows - header.num_bias_rows, weights.size(1))
        return combined_x, token_rows.sum(own.rows(own_offset + own_at.topk_weights, *shape, torch.float32))

    def reserve(self, shape: ExchangeShape) -> None:
        """Get memory for calls of a shape, whatever their routing; all ranks do so together."""
        row_bytes = shape.hidden * (1 if shape.use_fp8 else 2)
        hint = buffer_size_hint(
            shape.num_max_tokens_per_rank, row_bytes, self.num_ranks, shape.num_topk, shape.num_scales
        )
        combine_bytes = CombineLayout(
            num_rows=self.num_ranks * shape.num_max_tokens_per_rank,
            row_bytes=2 * shape.hidden,
            num_topk=shape.num_topk,
            num_bias_rows=0,
        ).num_bytes
        # Dispatched rows are in use while those of the combine arrive.
        self.exchanger.reserve(hint.num_nvl_bytes // 2 + max(hint.num_nvl_bytes // 2, combine_bytes))

    def mask(self, rank: int, *, is_masked: bool) -> None:
        """Mask a rank or take it in again, for normal and low-latency calls."""
        self.exchanger.mask(rank, is_masked=is_masked)

    def set_timeout(self, timeout_s: float) -> None:
        """Wait so long for a peer from now on."""
        self.exchanger.control.timeout_s = timeout_s

    def local_bytes(self) -> Tensor:
        """Return the first segment of this rank's shared memory, as a uint8 tensor."""
        return self.exchanger.local_bytes()

    def close(self) -> None:
        """Let go of the memory; received tensors that still live keep what they use."""
        self.exchanger.close()

    def _receive(
        self, request: DispatchRequest, exchange: Exchange[DispatchLayout], channels: Channels
    ) -> DispatchResult:
        """Turn what peers wrote and told into what a dispatch returns."""
        x, scales = request.x, request.scales
        num_real_rows = exchange.num_rows(self.rank)
        num_rows = request.num_worst_tokens or num_real_rows
        sizes = [num_rows * rows.row_bytes(x), num_rows * rows.row_bytes(scales)]
        recv_x, recv_scales = self.exchanger.take_sections(exchange, sizes)
        topk_idx, topk_weights = self._read_topk(request, exchange, num_real_rows, num_rows)
        src_idx = self._read_src_idx(exchange, num_real_rows)
        num_channels = request.config.num_channels
        begin, ends_begin = self.num_ranks * (1 + num_channels), self.num_ranks + self.rank * num_channels
        ends = [told[ends_begin : ends_begin + num_channels] for told in exchange.told]
        per_expert: list[int] = []
        if request.num_worst_tokens == 0:
            first, end = expert_range(self.rank, request.layout.num_tokens_per_expert.numel(), self.num_ranks)
            counts = [told[begin + first : begin + end] for told in exchange.told]
            alignment = request.expert_alignment
            per_expert = [-(-sum(column) // alignment) * alignment for column in zip(*counts, strict=True)]
        psum = list(accumulate(exchange.counts, lambda total, row: [a + b for a, b in zip(total, row, strict=True)]))
        handle = Handle(
            rank_prefix_matrix=_int32_matrix(psum),
            channel_prefix_matrix=_int32_matrix(channels.ends),
            recv_channel_prefix_matrix=_int32_matrix([[0, *line[:-1]] for line in ends]),
            recv_src_idx=rows.pad(src_idx, num_rows),
            is_token_in_rank=request.layout.is_token_in_rank,
            send_head=channels.send_head,
        )
        return DispatchResult(
            x=rows.as_rows(recv_x, num_rows, x),
            scales=None if scales is None else rows.as_rows(recv_scales, num_rows, scales),
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_recv_tokens_per_expert=per_expert,
            handle=handle,
        )

    def _read_src_idx(self, exchange: Exchange[DispatchLayout], num_rows: int) -> Tensor:
        """Return the index of each row at its source, `[N]` int32."""
        memory, at, offset = exchange.extent(self.rank)
        if few.is_few(num_rows):
            indices = few.values_at(memory.bytes, offset + at.src_idx, num_rows, torch.int32)
            return few.to_tensor(indices, torch.int32, (num_rows,))
        return memory.rows(offset + at.src_idx, num_rows, 1, torch.int32).view(-1).clone()

    def _read_topk(
        self, request: DispatchRequest, exchange: Exchange[DispatchLayout], num_real_rows: int, num_rows: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return expert ids among this rank's, and weights, with 0 where the expert is another rank's."""
        topk_idx = request.topk_idx
        if topk_idx is None:
            return None, None
        memory, at, offset = exchange.extent(self.rank)
        dtype, num_experts = topk_idx.dtype, request.layout.num_tokens_per_expert.numel()
        shape = (num_real_rows, topk_idx.size(1))
        num_items = shape[0] * shape[1]
        if few.is_few(num_items):
            expert_of = local_expert_list(self.rank, num_experts, self.num_ranks)
            ids = [expert_of[e] for e in few.values_at(memory.bytes, offset + at.topk_idx, num_items, dtype)]
            values = few.values_at(memory.bytes, offset + at.topk_weights, num_items, torch.float32)
            kept = [weight if e >= 0 else 0.0 for weight, e in zip(values, ids, strict=True)]
            local, weights = few.to_tensor(ids, dtype, shape), few.to_tensor(kept, torch.float32, shape)
        else:
            expert = memory.rows(offset + at.topk_idx, *shape, dtype)
            local = local_expert(self.rank, num_experts, self.num_ranks, dtype)[expert]
            weights = memory.rows(offset + at.topk_weights, *shape, torch.float32).masked_fill(local < 0, 0.0)
        return rows.pad(local, num_rows), rows.pad(weights, num_rows)


def _dispatch_layout(header: Header, num_rows: int) -> DispatchLayout:
    return DispatchLayout(
        num_rows=max(num_rows, header.num_worst_tokens),
        row_bytes=header.hidden * DTYPES[header.dtype].itemsize,
        scale_row_bytes=header.scale_row_bytes,
        num_topk=header.num_topk,
        topk_idx_bytes=header.topk_idx_bytes,
        has_src_idx=CALLS[header.call] == "dispatch",
    )


def _write_rows(
    exchange: Exchange[DispatchLayout], tokens: list[Tokens], sections: Mapping[str, Tensor | None]
) -> None:
    """Copy this rank's rows to where each receiver wants them; `sections` are named as those of the layout."""
    is_few = isinstance(tokens[0], list)
    sources = [(name, rows.Source(x, is_few=is_few)) for name, x in sections.items() if x is not None]
    for dst in exchange.receivers():
        if len(tokens[dst]) == 0:
            continue
        memory, at, offset = exchange.extent(dst)
        first_row = exchange.first_row(dst)
        for name, source in sources:
            source.gather(tokens[dst], memory, offset + getattr(at, name) + first_row * source.row_bytes)


def _return_rows(
    exchange: Exchange[CombineLayout], sections: Mapping[str, Tensor | None], tokens: list[Tokens]
) -> None:
    """Copy the rows that came from each rank back to it."""
    is_few = isinstance(tokens[0], list)
    sources = [(name, rows.Source(x, is_few=is_few)) for name, x in sections.items() if x is not None]
    ends = list(accumulate(exchange.counts[exchange.rank]))
    for dst in exchange.receivers():
        begin, end = ends[dst] - exchange.counts[exchange.rank][dst], ends[dst]
        memory, at, offset = exchange.extent(dst)
        first_row = exchange.first_row(dst)
        for name, source in sources:
            source.copy(begin, end, memory, offset + getattr(at, name) + first_row * source.row_bytes)


def _without(layout: Layout, masked: set[int]) -> Layout:
    """Send nothing to masked ranks."""
    columns = sorted(masked)
    per_rank, is_token_in_rank = layout.num_tokens_per_rank.clone(), layout.is_token_in_rank.clone()
    per_rank[columns] = 0
    is_token_in_rank[:, columns] = False
    return Layout(per_rank, layout.num_tokens_per_expert, is_token_in_rank)


def _clear_rows(exchange: Exchange[L], sections: Mapping[str, Tensor | None]) -> None:
    """Fill rows of this rank with zeros that masked ones would write, by a handle that is older than the mask."""
    if not exchange.masked:
        return
    memory, at, offset = exchange.extent(exchange.rank)
    for src in exchange.masked:
        first_row = sum(counts[exchange.rank] for counts in exchange.counts[:src])
        for name, x in sections.items():
            begin = offset + getattr(at, name) + first_row * rows.row_bytes(x)
            memory.data[begin : begin + exchange.counts[src][exchange.rank] * rows.row_bytes(x)].zero_()


class _Routing(NamedTuple):
    """What a handle tells of a dispatch: `counts[src][dst]` rows, and a checksum that all ranks must agree on."""

    counts: list[list[int]]
    checksum: int


def _read_routing(handle: Handle, rank: int) -> _Routing:
    psum = handle.rank_prefix_matrix.tolist()
    rows_before = [[0] * len(psum), *psum]
    counts = [[end - begin for begin, end in zip(*rows_, strict=True)] for rows_ in pairwise(rows_before)]
    if min(min(row) for row in counts) < 0:
        raise ConfigError(f"rank_prefix_matrix of the handle must not fall from one row to the next, got {psum}")
    if psum[-1][rank] > handle.recv_src_idx.numel():
        raise ConfigError(
            f"recv_src_idx of the handle must have an item for each of the {psum[-1][rank]} rows that its "
            f"rank_prefix_matrix counts, got {handle.recv_src_idx.numel()}"
        )
    return _Routing(counts, zlib.crc32(array("q", [n for row in psum for n in row])))


def _check_counts(layout: Layout, channels: Channels) -> list[int]:
    """Return how many tokens go to each rank, by both of the tensors that tell it."""
    told = layout.num_tokens_per_rank.tolist()
    counted = [ends[-1] for ends in channels.ends]
    if told != counted:
        raise ConfigError(f"num_tokens_per_rank must be the column sums of is_token_in_rank, {counted}, got {told}")
    return counted


def _int32_matrix(lines: list[list[int]]) -> Tensor:
    return few.to_tensor(chain.from_iterable(lines), torch.int32, (len(lines), len(lines[0])))
