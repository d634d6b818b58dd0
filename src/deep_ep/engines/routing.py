"""Routing: from expert ids to ranks, rows and channels, in plain tensor operations of this rank alone.

Experts are split over the ranks as ``torch.tensor_split`` splits: the first ``E % R`` ranks own one expert more.
Where R divides E, expert e belongs to rank ``e // (E // R)``, as in DeepEP V1.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from deep_ep.engines.base import Layout


def expert_range(rank: int, num_experts: int, num_ranks: int) -> tuple[int, int]:
    """Return the first expert of a rank and the first of the next rank."""
    each, extra = divmod(num_experts, num_ranks)
    return rank * each + min(rank, extra), (rank + 1) * each + min(rank + 1, extra)


@lru_cache(maxsize=64)
def _rank_of_expert(num_experts: int, num_ranks: int) -> Tensor:
    """Return `[E + 1]` int64: 1 + the rank of each expert, behind a 0 that stands for the expert -1."""
    sizes = [end - begin for begin, end in (expert_range(r, num_experts, num_ranks) for r in range(num_ranks))]
    owners = torch.repeat_interleave(torch.arange(1, num_ranks + 1), torch.tensor(sizes))
    return torch.cat([torch.zeros(1, dtype=torch.int64), owners])


@lru_cache(maxsize=64)
def local_expert(rank: int, num_experts: int, num_ranks: int, dtype: torch.dtype) -> Tensor:
    """Return `[E + 1]`: the number of each expert among those of a rank, -1 for others, and last for the expert -1."""
    begin, end = expert_range(rank, num_experts, num_ranks)
    table = torch.full((num_experts + 1,), -1, dtype=dtype)
    table[begin:end] = torch.arange(end - begin, dtype=dtype)
    return table


def compute_layout(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Count where the tokens of `topk_idx` `[T, K]` go; -1 goes nowhere."""
    shifted = (topk_idx + 1).view(-1)
    per_expert = torch.bincount(shifted, minlength=num_experts + 1)[1:].to(torch.int32)
    reached = torch.zeros(topk_idx.size(0), num_ranks + 1, dtype=torch.bool)
    owners = _rank_of_expert(num_experts, num_ranks).index_select(0, shifted)
    reached.scatter_(1, owners.view(topk_idx.shape), True)
    is_token_in_rank = reached[:, 1:].contiguous()
    return Layout(is_token_in_rank.sum(0, dtype=torch.int32), per_expert, is_token_in_rank)


class Channels(NamedTuple):
    """How a rank's tokens, cut into C channels of equal length, fill the rows of each receiver.

    Attributes:
        ends: `[C, R]` int32; how many tokens go to each rank, up to the end of each channel.
        send_head: `[T, R]` int32, as in the handle.
    """

    ends: Tensor
    send_head: Tensor


def compute_channels(is_token_in_rank: Tensor, num_channels: int) -> Channels:
    """Cut tokens into channels (the last ones shorter) and number them within.

    Example: three tokens in two channels of two tokens, all for rank 0: `ends[:, 0]` is [2, 3] and `send_head[:, 0]` is
    [0, 1, 0].
    """
    num_tokens, num_ranks = is_token_in_rank.shape
    if num_tokens == 0:
        return Channels(torch.zeros(num_channels, num_ranks, dtype=torch.int32), is_token_in_rank.to(torch.int32))
    bounds, channel_of_token = _channel_bounds(num_tokens, num_channels)
    psum = torch.zeros(num_tokens + 1, num_ranks, dtype=torch.int32)
    torch.cumsum(is_token_in_rank, 0, dtype=torch.int32, out=psum[1:])
    at_bounds = psum.index_select(0, bounds)
    before_channel = at_bounds.index_select(0, channel_of_token)
    send_head = (psum[1:] - before_channel).mul_(is_token_in_rank).sub_(1)
    return Channels(at_bounds[1:], send_head)


@lru_cache(maxsize=16)
def _channel_bounds(num_tokens: int, num_channels: int) -> tuple[Tensor, Tensor]:
    """Return where channels begin and the last one ends, `[C + 1]`, and the channel of each token, `[T]`."""
    each = -(-num_tokens // num_channels)
    bounds = (torch.arange(num_channels + 1) * each).clamp(max=num_tokens)
    return bounds, torch.arange(num_tokens) // each


@lru_cache(maxsize=16)
def token_numbers(num_tokens: int) -> Tensor:
    """Return `[T, 1]` int32: the numbers of the tokens."""
    return torch.arange(num_tokens, dtype=torch.int32).unsqueeze(1)
