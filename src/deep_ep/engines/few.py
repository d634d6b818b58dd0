"""Few tokens: the routing of `deep_ep.engines.routing` in plain Python, with the same results.

A torch operator costs 5 to 20 us however small its tensors are, an item of a Python list 0.1 us. A dispatch of few
tokens as operators is a queue of some sixty of them, and takes the time of their number, not of their work.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from ctypes import c_ubyte
from itertools import compress
from struct import unpack_from
from typing import Any

import torch
from torch import Tensor

NUM_MAX_ITEMS = 512
"""Tensors of routing with at most so many items take this way; `benchmarks/cpu_exchange.py` is faster with it."""

_CODES = {torch.int32: "i", torch.int64: "q", torch.float32: "f"}


def is_few(num_items: int) -> bool:
    """Tell whether a call with so many items of routing takes this way."""
    return num_items <= NUM_MAX_ITEMS


def bytes_of(tensor: Tensor) -> memoryview:
    """View a contiguous CPU tensor as bytes; it must live as long as the view is used."""
    return memoryview((c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def to_tensor(values: Iterable[float], dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return int32, int64 or float32 values as a tensor; much cheaper than `torch.tensor`."""
    items = array(_CODES[dtype], values)
    if not items:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(items, dtype=dtype)
    return tensor if len(shape) == 1 else tensor.view(shape)


def values_at(memory: memoryview, offset_bytes: int, num_items: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Read int32, int64 or float32 values from an offset on."""
    if num_items == 0:
        return ()  # of memory that may have no bytes at all
    return unpack_from(f"{num_items}{_CODES[dtype]}", memory, offset_bytes)


def count_tokens(topk_idx: Tensor, rank_of_expert: list[int], num_ranks: int) -> tuple[list[int], list[int], bytearray]:
    """Count where the tokens of `topk_idx` `[T, K]` go; -1 goes nowhere.

    Returns:
        Tokens per rank, slots per expert, and a flag for each token and rank.
    """
    per_expert = [0] * len(rank_of_expert)
    flags = bytearray(topk_idx.size(0) * num_ranks)
    begin = 0
    for experts in topk_idx.tolist():
        for expert in experts:
            if expert >= 0:
                per_expert[expert] += 1
                flags[begin + rank_of_expert[expert]] = 1
        begin += num_ranks
    return [flags[rank::num_ranks].count(1) for rank in range(num_ranks)], per_expert, flags


def cut_channels(is_token_in_rank: Tensor, num_channels: int) -> tuple[list[list[int]], list[int]]:
    """Cut tokens into channels (the last ones shorter) and number them within.

    Returns:
        `ends[rank][channel]` and `send_head[token * R + rank]`, as `deep_ep.engines.routing.Channels` has them.
    """
    num_tokens, num_ranks = is_token_in_rank.shape
    flags, each = bytes(bytes_of(is_token_in_rank)), -(-num_tokens // num_channels)
    send_head, ends = [-1] * (num_tokens * num_ranks), []
    for rank in range(num_ranks):
        total, ends_of_rank = 0, []
        for begin in range(0, num_tokens, max(each, 1)):
            tokens = range(begin, min(begin + each, num_tokens))
            first, last = begin * num_ranks + rank, (tokens.stop - 1) * num_ranks + rank + 1
            for number, token in enumerate(compress(tokens, flags[first:last:num_ranks])):
                send_head[token * num_ranks + rank] = number
                total += 1
            ends_of_rank.append(total)
        ends.append(ends_of_rank + [total] * (num_channels - len(ends_of_rank)))
    return ends, send_head


def tokens_by_rank(is_token_in_rank: Tensor) -> list[list[int]]:
    """Return, for each rank, the tokens that go there, in ascending order."""
    num_tokens, num_ranks = is_token_in_rank.shape
    flags, tokens = bytes(bytes_of(is_token_in_rank)), range(num_tokens)
    return [list(compress(tokens, flags[rank::num_ranks])) for rank in range(num_ranks)]


def rows_by_token(tokens: list[list[int]], num_tokens: int, num_biases: int) -> tuple[list[int], list[int]]:
    """Return the rows of a combine's table token by token, and where each token's rows begin.

    The table has the biases of all tokens first, then the rows of `tokens[0]`, of `tokens[1]`, and so on.
    """
    rows: list[list[int]] = [list(range(token, num_biases * num_tokens, num_tokens)) for token in range(num_tokens)]
    row = num_biases * num_tokens
    for tokens_of_rank in tokens:
        for token in tokens_of_rank:
            rows[token].append(row)
            row += 1
    begins, flat = [0], []
    for rows_of_token in rows:
        flat += rows_of_token
        begins.append(len(flat))
    return flat, begins
