"""Scores of routers that load the ranks unevenly, as DeepEP's tests make them."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_ep.errors import ConfigError


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool = False
) -> Tensor:
    """Return scores whose top-k give the first rank `ratio` times the slots that an even spread would.

    Args:
        num_tokens: Rows to make.
        num_experts: Experts on all ranks, a multiple of `num_ranks`.
        num_ranks: Ranks of equally many experts.
        num_topk: How many experts each token will choose.
        ratio: 1 for an even spread, up to `num_ranks`, or up to where every expert of the first rank is chosen always.
        precise: Whether the first rank gets exactly that many slots, rounded; otherwise it does on average.

    Returns:
        `[num_tokens, num_experts]` float32, positive, on the default device.

    Raises:
        ConfigError: If no routing has that ratio.

    Example: 8 experts on 4 ranks, top-2 and a ratio of 1.5. An even spread gives the first rank half a slot of each
    token, so here it gets 0.75: three of four tokens choose one of its experts.
    """
    num_local = num_experts // num_ranks
    most = min(num_local, num_topk)
    mean = ratio * num_topk / num_ranks
    if not ratio >= 1 or mean > most:
        raise ConfigError(f"ratio must be from 1 to {most * num_ranks / num_topk:g} for these sizes, got {ratio}")
    if num_topk - int(mean) > num_experts - num_local:
        raise ConfigError(f"num_topk={num_topk} experts cannot be chosen of {num_experts} with a ratio of {ratio}")
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32).clamp(min=1e-6)
    if ratio == 1 and not precise:
        return scores
    if precise:
        # Slots are dealt out evenly: after t tokens the first rank has had round(t * mean) of them.
        dealt = (torch.arange(num_tokens + 1, dtype=torch.float64) * mean).round().long()
        num_at_home = dealt.diff()[torch.randperm(num_tokens)]
    else:
        num_at_home = int(mean) + (torch.rand(num_tokens, dtype=torch.float32) < mean - int(mean)).long()
    # As many experts of the first rank as wanted come first, the others of that rank last.
    position = scores[:, :num_local].argsort(1, descending=True).argsort(1)
    scores[:, :num_local] += torch.where(position < num_at_home.unsqueeze(1), 1.0, -1.0)
    return scores.add(1.0)
