"""Moving rows: the loops that carry the bytes, shared by dispatch and combine.

A row is opaque here: `ROW_WORDS` words of the widest type that its size and its address allow. Tiles are shaped so
that a lane has 16 bytes at a time and each warp touches whole 512-byte stretches; several tiles' worth of loads are in
flight before the first store waits for one. With `STREAM`, payload passes by the caches it will not be read from
again; without it, loads and stores are plain.
"""

import triton
import triton.language as tl

from deep_ep.kernels.signal import pointer


@triton.jit
def load_words(ptrs, mask, STREAM: tl.constexpr):
    """Load payload."""
    if STREAM:
        return tl.load(ptrs, mask=mask, cache_modifier=".cg")
    return tl.load(ptrs, mask=mask)


@triton.jit
def store_words(ptrs, words, mask, STREAM: tl.constexpr):
    """Store payload."""
    if STREAM:
        tl.store(ptrs, words, mask=mask, cache_modifier=".cs")
    else:
        tl.store(ptrs, words, mask=mask)


@triton.jit
def inside(is_row, column, ROW: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the mask of a tile of rows: the rows' own mask if its columns cannot pass their end."""
    if ROW % COLUMNS == 0:
        return is_row
    else:  # noqa: RET505 (only one branch is compiled)
        return is_row & (column < ROW)


@triton.jit
def copy_flat(dst, src, num_words, WORD: tl.constexpr, ALIGN: tl.constexpr, TILE: tl.constexpr, STREAM: tl.constexpr):
    """Copy consecutive words from one address to another.

    Example: with TILE = 8, 20 words go as 8, 8 and 4.
    """
    dst_ptr = pointer(dst, WORD, ALIGN)
    src_ptr = pointer(src, WORD, ALIGN)
    for begin in range(0, num_words, TILE):
        word = begin + tl.arange(0, TILE).to(tl.int64)
        mask = word < num_words
        store_words(dst_ptr + word, load_words(src_ptr + word, mask, STREAM), mask, STREAM)


@triton.jit
def copy_rows(
    dst,
    dst_row,
    src,
    src_row,
    is_row,
    row_words,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STREAM: tl.constexpr,
):
    """Copy each row `src_row[i]` to row `dst_row[i]` where `is_row[i]`.

    Example: src_row=[4, 5, 6], dst_row=[9, -, 10], is_row=[1, 0, 1] copies row 4 to row 9 and row 6 to row 10.
    """
    dst_ptr = pointer(dst, WORD, ALIGN) + dst_row[:, None] * ROW_WORDS
    src_ptr = pointer(src, WORD, ALIGN) + src_row[:, None] * ROW_WORDS
    # `row_words` is ROW_WORDS, but not known to the compiler: unrolled, this loop runs out of registers.
    for begin in range(0, row_words, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        mask = inside(is_row[:, None], column[None, :], ROW_WORDS, COLUMNS)
        words = load_words(src_ptr + column[None, :], mask, STREAM)
        store_words(dst_ptr + column[None, :], words, mask, STREAM)
