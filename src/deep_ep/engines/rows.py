"""Rows on a CPU: one vectorised copy to move them, one pass to add them.

Rows are opaque bytes while they move, so any dtype of any width goes the same way: as words of 8, 4, 2 or 1 bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

with warnings.catch_warnings():
    # torch says once per process that its sparse matrices are in beta; it says it here, to nobody.
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor(torch.tensor([0]), torch.tensor([], dtype=torch.int64), torch.tensor([]), size=(0, 0))


def as_words(rows: Tensor) -> Tensor:
    """View rows `[N, H]` as rows of the widest words that divide them, `[N, W]`."""
    row_bytes = rows.size(1) * rows.element_size()
    offset_bytes = rows.storage_offset() * rows.element_size()
    width = next(width for width in _WORDS if row_bytes % width == 0 and offset_bytes % width == 0)
    return rows if width == rows.element_size() else rows.view(_WORDS[width])


def section(extent: Tensor, offset: int, num_rows: int, dtype: torch.dtype, num_columns: int) -> Tensor:
    """View a section of an extent of bytes as rows `[num_rows, num_columns]`."""
    num_bytes = num_rows * num_columns * dtype.itemsize
    return extent[offset : offset + num_bytes].view(dtype).view(num_rows, num_columns)


def gather(source: Tensor, token_idx: Tensor, extent: Tensor, offset: int, first_row: int) -> None:
    """Copy the named rows of `source` `[T, H]` into a section of an extent, from `first_row` of it on."""
    words = as_words(source)
    row_bytes = source.size(1) * source.element_size()
    if row_bytes:
        target = section(extent, offset + first_row * row_bytes, len(token_idx), words.dtype, words.size(1))
        torch.index_select(words, 0, token_idx, out=target)


def copy(source: Tensor, extent: Tensor, offset: int, first_row: int) -> None:
    """Copy all rows of `source` `[N, H]` into a section of an extent, from `first_row` of it on."""
    row_bytes = source.size(1) * source.element_size()
    if source.numel():
        section(extent, offset + first_row * row_bytes, source.size(0), source.dtype, source.size(1)).copy_(source)


def sum_by_token(table: Tensor, is_token_in_rank: Tensor, row_of_token: Tensor, bias_begins: Sequence[int]) -> Tensor:
    """Add up the rows of each token, in float32 and with one rounding at the end.

    The order of the sum is: the biases, then the ranks in ascending order, as in DeepEP V1. The sum is the product of
    a sparse matrix of ones with the table: torch does that in one pass over the rows, accumulates in float32 and
    rounds to nearest even. (`embedding_bag` is faster still, but rounds ties of bfloat16 away from zero.)

    Args:
        table: `[N, H]`; all rows that came back, and those of the biases.
        is_token_in_rank: `[T, R]` bool; from which ranks a row of each token came.
        row_of_token: `[T, R]` integers; where in the table that row is.
        bias_begins: For each bias, where in the table its rows begin; it has one for every token.

    Returns:
        `[T, H]`, of the table's dtype; zeros for a token without any row.
    """
    num_tokens = is_token_in_rank.size(0)
    if bias_begins:
        tokens = torch.arange(num_tokens)
        bias_rows = torch.stack([tokens + begin for begin in bias_begins], 1)
        row_of_token = torch.cat([bias_rows, row_of_token], 1)
        is_token_in_rank = torch.cat([torch.ones_like(bias_rows, dtype=torch.bool), is_token_in_rank], 1)
    rows = row_of_token[is_token_in_rank]
    begins = torch.zeros(num_tokens + 1, dtype=rows.dtype)
    torch.cumsum(is_token_in_rank.sum(1), 0, out=begins[1:])
    ones = torch.ones(len(rows), dtype=table.dtype)
    matrix = torch.sparse_csr_tensor(begins, rows, ones, size=(num_tokens, len(table)), check_invariants=False)
    return torch.sparse.mm(matrix, table, "sum")
