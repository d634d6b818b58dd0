"""The shortest way in: a mixture of experts whose experts are spread over the ranks of a buffer.

Example:
    >>> buffer = Buffer(dist.group.WORLD)
    >>> router = TopKRouter(hidden=512, num_experts=64, num_topk=4)
    >>> experts = [make_expert() for _ in local_experts(64, buffer)]
    >>> moe = ExpertParallel(router, experts, buffer, num_experts=64)
    >>> y = moe(x)  # [..., 512]; forward and backward exchange tokens

Gradients of the experts are complete, as an expert sees the tokens of all ranks; those of the router and of everything
outside are of this rank's tokens, to be added up over the ranks as for any data-parallel parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deep_ep import ops
from deep_ep.buffer import Buffer
from deep_ep.engines.routing import expert_range
from deep_ep.errors import ConfigError


def local_experts(num_experts: int, buffer: Buffer) -> range:
    """Return the ids of the experts that this rank owns: an even share, one more on the first ranks if need be."""
    return range(*expert_range(buffer.rank, num_experts, buffer.group_size))


class TopKRouter(nn.Linear):
    """Scores experts by a linear layer and a softmax, and chooses the best.

    Args:
        hidden: Size of a token.
        num_experts: Experts on all ranks.
        num_topk: How many each token chooses.
    """

    def __init__(self, hidden: int, num_experts: int, num_topk: int) -> None:
        super().__init__(hidden, num_experts, bias=False)
        self.num_topk = num_topk

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return weights `[num_tokens, num_topk]` float32 and expert ids `[num_tokens, num_topk]` int64."""
        weights, idx = super().forward(x).float().softmax(-1).topk(self.num_topk)
        return weights, idx


class ExpertParallel(nn.Module):
    """Sends tokens to their experts on all ranks, runs those of this rank, and brings the weighted sums back.

    All ranks call it together, also with no tokens, and backward as well.

    Args:
        router: Gives for `[num_tokens, hidden]` the weights and the ids of experts, `[num_tokens, num_topk]` each; -1
            chooses none. `TopKRouter` is one.
        experts: This rank's experts, one for each of `local_experts(num_experts, buffer)`: modules from
            `[num_rows, hidden]` to the same shape, that take no rows as well.
        buffer: What to send through; layers may share one.
        num_experts: Experts on all ranks.

    Raises:
        ConfigError: If there are more or fewer experts than this rank's share.
    """

    def __init__(self, router: nn.Module, experts: Sequence[nn.Module], buffer: Buffer, num_experts: int) -> None:
        super().__init__()
        share = local_experts(num_experts, buffer)
        if len(experts) != len(share):
            raise ConfigError(
                f"experts must be this rank's {len(share)} of num_experts={num_experts}, those of {share}, "
                f"got {len(experts)}"
            )
        self.router, self.experts = router, nn.ModuleList(experts)
        self.buffer, self.num_experts = buffer, num_experts

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., hidden]`, like `x`."""
        tokens = x.reshape(-1, x.size(-1))
        topk_weights, topk_idx = self.router(tokens)
        received = ops.dispatch(tokens, topk_idx, topk_weights.float(), self.buffer, num_experts=self.num_experts)
        return ops.combine(self._run_experts(received), received.handle, self.buffer).view(x.shape)

    def _run_experts(self, received: ops.Dispatched) -> Tensor:
        """Return for each received row the weighted sum of what this rank's experts make of it."""
        row, slot = torch.where(received.topk_idx >= 0)
        order = torch.argsort(received.topk_idx[row, slot], stable=True)
        row, slot = row[order], slot[order]
        parts = received.x[row].split(received.num_tokens_per_expert.tolist())
        made = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)] or [received.x[row]])
        weighted = made.float() * received.topk_weights[row, slot, None]
        sums = torch.zeros_like(received.x, dtype=torch.float32).index_add(0, row, weighted)
        return sums.to(received.x.dtype)
