"""The same exchange over `torch.distributed`, as programs do it without this library."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep.errors import DeepEPError
from deep_ep.reference import local_experts


class Sent(NamedTuple):
    """How one dispatch went: the token of each row that was sent, how many rows went where, and the tokens."""

    token: Tensor
    order: Tensor
    send_splits: list[int]
    recv_splits: list[int]
    num_tokens: int


class TorchExchange:
    """Sort the (token, expert) pairs, tell how many come, `all_to_all_single` rows and weights; and back, and add.

    A token travels once for every expert. Rows are bfloat16, whatever the case says.

    Args:
        num_experts: On all ranks.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_ranks = dist.get_world_size()
        self.num_experts = num_experts
        self._experts = local_experts(num_experts, self.num_ranks)

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor, Sent]:
        """Return rows `[num_recv, hidden]` by source, then by expert; their weights; and what `combine` needs."""
        expert = topk_idx.view(-1)
        # Slots that name no expert come first, and are left out.
        num_unused = int((expert < 0).sum())
        order = expert.argsort(stable=True)[num_unused:]
        token = order // topk_idx.size(1)
        counts = torch.bincount(expert[order], minlength=self.num_experts)
        send_counts = torch.stack([counts[owned.start : owned.stop].sum() for owned in self._experts])
        recv_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(recv_counts, send_counts)
        send_splits, recv_splits = send_counts.tolist(), recv_counts.tolist()
        recv_x = x.new_empty(sum(recv_splits), x.size(1))
        dist.all_to_all_single(recv_x, x.index_select(0, token), recv_splits, send_splits)
        recv_weights = topk_weights.new_empty(sum(recv_splits))
        weights = topk_weights.reshape(-1).index_select(0, order)
        dist.all_to_all_single(recv_weights, weights, recv_splits, send_splits)
        return recv_x, recv_weights, Sent(token, order, send_splits, recv_splits, x.size(0))

    def combine(self, y: Tensor, sent: Sent, weights: Tensor | None = None) -> Tensor:
        """Return the sum of each token's rows `[num_tokens, hidden]`, weighted if dispatch's weights are given."""
        if weights is not None:
            y = y * weights.unsqueeze(1).to(y.dtype)
        back = y.new_empty(len(sent.token), y.size(1))
        dist.all_to_all_single(back, y, sent.send_splits, sent.recv_splits)
        return y.new_zeros(sent.num_tokens, y.size(1)).index_add_(0, sent.token, back)

    def verify(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Send rows there and back and compare: a rival that is wrong has no time.

        Raises:
            DeepEPError: If the sums are off.
        """
        rows, _, sent = self.dispatch(x, topk_idx, topk_weights)
        sums = self.combine(rows, sent).float()
        num_copies = (topk_idx >= 0).sum(1, keepdim=True)
        if not torch.allclose(sums, x.float() * num_copies, rtol=2**-5, atol=2**-6):
            raise DeepEPError("torch.distributed brought back other sums than it should")
