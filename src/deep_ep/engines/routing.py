"""Routing: from expert ids to ranks, rows and channels, in operations of this rank alone.

Many tokens are counted by torch operators, few by plain Python (`deep_ep.engines.few`): the results are the same.

Experts are split over the ranks as ``torch.tensor_split`` splits: the first ``E % R`` ranks own one expert more.
Where R divides E, expert e belongs to rank ``e // (E // R)``, as in DeepEP V1.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from deep_ep.engines import few
from deep_ep.engines.base import Layout
from deep_ep.errors import ConfigError

Tokens = Tensor | list[int]
"""Token numbers, in ascending order: an int64 tensor, or a list where they are few."""


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
def _rank_list(num_experts: int, num_ranks: int) -> list[int]:
    """Return the rank of each expert."""
    return [owner - 1 for owner in _rank_of_expert(num_experts, num_ranks)[1:].tolist()]


@lru_cache(maxsize=64)
def local_expert_list(rank: int, num_experts: int, num_ranks: int) -> list[int]:
    """Return what `local_expert` returns, as a list."""
    return local_expert(rank, num_experts, num_ranks, torch.int64).tolist()


@lru_cache(maxsize=64)
def local_expert(rank: int, num_experts: int, num_ranks: int, dtype: torch.dtype) -> Tensor:
    """Return `[E + 1]`: the number of each expert among those of a rank, -1 for others, and last for the expert -1."""
    begin, end = expert_range(rank, num_experts, num_ranks)
    table = torch.full((num_experts + 1,), -1, dtype=dtype)
    table[begin:end] = torch.arange(end - begin, dtype=dtype)
    return table


def compute_layout(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Count where the tokens of `topk_idx` `[T, K]` go; -1 goes nowhere."""
    num_tokens = topk_idx.size(0)
    if few.is_few(topk_idx.numel()) and few.is_few(num_tokens * num_ranks):
        per_rank, slots, flags = few.count_tokens(topk_idx, _rank_list(num_experts, num_ranks), num_ranks)
        is_in_rank = torch.frombuffer(flags, dtype=torch.bool) if flags else torch.empty(0, dtype=torch.bool)
        return Layout(
            few.to_tensor(per_rank, torch.int32, (num_ranks,)),
            few.to_tensor(slots, torch.int32, (num_experts,)),
            is_in_rank.view(num_tokens, num_ranks),
        )
    shifted = (topk_idx + 1).view(-1)
    per_expert = torch.bincount(shifted, minlength=num_experts + 1)[1:].to(torch.int32)
    reached = torch.zeros(num_tokens, num_ranks + 1, dtype=torch.bool)
    owners = _rank_of_expert(num_experts, num_ranks).index_select(0, shifted)
    reached.scatter_(1, owners.view(topk_idx.shape), True)
    is_token_in_rank = reached[:, 1:].contiguous()
    return Layout(is_token_in_rank.sum(0, dtype=torch.int32), per_expert, is_token_in_rank)


class Channels(NamedTuple):
    """How a rank's tokens, cut into C channels of equal length, fill the rows of each receiver.

    Attributes:
        ends: `ends[rank][channel]` tokens go to a rank up to the end of a channel.
        send_head: `[T, R]` int32, as in the handle.
    """

    ends: list[list[int]]
    send_head: Tensor


def compute_channels(is_token_in_rank: Tensor, num_channels: int) -> Channels:
    """Cut tokens into channels (the last ones shorter) and number them within.

    Example: three tokens in two channels of two tokens, all for rank 0: `ends[0]` is [2, 3] and `send_head[:, 0]` is
    [0, 1, 0].
    """
    num_tokens, num_ranks = is_token_in_rank.shape
    if few.is_few(num_tokens * num_ranks):
        ends, numbers = few.cut_channels(is_token_in_rank, num_channels)
        return Channels(ends, few.to_tensor(numbers, torch.int32, (num_tokens, num_ranks)))
    bounds, channel_of_token = _channel_bounds(num_tokens, num_channels)
    psum = torch.zeros(num_tokens + 1, num_ranks, dtype=torch.int32)
    torch.cumsum(is_token_in_rank, 0, dtype=torch.int32, out=psum[1:])
    at_bounds = psum.index_select(0, bounds)
    before_channel = at_bounds.index_select(0, channel_of_token)
    send_head = (psum[1:] - before_channel).mul_(is_token_in_rank).sub_(1)
    return Channels(at_bounds[1:].t().tolist(), send_head)


def tokens_by_rank(is_token_in_rank: Tensor, counts: list[int]) -> list[Tokens]:
    """Return, for each rank, the tokens that go there.

    Args:
        is_token_in_rank: `[T, R]` bool.
        counts: How many there are for each rank by what else is known of the routing.

    Raises:
        ConfigError: If the two do not agree.
    """
    if few.is_few(is_token_in_rank.numel()):
        lists = few.tokens_by_rank(is_token_in_rank)
        found = [len(tokens) for tokens in lists]
        by_rank: list[Tokens] = [*lists]
    else:
        tokens = is_token_in_rank.t().nonzero()[:, 1]
        found = is_token_in_rank.sum(0).tolist()
        by_rank = [*torch.split(tokens, found)]
    if found != counts:
        raise ConfigError(
            f"handle must be as dispatch returned it, but its is_token_in_rank names {found} rows for the ranks and "
            f"its rank_prefix_matrix counts {counts}"
        )
    return by_rank


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
