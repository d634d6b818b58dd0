"""Where everything lies in the memory that ranks share for low-latency mode, and how many bytes that is.

Each rank brings one region to which all ranks of the host write:

    ACKS      [2, S]   words; item [h, p]: the last call of half h that rank p has finished (S = `MAX_RANKS`)
    words of half 0, words of half 1
    slots of half 0, slots of half 1

Call n uses half n mod 2, whatever it is. Words are signals (`deep_ep.kernels.signal`): 8 bytes, one writer, the number
of a call and a value. They are never cleared and never hold anything else, so that calls of other shapes may cut the
same words up differently: what is left of them carries an older number. Slots hold rows and what belongs to them, and
are read after a word has said that they are there.

With R ranks, M tokens per rank at most, K top-k slots, L experts of a rank at most and P pieces of a row, in order:

    words of a dispatch     TOKENS [R], from each source: how many tokens it has
                            COUNTS [R, L], from each source: how many of them name each expert of this rank
                            ROWS   [R, M], from each source, by token: 1 if its row has landed here, 0 if none will
    slots of a dispatch     [R, M], by source and token: the row, its scales, its expert slots (K int32)
    words of a combine      TOKENS [R]
                            ROUTES [R, M, K, 2], from each source: expert slot and weight of each of its top-k slots
                            SUMS   [R, M, P], from each expert rank, by this rank's token: a piece has landed
    slots of a combine      [R, M], by expert rank and token: the sum of that rank's rows

An expert slot is `expert * M + row`, with the experts of a rank and the rows of one source in it counted from 0; for a
top-k slot that names no expert of the rank it is all ones.

Example: 8 ranks, M = 128, hidden 7168, 256 experts, top-8. A dispatch of fp8 needs 8 * 128 slots of 7168 + 224 + 32
bytes, a combine with 24-bit sums as many of 21,504 bytes, and it has 20,488 words: with two halves 44,369,024 bytes in
all.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_RANKS = 64
WORD_BYTES = 8
ACKS = 0
HEAD_BYTES = 2 * MAX_RANKS * WORD_BYTES

# A rank's private state goes on where that of `deep_ep.gpu_layout` ends: the last finished call of each half, and the
# number of calls begun, in units of `CALL`.
STATE_DONE = 3
STATE_CALLS = 5
STATE_WORDS = 8
CALL = 1 << 20

AWAITED = (
    "the end of its call before last",
    "the number of its tokens",
    "its counts per expert",
    "its dispatched rows",
    "its expert ids and weights",
    "its combined rows",
)
AWAIT_ACK, AWAIT_TOKENS, AWAIT_COUNTS, AWAIT_ROWS, AWAIT_ROUTES, AWAIT_SUMS = range(6)

PIECE_CHANNELS = 1024
"""Most channels of a piece: those that go with one signal."""

_ALIGNMENT_BYTES = 16


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class DispatchLayout:
    """Words and slots of a dispatch.

    Args:
        num_ranks: R.
        num_max_tokens: M.
        num_experts: Of all ranks.
        num_topk: K.
        row_bytes: Bytes of a row as it travels.
        num_scales: Four-byte scales per row.
    """

    num_ranks: int
    num_max_tokens: int
    num_experts: int
    num_topk: int
    row_bytes: int
    num_scales: int

    @property
    def num_local(self) -> int:
        """Return the most experts that a rank owns."""
        return -(-self.num_experts // self.num_ranks)

    @property
    def counts(self) -> int:
        """Return the word where COUNTS begin."""
        return self.num_ranks

    @property
    def rows(self) -> int:
        """Return the word where ROWS begin."""
        return self.counts + self.num_ranks * self.num_local

    @property
    def num_words(self) -> int:
        """Return the words of one half."""
        return self.rows + self.num_ranks * self.num_max_tokens

    @property
    def scales_offset(self) -> int:
        """Return where in a slot the scales begin."""
        return _align(self.row_bytes)

    @property
    def routes_offset(self) -> int:
        """Return where in a slot the expert slots begin."""
        return self.scales_offset + _align(4 * self.num_scales)

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of a slot."""
        return self.routes_offset + _align(4 * self.num_topk)

    @property
    def data_bytes(self) -> int:
        """Return the bytes of all slots of one half."""
        return self.num_ranks * self.num_max_tokens * self.slot_bytes


@dataclass(frozen=True, slots=True)
class CombineLayout:
    """Words and slots of a combine.

    Args:
        num_ranks: R.
        num_max_tokens: M.
        num_topk: K.
        hidden: Channels of a row.
        wire_bits: Bits that a sum of several rows travels in: 32, 24 or 16.
    """

    num_ranks: int
    num_max_tokens: int
    num_topk: int
    hidden: int
    wire_bits: int

    @property
    def piece_channels(self) -> int:
        """Return the channels of a piece, a power of two."""
        return min(PIECE_CHANNELS, 1 << (max(self.hidden, 1) - 1).bit_length())

    @property
    def num_pieces(self) -> int:
        """Return P."""
        return -(-self.hidden // self.piece_channels)

    @property
    def routes(self) -> int:
        """Return the word where ROUTES begin."""
        return self.num_ranks

    @property
    def sums(self) -> int:
        """Return the word where SUMS begin."""
        return self.routes + self.num_ranks * self.num_max_tokens * self.num_topk * 2

    @property
    def num_words(self) -> int:
        """Return the words of one half."""
        return self.sums + self.num_ranks * self.num_max_tokens * self.num_pieces

    @property
    def low_offset(self) -> int:
        """Return where in a slot the low bits of a sum begin; its high 16 bits come first."""
        return _align(2 * self.hidden)

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of a slot."""
        return self.low_offset + _align((self.wire_bits - 16) // 8 * self.hidden)

    @property
    def data_bytes(self) -> int:
        """Return the bytes of all slots of one half."""
        return self.num_ranks * self.num_max_tokens * self.slot_bytes


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """The whole region of a rank, for halves of so many words and bytes of slots."""

    num_words: int
    data_bytes: int

    @property
    def first_word(self) -> int:
        """Return the word where the words of half 0 begin."""
        return HEAD_BYTES // WORD_BYTES

    @property
    def data_offset(self) -> int:
        """Return where the slots of half 0 begin."""
        return HEAD_BYTES + _align(2 * self.num_words * WORD_BYTES)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the region."""
        return self.data_offset + 2 * self.data_bytes

    def holds(self, num_words: int, data_bytes: int) -> bool:
        """Return whether a call fits."""
        return num_words <= self.num_words and data_bytes <= self.data_bytes

    def grown(self, num_words: int, data_bytes: int) -> RegionLayout:
        """Return the layout of a region that holds what this one does, and another call."""
        return RegionLayout(max(self.num_words, num_words), max(self.data_bytes, data_bytes))


def region_for(
    num_max_tokens: int, hidden: int, num_ranks: int, num_experts: int, num_topk: int, wire_bits: int = 24
) -> RegionLayout:
    """Return the region that dispatches (bf16 or fp8) and combines of one shape need."""
    groups = -(-hidden // 128)
    calls = (
        DispatchLayout(num_ranks, num_max_tokens, num_experts, num_topk, 2 * hidden, 0),
        DispatchLayout(num_ranks, num_max_tokens, num_experts, num_topk, hidden, groups),
        CombineLayout(num_ranks, num_max_tokens, num_topk, hidden, wire_bits),
    )
    return RegionLayout(max(call.num_words for call in calls), max(call.data_bytes for call in calls))


def low_latency_num_bytes(
    num_max_tokens_per_rank: int,
    hidden: int,
    num_ranks: int,
    num_experts: int,
    *,
    num_topk: int = 8,
    wire_bits: int = 24,
) -> int:
    """Return the bytes that each rank shares for low-latency calls of one shape.

    Example:
        >>> low_latency_num_bytes(128, 7168, 8, 256)
        44369024
    """
    return region_for(num_max_tokens_per_rank, hidden, num_ranks, num_experts, num_topk, wire_bits).num_bytes
