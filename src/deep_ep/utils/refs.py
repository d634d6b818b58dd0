"""What dispatch and combine must give, over plain collectives, as DeepEP 2's tests ask for it.

These functions run on every rank of the default process group. They are slow and send everything to everyone. A token's
global index is the index of its rank times `num_max_tokens_per_rank`, plus its index there.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

Rows = Tensor | tuple[Tensor, Tensor]


def dispatch(
    x: Rows, topk_idx: Tensor, topk_weights: Tensor, num_max_tokens_per_rank: int, num_experts: int
) -> tuple[Rows, Tensor, Tensor, Tensor, list[int]]:
    """Give each rank the tokens that name one of its experts, sorted by their global index.

    Args:
        x: `[num_tokens, hidden]`, or a pair of that and scales `[num_tokens, num_scales]`.
        topk_idx: `[num_tokens, num_topk]`; -1 for none.
        topk_weights: `[num_tokens, num_topk]` float32.
        num_max_tokens_per_rank: At least the tokens of every rank.
        num_experts: Experts on all ranks, as many on each.

    Returns:
        The rows, as `x`; ids among this rank's experts, -1 for others; the weights, 0 for others; global indices
        `[num_recv]`, of the dtype int32; and how many rows came from each rank.
    """
    num_local = num_experts // dist.get_world_size()
    first = dist.get_rank() * num_local
    idx_of_ranks = _gather(topk_idx, num_max_tokens_per_rank)
    masks = [((idx >= first) & (idx < first + num_local)).any(1) for idx in idx_of_ranks]

    def receive(tensor: Tensor) -> Tensor:
        parts = zip(_gather(tensor, num_max_tokens_per_rank), masks, strict=True)
        return torch.cat([part[mask] for part, mask in parts])

    idx = receive(topk_idx)
    is_here = (idx >= first) & (idx < first + num_local)
    begins = [rank * num_max_tokens_per_rank for rank in range(len(masks))]
    src_idx = torch.cat([mask.nonzero()[:, 0] + begin for mask, begin in zip(masks, begins, strict=True)])
    return (
        receive(x) if isinstance(x, Tensor) else (receive(x[0]), receive(x[1])),
        torch.where(is_here, idx - first, -1),
        receive(topk_weights).masked_fill(~is_here, 0),
        src_idx.int(),
        [int(mask.sum()) for mask in masks],
    )


def combine(
    y: Tensor,
    topk_idx: Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: Tensor | tuple[Tensor, ...] | None = None,
    reduce_in_rank: bool = True,
    reduce_in_scaleup: bool = False,
) -> Tensor:
    """Add, for each of this rank's tokens, what its experts made of it; involves no peer.

    Sums are in float32, and every stage rounds once to bfloat16. A stage puts its sum in the place of its last slot.

    Args:
        y: `[num_tokens, num_topk, hidden]` bfloat16; what the expert of each slot made of the token.
        topk_idx: `[num_tokens, num_topk]`; slots of -1 are not added.
        num_scaleout_ranks: Hosts.
        num_scaleup_ranks: Ranks of each host.
        num_experts: Experts on all ranks, as many on each.
        bias: None, or one or two tensors `[num_tokens, hidden]`, with which the last sum begins.
        reduce_in_rank: Whether the slots of a rank are added first.
        reduce_in_scaleup: Whether the sums of a host are added next.

    Returns:
        `[num_tokens, hidden]` bfloat16.
    """
    num_local = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    biases = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
    is_used = topk_idx >= 0
    rank = torch.where(is_used, topk_idx // num_local, -1)
    if reduce_in_rank:
        y, is_used = _add_alike(y, rank, is_used)
    if reduce_in_scaleup:
        y, is_used = _add_alike(y, torch.where(is_used, rank // num_scaleup_ranks, -1), is_used)
    total = torch.zeros_like(y[:, 0], dtype=torch.float32)
    for item in biases:
        total = total + item.float()
    for slot in range(y.size(1)):
        total = torch.where(is_used[:, slot, None], total + y[:, slot].float(), total)
    return total.to(torch.bfloat16)


def generate_pre_combine_data(
    src_token_global_idx: Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> Tensor:
    """Return rows that follow from a token's global index and a slot alone, so that every rank can make them.

    Returns:
        `[num_tokens, num_topk, hidden]` bfloat16, from -1 to 1, that look random.
    """
    device = src_token_global_idx.device
    token = src_token_global_idx.long()[:, None, None] + 7 * num_max_tokens_per_rank
    slot = torch.arange(num_topk, device=device)[None, :, None]
    channel = torch.arange(hidden, device=device)[None, None, :]
    words = (token * num_topk + slot) * hidden + channel
    # Two rounds of a multiplicative hash. Products stay below 2 ** 63.
    for factor in (0x45D9F3B, 0x119DE1F3):
        words = ((words ^ (words >> 16)) & 0x7FFFFFFF) * factor
    return (((words >> 8) & 0xFFFF).float() * 2 / 0xFFFF - 1).to(torch.bfloat16)


def ordered_accumulate(y: Tensor) -> Tensor:
    """Add rows `[num_tokens, num_topk, hidden]` over the slots, in ascending order in float32; round once."""
    total = torch.zeros_like(y[:, 0], dtype=torch.float32)
    for slot in range(y.size(1)):
        total = total + y[:, slot].float()
    return total.to(torch.bfloat16)


def _add_alike(y: Tensor, owner: Tensor, is_used: Tensor) -> tuple[Tensor, Tensor]:
    """Add the slots of a token that have the same owner; return sums, each in its last slot, and where those are."""
    num_topk = y.size(1)
    sums, is_last = torch.zeros_like(y), is_used.clone()
    for slot in range(num_topk):
        total = torch.zeros_like(y[:, 0], dtype=torch.float32)
        for earlier in range(slot + 1):
            alike = is_used[:, earlier] & (owner[:, earlier] == owner[:, slot])
            total = torch.where(alike[:, None], total + y[:, earlier].float(), total)
        sums[:, slot] = total.to(y.dtype)
        for later in range(slot + 1, num_topk):
            is_last[:, slot] &= ~(is_used[:, later] & (owner[:, later] == owner[:, slot]))
    return sums, is_last


def _gather(tensor: Tensor, num_max_tokens_per_rank: int) -> list[Tensor]:
    """Return the rows of every rank."""
    num_rows = torch.tensor([tensor.size(0)], dtype=torch.int64, device=tensor.device)
    rows_of_ranks = [torch.empty_like(num_rows) for _ in range(dist.get_world_size())]
    dist.all_gather(rows_of_ranks, num_rows)
    # As bytes, for not every backend knows every dtype.
    row_bytes = tensor.size(1) * tensor.element_size()
    mine = torch.zeros(num_max_tokens_per_rank, row_bytes, dtype=torch.uint8, device=tensor.device)
    mine[: tensor.size(0)] = tensor.reshape(-1).view(torch.uint8).view(tensor.size(0), row_bytes)
    all_rows = [torch.empty_like(mine) for _ in rows_of_ranks]
    dist.all_gather(all_rows, mine)
    return [
        rows[: int(num)].view(tensor.dtype).view(int(num), tensor.size(1))
        for rows, num in zip(all_rows, rows_of_ranks, strict=True)
    ]
