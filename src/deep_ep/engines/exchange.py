"""Exchange: how every call on CPU ranks goes, and the memory it receives into.

1. **Headers.** Every rank tells the others what it is about to do (the call and its shapes), how many rows it has for
   each rank, and which stretch of its own memory is free to receive into. Now all ranks know all counts, so each can
   tell where its rows belong: behind those of the ranks before it. If somebody's free stretch is too small, all ranks
   know that too, and map new memory together before they go on.
2. **Rows.** Every rank copies its rows to where they belong, in the memory of their receivers, and announces that. Who
   has seen the announcements of all peers has all its rows.

Example: two ranks with three tokens each. Rank 0 sends its tokens 0 and 2 to rank 1, rank 1 its tokens 0, 1 and 2 to
itself. The headers say [.., 2] and [.., 3] for rank 1, so rank 0 writes to rows 0 and 1 of rank 1, and rank 1 to rows
2, 3 and 4. Then rank 1 returns those five rows, sorted by source rank, then by source token.

*What makes reuse safe.* A rank offers a free stretch in the headers of one call, and a peer writes there before it
enters the next call. So a rank may use or free the stretch once it has all its rows, and what it offers in the headers
of a later call, peers use only after all of them have come to that call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from deep_ep.engines.rows import Memory
from deep_ep.errors import CapacityError, MismatchError, PeerError, PeerTimeoutError
from deep_ep.layout import CombineLayout, ControlLayout, align
from deep_ep.memory.arena import NO_EXTENT, Arena, Extent
from deep_ep.memory.control import Control
from deep_ep.memory.cpu import HostMemory
from deep_ep.memory.rendezvous import AllGather, Rendezvous

logger = logging.getLogger("deep_ep")

CALLS = ("dispatch", "cached dispatch", "combine", "low-latency dispatch", "low-latency combine")
DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
)
"""The dtypes that rows may have; ranks tell each other the index."""


class Header(NamedTuple):
    """What a rank says at the beginning of a call. The fields up to `routing` must be equal on all ranks."""

    call: int
    dtype: int
    hidden: int
    scale_row_bytes: int = 0
    num_topk: int = 0
    topk_idx_bytes: int = 0
    num_experts: int = 0
    num_channels: int = 0
    num_max_tokens_per_rank: int = 0
    row_format: int = 0
    routing: int = 0
    num_worst_tokens: int = 0
    num_bias_rows: int = 0


NUM_SIGNATURE_FIELDS = Header._fields.index("routing") + 1
_NUM_FIELDS = len(Header._fields)
_NUM_WORDS = _NUM_FIELDS + len(Extent._fields)


class Sections(Protocol):
    """A layout of `deep_ep.layout`: where the sections of one rank's extent begin, and how long it is."""

    num_bytes: int


L = TypeVar("L", bound=Sections)
MakeLayout = Callable[[Header, int], L]
"""Gives the layout of the extent of a rank that said this header and receives so many rows."""


@dataclass(frozen=True, slots=True)
class Exchange(Generic[L]):
    """What this rank knows about a call after its first step.

    Attributes:
        number: The number of the call, which is that of its last step before rows are written.
        call: The call, in words.
        rank: This rank.
        counts: `counts[src][dst]` rows go from src to dst.
        headers: What each rank said.
        told: What each rank told beyond its header.
        layouts: The sections of each rank's extent.
        places: Where each rank's extent is.
        memories: The segment that each rank's extent is in.
        masked: The ranks that do not take part.
    """

    number: int
    call: str
    rank: int
    counts: list[list[int]]
    headers: list[Header]
    told: list[list[int]]
    layouts: list[L]
    places: list[Extent]
    memories: list[Memory]
    masked: frozenset[int]

    def extent(self, dst: int) -> tuple[Memory, L, int]:
        """Return the memory of a receiver, the sections of its extent, and the byte where the extent begins."""
        return self.memories[dst], self.layouts[dst], self.places[dst].offset

    def first_row(self, dst: int) -> int:
        """Return where this rank's rows begin among those of a receiver."""
        return sum([row[dst] for row in self.counts[: self.rank]])

    def num_rows(self, dst: int) -> int:
        """Return how many rows a receiver gets."""
        return sum([row[dst] for row in self.counts])

    def receivers(self) -> Iterator[int]:
        """Go through all ranks that take part, beginning with this one's successor: not all write to one at a time."""
        num_ranks = len(self.counts)
        ranks = ((self.rank + 1 + i) % num_ranks for i in range(num_ranks))
        return (rank for rank in ranks if rank not in self.masked)


class Exchanger:
    """The memory of all ranks and the steps through which they use it. All ranks construct one together.

    Args:
        rendezvous: The ranks.
        num_bytes: Bytes of memory that this rank brings to begin with.
        timeout_s: How long a step waits for a peer.
        can_mask: Whether ranks may be masked.

    Attributes:
        acknowledged: The masked ranks that the program knows of: normal calls go on without these.
    """

    def __init__(self, rendezvous: Rendezvous, num_bytes: int, timeout_s: float, *, can_mask: bool = False) -> None:
        self.rank, self.num_ranks = rendezvous.rank, rendezvous.num_ranks
        self.control = Control(
            self.rank, self.num_ranks, rendezvous.all_gather, timeout_s, rendezvous.ranks, can_mask=can_mask
        )
        self.names = rendezvous.ranks
        self.arena = Arena()
        self.segments: dict[int, list[Memory]] = {}
        self.acknowledged: set[int] = set()
        self._num_membership_changes = 0
        self._num_asked_bytes = num_bytes
        if any(size for (size,) in rendezvous.all_gather([num_bytes])):
            self._add_segment(num_bytes, rendezvous.all_gather)

    def begin(
        self,
        header: Header,
        make_layout: MakeLayout[L],
        told: Sequence[int] = (),
        counts: list[list[int]] | None = None,
    ) -> Exchange[L]:
        """Take the first step of a call.

        Args:
            header: What this rank says.
            make_layout: How the extent of a rank is laid out.
            told: More integers to tell the others; all ranks tell equally many.
            counts: `counts[src][dst]` rows, if this rank knows them. If not, the first integers that each rank tells
                are how many rows it has for each rank.

        Raises:
            MismatchError: If the ranks are in different calls, or in calls of different shapes.
            CapacityError: If memory is too small and no more can be had.
        """
        while True:
            exchange = self._try_to_begin(header, make_layout, told, counts)
            if exchange is not None:
                return exchange

    def _try_to_begin(
        self, header: Header, make_layout: MakeLayout[L], told: Sequence[int], counts: list[list[int]] | None
    ) -> Exchange[L] | None:
        """Take the first step of a call; return None if a rank was masked after its header had been seen."""
        call = CALLS[header.call]
        # What does not fit beside the header follows once all ranks are known to be in the same call.
        room = ControlLayout.NUM_AREA_WORDS - _NUM_WORDS
        words = [*header, *self.arena.largest_free(), *told[:room]]
        replies = self.control.all_gather(words, call, "a header")
        masked = self.control.masked_at(self.control.step)
        headers = [header if rank in masked else Header(*reply[:_NUM_FIELDS]) for rank, reply in enumerate(replies)]
        check_signatures(headers, self.rank, self.names)
        self._check_masked(masked, call)
        places = [Extent(*reply[_NUM_FIELDS:_NUM_WORDS]) for reply in replies]
        if self._has_membership_changed():
            places = [NO_EXTENT] * self.num_ranks
        all_told = [reply[_NUM_WORDS:] for reply in replies]
        if len(told) > room:
            rest = self.control.all_gather(told[room:], call, "counts")
            all_told = [begun + ended for begun, ended in zip(all_told, rest, strict=True)]
        if counts is None:
            counts = [integers[: self.num_ranks] for integers in all_told]
        layouts = [make_layout(headers[dst], sum([row[dst] for row in counts])) for dst in range(self.num_ranks)]
        needs = [0 if dst in masked else layout.num_bytes for dst, layout in enumerate(layouts)]
        if any(need > place.num_bytes for need, place in zip(needs, places, strict=True)):
            places = self._grow(needs, places, call)
        if self.control.masked_at(self.control.step) != masked:
            return None
        memories = [
            self.segments[place.segment][dst] if need else _NO_MEMORY
            for dst, (place, need) in enumerate(zip(places, needs, strict=True))
        ]
        number = self.control.step
        return Exchange(number, call, self.rank, counts, headers, all_told, layouts, places, memories, masked)

    def _check_masked(self, masked: frozenset[int], call: str) -> None:
        """Refuse a normal call that masked ranks would be missing from, unless the program has said that it knows."""
        unknown = sorted(masked - self.acknowledged)
        if unknown and not call.startswith("low-latency"):
            raise PeerTimeoutError(
                f"rank {self.rank}: ranks {unknown} did not come to a {call} within {self.control.timeout_s} s, "
                "or to a call before it, and have been masked",
                unknown,
                hint="to go on without them, call Buffer.mask on all other ranks and repeat this call",
            )

    def _has_membership_changed(self) -> bool:
        """Tell whether ranks have been masked or unmasked since the last call; all ranks come to the same result.

        All segments are then forgotten. A masked rank may write to those it knows, and one that comes back knows none
        of those that were mapped meanwhile. Tensors keep what they use.
        """
        members = self.control.membership
        if members is None or members.num_lines_at(self.control.step) == self._num_membership_changes:
            return False
        self._num_membership_changes = members.num_lines_at(self.control.step)
        self.arena = Arena()
        self.segments.clear()
        return True

    @contextmanager
    def writing(self, exchange: Exchange[L]) -> Iterator[None]:
        """Announce this rank's rows when the body, which writes them, has ended; an error in it is announced too."""
        try:
            yield
        except Exception:
            self.control.announce_rows(exchange.number, has_failed=True)
            raise
        self.control.announce_rows(exchange.number, has_failed=False)

    def finish(self, exchange: Exchange[L]) -> frozenset[int]:
        """Wait for the peers' rows.

        Returns:
            The ranks that have been masked since the call began, whose rows are not there. Of a low-latency call:
            other calls are refused.

        Raises:
            PeerError: If a peer could not write its rows.
            PeerTimeoutError: If a peer does not write them in time.
        """
        failed, lost = self.control.wait_for_rows(exchange.number, exchange.call)
        if failed:
            self.control.raise_if_lost(failed, exchange.call)
            raise PeerError(
                f"rank {self.names[self.rank]}: {exchange.call} failed on ranks "
                f"{[self.names[rank] for rank in failed]}, so its results would be incomplete",
                hint="the error on those ranks tells why; this buffer can be used again",
            )
        self._check_masked(lost, exchange.call)
        return lost

    def mask(self, rank: int, *, is_masked: bool) -> None:
        """Mask a rank because the program says so, or take it in again; all ranks do so between the same calls."""
        self.control.mask(rank, is_out=is_masked)
        (self.acknowledged.add if is_masked else self.acknowledged.discard)(rank)

    def masked(self) -> frozenset[int]:
        """Return the ranks that are masked in the next call, as far as is known."""
        return self.control.masked_at(self.control.step + 1)

    def take_sections(self, exchange: Exchange[L], sizes: Sequence[int]) -> list[Tensor]:
        """Keep the sections at the beginning of this rank's extent, each as a tensor of its own that frees it."""
        segment, offset, _ = exchange.places[self.rank]
        taken = []
        for num_bytes in sizes:
            taken.append(self.arena.take(segment, offset, num_bytes))
            offset += align(num_bytes)
        return taken

    def local_bytes(self) -> Tensor:
        """Return the first segment of this rank's memory, as a uint8 tensor."""
        return next((memories[self.rank].data for memories in self.segments.values()), _NO_MEMORY.data)

    def close(self) -> None:
        """Let go of the memory; received tensors that still live keep what they use."""
        self.arena = Arena()
        self.segments.clear()
        self.control.close()

    def reserve(self, num_bytes: int) -> None:
        """Get memory so that every rank can receive so many bytes at once; all ranks do so together."""
        replies = self.control.all_gather(self.arena.largest_free(), "warm-up", "its memory")
        places = [Extent(*reply) for reply in replies]
        if any(place.num_bytes < num_bytes for place in places):
            self._grow([num_bytes] * self.num_ranks, places, "warm-up")

    def _grow(self, needs: list[int], places: list[Extent], call: str) -> list[Extent]:
        """Map new memory on every rank whose free stretch is too small; give back what nobody uses."""

        def all_gather(words: Sequence[int]) -> list[list[int]]:
            return self.control.all_gather(words, call, "new memory")

        unused = self.arena.remove_unused_segments() if needs[self.rank] > places[self.rank].num_bytes else []
        segments = list(self.segments)  # the same on all ranks
        for rank, is_unused in enumerate(all_gather([int(segment in unused) for segment in segments])):
            for segment in compress(segments, is_unused):
                self.segments[segment][rank] = _NO_MEMORY
        for segment in segments:
            if not any(memory.data.numel() for memory in self.segments[segment]):
                del self.segments[segment]
        is_short = [need > place.num_bytes for need, place in zip(needs, places, strict=True)]
        # A quarter more than is needed, so that routing which varies from call to call does not grow it each time.
        own_bytes = align(needs[self.rank] * 5 // 4) if is_short[self.rank] else 0
        if own_bytes:
            logger.log(
                logging.WARNING if self._num_asked_bytes else logging.INFO,
                "rank %d: this %s needs %d bytes of shared memory, num_nvl_bytes was %d; all ranks map %d more",
                *(self.names[self.rank], call, needs[self.rank], self._num_asked_bytes, own_bytes),
            )
        segment = self._add_segment(own_bytes, all_gather)
        sizes = [memory.data.numel() for memory in self.segments[segment]]
        return [
            Extent(segment, 0, size) if short else place
            for short, size, place in zip(is_short, sizes, places, strict=True)
        ]

    def _add_segment(self, num_bytes: int, all_gather: AllGather) -> int:
        memory = HostMemory(num_bytes, self.rank, all_gather)
        segment = self.control.step  # a number that all ranks agree on, also one that has missed some calls
        self.segments[segment] = [Memory(memory.tensor_of(rank)) for rank in range(self.num_ranks)]
        if num_bytes:
            self.arena.add_segment(segment, memory.bytes_of(self.rank))
        return segment


def check_signatures(headers: Sequence[Header], rank: int, names: Sequence[int]) -> None:
    """Refuse a call that the ranks disagree about; every rank comes to the same result.

    Args:
        headers: What each rank said.
        rank: Which of them this rank is.
        names: What to call each of them.

    Raises:
        MismatchError: If the signatures differ.
    """
    own = headers[rank]
    for peer, header in enumerate(headers):
        if header[:NUM_SIGNATURE_FIELDS] == own[:NUM_SIGNATURE_FIELDS]:
            continue
        field = next(f for f in Header._fields if getattr(header, f) != getattr(own, f))
        raise MismatchError(
            f"the ranks disagree about {field}: rank {names[rank]} is in a {_describe(own, field)}, "
            f"rank {names[peer]} in a {_describe(header, field)}",
            hint="all ranks must make the same calls in the same order, with tensors of the same kind",
        )


def combine_layout(header: Header, num_rows: int) -> CombineLayout:
    """Return the layout of the extent that a rank receives a combine into."""
    return CombineLayout(
        num_rows=num_rows,
        row_bytes=header.hidden * DTYPES[header.dtype].itemsize,
        num_topk=header.num_topk,
        num_bias_rows=header.num_bias_rows,
    )


def check_worst_tokens(exchange: Exchange[L]) -> None:
    """Refuse a call whose rows do not fit where a rank said they would; every rank comes to the same result.

    Raises:
        CapacityError: If a rank gets more rows than its `num_worst_tokens`.
    """
    for dst, header in enumerate(exchange.headers):
        if 0 < header.num_worst_tokens < exchange.num_rows(dst):
            raise CapacityError(
                f"num_worst_tokens must be at least the tokens that a rank receives, got {header.num_worst_tokens} "
                f"on rank {dst}, which would receive {exchange.num_rows(dst)}"
            )


def _describe(header: Header, field: str) -> str:
    value = getattr(header, field)
    if field == "call":
        return CALLS[value]
    if field == "routing":
        return f"{CALLS[header.call]} with the handle of another dispatch (checksum {value})"
    return f"{CALLS[header.call]} with {field}={DTYPES[value] if field == 'dtype' else value}"


_NO_MEMORY = Memory(torch.empty(0, dtype=torch.uint8))
