"""Where every byte of the shared memory lies, for whoever writes it and whoever reads it.

Each rank of a host owns two kinds of memory that every other rank of the host has mapped:

- a **control block** of a few hundred bytes (`ControlLayout`): one signal word and two areas of integers;
- **segments**, which hold rows. A call uses one **extent** of one segment, cut into **sections** by
  `DispatchLayout` or `CombineLayout`. Senders and the receiver compute the same offsets from the same integers.

Example: rank 1 receives two rows of 6 bytes from rank 0 and one from itself, with no scales and no top-k::

    control block of rank 1            an extent of rank 1, from its offset on
    +--------+--------+--------+       +------------------+-----------+------------------------+
    | signal | area 0 | area 1 |       | x: 3 rows x 6 B  | src_idx   | meta: one line of      |
    | 128 B  |        |        |       | row 0, 1: rank 0 | 3 x 4 B   | integers per source    |
    +--------+--------+--------+       | row 2: rank 1    |           |                        |
                                       +------------------+-----------+------------------------+
                                       0                  128         256                  384
"""

from __future__ import annotations

ALIGNMENT_BYTES = 128
"""Every section begins at a multiple of this: two cache lines, which some machines fetch together."""


def align(num_bytes: int) -> int:
    """Round up to the alignment of sections."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class ControlLayout:
    """The control block of one rank, counted in words of 8 bytes.

    Args:
        num_ranks: Ranks of the group.
    """

    SIGNAL = 0
    NUM_HEADER_WORDS = 16

    def __init__(self, num_ranks: int) -> None:
        words_per_line = ALIGNMENT_BYTES // 8
        self.num_area_words = align((self.NUM_HEADER_WORDS + num_ranks) * 8) // 8
        self._areas = (words_per_line, words_per_line + self.num_area_words)
        self.num_bytes = (words_per_line + 2 * self.num_area_words) * 8

    def area(self, step: int) -> int:
        """Return the first word of the area that a step uses: steps take turns between two."""
        return self._areas[step % 2]


class DispatchLayout:
    """The sections of the extent that one rank receives a dispatch into; each attribute is a byte offset.

    Args:
        num_rows: Rows of the receiver, from all ranks.
        row_bytes: Bytes of one row of x.
        scale_row_bytes: Bytes of one token's scales, 0 without scales.
        num_topk: Columns of the top-k tensors, 0 without them.
        topk_idx_bytes: Bytes of one expert id.
        num_meta: Integers of 4 bytes that each source adds about its rows.
        num_ranks: Ranks of the group.
    """

    __slots__ = ("meta", "num_bytes", "scales", "src_idx", "topk_idx", "topk_weights", "x")

    def __init__(
        self,
        *,
        num_rows: int,
        row_bytes: int,
        scale_row_bytes: int,
        num_topk: int,
        topk_idx_bytes: int,
        num_meta: int,
        num_ranks: int,
    ) -> None:
        self.x = 0
        self.scales = align(num_rows * row_bytes)
        self.topk_idx = self.scales + align(num_rows * scale_row_bytes)
        self.topk_weights = self.topk_idx + align(num_rows * num_topk * topk_idx_bytes)
        self.src_idx = self.topk_weights + align(num_rows * num_topk * 4)
        self.meta = self.src_idx + align(num_rows * 4)
        self.num_bytes = self.meta + align(num_ranks * num_meta * 4)


class CombineLayout:
    """The sections of the extent that one rank receives a combine into; each attribute is a byte offset.

    The rows come last: the receiver puts the rows of its biases right behind them.

    Args:
        num_rows: Rows that come back to this rank, from all ranks.
        row_bytes: Bytes of one row of x.
        num_topk: Columns of the weights, 0 without them.
        num_bias_rows: Rows of the receiver's biases.
    """

    __slots__ = ("num_bytes", "topk_weights", "x")

    def __init__(self, *, num_rows: int, row_bytes: int, num_topk: int, num_bias_rows: int) -> None:
        self.topk_weights = 0
        self.x = align(num_rows * num_topk * 4)
        self.num_bytes = self.x + align((num_rows + num_bias_rows) * row_bytes)
