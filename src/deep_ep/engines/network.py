"""Normal mode between hosts, on CPU ranks: each token crosses the network once per destination host.

Inside a host, ranks share memory and meet as in `deep_ep.engines.exchange`; between hosts, messages travel over the
wire (`deep_ep.memory.wire`), from a token's source to its relay on the destination host (`deep_ep.topology`).

**Dispatch.** After the letters (`deep_ep.engines.mail`) every rank knows how many rows each source has for each rank of
its host, so it knows where in the memory of each local rank the rows of each source belong: behind those of all lower
sources, wherever they come from. So rows have the order that one host would give them, and a relay puts what it passes
on where it stays. The rows of a source come in chunks: while a relay copies one to its local ranks, the next ones are
on the wire.

**Combine** goes the same way back. Every rank puts its rows into the memory of the relays that passed them on. A relay
adds the rows of each token, in the order of the local ranks, and returns one row per token to the source, in chunks:
while one is under way, the next is added up. The source adds what the hosts return, in the order of the hosts, behind
its biases. All sums are made in float32; what a host returns is rounded once to the dtype of the rows, like the result.

Example: host A has ranks 0 and 1, host B has ranks 2 and 3. A token of rank 1 goes to ranks 0, 2 and 3. Its relay on B
is rank 3, so it crosses once, to rank 3, which copies it to itself and to rank 2. In combine, rank 2 puts its row into
rank 3's memory; rank 3 adds its own and returns one row to rank 1, which adds it to what it got from rank 0.

*No deadlock.* A rank starts all its sends before it waits for anything, receives are offered before any of their
senders waits for them, and no rank waits for a rank of its host while a message that it owes has not been started.

*What makes reuse safe.* Inside a host: `deep_ep.engines.exchange`. The bytes of a message lie in memory that is taken
anew for each call and free again once nothing refers to it, and a call refers to them until they have left or come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, cast

import torch
from torch import Tensor

from deep_ep.engines import rows
from deep_ep.engines.base import (
    CachedDispatchRequest,
    CombineRequest,
    DispatchRequest,
    DispatchResult,
    Layout,
    NetworkHandle,
)
from deep_ep.engines.exchange import (
    CALLS,
    DTYPES,
    Exchange,
    Exchanger,
    Header,
    check_signatures,
    check_worst_tokens,
    combine_layout,
)
from deep_ep.engines.mail import Kind, Mail, Staging
from deep_ep.engines.routing import Channels, compute_channels, compute_layout, expert_range, local_expert
from deep_ep.errors import CapacityError, ConfigError, DeepEPError, MismatchError, PeerError
from deep_ep.layout import PassedLayout
from deep_ep.memory.rendezvous import Rendezvous
from deep_ep.memory.wire import HostRendezvous, Transfer, Wire
from deep_ep.topology import Topology

_NUM_HEADER_FIELDS = len(Header._fields)
_NUM_TOP_WORDS = _NUM_HEADER_FIELDS + 2
"""A letter begins with a header, a number of tokens and a number of chunks."""


@dataclass(frozen=True, slots=True)
class NetworkTuning:
    """How what crosses the network is cut up. Each sender tells its receivers; ranks may differ.

    Attributes:
        num_chunks: The most chunks that the rows from one rank for one host come in.
        min_chunk_bytes: No chunk but the only one is smaller.
    """

    num_chunks: int = 8
    min_chunk_bytes: int = 1 << 18

    def chunks(self, num_bytes: int) -> int:
        """Return in how many chunks so many bytes are sent."""
        return max(min(self.num_chunks, num_bytes // self.min_chunk_bytes), 1)


class NetworkEngine:
    """Exchanges between CPU ranks of several hosts (`deep_ep.engines.base.Engine`). All ranks construct one together.

    Args:
        rendezvous: The ranks.
        topology: Where they are.
        num_bytes: Bytes of shared memory to begin with, for exchange inside the host.
        num_wire_bytes: Bytes to begin with for messages between hosts.
        timeout_s: How long a call waits for a peer.
        tuning: How messages are cut up.

    Attributes:
        exchanger: The memory and the steps of this host.
        staging: Memory for messages.
        local_ranks, local_rank: The ranks of this host, and which of them this one is.
        sources: The ranks that this one passes tokens on for, itself included.
        sources_of: The same of each local rank.
        duties: What this rank owes to others, to be done before its next call.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        topology: Topology,
        num_bytes: int,
        num_wire_bytes: int,
        timeout_s: float,
        tuning: NetworkTuning | None = None,
    ) -> None:
        self.device = torch.device("cpu")
        self.topology, self.tuning = topology, tuning or NetworkTuning()
        self.rank, self.num_ranks = rendezvous.rank, rendezvous.num_ranks
        self.local_ranks, self.sources = topology.local_ranks, topology.sources(self.rank)
        self.local_rank = topology.local_index[self.rank]
        names = [topology.host_names[host] for host in topology.host_of]
        self.wire = Wire(rendezvous, names, timeout_s)
        error: DeepEPError | None = None
        try:
            self.exchanger = Exchanger(HostRendezvous(self.wire, self.local_ranks), num_bytes, timeout_s)
            self.staging = Staging(num_wire_bytes)
        except DeepEPError as failure:
            error = failure
        failed = [rank for rank, (has_failed,) in enumerate(rendezvous.all_gather([error is not None])) if has_failed]
        if error is not None:
            raise error
        if failed:
            raise CapacityError(f"rank {self.rank}: ranks {failed}, on other hosts, could not set up their memory")
        self.sources_of = [topology.sources(rank) for rank in self.local_ranks]
        self._num_slots = max(len(sources) for sources in self.sources_of)
        self._num_calls = 0
        self._abandoned: list[object] = []
        self.duties: deque[Callable[[], None]] = deque()

    def compute_layout(self, topk_idx: Tensor, num_experts: int) -> Layout:
        """Count where tokens go."""
        layout = compute_layout(topk_idx, num_experts, self.num_ranks)
        mask = self.host_mask(layout.is_token_in_rank)
        return layout._replace(num_tokens_per_host=mask.sum(0, dtype=torch.int32))

    def dispatch(self, request: DispatchRequest) -> DispatchResult:
        """Send tokens to the ranks of their experts."""
        layout, x, scales, topk_idx = request.layout, request.x, request.scales, request.topk_idx
        is_token_in_rank, num_channels = layout.is_token_in_rank, request.config.num_channels
        host_mask = self.host_mask(is_token_in_rank)
        to_ranks = compute_channels(is_token_in_rank, num_channels)
        to_hosts = compute_channels(host_mask, num_channels)
        _check_counts(layout, to_ranks, to_hosts)
        header = Header(
            call=CALLS.index("dispatch"),
            dtype=DTYPES.index(x.dtype),
            hidden=x.size(1),
            scale_row_bytes=rows.row_bytes(scales),
            num_topk=0 if topk_idx is None else topk_idx.size(1),
            topk_idx_bytes=0 if topk_idx is None else topk_idx.element_size(),
            num_experts=layout.num_tokens_per_expert.numel(),
            num_channels=num_channels,
            num_worst_tokens=request.num_worst_tokens,
        )
        contents = _Contents.of(header, has_records=True)
        per_expert = layout.num_tokens_per_expert.tolist()
        bodies = []
        for host, ranks in enumerate(self.topology.hosts):
            ends = [*to_hosts.ends[host], *(end for rank in ranks for end in to_ranks.ends[rank])]
            bodies.append([*ends, *(per_expert[e] for e in self._experts_of(ranks, header.num_experts))])
        tokens = _tokens_of_hosts(host_mask)
        mail = self.open_mail(header)
        letters = self._exchange_letters(mail, header, self._offers(tokens, contents), bodies)
        told = self._tell([letter.body for letter in letters.values()], mail)
        ledger = _Ledger(told, num_channels, len(self.local_ranks))
        passing = _Passing(self, mail, contents, letters, None)
        records = [
            _make_records(is_token_in_rank[tokens[host]][:, list(ranks)], tokens[host], topk_idx, request.topk_weights)
            for host, ranks in enumerate(self.topology.hosts)
        ]
        passing.send_rows(tokens, x, scales, records)
        exchange = self._pass_on(passing, header, ledger.counts)
        check_worst_tokens(exchange)
        masks = torch.cat([passing.masks[source] for source in self.sources])
        received = self._read_rows(request, exchange, contents, ledger)
        handle = self._make_handle(request, ledger, masks, received.host_bits, to_ranks, to_hosts)
        return DispatchResult(
            x=received.x,
            scales=received.scales,
            topk_idx=received.topk_idx,
            topk_weights=received.topk_weights,
            num_recv_tokens_per_expert=self._aligned_expert_counts(request, ledger),
            handle=handle,
        )

    def dispatch_cached(self, request: CachedDispatchRequest) -> tuple[Tensor, Tensor | None]:
        """Send tokens the way of an earlier dispatch; return rows and scales."""
        handle = cast(NetworkHandle, request.handle)  # buffer.py has checked that
        x, scales, num_rows = request.x, request.scales, handle.num_rows
        masks = self._masks_of_sources(handle)
        tokens = _tokens_of_hosts(self.host_mask(handle.is_token_in_rank))
        header = Header(
            call=CALLS.index("cached dispatch"),
            dtype=DTYPES.index(x.dtype),
            hidden=x.size(1),
            scale_row_bytes=rows.row_bytes(scales),
            num_worst_tokens=num_rows,
        )
        contents = _Contents.of(header, has_records=False)
        mail = self.open_mail(header)
        letters = self._exchange_letters(mail, header, self._offers(tokens, contents), None)
        told = self._tell([masks[source].sum(0).tolist() for source in self.sources], mail)
        counts = [told[source] for source in range(self.num_ranks)]
        passing = _Passing(self, mail, contents, letters, masks)
        passing.send_rows(tokens, x, scales, None)
        exchange = self._pass_on(passing, header, counts)
        self._check_own_rows(handle, counts)
        sizes = [num_rows * rows.row_bytes(x), num_rows * rows.row_bytes(scales)]
        recv_x, recv_scales = self.exchanger.take_sections(exchange, sizes)
        return rows.as_rows(recv_x, num_rows, x), None if scales is None else rows.as_rows(
            recv_scales, num_rows, scales
        )

    def combine(self, request: CombineRequest) -> tuple[Tensor, Tensor | None]:
        """Bring rows back and add them."""
        handle = cast(NetworkHandle, request.handle)  # buffer.py has checked that
        x, weights = request.x, request.topk_weights
        masks = self._masks_of_sources(handle)
        tokens = _tokens_of_hosts(self.host_mask(handle.is_token_in_rank))
        header = Header(
            call=CALLS.index("combine"),
            dtype=DTYPES.index(x.dtype),
            hidden=x.size(1),
            num_topk=0 if weights is None else weights.size(1),
        )
        contents = _Contents.of(header, has_records=False)
        row_ends = handle.recv_gbl_rank_prefix_sum.tolist()
        if row_ends[-1] > x.size(0):
            raise ConfigError(
                f"recv_src_meta of the handle must have a row for each of the {row_ends[-1]} rows that its "
                f"recv_gbl_rank_prefix_sum counts, got {x.size(0)}"
            )
        mail = self.open_mail(header)
        letters = self._exchange_letters(mail, header, self._offers(tokens, contents), None)
        sums = _Sums(self, mail, tokens, request)
        try:
            memory = self._bring_rows_back(mail, header, masks, request, row_ends)
            for source in self.sources:
                _check_claim(self.rank, letters[source], len(masks[source]))
        except DeepEPError:
            self._abandoned.append(sums)  # what still comes must have a place to come to
            for source in self.sources:
                if source != self.rank:
                    mail.send(Kind.STATUS, source, torch.ones(1, dtype=torch.int64), "whether rows follow")
            mail.wait_for_sends()
            raise
        self._return_sums(mail, letters, masks, memory, sums)
        combined = sums.finish()
        mail.wait_for_sends()
        return combined

    def set_timeout(self, timeout_s: float) -> None:
        """Wait so long for a peer from now on."""
        self.exchanger.control.timeout_s = self.wire.timeout_s = timeout_s

    def local_bytes(self) -> Tensor:
        """Return the first segment of this rank's shared memory, as a uint8 tensor."""
        return self.exchanger.local_bytes()

    def close(self) -> None:
        """Let go of the memory and the connections; received tensors that still live keep what they use."""
        self.duties.clear()
        self.exchanger.close()
        self.wire.close()
        self._abandoned.clear()

    # Letters

    def do_duties(self) -> None:
        """Do what this rank still owes to others from earlier calls (`deep_ep.engines.network_low_latency`)."""
        while self.duties:
            self.duties.popleft()()

    def give_up(self, source: int, reason: str) -> None:
        """Take part in nothing more, because of a rank of another host."""
        self.exchanger.control.announce_loss(source, reason)
        self.wire.give_up(reason)

    def open_mail(self, header: Header) -> Mail:
        """Return the messages of a new call.

        Raises:
            DestroyedError: If a rank was lost in an earlier one.
        """
        self.exchanger.control.check_in_step()
        self.do_duties()
        self._num_calls += 1
        call = CALLS[header.call]
        return Mail(self.wire, self.staging, self._num_calls, call, self.exchanger.control)

    def _offers(self, tokens: Sequence[Tensor], contents: _Contents) -> list[tuple[int, int]]:
        """Return how many tokens go to each host, in how many chunks."""
        return [
            (len(tokens_), self.tuning.chunks(contents.sections(len(tokens_), len(ranks)).num_bytes))
            for tokens_, ranks in zip(tokens, self.topology.hosts, strict=True)
        ]

    def _exchange_letters(
        self, mail: Mail, header: Header, offers: list[tuple[int, int]], bodies: list[list[int]] | None
    ) -> dict[int, _Letter]:
        """Send letters, receive those of this rank's sources, and compare the headers of all ranks of the group.

        Args:
            mail: The call.
            header: What this rank says.
            offers: Tokens and chunks for each host.
            bodies: More for each host, if anything.

        Raises:
            MismatchError: If ranks are in different calls, or in calls of different shapes; on all ranks.
        """
        topology, control = self.topology, self.exchanger.control
        coming = {source: mail.recv_letter(source) for source in self.sources if source != self.rank}
        for host in range(topology.num_hosts):
            words = [*header, *offers[host], *(bodies[host] if bodies else ())]
            if host != topology.host:
                mail.send_letter(topology.relay(self.rank, host), words)
        own = torch.tensor([*header, *offers[topology.host], *(bodies[topology.host] if bodies else ())])
        written = {source: coming[source]() if source in coming else own for source in self.sources}
        tops = {source: words[:_NUM_TOP_WORDS].tolist() for source, words in written.items()}
        padded = [*tops.values(), *([[0] * _NUM_TOP_WORDS] * (self._num_slots - len(tops)))]
        replies = control.all_gather([word for words in padded for word in words], CALLS[header.call], "a header")
        headers = dict(self._by_source(replies, _NUM_TOP_WORDS))
        check_signatures(
            [Header(*headers[rank][:_NUM_HEADER_FIELDS]) for rank in range(self.num_ranks)],
            self.rank,
            range(self.num_ranks),
        )
        num_words = own.numel()
        return {
            source: _Letter(source, tops[source][-2], tops[source][-1], words[_NUM_TOP_WORDS:num_words].tolist())
            for source, words in written.items()
        }

    def _tell(self, words_of_sources: Sequence[Sequence[int]], mail: Mail) -> dict[int, list[int]]:
        """Tell the ranks of this host something about each of this rank's sources; return it of all sources."""
        size = len(words_of_sources[0])
        words = [word for part in words_of_sources for word in part]
        words += [0] * (size * self._num_slots - len(words))
        return dict(self._by_source(self.exchanger.control.all_gather(words, mail.call, "counts"), size))

    def _by_source(self, replies: list[list[int]], size: int) -> Iterator[tuple[int, list[int]]]:
        for sources, words in zip(self.sources_of, replies, strict=True):
            for slot, source in enumerate(sources):
                yield source, words[slot * size : (slot + 1) * size]

    # Dispatch

    def _pass_on(self, passing: _Passing, header: Header, counts: list[list[int]]) -> Exchange[PassedLayout]:
        """Write the rows of this rank's sources, its own included, to where they stay; wait for those of its peers.

        Args:
            passing: The rows.
            header: What this rank says.
            counts: `counts[source][local rank]` rows.
        """
        by_relay = [
            [sum(counts[source][dst] for source in sources) for dst in range(len(self.local_ranks))]
            for sources in self.sources_of
        ]
        record_bytes = passing.contents.record_words(len(self.local_ranks)) * 4

        def make_layout(header: Header, num_rows: int) -> PassedLayout:
            return PassedLayout(
                num_rows=max(num_rows, header.num_worst_tokens),
                row_bytes=passing.contents.row_bytes,
                scale_row_bytes=passing.contents.scale_row_bytes,
                record_bytes=record_bytes,
            )

        passing.mail.begin_phase()
        try:
            exchange = self.exchanger.begin(header, make_layout, counts=by_relay)
        except (CapacityError, MismatchError):
            passing.drain()  # who sends them shall not have to wait for us
            raise
        with self.exchanger.writing(exchange):
            passing.write(exchange, counts)
        passing.mail.wait_for_sends()
        self.exchanger.finish(exchange)
        return exchange

    def _read_rows(
        self, request: DispatchRequest, exchange: Exchange[PassedLayout], contents: _Contents, ledger: _Ledger
    ) -> _Received:
        """Turn what relays wrote into what a dispatch returns."""
        x, scales, topk_idx = request.x, request.scales, request.topk_idx
        num_real = sum(counts[self.local_rank] for counts in ledger.counts)
        num_rows = request.num_worst_tokens or num_real
        sizes = [num_rows * rows.row_bytes(x), num_rows * rows.row_bytes(scales)]
        recv_x, recv_scales = self.exchanger.take_sections(exchange, sizes)
        num_words = contents.record_words(len(self.local_ranks))
        offset = exchange.places[self.local_rank].offset + exchange.layouts[self.local_rank].records
        record = exchange.memories[self.local_rank].rows(offset, num_real, num_words, torch.int32)
        num_topk, num_idx_words = contents.num_topk, contents.num_topk * contents.topk_idx_bytes // 4
        host_bits = record[:, num_idx_words + num_topk].clone(memory_format=torch.contiguous_format)
        local = weights = None
        if topk_idx is not None:
            num_experts = request.layout.num_tokens_per_expert.numel()
            expert = record.view(topk_idx.dtype)[:, :num_topk]
            local = local_expert(self.rank, num_experts, self.num_ranks, topk_idx.dtype)[expert]
            weights = record.view(torch.float32)[:, num_idx_words : num_idx_words + num_topk]
            weights = weights.masked_fill(local < 0, 0.0)
            if num_rows > num_real:
                local, weights = rows.pad(local, num_rows), rows.pad(weights, num_rows)
        return _Received(
            rows.as_rows(recv_x, num_rows, x),
            None if scales is None else rows.as_rows(recv_scales, num_rows, scales),
            local,
            weights,
            host_bits,
        )

    def _make_handle(
        self,
        request: DispatchRequest,
        ledger: _Ledger,
        masks: Tensor,
        host_bits: Tensor,
        to_ranks: Channels,
        to_hosts: Channels,
    ) -> NetworkHandle:
        counts = torch.tensor([counts[self.local_rank] for counts in ledger.counts])
        ends = counts.cumsum(0)
        own_ends = torch.tensor([ledger.rank_ends(source, self.local_rank) for source in range(self.num_ranks)])
        starts = (ends - counts).unsqueeze(1) + torch.cat([torch.zeros_like(own_ends[:, :1]), own_ends[:, :-1]], 1)
        passed = torch.tensor([ledger.host_ends(source) for source in self.sources])
        hosts = torch.tensor(self.topology.host_of, dtype=torch.int32).repeat_interleave(counts)
        meta = torch.stack([hosts, host_bits], 1)
        if request.num_worst_tokens:
            meta = rows.pad(meta, request.num_worst_tokens)
        heads = [
            number_within(mask, [0, *channel_ends])
            for mask, channel_ends in zip(
                torch.split(masks, [line[-1] for line in passed.tolist()]), passed.tolist(), strict=True
            )
        ]
        return NetworkHandle(
            is_token_in_rank=request.layout.is_token_in_rank,
            rdma_channel_prefix_matrix=torch.tensor(to_hosts.ends, dtype=torch.int32),
            gbl_channel_prefix_matrix=torch.tensor(to_ranks.ends, dtype=torch.int32),
            recv_rdma_channel_prefix_matrix=passed.to(torch.int32),
            recv_rdma_rank_prefix_sum=passed[:, -1].cumsum(0).to(torch.int32),
            recv_gbl_channel_prefix_matrix=starts.to(torch.int32),
            recv_gbl_rank_prefix_sum=ends.to(torch.int32),
            recv_src_meta=meta.contiguous().view(torch.uint8),
            send_rdma_head=to_hosts.send_head,
            send_nvl_head=torch.cat(heads),
        )

    def _aligned_expert_counts(self, request: DispatchRequest, ledger: _Ledger) -> list[int]:
        if request.num_worst_tokens:
            return []
        num_experts, alignment = request.layout.num_tokens_per_expert.numel(), request.expert_alignment
        mine = self._experts_of([self.rank], num_experts)
        experts = self._experts_of(self.local_ranks, num_experts)
        first = experts.index(mine[0]) if mine else 0
        columns = [ledger.expert_counts(source)[first : first + len(mine)] for source in range(self.num_ranks)]
        return [-(-sum(column) // alignment) * alignment for column in zip(*columns, strict=True)]

    # Combine

    def _bring_rows_back(
        self, mail: Mail, header: Header, masks: dict[int, Tensor], request: CombineRequest, row_ends: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Give rows and weights to the relays that passed them on; return those that this rank gets as a relay.

        They are sorted by the local rank that they come from, then by source, then by the token's index there.
        """
        x, weights = request.x, request.topk_weights
        begins = [0, *row_ends]
        own_counts = [sum(row_ends[s] - begins[s] for s in sources) for sources in self.sources_of]
        counts = self.exchanger.control.all_gather(own_counts, mail.call, "counts")
        exchange = self.exchanger.begin(header, combine_layout, counts=counts)
        with self.exchanger.writing(exchange):
            for dst in exchange.receivers():
                row, at = exchange.first_row(dst), exchange.layouts[dst]
                memory, offset = exchange.memories[dst], exchange.places[dst].offset
                for source in self.sources_of[dst]:
                    mine = slice(begins[source], row_ends[source])
                    rows.copy(x[mine], memory, offset + at.x + row * rows.row_bytes(x))
                    if weights is not None:
                        rows.copy(weights[mine], memory, offset + at.topk_weights + row * rows.row_bytes(weights))
                    row += row_ends[source] - begins[source]
        self.exchanger.finish(exchange)
        expected = torch.stack([mask.sum(0) for mask in masks.values()]).sum(0).tolist()
        for peer, line in enumerate(counts):
            if line[self.local_rank] != expected[peer]:
                raise MismatchError(
                    f"rank {self.rank}: by its handle rank {self.local_ranks[peer]} has {expected[peer]} rows to "
                    f"return through it, but it returns {line[self.local_rank]}",
                    hint="combine with the handle of one dispatch on all ranks",
                )
        memory, at = exchange.memories[self.local_rank], exchange.layouts[self.local_rank]
        offset, num_rows = exchange.places[self.local_rank].offset, exchange.num_rows(self.local_rank)
        table = memory.rows(offset + at.x, num_rows, x.size(1), x.dtype)
        if weights is None:
            return table, None
        return table, memory.rows(offset + at.topk_weights, num_rows, weights.size(1), torch.float32)

    def _return_sums(
        self,
        mail: Mail,
        letters: dict[int, _Letter],
        masks: dict[int, Tensor],
        memory: tuple[Tensor, Tensor | None],
        sums: _Sums,
    ) -> None:
        """Add up the rows of each token that this rank passed on, and return the sums to their sources."""
        table, weights = memory
        mail.begin_phase()
        mask = torch.cat(list(masks.values()))
        token_rows = rows.TokenRows([column.nonzero()[:, 0] for column in mask.t()], mask.size(0), 0)
        ends = list(accumulate(letter.num_tokens for letter in letters.values()))
        begins = dict(zip(letters, [0, *ends], strict=False))
        weight_sums = None if weights is None else token_rows.sum(weights)
        remote = [letter for source, letter in letters.items() if source != self.rank]
        for letter in remote:
            mail.send(Kind.STATUS, letter.source, torch.zeros(1, dtype=torch.int64), "whether rows follow")
        for chunk in range(max((letter.num_chunks for letter in remote), default=0)):
            for letter in remote:
                if chunk < letter.num_chunks:
                    first = begins[letter.source]
                    begin, end = (first + token for token in letter.chunk(chunk))
                    mail.send(Kind.ROWS, letter.source, token_rows.sum_range(table, begin, end), "combined rows")
        for letter in letters.values():
            begin = begins[letter.source]
            end = begin + letter.num_tokens
            if letter.source == self.rank:
                own_weights = None if weight_sums is None else weight_sums[begin:end]
                sums.put_own(token_rows.sum_range(table, begin, end), own_weights)
            elif weight_sums is not None:
                mail.send(Kind.WEIGHTS, letter.source, weight_sums[begin:end], "combined weights")

    # Routing

    def host_mask(self, is_token_in_rank: Tensor) -> Tensor:
        """Return `[T, D]` bool: which hosts each token goes to."""
        parts = [is_token_in_rank[:, list(ranks)].any(1) for ranks in self.topology.hosts]
        return torch.stack(parts, 1)

    def _experts_of(self, ranks: Sequence[int], num_experts: int) -> list[int]:
        return [expert for rank in ranks for expert in range(*expert_range(rank, num_experts, self.num_ranks))]

    def _masks_of_sources(self, handle: NetworkHandle) -> dict[int, Tensor]:
        """Return, for each source, which local ranks each of its tokens that this rank passes on goes to."""
        mask = handle.send_nvl_head >= 0
        ends = handle.recv_rdma_rank_prefix_sum.tolist()
        counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        if min(counts) < 0 or ends[-1] != mask.size(0):
            raise ConfigError(
                f"recv_rdma_rank_prefix_sum of the handle must not fall and must end with the {mask.size(0)} tokens of "
                f"its send_nvl_head, got {ends}"
            )
        return dict(zip(self.sources, torch.split(mask, counts), strict=True))

    def _check_own_rows(self, handle: NetworkHandle, counts: list[list[int]]) -> None:
        """Compare the rows that came with those that the handle counts."""
        ends = list(accumulate(line[self.local_rank] for line in counts))
        if ends != handle.recv_gbl_rank_prefix_sum.tolist():
            raise MismatchError(
                f"rank {self.rank}: by its handle it gets {handle.recv_gbl_rank_prefix_sum.tolist()} rows from the "
                f"ranks up to each, but it got {ends}",
                hint="dispatch with the handle of one earlier dispatch on all ranks",
            )


class _Letter(NamedTuple):
    """What a source says: its rank, how many tokens it has for this host, in how many chunks they come, and more."""

    source: int
    num_tokens: int
    num_chunks: int
    body: list[int]

    def chunk(self, number: int) -> tuple[int, int]:
        """Return the first token of a chunk and the first behind it."""
        return self.num_tokens * number // self.num_chunks, self.num_tokens * (number + 1) // self.num_chunks


class _Ledger:
    """What the sources of a dispatch told about their rows for this host.

    Args:
        bodies: Of each source: `[C]` tokens for this host up to the end of each channel, `[L, C]` for each local rank,
            then counts of this host's experts, rank after rank.
        num_channels: C.
        num_local_ranks: L.

    Attributes:
        counts: `counts[source][local rank]` rows.
    """

    def __init__(self, bodies: dict[int, list[int]], num_channels: int, num_local_ranks: int) -> None:
        self._bodies, self._num_channels, self._num_local_ranks = bodies, num_channels, num_local_ranks
        self.counts = [
            [self.rank_ends(source, local_rank)[-1] for local_rank in range(num_local_ranks)]
            for source in range(len(bodies))
        ]

    def host_ends(self, source: int) -> list[int]:
        """Return the tokens for this host up to each channel."""
        return self._bodies[source][: self._num_channels]

    def rank_ends(self, source: int, local_rank: int) -> list[int]:
        """Return the tokens for a local rank up to each channel."""
        begin = self._num_channels * (1 + local_rank)
        return self._bodies[source][begin : begin + self._num_channels]

    def expert_counts(self, source: int) -> list[int]:
        """Return the tokens for each expert of this host."""
        return self._bodies[source][self._num_channels * (1 + self._num_local_ranks) :]


@dataclass(frozen=True, slots=True)
class _Sections:
    """Where the parts of a message begin: rows, scales, records."""

    x: int
    scales: int
    records: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Contents:
    """What travels for each token of a dispatch.

    A **record** is, in words of 4 bytes: the expert ids, the weights, a bit for each rank of the destination host that
    the token goes to, and what it takes to make the number of words even if ids have two.
    """

    row_bytes: int
    scale_row_bytes: int
    num_topk: int
    topk_idx_bytes: int
    has_records: bool

    @classmethod
    def of(cls, header: Header, *, has_records: bool) -> _Contents:
        """Return the contents of a call's messages."""
        row_bytes = header.hidden * DTYPES[header.dtype].itemsize
        return cls(row_bytes, header.scale_row_bytes, header.num_topk, header.topk_idx_bytes, has_records)

    def record_words(self, num_local_ranks: int) -> int:
        """Return the words of a record for a host of so many ranks."""
        if not self.has_records:
            return 0
        num_words = self.num_topk * (self.topk_idx_bytes // 4 + 1) + -(-num_local_ranks // _MASK_BITS)
        return num_words + (num_words % 2 if self.topk_idx_bytes == 8 else 0)

    def sections(self, num_tokens: int, num_local_ranks: int) -> _Sections:
        """Return the parts of a message of so many tokens for a host of so many ranks."""
        scales = _align8(num_tokens * self.row_bytes)
        records = _align8(scales + num_tokens * self.scale_row_bytes)
        return _Sections(0, scales, records, records + num_tokens * self.record_words(num_local_ranks) * 4)


class _Received(NamedTuple):
    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    host_bits: Tensor


class _Passing:
    """The rows of one dispatch that a rank sends, and those that it passes on. Receives are offered at once.

    Args:
        engine: Whose dispatch it is.
        mail: The call.
        contents: What travels for each token.
        letters: What this rank's sources said.
        masks: Of each source, `[tokens, local ranks]` which of them each token goes to; None if records tell it.
    """

    def __init__(
        self,
        engine: NetworkEngine,
        mail: Mail,
        contents: _Contents,
        letters: dict[int, _Letter],
        masks: dict[int, Tensor] | None,
    ) -> None:
        self.engine, self.mail, self.contents, self.letters = engine, mail, contents, letters
        self.expected = masks
        self.masks: dict[int, Tensor] = {}
        num_local_ranks = len(engine.local_ranks)
        self._coming: list[tuple[_Letter, int, _Sections, Tensor, Transfer | None]] = []
        remote = [letter for source, letter in letters.items() if source != engine.rank]
        for chunk in range(max((letter.num_chunks for letter in remote), default=0)):
            for letter in remote:
                if chunk < letter.num_chunks:
                    begin, end = letter.chunk(chunk)
                    sections = contents.sections(end - begin, num_local_ranks)
                    data = mail.staging.take(sections.num_bytes)
                    transfer = mail.recv(Kind.ROWS, letter.source, data, "rows")
                    self._coming.append((letter, end - begin, sections, data, transfer))

    def send_rows(self, tokens: list[Tensor], x: Tensor, scales: Tensor | None, records: list[Tensor] | None) -> None:
        """Start to send this rank's rows to its relay on every other host, chunk by chunk.

        Args:
            tokens: The tokens for each host.
            x: `[T, H]`.
            scales: `[T, S]` or None.
            records: For each host, one for each of its tokens.
        """
        topology, rank = self.engine.topology, self.engine.rank
        self._own = (tokens[topology.host], x, scales, None if records is None else records[topology.host])
        offers = self.engine._offers(tokens, self.contents)
        for chunk in range(max(num_chunks for _, num_chunks in offers)):
            for host, (num_tokens, num_chunks) in enumerate(offers):
                if host == topology.host or chunk >= num_chunks:
                    continue
                letter = _Letter(rank, num_tokens, num_chunks, [])
                part = slice(*letter.chunk(chunk))
                at = self.contents.sections(part.stop - part.start, len(topology.hosts[host]))
                data = self.mail.staging.take(at.num_bytes)
                memory = rows.Memory(data)
                rows.gather(rows.as_words(x), tokens[host][part], memory, at.x)
                if scales is not None:
                    rows.gather(rows.as_words(scales), tokens[host][part], memory, at.scales)
                if records is not None:
                    rows.copy(records[host][part], memory, at.records)
                self.mail.send(Kind.ROWS, topology.relay(rank, host), data, "rows")

    def write(self, exchange: Exchange[PassedLayout], counts: list[list[int]]) -> None:
        """Copy the rows of all sources to where they stay, those of this rank first.

        Args:
            exchange: The call inside the host.
            counts: `counts[source][local rank]` rows.

        Raises:
            MismatchError: If a source sends more or fewer tokens than the handle says.
        """
        engine = self.engine
        before = [[0] * len(engine.local_ranks)]
        for line in counts:
            before.append([total + count for total, count in zip(before[-1], line, strict=True)])
        next_rows = {source: list(before[source]) for source in self.letters}
        tokens, x, scales, records = self._own
        own_mask = self._mask(engine.rank, records, 0, len(tokens))
        self._write(exchange, next_rows[engine.rank], own_mask, tokens, (x, scales), records)
        masks: dict[int, list[Tensor]] = {source: [] for source in self.letters}
        masks[engine.rank].append(own_mask)
        if self.expected is not None:
            for letter in self.letters.values():
                if letter.num_tokens != len(self.expected[letter.source]):
                    self.drain()
                    _check_claim(engine.rank, letter, len(self.expected[letter.source]))
        num_words = self.contents.record_words(len(engine.local_ranks))
        for letter, num_tokens, at, data, transfer in self._coming:
            self.mail.wait(transfer)
            memory = rows.Memory(data)
            first = sum(len(mask) for mask in masks[letter.source])
            arrived = memory.rows(at.x, num_tokens, self.contents.row_bytes, torch.uint8)
            arrived_scales = arrived_records = None
            if self.contents.scale_row_bytes:
                arrived_scales = memory.rows(at.scales, num_tokens, self.contents.scale_row_bytes, torch.uint8)
            if num_words:
                arrived_records = memory.rows(at.records, num_tokens, num_words, torch.int32)
            mask = self._mask(letter.source, arrived_records, first, num_tokens)
            self._write(exchange, next_rows[letter.source], mask, None, (arrived, arrived_scales), arrived_records)
            masks[letter.source].append(mask)
        self.masks = {source: torch.cat(parts) for source, parts in masks.items()}

    def drain(self) -> None:
        """Receive what comes and let it go; let what is sent leave."""
        for *_, transfer in self._coming:
            self.mail.wait(transfer)
        self.mail.wait_for_sends()

    def _mask(self, source: int, records: Tensor | None, first: int, num_tokens: int) -> Tensor:
        if self.expected is not None:
            return self.expected[source][first : first + num_tokens]
        assert records is not None, "a dispatch with new routing has records"
        begin = self.contents.num_topk * (self.contents.topk_idx_bytes // 4 + 1)
        return _unpack_bits(records[:, begin:], len(self.engine.local_ranks))

    def _write(
        self,
        exchange: Exchange[PassedLayout],
        next_rows: list[int],
        mask: Tensor,
        tokens: Tensor | None,
        data: tuple[Tensor, Tensor | None],
        records: Tensor | None,
    ) -> None:
        """Copy rows of one source to the local ranks that they go to.

        Args:
            exchange: The call inside the host.
            next_rows: Where the next row for each local rank belongs; moved on.
            mask: `[n, local ranks]` bool.
            tokens: `[n]` the rows of `data` that are meant; None for all of them.
            data: Rows, and scales or None.
            records: `[n, words]` or None.
        """
        x, scales = (None if part is None else rows.as_words(part) for part in data)
        assert x is not None
        for dst in exchange.receivers():
            numbers = mask[:, dst].nonzero()[:, 0]
            if numbers.size(0) == 0:
                continue
            index = numbers if tokens is None else tokens[numbers]
            memory, at, offset = exchange.memories[dst], exchange.layouts[dst], exchange.places[dst].offset
            row = next_rows[dst]
            rows.gather(x, index, memory, offset + at.x + row * self.contents.row_bytes)
            if scales is not None:
                rows.gather(scales, index, memory, offset + at.scales + row * self.contents.scale_row_bytes)
            if records is not None:
                rows.gather(records, numbers, memory, offset + at.records + row * rows.row_bytes(records))
            next_rows[dst] += numbers.size(0)


class _Sums:
    """What a rank gets back in a combine: one row per token from each host it went to. Receives are offered at once.

    Args:
        engine: Whose combine it is.
        mail: The call.
        tokens: The tokens that went to each host.
        request: The combine.
    """

    def __init__(self, engine: NetworkEngine, mail: Mail, tokens: list[Tensor], request: CombineRequest) -> None:
        self._mail, self._tokens, self._rank = mail, tokens, engine.rank
        x, weights, biases = request.x, request.topk_weights, request.biases
        topology, contents = engine.topology, _Contents(rows.row_bytes(x), 0, 0, 0, has_records=False)
        self._num_tokens = request.handle.is_token_in_rank.size(0)
        self._num_biases = len(biases)
        num_bias_rows = self._num_biases * self._num_tokens
        num_rows = sum(len(tokens_) for tokens_ in tokens)
        self._table = _rows_in(mail.staging, num_bias_rows + num_rows, x.size(1), x.dtype)
        self._weights = None
        if weights is not None:
            self._weights = _rows_in(mail.staging, num_rows, weights.size(1), torch.float32)
        for i, bias in enumerate(biases):
            self._table[i * self._num_tokens : (i + 1) * self._num_tokens] = bias
        self._coming: list[tuple[int, Tensor, Transfer | None, list[Transfer | None]]] = []
        begin = 0
        for host, (num_tokens, num_chunks) in enumerate(engine._offers(tokens, contents)):
            mine = slice(begin, begin + num_tokens)
            begin = mine.stop
            host_rows = self._table[num_bias_rows:][mine]
            host_weights = None if self._weights is None else self._weights[mine]
            if host == topology.host:
                self._own = (host_rows, host_weights)
                continue
            peer = topology.relay(engine.rank, host)
            letter = _Letter(peer, num_tokens, num_chunks, [])
            status = torch.zeros(1, dtype=torch.int64)
            told = mail.recv(Kind.STATUS, peer, status, "word whether rows follow")
            chunks = [
                mail.recv(Kind.ROWS, peer, host_rows[slice(*letter.chunk(chunk))], "combined rows")
                for chunk in range(num_chunks)
            ]
            if host_weights is not None:
                chunks.append(mail.recv(Kind.WEIGHTS, peer, host_weights, "combined weights"))
            self._coming.append((peer, status, told, chunks))

    def put_own(self, sums: Tensor, weight_sums: Tensor | None) -> None:
        """Take what this rank's own host returns."""
        own_rows, own_weights = self._own
        own_rows.copy_(sums)
        if own_weights is not None and weight_sums is not None:
            own_weights.copy_(weight_sums)

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """Wait for what the other hosts return, and add up.

        Raises:
            PeerError: If a host could not make its sums.
        """
        for peer, status, told, chunks in self._coming:
            self._mail.wait(told)
            if int(status):
                raise PeerError(
                    f"rank {self._rank}: rank {peer}, on another host, could not return its rows of a combine",
                    hint="the error on that rank tells why; this buffer can be used again",
                )
            for transfer in chunks:
                self._mail.wait(transfer)
        sum_rows = token_rows = rows.TokenRows(self._tokens, self._num_tokens, 0)
        if self._num_biases:
            sum_rows = rows.TokenRows(self._tokens, self._num_tokens, self._num_biases)
        combined = sum_rows.sum(self._table)
        return combined, None if self._weights is None else token_rows.sum(self._weights)


def number_within(mask: Tensor, bounds: Sequence[int]) -> Tensor:
    """Number the tokens that go to each rank within each channel.

    Args:
        mask: `[n, L]` bool.
        bounds: Where channels begin, and where the last one ends.

    Returns:
        `[n, L]` int32; -1 where a token does not go.

    Example: three tokens, all for rank 0, in channels that begin at 0 and 2, have the numbers 0, 1 and 0.
    """
    totals = torch.cat([torch.zeros(1, mask.size(1), dtype=torch.int32), mask.cumsum(0, dtype=torch.int32)])
    starts = torch.tensor(bounds)
    lengths = starts.diff()
    before = totals[starts[:-1]].repeat_interleave(lengths, 0)
    return (totals[1:] - before).mul_(mask).sub_(1)


def _check_claim(rank: int, letter: _Letter, num_expected: int) -> None:
    if letter.num_tokens != num_expected:
        raise MismatchError(
            f"rank {rank}: by its handle rank {letter.source} has {num_expected} tokens for this host, but by its own "
            f"it has {letter.num_tokens}",
            hint="use the handle of one dispatch on all ranks",
        )


def _check_counts(layout: Layout, to_ranks: Channels, to_hosts: Channels) -> None:
    for name, told, channels in (
        ("num_tokens_per_rank", layout.num_tokens_per_rank, to_ranks),
        ("num_tokens_per_rdma_rank", layout.num_tokens_per_host, to_hosts),
    ):
        counted = [ends[-1] for ends in channels.ends]
        if told is not None and told.tolist() != counted:
            raise ConfigError(f"{name} must agree with is_token_in_rank, {counted}, got {told.tolist()}")


def _tokens_of_hosts(host_mask: Tensor) -> list[Tensor]:
    """Return the tokens that go to each host, in ascending order."""
    return [host_mask[:, host].nonzero()[:, 0] for host in range(host_mask.size(1))]


_MASK_BITS = 32


def _pack_bits(mask: Tensor) -> Tensor:
    """Return `[n, words]` int32: 32 columns of `mask` `[n, L]` in a word, the first in the lowest bit."""
    num_columns = mask.size(1)
    words = []
    for begin in range(0, num_columns, _MASK_BITS):
        part = mask[:, begin : begin + _MASK_BITS].to(torch.int64)
        words.append((part << torch.arange(part.size(1))).sum(1))
    return torch.stack(words, 1).to(torch.int32)


def _unpack_bits(words: Tensor, num_columns: int) -> Tensor:
    """Return what `_pack_bits` packed."""
    column = torch.arange(num_columns)
    return (words[:, column // _MASK_BITS] >> (column % _MASK_BITS).to(torch.int32) & 1).bool()


def _make_records(mask: Tensor, tokens: Tensor, topk_idx: Tensor | None, topk_weights: Tensor | None) -> Tensor:
    """Return `[n, words]` int32: what travels beside the rows of tokens for one host (`_Contents`)."""
    bits = _pack_bits(mask)
    if topk_idx is None or topk_weights is None:
        return bits
    parts = [topk_idx[tokens].view(torch.int32), topk_weights[tokens].view(torch.int32), bits]
    if topk_idx.element_size() == 8 and sum(part.size(1) for part in parts) % 2:
        parts.append(torch.zeros(len(tokens), 1, dtype=torch.int32))
    return torch.cat(parts, 1)


def _rows_in(staging: Staging, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    return staging.take(num_rows * num_columns * dtype.itemsize).view(dtype).view(num_rows, num_columns)


def _align8(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8
