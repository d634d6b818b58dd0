"""Rows on a CPU: one vectorised copy to move them, one pass to add them.

Rows are opaque bytes while they move, so any dtype of any width goes the same way: as words of 8, 4, 2 or 1 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from deep_ep.engines import few
from deep_ep.engines.routing import Tokens

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def as_words(rows: Tensor) -> Tensor:
    """View rows `[N, H]` as rows of the widest words that divide them, `[N, W]`."""
    row_bytes = rows.size(1) * rows.element_size()
    offset_bytes = rows.storage_offset() * rows.element_size()
    width = next(width for width in _WORDS if row_bytes % width == 0 and offset_bytes % width == 0)
    return rows.view(_WORDS[width])


def row_bytes(rows: Tensor | None) -> int:
    """Return the bytes of one row of `[N, H]`, 0 if there are no rows at all."""
    return 0 if rows is None else rows.size(1) * rows.element_size()


def as_rows(data: Tensor, num_rows: int, like: Tensor) -> Tensor:
    """View bytes as rows `[N, H]` of the dtype and the width of others."""
    return data.view(like.dtype).view(num_rows, like.size(1))


def pad(rows: Tensor, num_rows: int) -> Tensor:
    """Add rows of -1, or of 0 where they are no integers, up to a number of rows."""
    if len(rows) == num_rows:
        return rows
    value = 0 if rows.is_floating_point() else -1
    padded = rows.new_full((num_rows, *rows.shape[1:]), value)
    padded[: len(rows)] = rows
    return padded


class Memory:
    """One rank's segment, to be seen as rows of any dtype.

    Args:
        data: All of it, as uint8.

    Attributes:
        data, bytes: The same memory as a tensor and as bytes.
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.bytes = few.bytes_of(data)
        self._views: dict[torch.dtype, Tensor] = {}

    def rows(self, offset_bytes: int, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
        """View `[num_rows, num_columns]` that begin at a byte offset, which the size of an item divides."""
        view = self._views.get(dtype)
        if view is None:
            num_bytes = self.data.numel() // dtype.itemsize * dtype.itemsize
            view = self._views[dtype] = self.data[:num_bytes].view(dtype)
        return view.as_strided((num_rows, num_columns), (num_columns, 1), offset_bytes // dtype.itemsize)


class Source:
    """Rows that a rank copies to its peers: many at once by a torch operator, few by slices of bytes.

    Args:
        rows: `[N, H]` of any dtype, contiguous.
        is_few: Whether slices of bytes are faster.
    """

    def __init__(self, rows: Tensor, *, is_few: bool) -> None:
        self._rows = rows
        self.row_bytes = rows.size(1) * rows.element_size()
        self._bytes = few.bytes_of(rows) if is_few else None
        self._words = as_words(rows) if self._bytes is None else rows

    def gather(self, token_idx: Tokens, memory: Memory, offset_bytes: int) -> None:
        """Copy the named rows to a byte offset."""
        if isinstance(token_idx, Tensor):
            gather(self._words, token_idx, memory, offset_bytes)
            return
        source, size = self._bytes, self.row_bytes
        assert source is not None, "a list of tokens means that there are few"
        chunk = b"".join([source[token * size : (token + 1) * size] for token in token_idx])
        memory.bytes[offset_bytes : offset_bytes + len(chunk)] = chunk

    def copy(self, begin: int, end: int, memory: Memory, offset_bytes: int) -> None:
        """Copy rows `begin` to `end - 1` to a byte offset."""
        if self._bytes is None:
            copy(self._rows[begin:end], memory, offset_bytes)
        else:
            chunk = self._bytes[begin * self.row_bytes : end * self.row_bytes]
            memory.bytes[offset_bytes : offset_bytes + len(chunk)] = chunk


def gather(words: Tensor, token_idx: Tensor, memory: Memory, offset_bytes: int) -> None:
    """Copy the named rows of `words` `[T, W]` to a byte offset."""
    if words.size(1) and token_idx.size(0):
        target = memory.rows(offset_bytes, token_idx.size(0), words.size(1), words.dtype)
        torch.index_select(words, 0, token_idx, out=target)


def copy(source: Tensor, memory: Memory, offset_bytes: int) -> None:
    """Copy all rows of `source` `[N, H]` to a byte offset."""
    if source.numel():
        memory.rows(offset_bytes, source.size(0), source.size(1), source.dtype).copy_(source)


def scatter(
    words: Tensor, token_idx: Tensor, memory: Memory, offset_bytes: int, row_idx: Tensor, num_rows: int
) -> None:
    """Copy the named rows of `words` `[T, W]` to the named ones of `num_rows` rows that begin at a byte offset."""
    if words.size(1):
        target = memory.rows(offset_bytes, num_rows, words.size(1), words.dtype)
        target.index_copy_(0, row_idx, words.index_select(0, token_idx))


class TokenRows:
    """Which rows of a table belong to which token: what a combine adds up.

    The table begins with the biases, of all tokens each; then come the rows that each rank returned, in order.

    Example: without biases, rank 0 returned the rows of the tokens 0 and 1, rank 1 those of the tokens 0 and 2. Then
    the rows of token 0 are 0 and 2: `rows` is [0, 2, 1, 3] and `begins` is [0, 2, 3, 4].

    Args:
        tokens: The tokens whose rows each rank returned.
        num_tokens: How many tokens there are; some may have no row.
        num_biases: How many biases there are.
    """

    def __init__(self, tokens: Sequence[Tokens], num_tokens: int, num_biases: int) -> None:
        self.num_tokens = num_tokens
        if all(isinstance(tokens_of_rank, list) for tokens_of_rank in tokens):
            rows, begins = few.rows_by_token(cast(list[list[int]], tokens), num_tokens, num_biases)
            self.rows = few.to_tensor(rows, torch.int64, (len(rows),))
            self.begins = few.to_tensor(begins, torch.int64, (num_tokens + 1,))
            return
        token_of_row = torch.cat([_first_numbers(num_tokens)] * num_biases + cast(list[Tensor], tokens))
        # Stable: the rows of a token stay in the order of the table.
        token, self.rows = torch.sort(token_of_row, stable=True)
        self.begins = torch.searchsorted(token, _first_numbers(num_tokens + 1))

    def sum(self, table: Tensor) -> Tensor:
        """Add up the rows of each token, in the order in which the table `[N, H]` has them.

        The sum is in float32 and is rounded once, to the nearest value of the table's dtype. (Where two values are
        equally near, torch takes the even one, but for bfloat16 on x86 the one away from zero.)

        Returns:
            `[T, H]` of the table's dtype; zeros for a token without rows.
        """
        if table.numel() == 0:
            return table.new_zeros(self.num_tokens, table.size(1))
        # Mode 0 sums; the last argument says that `begins` has one item more than there are tokens.
        return torch.embedding_bag(table, self.rows, self.begins, False, 0, False, None, True)[0]

    def sum_range(self, table: Tensor, begin: int, end: int) -> Tensor:
        """Add up the rows of the tokens from `begin` to before `end`, as `sum` does for all."""
        if table.numel() == 0 or begin == end:
            return table.new_zeros(end - begin, table.size(1))
        bounds = self.begins[begin : end + 1]
        first, last = int(bounds[0]), int(bounds[-1])
        return torch.embedding_bag(table, self.rows[first:last], bounds - first, False, 0, False, None, True)[0]


@lru_cache(maxsize=16)
def _first_numbers(count: int) -> Tensor:
    return torch.arange(count)
