"""The CPU engine: ranks are processes of one host, rows move through memory that all of them have mapped.

`deep_ep.engines.exchange` has the protocol; here is what each call writes, and where. A dispatch moves each row with
one vectorised copy, from the sender's tensor into the receiver's memory, and what it returns are tensors on that very
memory: nothing is copied out (`deep_ep.memory.arena` has their lifetime).
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from deep_ep.engines import rows
from deep_ep.engines.base import CachedDispatchRequest, CombineRequest, DispatchRequest, DispatchResult, Handle, Layout
from deep_ep.engines.exchange import (
    CALLS,
    DTYPES,
    Exchange,
    Exchanger,
    Header,
    check_recv_counts,
    check_worst_tokens,
)
from deep_ep.engines.routing import compute_channels, compute_layout, expert_range, token_psum
from deep_ep.layout import CombineLayout, DispatchLayout
from deep_ep.memory.rendezvous import Rendezvous

_NO_BYTES = torch.empty(0, dtype=torch.uint8)


class CpuEngine:
    """Exchanges between processes of one host (`deep_ep.engines.base.Engine`). All ranks construct one together.

    Args:
        rendezvous: The ranks.
        num_bytes: Bytes of shared memory to begin with; a call that needs more makes all ranks map more.
        timeout_s: How long a call waits for a peer.
    """

    def __init__(self, rendezvous: Rendezvous, num_bytes: int, timeout_s: float) -> None:
        self.device = torch.device("cpu")
        self.rank, self.num_ranks = rendezvous.rank, rendezvous.num_ranks
        self._exchanger = Exchanger(rendezvous, num_bytes, timeout_s)

    def compute_layout(self, topk_idx: Tensor, num_experts: int) -> Layout:
        """Count where tokens go."""
        return compute_layout(topk_idx, num_experts, self.num_ranks)

    @torch.no_grad()
    def dispatch(self, request: DispatchRequest) -> DispatchResult:
        """Send tokens to the ranks of their experts."""
        layout, x, scales = request.layout, request.x, request.scales
        topk_idx, topk_weights = request.topk_idx, request.topk_weights
        send_counts = layout.num_tokens_per_rank.tolist()
        num_experts = layout.num_tokens_per_expert.numel()
        num_channels = request.config.num_channels
        header = Header(
            call=CALLS.index("dispatch"),
            dtype=DTYPES.index(x.dtype),
            hidden=x.size(1),
            scale_row_bytes=_row_bytes(scales),
            num_topk=0 if topk_idx is None else topk_idx.size(1),
            topk_idx_bytes=0 if topk_idx is None else topk_idx.element_size(),
            num_experts=num_experts,
            num_channels=num_channels,
            num_worst_tokens=request.num_worst_tokens,
        )
        channels = compute_channels(layout.is_token_in_rank, num_channels)
        meta = self._describe_rows(layout.num_tokens_per_expert, channels.begin)
        exchange = self._exchanger.begin(header, send_counts, self._dispatch_layout)
        check_worst_tokens(exchange)
        with self._exchanger.writing(exchange):
            tokens = _tokens_by_rank(layout.is_token_in_rank, send_counts)
            for dst in exchange.receivers():
                extent, at, first_row = exchange.extents[dst], exchange.layouts[dst], exchange.first_row(dst)
                own_meta = rows.section(extent, at.meta, self.num_ranks, torch.int32, meta.size(1))[self.rank]
                own_meta.copy_(meta[dst])
                if send_counts[dst] == 0:
                    continue
                rows.gather(x, tokens[dst], extent, at.x, first_row)
                if scales is not None:
                    rows.gather(scales, tokens[dst], extent, at.scales, first_row)
                if topk_idx is not None and topk_weights is not None:
                    rows.gather(topk_idx, tokens[dst], extent, at.topk_idx, first_row)
                    rows.gather(topk_weights, tokens[dst], extent, at.topk_weights, first_row)
                rows.copy(tokens[dst].to(torch.int32).unsqueeze(1), extent, at.src_idx, first_row)
        return self._received(request, exchange, channels.channel_prefix_matrix, channels.send_head)

    @torch.no_grad()
    def dispatch_cached(self, request: CachedDispatchRequest) -> tuple[Tensor, Tensor | None]:
        """Send tokens the way of an earlier dispatch; return rows and scales."""
        handle, x, scales = request.handle, request.x, request.scales
        send_counts = handle.is_token_in_rank.sum(0).tolist()
        num_rows = handle.recv_src_idx.numel()
        header = Header(
            call=CALLS.index("cached dispatch"),
            dtype=DTYPES.index(x.dtype),
            hidden=x.size(1),
            scale_row_bytes=_row_bytes(scales),
            num_worst_tokens=num_rows,
        )
        exchange = self._exchanger.begin(header, send_counts, self._dispatch_layout)
        with self._exchanger.writing(exchange):
            check_recv_counts(exchange, _counts_by_source(handle, self.rank))
            tokens = _tokens_by_rank(handle.is_token_in_rank, send_counts)
            for dst in exchange.receivers():
                extent, at, first_row = exchange.extents[dst], exchange.layouts[dst], exchange.first_row(dst)
                if send_counts[dst]:
                    rows.gather(x, tokens[dst], extent, at.x, first_row)
                    if scales is not None:
                        rows.gather(scales, tokens[dst], extent, at.scales, first_row)
        sizes = [num_rows * _row_bytes(x), num_rows * _row_bytes(scales)]
        recv_x, recv_scales = self._exchanger.take_sections(exchange, sizes)
        return _as_rows(recv_x, num_rows, x), None if scales is None else _as_rows(recv_scales, num_rows, scales)

    @torch.no_grad()
    def combine(self, request: CombineRequest) -> tuple[Tensor, Tensor | None]:
        """Bring rows back and add them."""
        x, weights, biases, handle = request.x, request.topk_weights, request.biases, request.handle
        is_token_in_rank = handle.is_token_in_rank
        num_topk = 0 if weights is None else weights.size(1)
        num_tokens = is_token_in_rank.size(0)
        header = Header(
            call=CALLS.index("combine"),
            dtype=DTYPES.index(x.dtype),
            hidden=x.size(1),
            num_topk=num_topk,
            num_bias_rows=len(biases) * num_tokens,
        )
        send_counts = _counts_by_source(handle, self.rank)
        recv_counts = is_token_in_rank.sum(0).tolist()
        num_back = sum(recv_counts)
        exchange = self._exchanger.begin(header, send_counts, _combine_layout)
        own, own_at = exchange.extents[self.rank], exchange.layouts[self.rank]
        row_begins = [0, *accumulate(send_counts)]
        with self._exchanger.writing(exchange):
            check_recv_counts(exchange, recv_counts)
            for dst in exchange.receivers():
                extent, at, first_row = exchange.extents[dst], exchange.layouts[dst], exchange.first_row(dst)
                mine = slice(row_begins[dst], row_begins[dst + 1])
                rows.copy(x[mine], extent, at.x, first_row)
                if weights is not None:
                    rows.copy(weights[mine], extent, at.topk_weights, first_row)
            for i, bias in enumerate(biases):
                rows.copy(bias, own, own_at.x, num_back + i * num_tokens)
        block_begins = torch.tensor([0, *accumulate(recv_counts)][:-1], dtype=torch.int32)
        row_of_token = token_psum(is_token_in_rank)[:-1] + block_begins
        table = rows.section(own, own_at.x, num_back + header.num_bias_rows, x.dtype, x.size(1))
        bias_begins = [num_back + i * num_tokens for i in range(len(biases))]
        combined = rows.sum_by_token(table, is_token_in_rank, row_of_token, bias_begins)
        if weights is None:
            return combined, None
        table = rows.section(own, own_at.topk_weights, num_back, torch.float32, num_topk)
        return combined, rows.sum_by_token(table, is_token_in_rank, row_of_token, [])

    def local_bytes(self) -> Tensor:
        """Return the first segment of this rank's shared memory, as a uint8 tensor."""
        return next((tensors[self.rank] for tensors in self._exchanger.segments.values()), _NO_BYTES)

    def close(self) -> None:
        """Let go of the memory; received tensors that still live keep what they use."""
        self._exchanger.close()

    def _dispatch_layout(self, header: Header, num_rows: int) -> DispatchLayout:
        return DispatchLayout(
            num_rows=max(num_rows, header.num_worst_tokens),
            row_bytes=header.hidden * DTYPES[header.dtype].itemsize,
            scale_row_bytes=header.scale_row_bytes,
            num_topk=header.num_topk,
            topk_idx_bytes=header.topk_idx_bytes,
            num_meta=header.num_channels + self._max_local_experts(header.num_experts),
            num_ranks=self.num_ranks,
        )

    def _max_local_experts(self, num_experts: int) -> int:
        return -(-num_experts // self.num_ranks)

    def _describe_rows(self, num_tokens_per_expert: Tensor, channel_begin: Tensor) -> Tensor:
        """Return `[R, C + L]` int32: for each receiver, where channels begin, then the counts of its experts."""
        num_experts, num_channels = num_tokens_per_expert.numel(), channel_begin.size(1)
        meta = torch.zeros(self.num_ranks, num_channels + self._max_local_experts(num_experts), dtype=torch.int32)
        meta[:, :num_channels] = channel_begin
        for dst in range(self.num_ranks):
            begin, end = expert_range(dst, num_experts, self.num_ranks)
            meta[dst, num_channels : num_channels + end - begin] = num_tokens_per_expert[begin:end]
        return meta

    def _received(
        self,
        request: DispatchRequest,
        exchange: Exchange[DispatchLayout],
        channel_prefix_matrix: Tensor,
        send_head: Tensor,
    ) -> DispatchResult:
        """Turn what peers wrote into what a dispatch returns."""
        x, scales, topk_idx, topk_weights = request.x, request.scales, request.topk_idx, request.topk_weights
        header, num_real_rows = exchange.headers[self.rank], exchange.num_rows(self.rank)
        num_rows = header.num_worst_tokens or num_real_rows
        num_channels, num_experts = header.num_channels, header.num_experts
        num_meta = num_channels + self._max_local_experts(num_experts)
        row_sizes = [_row_bytes(x), _row_bytes(scales), _row_bytes(topk_idx), _row_bytes(topk_weights), 4]
        sizes = [num_rows * row_bytes for row_bytes in row_sizes] + [self.num_ranks * num_meta * 4]
        recv_x, recv_scales, recv_topk_idx, recv_topk_weights, recv_src_idx, meta = self._exchanger.take_sections(
            exchange, sizes
        )
        src_idx = recv_src_idx.view(torch.int32)
        src_idx[num_real_rows:] = -1
        first_expert, end_expert = expert_range(self.rank, num_experts, self.num_ranks)
        local_idx = local_weights = None
        if topk_idx is not None and topk_weights is not None:
            local_idx = _as_rows(recv_topk_idx, num_rows, topk_idx)
            local_weights = _as_rows(recv_topk_weights, num_rows, topk_weights)
            local_idx[num_real_rows:] = -1
            _make_local(local_idx, local_weights, first_expert, end_expert)
        counts = meta.view(torch.int32).view(self.num_ranks, num_meta)
        per_expert: list[int] = []
        if request.num_worst_tokens == 0:
            expert_counts = counts[:, num_channels : num_channels + end_expert - first_expert]
            alignment = request.expert_alignment
            per_expert = [-(-n // alignment) * alignment for n in expert_counts.sum(0).tolist()]
        handle = Handle(
            rank_prefix_matrix=torch.tensor(exchange.counts, dtype=torch.int32).cumsum(0, dtype=torch.int32),
            channel_prefix_matrix=channel_prefix_matrix,
            recv_channel_prefix_matrix=counts[:, :num_channels].clone(),
            recv_src_idx=src_idx,
            is_token_in_rank=request.layout.is_token_in_rank,
            send_head=send_head,
        )
        return DispatchResult(
            x=_as_rows(recv_x, num_rows, x),
            scales=None if scales is None else _as_rows(recv_scales, num_rows, scales),
            topk_idx=local_idx,
            topk_weights=local_weights,
            num_recv_tokens_per_expert=per_expert,
            handle=handle,
        )


def _combine_layout(header: Header, num_rows: int) -> CombineLayout:
    return CombineLayout(
        num_rows=num_rows,
        row_bytes=header.hidden * DTYPES[header.dtype].itemsize,
        num_topk=header.num_topk,
        num_bias_rows=header.num_bias_rows,
    )


def _row_bytes(rows: Tensor | None) -> int:
    return 0 if rows is None else rows.size(1) * rows.element_size()


def _as_rows(data: Tensor, num_rows: int, like: Tensor) -> Tensor:
    return data.view(like.dtype).view(num_rows, like.size(1))


def _tokens_by_rank(is_token_in_rank: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
    """Return, for each rank, the tokens that go there, in ascending order."""
    return is_token_in_rank.t().nonzero()[:, 1].split(counts)


def _counts_by_source(handle: Handle, rank: int) -> list[int]:
    """Return how many of the rows that this rank received in a dispatch came from each rank."""
    psum = [0, *handle.rank_prefix_matrix[:, rank].tolist()]
    return [end - begin for begin, end in zip(psum, psum[1:], strict=False)]


def _make_local(topk_idx: Tensor, topk_weights: Tensor, first_expert: int, end_expert: int) -> None:
    """Turn expert ids into ids among this rank's experts, in place: -1, and a weight of 0, for other ranks' experts."""
    is_elsewhere = (topk_idx < first_expert) | (topk_idx >= end_expert)
    topk_idx -= first_expert
    topk_idx.masked_fill_(is_elsewhere, -1)
    topk_weights.masked_fill_(is_elsewhere, 0.0)
