"""Rows on a CPU: one vectorised copy to move them, one pass to add them.

Rows are opaque bytes while they move, so any dtype of any width goes the same way: as words of 8, 4, 2 or 1 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def as_words(rows: Tensor) -> Tensor:
    """View rows `[N, H]` as rows of the widest words that divide them, `[N, W]`."""
    row_bytes = rows.size(1) * rows.element_size()
    offset_bytes = rows.storage_offset() * rows.element_size()
    width = next(width for width in _WORDS if row_bytes % width == 0 and offset_bytes % width == 0)
    return rows if width == rows.element_size() else rows.view(_WORDS[width])


class Memory:
    """One rank's segment, to be seen as rows of any dtype.

    Args:
        data: All of it, as uint8.
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self._views: dict[torch.dtype, Tensor] = {}

    def rows(self, offset_bytes: int, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
        """View `[num_rows, num_columns]` that begin at a byte offset, which the size of an item divides."""
        view = self._views.get(dtype)
        if view is None:
            num_bytes = self.data.numel() // dtype.itemsize * dtype.itemsize
            view = self._views[dtype] = self.data[:num_bytes].view(dtype)
        return view.as_strided((num_rows, num_columns), (num_columns, 1), offset_bytes // dtype.itemsize)


def gather(words: Tensor, token_idx: Tensor, memory: Memory, offset_bytes: int) -> None:
    """Copy the named rows of `words` `[T, W]` to a byte offset."""
    if words.size(1):
        target = memory.rows(offset_bytes, len(token_idx), words.size(1), words.dtype)
        torch.index_select(words, 0, token_idx, out=target)


def copy(source: Tensor, memory: Memory, offset_bytes: int) -> None:
    """Copy all rows of `source` `[N, H]` to a byte offset."""
    if source.numel():
        memory.rows(offset_bytes, source.size(0), source.size(1), source.dtype).copy_(source)


class TokenRows:
    """Which rows of a table belong to which token: what a combine adds up.

    The table has the rows that came back, those of rank 0 first, each rank's in the order of the tokens; behind them it
    has, for each bias, a row for every token.

    Example: token 0 went to ranks 0 and 1, token 1 only to rank 1. The table is [token 0 from rank 0, token 0 from
    rank 1, token 1 from rank 1], so the rows of token 0 are 0 and 1, and those of token 1 are 2: `rows` is [0, 1, 2]
    and `begins` is [0, 2, 3].

    Args:
        is_token_in_rank: `[T, R]` bool; from which ranks a row of each token comes.
        counts: How many rows come from each rank.
        num_biases: How many biases there are.
    """

    def __init__(self, is_token_in_rank: Tensor, counts: Sequence[int], num_biases: int = 0) -> None:
        num_tokens, num_ranks = is_token_in_rank.shape
        psum = torch.zeros(num_tokens + 1, num_ranks, dtype=torch.int32)
        torch.cumsum(is_token_in_rank, 0, dtype=torch.int32, out=psum[1:])
        block_begins = torch.tensor([0, *accumulate(counts[:-1])], dtype=torch.int32)
        row_of_token = psum[:-1] + block_begins
        self.begins = psum.sum(1, dtype=torch.int32)
        if num_biases:
            tokens = torch.arange(num_tokens, dtype=torch.int32)
            bias_rows = [tokens + (sum(counts) + i * num_tokens) for i in range(num_biases)]
            row_of_token = torch.cat([torch.stack(bias_rows, 1), row_of_token], 1)
            has_bias = torch.ones(num_tokens, num_biases, dtype=torch.bool)
            is_token_in_rank = torch.cat([has_bias, is_token_in_rank], 1)
            self.begins += num_biases * torch.arange(num_tokens + 1, dtype=torch.int32)
        self.rows = torch.masked_select(row_of_token, is_token_in_rank)

    def sum(self, table: Tensor) -> Tensor:
        """Add up the rows `[N, H]` of each token: biases first, then ranks in ascending order, as DeepEP V1 does.

        The sum is in float32 and is rounded once, to the nearest value of the table's dtype. (Where two values are
        equally near, torch takes the even one, but for bfloat16 on x86 the one away from zero.)

        Returns:
            `[T, H]` of the table's dtype; zeros for a token without rows.
        """
        if table.size(1) == 0 or len(self.begins) == 1:
            return table.new_zeros(len(self.begins) - 1, table.size(1))
        # Mode 0 sums; the last argument says that `begins` has one item more than there are tokens.
        return torch.embedding_bag(table, self.rows, self.begins, False, 0, False, None, True)[0]
