"""The CPU engine: ranks are processes of one host, rows move through memory that all of them have mapped.

`deep_ep.engines.exchange` has the protocol; here is what each call writes, and where. A dispatch moves each row with
one vectorised copy, from the sender's tensor into the receiver's memory, and the rows it returns are tensors on that
very memory: they are not copied out (`deep_ep.memory.arena` has their lifetime).
"""

from __future__ import annotations

import zlib
from array import array
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from deep_ep.engines import rows
from deep_ep.engines.base import CachedDispatchRequest, CombineRequest, DispatchRequest, DispatchResult, Handle, Layout
from deep_ep.engines.exchange import CALLS, DTYPES, Exchange, Exchanger, Header, check_worst_tokens
from deep_ep.engines.routing import compute_channels, compute_layout, expert_range, local_expert, token_numbers
from deep_ep.errors import ConfigError
from deep_ep.layout import CombineLayout, DispatchLayout
from deep_ep.memory.rendezvous import Rendezvous


class CpuEngine:
    """Exchanges between processes of one host (`deep_ep.engines.base.Engine`). All ranks construct one together.

    Args:
        rendezvous: The ranks.
        num_bytes: Bytes of shared memory to begin with; a call that needs more makes all ranks map more.
        timeout_s: How long a call waits for a peer.

    Attributes:
        exchanger: The memory and the steps, which low-latency calls share.
    """

    def __init__(self, rendezvous: Rendezvous, num_bytes: int, timeout_s: float) -> None:
        self.device = torch.device("cpu")
        self.rank, self.num_ranks = rendezvous.rank, rendezvous.num_ranks
        self.exchanger = Exchanger(rendezvous, num_bytes, timeout_s)

    def compute_layout(self, topk_idx: Tensor, num_experts: int) -> Layout:
        """Count where tokens go."""
        return compute_layout(topk_idx, num_experts, self.num_ranks)

    def dispatch(self, request: DispatchRequest) -> DispatchResult:
        """Send tokens to the ranks of their experts."""
        layout, x, scales, topk_idx = request.layout, request.x, request.scales, request.topk_idx
        channels = compute_channels(layout.is_token_in_rank, request.config.num_channels)
        send_counts = _check_counts(layout, channels.ends)
        tokens = _tokens_by_rank(layout.is_token_in_rank, send_counts)
        records = _make_records(x.size(0), topk_idx, request.topk_weights)
        header = Header(
            call=CALLS.index("dispatch"),
            dtype=DTYPES.index(x.dtype),
            hidden=x.size(1),
            scale_row_bytes=_row_bytes(scales),
            num_topk=0 if topk_idx is None else topk_idx.size(1),
            topk_idx_bytes=0 if topk_idx is None else topk_idx.element_size(),
            num_experts=layout.num_tokens_per_expert.numel(),
            num_channels=request.config.num_channels,
            num_worst_tokens=request.num_worst_tokens,
        )
        told = [*send_counts, *channels.ends.view(-1).tolist(), *layout.num_tokens_per_expert.tolist()]
        exchange = self.exchanger.begin(header, _dispatch_layout, told)
        check_worst_tokens(exchange)
        with self.exchanger.writing(exchange):
            _write_rows(exchange, tokens, x, scales, records)
        self.exchanger.finish(exchange)
        return self._receive(request, exchange, channels.ends.t().contiguous(), channels.send_head)

    def dispatch_cached(self, request: CachedDispatchRequest) -> tuple[Tensor, Tensor | None]:
        """Send tokens the way of an earlier dispatch; return rows and scales."""
        x, scales, is_token_in_rank = request.x, request.scales, request.handle.is_token_in_rank
        num_rows = request.handle.recv_src_idx.numel()
        routing = _read_routing(request.handle, self.rank)
        tokens = _tokens_by_rank(is_token_in_rank, routing.counts[self.rank])
        header = Header(
            call=CALLS.index("cached dispatch"),
            dtype=DTYPES.index(x.dtype),
            hidden=x.size(1),
            scale_row_bytes=_row_bytes(scales),
            routing=routing.checksum,
            num_worst_tokens=num_rows,
        )
        exchange = self.exchanger.begin(header, _dispatch_layout, counts=routing.counts)
        with self.exchanger.writing(exchange):
            _write_rows(exchange, tokens, x, scales, None)
        self.exchanger.finish(exchange)
        sizes = [num_rows * _row_bytes(x), num_rows * _row_bytes(scales)]
        recv_x, recv_scales = self.exchanger.take_sections(exchange, sizes)
        return _as_rows(recv_x, num_rows, x), None if scales is None else _as_rows(recv_scales, num_rows, scales)

    def combine(self, request: CombineRequest) -> tuple[Tensor, Tensor | None]:
        """Bring rows back and add them."""
        x, weights, biases = request.x, request.topk_weights, request.biases
        is_token_in_rank, num_tokens = request.handle.is_token_in_rank, request.handle.is_token_in_rank.size(0)
        routing = _read_routing(request.handle, self.rank)
        token_of_row = _tokens(is_token_in_rank, sum(routing.counts[self.rank]))  # a rank gets back what it sent
        counts_back = [list(column) for column in zip(*routing.counts, strict=True)]
        header = Header(
            call=CALLS.index("combine"),
            dtype=DTYPES.index(x.dtype),
            hidden=x.size(1),
            num_topk=0 if weights is None else weights.size(1),
            routing=routing.checksum,
            num_bias_rows=len(biases) * num_tokens,
        )
        exchange = self.exchanger.begin(header, _combine_layout, counts=counts_back)
        own, own_at = exchange.memories[self.rank], exchange.layouts[self.rank]
        own_offset = exchange.places[self.rank].offset
        with self.exchanger.writing(exchange):
            begins = [0, *accumulate(counts_back[self.rank])]
            for dst in exchange.receivers():
                mine, first_row = slice(begins[dst], begins[dst + 1]), exchange.first_row(dst)
                memory, offset, at = exchange.memories[dst], exchange.places[dst].offset, exchange.layouts[dst]
                rows.copy(x[mine], memory, offset + at.x + first_row * _row_bytes(x))
                if weights is not None:
                    rows.copy(weights[mine], memory, offset + at.topk_weights + first_row * _row_bytes(weights))
            for i, bias in enumerate(biases):
                rows.copy(bias, own, own_offset + own_at.biases + i * num_tokens * _row_bytes(x))
        self.exchanger.finish(exchange)
        token_rows = rows.TokenRows(token_of_row, num_tokens)
        sum_rows = token_rows
        if biases:
            tokens = torch.arange(num_tokens)
            sum_rows = rows.TokenRows(torch.cat([tokens] * len(biases) + [token_of_row]), num_tokens)
        num_rows = token_of_row.size(0) + header.num_bias_rows
        combined_x = sum_rows.sum(own.rows(own_offset + own_at.biases, num_rows, x.size(1), x.dtype))
        if weights is None:
            return combined_x, None
        shape = (token_of_row.size(0), weights.size(1))
        return combined_x, token_rows.sum(own.rows(own_offset + own_at.topk_weights, *shape, torch.float32))

    def local_bytes(self) -> Tensor:
        """Return the first segment of this rank's shared memory, as a uint8 tensor."""
        return self.exchanger.local_bytes()

    def close(self) -> None:
        """Let go of the memory; received tensors that still live keep what they use."""
        self.exchanger.close()

    def _receive(
        self,
        request: DispatchRequest,
        exchange: Exchange[DispatchLayout],
        channel_prefix_matrix: Tensor,
        send_head: Tensor,
    ) -> DispatchResult:
        """Turn what peers wrote and told into what a dispatch returns."""
        x, scales = request.x, request.scales
        num_real_rows = exchange.num_rows(self.rank)
        num_rows = request.num_worst_tokens or num_real_rows
        sizes = [num_rows * _row_bytes(x), num_rows * _row_bytes(scales)]
        recv_x, recv_scales = self.exchanger.take_sections(exchange, sizes)
        topk_idx, topk_weights, src_idx = self._read_records(request, exchange, num_real_rows, num_rows)
        num_experts = request.layout.num_tokens_per_expert.numel()
        first_expert, end_expert = expert_range(self.rank, num_experts, self.num_ranks)
        num_ends = self.num_ranks * request.config.num_channels
        ends = [told[self.num_ranks : self.num_ranks + num_ends][self.rank :: self.num_ranks] for told in exchange.told]
        per_expert: list[int] = []
        if request.num_worst_tokens == 0:
            begin = self.num_ranks + num_ends
            counts = [told[begin + first_expert : begin + end_expert] for told in exchange.told]
            alignment = request.expert_alignment
            per_expert = [-(-sum(column) // alignment) * alignment for column in zip(*counts, strict=True)]
        psum = list(accumulate(exchange.counts, lambda total, row: [a + b for a, b in zip(total, row, strict=True)]))
        handle = Handle(
            rank_prefix_matrix=_int32_matrix(psum),
            channel_prefix_matrix=channel_prefix_matrix,
            recv_channel_prefix_matrix=_int32_matrix([[0, *column[:-1]] for column in ends]),
            recv_src_idx=src_idx,
            is_token_in_rank=request.layout.is_token_in_rank,
            send_head=send_head,
        )
        return DispatchResult(
            x=_as_rows(recv_x, num_rows, x),
            scales=None if scales is None else _as_rows(recv_scales, num_rows, scales),
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_recv_tokens_per_expert=per_expert,
            handle=handle,
        )

    def _read_records(
        self, request: DispatchRequest, exchange: Exchange[DispatchLayout], num_real_rows: int, num_rows: int
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Take the records apart; return expert ids among this rank's, weights and source indices."""
        topk_idx, topk_weights = request.topk_idx, request.topk_weights
        memory = exchange.memories[self.rank]
        offset = exchange.places[self.rank].offset + exchange.layouts[self.rank].records
        num_words = _record_words(exchange.headers[self.rank])
        if topk_idx is None or topk_weights is None:
            return None, None, _copy(memory.rows(offset, num_real_rows, num_words, torch.int32)[:, 0])
        num_topk, num_experts = topk_idx.size(1), request.layout.num_tokens_per_expert.numel()
        num_idx_words = num_topk * topk_idx.element_size() // 4
        record = memory.rows(offset, num_real_rows, num_words, torch.int32)
        src_idx = _copy(record[:, num_idx_words + num_topk])
        expert = record.view(topk_idx.dtype)[:, :num_topk]
        local = local_expert(self.rank, num_experts, self.num_ranks, topk_idx.dtype)[expert]
        weights = record.view(torch.float32)[:, num_idx_words : num_idx_words + num_topk].masked_fill(local < 0, 0.0)
        if num_rows > num_real_rows:
            src_idx, local, weights = (_pad(rows_, num_rows) for rows_ in (src_idx, local, weights))
        return local, weights, src_idx


def _copy(column: Tensor) -> Tensor:
    """Copy a column of the records, which lie in memory that the next call uses again.

    `contiguous` would copy nothing where there is one column or one row.
    """
    return column.clone(memory_format=torch.contiguous_format)


def _make_records(num_tokens: int, topk_idx: Tensor | None, topk_weights: Tensor | None) -> Tensor:
    """Return `[T, P]` int32: what travels beside each token's row. P is even where expert ids have two words."""
    numbers = token_numbers(num_tokens)
    if topk_idx is None or topk_weights is None:
        return numbers
    parts = [topk_idx.view(torch.int32), topk_weights.view(torch.int32), numbers]
    if topk_idx.element_size() == 8 and topk_idx.size(1) % 2 == 0:
        parts.append(numbers)  # 3 K + 1 words would be odd
    return torch.cat(parts, 1)


def _record_words(header: Header) -> int:
    num_words = header.num_topk * (header.topk_idx_bytes // 4 + 1) + 1
    return num_words + (num_words % 2 if header.topk_idx_bytes == 8 else 0)


def _dispatch_layout(header: Header, num_rows: int) -> DispatchLayout:
    has_records = CALLS[header.call] == "dispatch"
    return DispatchLayout(
        num_rows=max(num_rows, header.num_worst_tokens),
        row_bytes=header.hidden * DTYPES[header.dtype].itemsize,
        scale_row_bytes=header.scale_row_bytes,
        record_bytes=_record_words(header) * 4 if has_records else 0,
    )


def _combine_layout(header: Header, num_rows: int) -> CombineLayout:
    return CombineLayout(
        num_rows=num_rows,
        row_bytes=header.hidden * DTYPES[header.dtype].itemsize,
        num_topk=header.num_topk,
        num_bias_rows=header.num_bias_rows,
    )


def _write_rows(
    exchange: Exchange[DispatchLayout], tokens: list[Tensor], x: Tensor, scales: Tensor | None, records: Tensor | None
) -> None:
    """Copy this rank's rows, and what travels beside them, to where each receiver wants them."""
    x = rows.as_words(x)
    scales = None if scales is None else rows.as_words(scales)
    for dst in exchange.receivers():
        token_idx = tokens[dst]
        if token_idx.size(0) == 0:
            continue
        memory, at, first_row = exchange.memories[dst], exchange.layouts[dst], exchange.first_row(dst)
        offset = exchange.places[dst].offset
        rows.gather(x, token_idx, memory, offset + at.x + first_row * _row_bytes(x))
        if scales is not None:
            rows.gather(scales, token_idx, memory, offset + at.scales + first_row * _row_bytes(scales))
        if records is not None:
            rows.gather(records, token_idx, memory, offset + at.records + first_row * _row_bytes(records))


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


def _check_counts(layout: Layout, channel_ends: Tensor) -> list[int]:
    """Return how many tokens go to each rank, by both of the tensors that tell it."""
    told = layout.num_tokens_per_rank.tolist()
    counted = channel_ends[-1].tolist()
    if told != counted:
        raise ConfigError(f"num_tokens_per_rank must be the column sums of is_token_in_rank, {counted}, got {told}")
    return counted


def _tokens(is_token_in_rank: Tensor, num_rows: int) -> Tensor:
    """Return the tokens that go to rank 0, in ascending order, then those that go to rank 1, and so on."""
    tokens = is_token_in_rank.t().nonzero()[:, 1]
    if tokens.size(0) != num_rows:
        raise ConfigError(
            f"handle must be as dispatch returned it, but its is_token_in_rank names {tokens.size(0)} rows and its "
            f"rank_prefix_matrix counts {num_rows}"
        )
    return tokens


def _tokens_by_rank(is_token_in_rank: Tensor, counts: list[int]) -> list[Tensor]:
    """Return, for each rank, the tokens that go there, in ascending order."""
    ends = list(accumulate(counts))
    tokens = _tokens(is_token_in_rank, ends[-1])
    return [tokens[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _int32_matrix(lines: list[list[int]]) -> Tensor:
    """Return a matrix of Python integers; much cheaper than `torch.tensor`."""
    return torch.frombuffer(array("i", chain.from_iterable(lines)), dtype=torch.int32).view(len(lines), -1)


def _row_bytes(rows_: Tensor | None) -> int:
    return 0 if rows_ is None else rows_.size(1) * rows_.element_size()


def _as_rows(data: Tensor, num_rows: int, like: Tensor) -> Tensor:
    return data.view(like.dtype).view(num_rows, like.size(1))


def _pad(rows_: Tensor, num_rows: int) -> Tensor:
    """Add rows of -1, or of 0 where they are no integers, up to a number of rows."""
    value = 0 if rows_.is_floating_point() else -1
    padded = rows_.new_full((num_rows, *rows_.shape[1:]), value)
    padded[: len(rows_)] = rows_
    return padded
