"""Low-latency mode between hosts, on CPU ranks: one message per destination host, into slots of fixed size.

**Dispatch.** A rank sends each token once to every host that owns one of its experts, with its expert ids, in one
message to its relay there (`deep_ep.topology`). Receivers offer room for the most tokens that a call may have, so no
rank asks another how many come: messages are under way from the moment of the call. A relay copies what comes to the
**slots** of its local ranks: each rank has M of them for each rank of the group, so nobody needs to know what others
write. Who receives, sorts the rows of its slots by expert, then by source, then by token, to where they stay.

**Combine.** At the call a rank sends the expert ids and weights of its tokens to the relays that passed them on, and
the rows that it returns go into the memory of their relays. A relay adds the weighted rows of each token in float32 and
sends one sum per token, in 24 bits per element (16 with `use_logfmt`). The source adds the sums of the hosts, in the
order of their lowest ranks, and rounds once.

**Duties.** What a relay does for others has to wait for the network, which a call with a hook shall not. So it is left
as a duty, done when the hook is called, or else at the beginning of the next call: a rank of the host that waits in its
hook is served even if this rank calls its own hook much later.

*No deadlock.* Whatever a duty waits for (messages, rows of local ranks) its senders have started at their calls, before
they wait for anything of this call; and duties are done in the order of the calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

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
from deep_ep.engines.exchange import CALLS, DTYPES, Exchange, Header, check_signatures
from deep_ep.engines.mail import Kind, Mail
from deep_ep.engines.network import NetworkEngine
from deep_ep.engines.routing import compute_layout, expert_range
from deep_ep.errors import MismatchError
from deep_ep.layout import CombineLayout, SlotLayout
from deep_ep.memory.wire import Transfer

R = TypeVar("R")
_FORMATS = tuple(RowFormat)
_LETTER_WORDS = len(Header._fields) + 1


class NetworkLowLatencyEngine:
    """Low-latency exchanges between CPU ranks of several hosts (`deep_ep.engines.base.LowLatencyEngine`).

    Args:
        network: The memory, steps and messages of the ranks, shared with normal mode.
    """

    def __init__(self, network: NetworkEngine) -> None:
        self._network = network
        self.rank, self.num_ranks = network.rank, network.num_ranks

    def dispatch(self, request: LowLatencyDispatchRequest, *, split: bool) -> Pending[LowLatencyDispatchResult]:
        """Send each token to each of its experts; split in two halves, or as one."""
        network = self._network
        network.do_duties()
        data, scales = request.x, None
        if request.row_format is not RowFormat.BF16:
            data, scales = fp8.cast_rows(request.x, request.row_format)
        header = Header(
            call=CALLS.index("low-latency dispatch"),
            dtype=DTYPES.index(data.dtype),
            hidden=data.size(1),
            scale_row_bytes=0 if scales is None else scales.size(1) * 4,
            num_topk=request.topk_idx.size(1),
            num_experts=request.num_experts,
            num_max_tokens_per_rank=request.num_max_tokens_per_rank,
            row_format=_FORMATS.index(request.row_format),
        )
        arriving = _Dispatch(self, header, request, data, scales)
        return self._pend(arriving.result, arriving.do_duty, arriving.finish, split)

    def combine(self, request: LowLatencyCombineRequest, *, split: bool) -> Pending[Tensor]:
        """Bring rows back and add them, weighted; split in two halves, or as one."""
        network, handle = self._network, request.handle
        network.do_duties()
        header = Header(
            call=CALLS.index("low-latency combine"),
            dtype=DTYPES.index(request.x.dtype),
            hidden=handle.hidden,
            num_topk=request.topk_idx.size(1),
            num_experts=handle.num_experts,
            num_max_tokens_per_rank=handle.num_max_dispatch_tokens_per_rank,
            row_format=int(request.use_logfmt),
        )
        arriving = _Combine(self, header, request)
        return self._pend(arriving.out, arriving.do_duty, arriving.finish, split)

    def set_timeout(self, timeout_s: float) -> None:
        """Nothing to set: the limit is the normal engine's."""

    def local_bytes(self) -> Tensor:
        """Return the first segment of this rank's shared memory, which normal mode uses too."""
        return self._network.local_bytes()

    def close(self) -> None:
        """Nothing to let go of: the memory is the normal engine's."""

    def _pend(self, result: R, duty: Callable[[], None], finish: Callable[[], None], split: bool) -> Pending[R]:
        network = self._network
        network.duties.append(duty)

        def complete() -> None:
            network.do_duties()
            finish()

        if split:
            return Pending(result, complete)
        complete()
        return Pending(result, lambda: None)


class _Call:
    """What both directions have in common: who is who, and messages that begin with a header."""

    def __init__(self, engine: NetworkLowLatencyEngine, header: Header) -> None:
        self.network = network = engine._network
        self.rank, self.num_ranks, self.topology = engine.rank, engine.num_ranks, network.topology
        self.header = header
        self.mail: Mail = network.open_mail(header)
        self.remote_sources = [source for source in network.sources if source != self.rank]
        self.remote_hosts = [host for host in range(self.topology.num_hosts) if host != self.topology.host]
        self.wait_ns = [0] * self.num_ranks

    def tokens_of_hosts(self, topk_idx: Tensor) -> list[Tensor]:
        """Return the tokens that go to each host."""
        layout = compute_layout(topk_idx, self.header.num_experts, self.num_ranks)
        mask = self.network.host_mask(layout.is_token_in_rank)
        return [mask[:, host].nonzero()[:, 0] for host in range(self.topology.num_hosts)]

    def send_letter(self, peer: int, num_tokens: int) -> None:
        """Tell a peer what this rank is doing, and of how many tokens it will hear."""
        self.mail.send(Kind.LETTER, peer, torch.tensor([*self.header, num_tokens]), "a header")

    def recv_letter(self, peer: int) -> tuple[Tensor, Transfer | None]:
        """Start to receive what a peer tells."""
        data = torch.empty(_LETTER_WORDS, dtype=torch.int64)
        return data, self.mail.recv(Kind.LETTER, peer, data, "a header")

    def read_letter(self, source: int, letter: tuple[Tensor, Transfer | None]) -> int:
        """Wait for what a peer tells; return of how many tokens this rank will hear.

        Raises:
            MismatchError: If it is in another call; the buffer is of no use after that.
        """
        self.wait(letter[1])
        *fields, num_tokens = letter[0].tolist()
        try:
            check_signatures([self.header, Header(*fields)], 0, [self.rank, source])
        except MismatchError as error:
            # Rows of another size may be under way that nobody will take.
            self.network.give_up(source, str(error))
            raise
        return int(num_tokens)

    def wait(self, transfer: Transfer | None) -> None:
        """Wait for a message, and remember for how long."""
        start_ns = time.monotonic_ns()
        self.mail.wait(transfer)
        if transfer is not None:
            self.wait_ns[transfer.peer] += time.monotonic_ns() - start_ns

    def finish_exchange(self, exchange: Exchange[Any]) -> None:
        """Wait for the rows of the ranks of this host."""
        self.network.exchanger.finish(exchange)
        for peer, waited_ns in zip(self.network.local_ranks, self.network.exchanger.control.last_wait_ns, strict=True):
            self.wait_ns[peer] += waited_ns

    def add_waits(self, wait_stats: Tensor | None) -> None:
        """Add the time spent waiting for each rank to what the program wants to know."""
        if wait_stats is not None:
            wait_stats.add_(torch.tensor(self.wait_ns))


class _Dispatch(_Call):
    """One dispatch under way. Messages leave at once; `do_duty` passes on, `finish` sorts.

    Attributes:
        result: What the dispatch returns; filled by `finish`.
    """

    def __init__(
        self,
        engine: NetworkLowLatencyEngine,
        header: Header,
        request: LowLatencyDispatchRequest,
        data: Tensor,
        scales: Tensor | None,
    ) -> None:
        super().__init__(engine, header)
        self._request, self._scale_columns = request, 0 if scales is None else scales.size(1)
        self._num_slots = header.num_max_tokens_per_rank
        self.result = self._make_result(data.dtype, None if scales is None else scales.dtype)
        self._limit = max(self._sections(self._num_slots).num_bytes, 1)
        self._coming = []
        for source in self.remote_sources:
            place = self.mail.staging.take(self._limit)
            transfer = self.mail.recv(Kind.ROWS, source, place, "rows", self._limit)
            self._coming.append((source, self.recv_letter(source), place, transfer))
        tokens = self.tokens_of_hosts(request.topk_idx)
        records = torch.cat([request.topk_idx.to(torch.int32), torch.arange(len(data), dtype=torch.int32)[:, None]], 1)
        for host in self.remote_hosts:
            self._send(self.topology.relay(self.rank, host), tokens[host], data, scales, records)
        exchanger = self.network.exchanger
        num_local = len(self.network.local_ranks)
        self._exchange = exchanger.begin(header, self._layout, (), [[0] * num_local] * num_local)
        (self._place,) = exchanger.take_sections(
            self._exchange, [self._exchange.layouts[self.network.local_rank].num_bytes]
        )
        own = tokens[self.topology.host]
        self._pass_on(self.rank, data, scales, records, own)

    def do_duty(self) -> None:
        """Pass on what other hosts sent, and announce that everything is where it belongs."""
        with self.network.exchanger.writing(self._exchange):
            self.mail.begin_phase()
            for source, letter, place, transfer in self._coming:
                num_tokens = self.read_letter(source, letter)
                self.wait(transfer)
                at, memory = self._sections(num_tokens), rows.Memory(place)
                data = memory.rows(at.x, num_tokens, self._row_bytes, torch.uint8)
                records = memory.rows(at.records, num_tokens, self.header.num_topk + 1, torch.int32)
                scales = None
                if self._scale_columns:
                    scales = memory.rows(at.scales, num_tokens, self._scale_columns, torch.int32)
                self._pass_on(source, data, scales, records, None)
        self._coming.clear()

    def finish(self) -> None:
        """Wait for the ranks of this host, and sort the rows."""
        self.finish_exchange(self._exchange)
        self._sort()
        self.mail.wait_for_sends()
        self.add_waits(self._request.wait_stats)

    @property
    def _row_bytes(self) -> int:
        return self.header.hidden * DTYPES[self.header.dtype].itemsize

    def _sections(self, num_tokens: int) -> SlotLayout:
        return SlotLayout(
            num_slots=num_tokens,
            row_bytes=self._row_bytes,
            scale_row_bytes=self.header.scale_row_bytes,
            num_topk=self.header.num_topk,
            num_sources=0,
        )

    def _layout(self, header: Header, _: int) -> SlotLayout:
        return SlotLayout(
            num_slots=self.num_ranks * header.num_max_tokens_per_rank,
            row_bytes=header.hidden * DTYPES[header.dtype].itemsize,
            scale_row_bytes=header.scale_row_bytes,
            num_topk=header.num_topk,
            num_sources=self.num_ranks,
        )

    def _send(self, peer: int, tokens: Tensor, data: Tensor, scales: Tensor | None, records: Tensor) -> None:
        at = self._sections(len(tokens))
        message = self.mail.staging.take(max(at.num_bytes, 1))  # a receive that is offered must be met
        memory = rows.Memory(message)
        rows.gather(rows.as_words(data), tokens, memory, at.x)
        rows.gather(records, tokens, memory, at.records)
        if scales is not None:
            rows.gather(rows.as_words(scales), tokens, memory, at.scales)
        self.send_letter(peer, len(tokens))
        self.mail.send(Kind.ROWS, peer, message, "rows", self._limit)

    def _pass_on(
        self, source: int, data: Tensor, scales: Tensor | None, records: Tensor, tokens: Tensor | None
    ) -> None:
        """Copy the rows of a source to the slots of the local ranks that they go to, and tell how many there are.

        Args:
            source: Whose rows.
            data: Its rows.
            scales: Their scales.
            records: Their expert ids and token numbers.
            tokens: Which of them are meant; None for all.
        """
        exchange, num_topk = self._exchange, self.header.num_topk
        words, scale_words = rows.as_words(data), None if scales is None else rows.as_words(scales)
        idx = records[:, :num_topk] if tokens is None else records[tokens, :num_topk]
        for dst in exchange.receivers():
            begin, end = expert_range(self.network.local_ranks[dst], self.header.num_experts, self.num_ranks)
            numbers = ((idx >= begin) & (idx < end)).any(1).nonzero()[:, 0]
            index = numbers if tokens is None else tokens[numbers]
            memory, at, offset = exchange.extent(dst)
            memory.rows(offset + at.counts, 1, self.num_ranks, torch.int64)[0, source] = len(numbers)
            slot = source * self._num_slots
            rows.gather(words, index, memory, offset + at.x + slot * self._row_bytes)
            rows.gather(records, index, memory, offset + at.records + slot * (num_topk + 1) * 4)
            if scale_words is not None:
                rows.gather(scale_words, index, memory, offset + at.scales + slot * self.header.scale_row_bytes)

    def _make_result(self, dtype: torch.dtype, scale_dtype: torch.dtype | None) -> LowLatencyDispatchResult:
        header, request = self.header, self._request
        begin, end = expert_range(self.rank, header.num_experts, self.num_ranks)
        num_experts, num_rows = end - begin, self.num_ranks * header.num_max_tokens_per_rank
        # In memory, the rows of a scale column are neighbours.
        scales = None
        if scale_dtype is not None:
            scales = torch.empty(num_experts, self._scale_columns, num_rows, dtype=scale_dtype).transpose(1, 2)
        return LowLatencyDispatchResult(
            x=torch.empty(num_experts, num_rows, header.hidden, dtype=dtype),
            scales=scales,
            recv_count=torch.zeros(num_experts, dtype=torch.int32),
            handle=LowLatencyHandle(
                src_info=torch.empty(num_experts, num_rows, dtype=torch.int32),
                layout_range=torch.zeros(num_experts, self.num_ranks, dtype=torch.int64),
                num_max_dispatch_tokens_per_rank=header.num_max_tokens_per_rank,
                hidden=request.x.size(1),
                num_experts=header.num_experts,
            ),
        )

    def _sort(self) -> None:
        """Copy rows from their slots to where they stay: by expert, then by source, then by token."""
        header, result = self.header, self.result
        at, memory = self._exchange.layouts[self.network.local_rank], rows.Memory(self._place)
        counts = memory.rows(at.counts, 1, self.num_ranks, torch.int64)[0]
        source = torch.arange(self.num_ranks).repeat_interleave(counts)
        first = counts.cumsum(0) - counts
        slot = source * self._num_slots + torch.arange(len(source)) - first[source]
        records = memory.rows(at.records, self.num_ranks * self._num_slots, header.num_topk + 1, torch.int32)[slot]
        begin, end = expert_range(self.rank, header.num_experts, self.num_ranks)
        idx = records[:, : header.num_topk].to(torch.int64)
        row, column = ((idx >= begin) & (idx < end)).nonzero(as_tuple=True)
        # A pair that a token names twice is one pair.
        key = torch.unique((idx[row, column] - begin) * max(len(slot), 1) + row)
        expert, row = key // max(len(slot), 1), key % max(len(slot), 1)
        per_pair = torch.bincount(expert * self.num_ranks + source[row], minlength=(end - begin) * self.num_ranks)
        per_pair = per_pair.view(end - begin, self.num_ranks)
        result.recv_count.copy_(per_pair.sum(1))
        result.handle.layout_range.copy_((per_pair.cumsum(1) - per_pair) << 32 | per_pair)
        if self._request.recv_stats is not None:
            self._request.recv_stats.add_(result.recv_count)
        if not len(key):
            return
        num_rows = result.x.size(1)
        starts = result.recv_count.cumsum(0) - result.recv_count
        place = expert * num_rows + torch.arange(len(key)) - starts[expert]
        table = memory.rows(at.x, self.num_ranks * self._num_slots, header.hidden, result.x.dtype)
        out = rows.as_words(result.x.view(-1, header.hidden))
        for local, (start, count) in enumerate(zip(starts.tolist(), result.recv_count.tolist(), strict=True)):
            if count and out.size(1):
                picked = slot[row[start : start + count]]
                target = out[local * num_rows : local * num_rows + count]
                torch.index_select(rows.as_words(table), 0, picked, out=target)
        result.handle.src_info.view(-1)[place] = records[row, header.num_topk]
        if result.scales is not None:
            scales = memory.rows(at.scales, self.num_ranks * self._num_slots, self._scale_columns, result.scales.dtype)
            result.scales[expert, place % num_rows] = scales[slot[row]]


@dataclass(frozen=True, slots=True)
class _Routes:
    """The tokens of one source that a relay passed on: expert ids `[n, K]` and weights `[n, K]`."""

    topk_idx: Tensor
    topk_weights: Tensor


class _Combine(_Call):
    """One combine under way. Expert ids, weights and rows leave at once; `do_duty` adds for others, `finish` adds up.

    Attributes:
        out: The sums; filled by `finish`.
    """

    def __init__(self, engine: NetworkLowLatencyEngine, header: Header, request: LowLatencyCombineRequest) -> None:
        super().__init__(engine, header)
        self._request = request
        num_topk, hidden = header.num_topk, header.hidden
        limit = header.num_max_tokens_per_rank * max(num_topk, 1) * 8
        self._coming = []
        for source in self.remote_sources:
            place = self.mail.staging.take(limit)
            transfer = self.mail.recv(Kind.WEIGHTS, source, place, "expert ids and weights", limit)
            self._coming.append((source, self.recv_letter(source), place, transfer))
        self._tokens = self.tokens_of_hosts(request.topk_idx)
        self._returning: list[tuple[int, Tensor, Transfer | None]] = []
        for host in self.remote_hosts:
            tokens, relay = self._tokens[host], self.topology.relay(self.rank, host)
            message = self.mail.staging.take(max(len(tokens) * num_topk * 8, 1))
            memory, routes = rows.Memory(message), self._routes_of(tokens)
            rows.copy(routes.topk_idx, memory, 0)
            rows.copy(routes.topk_weights, memory, len(tokens) * num_topk * 4)
            self.send_letter(relay, len(tokens))
            self.mail.send(Kind.WEIGHTS, relay, message, "expert ids and weights", limit)
            place = self.mail.staging.take(_packed_bytes(len(tokens), hidden, request.use_logfmt))
            self._returning.append((host, place, self.mail.recv(Kind.ROWS, relay, place, "combined rows")))
        shape = (request.topk_idx.size(0), hidden)
        self.out = torch.empty(shape, dtype=request.x.dtype) if request.out is None else request.out
        ranges = request.handle.layout_range.tolist()
        told = [
            sum(line[source] & 0xFFFFFFFF for line in ranges for source in sources)
            for sources in self.network.sources_of
        ]
        self._exchange = self.network.exchanger.begin(header, _combine_layout, told)
        (self._place,) = self.network.exchanger.take_sections(
            self._exchange, [self._exchange.layouts[self.network.local_rank].num_bytes]
        )
        with self.network.exchanger.writing(self._exchange):
            self._write_back(ranges)

    def do_duty(self) -> None:
        """Add up the rows of the tokens that this rank passed on, and return the sums to other hosts."""
        self.finish_exchange(self._exchange)
        self.mail.begin_phase()
        routes = {self.rank: self._routes_of(self._tokens[self.topology.host])}
        for source, letter, place, transfer in self._coming:
            num_tokens = self.read_letter(source, letter)
            self.wait(transfer)
            memory, num_topk = rows.Memory(place), self.header.num_topk
            routes[source] = _Routes(
                memory.rows(0, num_tokens, num_topk, torch.int32),
                memory.rows(num_tokens * num_topk * 4, num_tokens, num_topk, torch.float32),
            )
        self._coming.clear()
        num_rows = self._exchange.num_rows(self.network.local_rank)
        at = self._exchange.layouts[self.network.local_rank]
        table = rows.Memory(self._place).rows(at.x, num_rows, self.header.hidden, self._request.x.dtype).float()
        row_of_slot = self._rows_of_slots([routes[source].topk_idx for source in self.network.sources])
        for source, row in zip(self.network.sources, row_of_slot, strict=True):
            sums = _sum_weighted(table, row, routes[source].topk_weights)
            if source == self.rank:
                self._own_sums = sums
            else:
                packed = _pack(sums, self.mail.staging.take, self._request.use_logfmt)
                self.mail.send(Kind.ROWS, source, packed, "combined rows")

    def finish(self) -> None:
        """Wait for the sums of the other hosts, and add them up."""
        self.mail.begin_phase()
        sums = {self.topology.host: self._own_sums}
        for host, place, transfer in self._returning:
            self.wait(transfer)
            sums[host] = _unpack(place, len(self._tokens[host]), self.header.hidden, self._request.use_logfmt)
        total = torch.zeros(self._request.topk_idx.size(0), self.header.hidden)
        for host in range(self.topology.num_hosts):
            total.index_add_(0, self._tokens[host], sums[host])
        self.out.copy_(total)
        self.mail.wait_for_sends()
        self.add_waits(self._request.wait_stats)

    def _routes_of(self, tokens: Tensor) -> _Routes:
        return _Routes(self._request.topk_idx[tokens].to(torch.int32), self._request.topk_weights[tokens])

    def _write_back(self, ranges: list[list[int]]) -> None:
        """Copy the rows of each source to its relay, expert by expert."""
        x, num_rows = self._request.x, self._request.x.size(1)
        words, row_bytes = rows.as_words(x.view(-1, x.size(2))), x.size(2) * x.element_size()
        for dst in self._exchange.receivers():
            memory, at, offset = self._exchange.extent(dst)
            row = self._exchange.first_row(dst)
            for source in self.network.sources_of[dst]:
                slots = [
                    torch.arange(count) + expert * num_rows + (line[source] >> 32)
                    for expert, line in enumerate(ranges)
                    if (count := line[source] & 0xFFFFFFFF)
                ]
                if slots:
                    slot = torch.cat(slots)
                    rows.gather(words, slot, memory, offset + at.x + row * row_bytes)
                    row += len(slot)

    def _rows_of_slots(self, idx_of_sources: list[Tensor]) -> list[Tensor]:
        """Return, for each source, `[n, K]` int64: the row of the table that answers a slot of its ids; -1 for none.

        The table is sorted by the local rank that returned the rows, then by source, expert and token.

        Raises:
            MismatchError: If local ranks returned other numbers of rows.
        """
        found = [torch.full(idx.shape, -1, dtype=torch.int64) for idx in idx_of_sources]
        row = 0
        for dst, rank in enumerate(self.network.local_ranks):
            begin, end = expert_range(rank, self.header.num_experts, self.num_ranks)
            first = row
            for idx, out in zip(idx_of_sources, found, strict=True):
                token, column = ((idx >= begin) & (idx < end)).nonzero(as_tuple=True)
                key = idx[token, column].to(torch.int64) * max(len(idx), 1) + token
                pairs, pair_of_slot = torch.unique(key, return_inverse=True)
                out[token, column] = row + pair_of_slot
                row += len(pairs)
            returned = self._exchange.counts[dst][self.network.local_rank]
            if row - first != returned:
                raise MismatchError(
                    f"rank {self.rank}: by topk_idx rank {rank} has {row - first} rows to return, but it returns "
                    f"{returned}",
                    hint="pass the topk_idx of the dispatch, and its handle, on all ranks",
                )
        return found


def _sum_weighted(table: Tensor, row_of_slot: Tensor, weights: Tensor) -> Tensor:
    """Add up `weights[t, k] * table[row_of_slot[t, k]]` in float32, in ascending k; -1 counts for nothing.

    Args:
        table: `[N, H]` float32.
        row_of_slot: `[n, K]` int64.
        weights: `[n, K]` float32.
    """
    if table.numel() == 0 or len(row_of_slot) == 0:
        return torch.zeros(len(row_of_slot), table.size(1))
    used = row_of_slot >= 0
    begins = torch.cat([torch.zeros(1, dtype=torch.int64), used.sum(1).cumsum(0)])
    # Mode 0 sums; the last argument says that `begins` has one item more than there are tokens.
    return torch.embedding_bag(table, row_of_slot[used], begins, False, 0, False, weights[used], True)[0]


def _packed_bytes(num_tokens: int, hidden: int, is_short: bool) -> int:
    return num_tokens * hidden * (2 if is_short else 3)


def _pack(sums: Tensor, take: Callable[[int], Tensor], is_short: bool) -> Tensor:
    """Return float32 sums as bytes: 16 bits of each, then, unless `is_short`, 8 more of each.

    Example: 24 bits of a float32 are its sign, its exponent and 15 bits of fraction; the last bit is rounded.
    """
    num_tokens, hidden = sums.shape
    data = take(_packed_bytes(num_tokens, hidden, is_short))
    num_high_bytes = num_tokens * hidden * 2
    if is_short:
        data.view(torch.bfloat16).copy_(sums.view(-1))
        return data
    bits = sums.view(-1).view(torch.int32) + 0x80
    data[:num_high_bytes].view(torch.int16).copy_(bits >> 16)
    data[num_high_bytes:].copy_(bits >> 8 & 0xFF)
    return data


def _unpack(data: Tensor, num_tokens: int, hidden: int, is_short: bool) -> Tensor:
    """Return what `_pack` packed, as float32."""
    if is_short:
        return data.view(torch.bfloat16).float().view(num_tokens, hidden)
    num_high_bytes = num_tokens * hidden * 2
    bits = data[:num_high_bytes].view(torch.int16).to(torch.int32) << 16
    bits |= data[num_high_bytes:].to(torch.int32) << 8
    return bits.view(torch.float32).view(num_tokens, hidden)


def _combine_layout(header: Header, num_rows: int) -> CombineLayout:
    row_bytes = header.hidden * DTYPES[header.dtype].itemsize
    return CombineLayout(num_rows=num_rows, row_bytes=row_bytes, num_topk=0, num_bias_rows=0)
