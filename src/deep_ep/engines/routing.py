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
    """Return the rank of each expert, `[E + 1]`; the last item stands for the id -1 and is `num_ranks`."""
    sizes = [end - begin for begin, end in (expert_range(r, num_experts, num_ranks) for r in range(num_ranks))]
    owners = torch.repeat_interleave(torch.arange(num_ranks), torch.tensor(sizes))
    return torch.cat([owners, torch.tensor([num_ranks])])


def compute_layout(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Count where the tokens of `topk_idx` `[T, K]` go; -1 goes nowhere."""
    num_tokens = topk_idx.size(0)
    ranks = _rank_of_expert(num_experts, num_ranks)[topk_idx]
    reached = torch.zeros(num_tokens, num_ranks + 1, dtype=torch.bool)
    reached.scatter_(1, ranks, True)  # noqa: FBT003
    is_token_in_rank = reached[:, :num_ranks].contiguous()
    per_expert = torch.bincount(topk_idx.reshape(-1) + 1, minlength=num_experts + 1)[1:]
    return Layout(is_token_in_rank.sum(0, dtype=torch.int32), per_expert.to(torch.int32), is_token_in_rank)


class Channels(NamedTuple):
    """How a rank's tokens, cut into C channels, fill the rows of each receiver.

    Attributes:
        channel_prefix_matrix: `[R, C]` int32, as in the handle.
        begin: `[R, C]` int32; where each channel begins within this rank's rows on each rank.
        send_head: `[T, R]` int32, as in the handle.
    """

    channel_prefix_matrix: Tensor
    begin: Tensor
    send_head: Tensor


def token_psum(is_token_in_rank: Tensor) -> Tensor:
    """Return `[T + 1, R]` int32: how many tokens before each token go to each rank."""
    num_tokens, num_ranks = is_token_in_rank.shape
    psum = torch.zeros(num_tokens + 1, num_ranks, dtype=torch.int32)
    torch.cumsum(is_token_in_rank, 0, dtype=torch.int32, out=psum[1:])
    return psum


def compute_channels(is_token_in_rank: Tensor, num_channels: int) -> Channels:
    """Cut tokens into channels of equal length (the last ones shorter) and number them within.

    Example: three tokens in two channels of two tokens, all for rank 0: `channel_prefix_matrix[0]` is [2, 3],
    `begin[0]` is [0, 2] and `send_head[:, 0]` is [0, 1, 0].
    """
    begin, end, channel_of_token = _channel_bounds(is_token_in_rank.size(0), num_channels)
    psum = token_psum(is_token_in_rank)
    rows_before_channel = psum[begin]
    running = psum[:-1] - rows_before_channel[channel_of_token]
    return Channels(
        channel_prefix_matrix=psum[end].t().contiguous(),
        begin=rows_before_channel.t(),
        send_head=torch.where(is_token_in_rank, running, -1),
    )


@lru_cache(maxsize=256)
def _channel_bounds(num_tokens: int, num_channels: int) -> tuple[Tensor, Tensor, Tensor]:
    each = max(-(-num_tokens // num_channels), 1)
    begin = (torch.arange(num_channels) * each).clamp(max=num_tokens)
    end = (begin + each).clamp(max=num_tokens)
    return begin, end, torch.arange(num_tokens) // each
