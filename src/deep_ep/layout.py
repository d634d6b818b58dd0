"""Where every byte of the shared memory lies, for whoever writes it and whoever reads it.

Each rank of a host owns two kinds of memory that every other rank of the host has mapped:

- a **control block** of some kilobytes (`ControlLayout`): signals and two areas of integers;
- **segments**, which hold rows. A call uses one **extent** of one segment, cut into **sections** by
  `DispatchLayout` or `CombineLayout`. Senders and the receiver compute the same offsets from the same integers.

Example: rank 1 receives two rows of 6 bytes from rank 0 and one from itself, with a scale of 4 bytes each; after the
scales come expert ids, weights and source indices, in sections of their own::

    control block of rank 1               an extent of rank 1, from its offset on
    +------+---------+--------+--------+  +------------------+------------------+----------+---
    | step | written | area 0 | area 1 |  | x: 3 rows x 6 B  | scales           | topk_idx | ...
    |      | failed  |        |        |  | row 0, 1: rank 0 | 3 rows x 4 B     |          |
    +------+---------+--------+--------+  | row 2: rank 1    | in the same order|          |
    0      128       256    8448   16640  +------------------+------------------+----------+---
                                          0                  128                256
"""

from __future__ import annotations

ALIGNMENT_BYTES = 128
"""Every section begins at a multiple of this: two cache lines, which some machines fetch together."""


def align(num_bytes: int) -> int:
    """Round up to the alignment of sections."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class ControlLayout:
    """The control block of one rank, in words of 8 bytes. Signals of different times have lines of their own."""

    _WORDS_PER_LINE = ALIGNMENT_BYTES // 8
    STEP = 0
    WRITTEN = _WORDS_PER_LINE
    FAILED = WRITTEN + 1
    LOST = WRITTEN + 2
    NUM_AREA_WORDS = 1024
    _FIRST_AREA = 2 * _WORDS_PER_LINE
    NUM_BYTES = (_FIRST_AREA + 2 * NUM_AREA_WORDS) * 8

    @classmethod
    def area(cls, step: int) -> int:
        """Return the first word of the area that a step uses: steps take turns between two."""
        return cls._FIRST_AREA + step % 2 * cls.NUM_AREA_WORDS


class DispatchLayout:
    """The sections of the extent that one rank receives a dispatch into; each attribute is a byte offset.

    Args:
        num_rows: Rows of the receiver, from all ranks.
        row_bytes: Bytes of one row of x.
        scale_row_bytes: Bytes of one token's scales, 0 without scales.
        num_topk: Expert ids, and weights, of one token; 0 without them.
        topk_idx_bytes: Bytes of one expert id.
        has_src_idx: Whether the index of each row at its source travels too.
    """

    __slots__ = ("num_bytes", "scales", "src_idx", "topk_idx", "topk_weights", "x")

    def __init__(
        self,
        *,
        num_rows: int,
        row_bytes: int,
        scale_row_bytes: int,
        num_topk: int,
        topk_idx_bytes: int,
        has_src_idx: bool,
    ) -> None:
        self.x = 0
        self.scales = align(num_rows * row_bytes)
        self.topk_idx = self.scales + align(num_rows * scale_row_bytes)
        self.topk_weights = self.topk_idx + align(num_rows * num_topk * topk_idx_bytes)
        self.src_idx = self.topk_weights + align(num_rows * num_topk * 4)
        self.num_bytes = self.src_idx + align(num_rows * 4 * has_src_idx)


class PassedLayout:
    """The sections of the extent that a rank receives a dispatch between hosts into; each attribute is a byte offset.

    Args:
        num_rows: Rows of the receiver, from all ranks of all hosts.
        row_bytes: Bytes of one row of x.
        scale_row_bytes: Bytes of one token's scales, 0 without scales.
        record_bytes: Bytes of what else travels with a row, 0 without.
    """

    __slots__ = ("num_bytes", "records", "scales", "x")

    def __init__(self, *, num_rows: int, row_bytes: int, scale_row_bytes: int, record_bytes: int) -> None:
        self.x = 0
        self.scales = align(num_rows * row_bytes)
        self.records = self.scales + align(num_rows * scale_row_bytes)
        self.num_bytes = self.records + align(num_rows * record_bytes)


class CombineLayout:
    """The sections of the extent that one rank receives a combine into; each attribute is a byte offset.

    Biases and rows follow each other without a gap: together they are one table.

    Args:
        num_rows: Rows that come back to this rank, from all ranks.
        row_bytes: Bytes of one row of x.
        num_topk: Columns of the weights, 0 without them.
        num_bias_rows: Rows of the receiver's biases.
    """

    __slots__ = ("biases", "num_bytes", "topk_weights", "x")

    def __init__(self, *, num_rows: int, row_bytes: int, num_topk: int, num_bias_rows: int) -> None:
        self.topk_weights = 0
        self.biases = align(num_rows * num_topk * 4)
        self.x = self.biases + num_bias_rows * row_bytes
        self.num_bytes = align(self.x + num_rows * row_bytes)


class LowLatencyDispatchLayout:
    """The sections of the extent that one rank receives a low-latency dispatch into; attributes are byte offsets.

    There is a slot for every row that could come: for each expert, as many as all ranks may send.

    Args:
        num_slots: Slots of all experts of a rank; of the ranks with most experts, if they differ.
        row_bytes: Bytes of one row of x.
        scale_row_bytes: Bytes of one row's scales, 0 without scales.
    """

    __slots__ = ("num_bytes", "scales", "src_info", "x")

    def __init__(self, *, num_slots: int, row_bytes: int, scale_row_bytes: int) -> None:
        self.x = 0
        self.scales = align(num_slots * row_bytes)
        self.src_info = self.scales + align(num_slots * scale_row_bytes)
        self.num_bytes = self.src_info + align(num_slots * 4)


class SlotLayout:
    """The sections of slots for the tokens of a low-latency dispatch between hosts; attributes are byte offsets.

    The extent of a rank has slots for every token that any rank may send it; a message has one for each token in it.

    Args:
        num_slots: Slots.
        row_bytes: Bytes of one row of x.
        scale_row_bytes: Bytes of one row's scales, 0 without scales.
        num_topk: Expert ids of a token; they travel as 4-byte words, with the token's number behind them.
        num_sources: Ranks whose numbers of tokens are told here; 0 in a message, which tells its own.
    """

    __slots__ = ("counts", "num_bytes", "records", "scales", "x")

    def __init__(
        self, *, num_slots: int, row_bytes: int, scale_row_bytes: int, num_topk: int, num_sources: int
    ) -> None:
        self.x = 0
        self.scales = align(num_slots * row_bytes)
        self.records = self.scales + align(num_slots * scale_row_bytes)
        self.counts = self.records + align(num_slots * (num_topk + 1) * 4)
        self.num_bytes = self.counts + num_sources * 8
