"""What normal mode means: the tensors of all ranks in, the results of all ranks out, in plain torch.

This file is the specification. It sends nothing, keeps nothing and shares no code with the engines; it loops
over slices that can be read as the definition, and is as slow as that. Tests and tools compare every engine
with it, bit for bit: bytes that are moved, and also sums, whose order is defined here.

Letters at the end of a name give the shape of a tensor: T tokens of one rank, K top-k slots, H hidden, S
scales of a token, E experts, R ranks, C channels, N rows that a rank receives. A leading R means a list with
one tensor for each rank; the other letters may then differ from rank to rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Where the tokens of one rank go: int32 `[R]`, int32 `[E]`, bool `[T, R]`."""

    num_tokens_per_rank: Tensor
    num_tokens_per_expert: Tensor
    is_token_in_rank: Tensor


class Handle(NamedTuple):
    """How one dispatch went, as one rank knows it: DeepEP V1's handle, in its order.

    Attributes:
        rank_prefix_matrix: int32 `[R, R]`; `[i, j]` is how many rows ranks 0 to i sent to rank j.
        channel_prefix_matrix: int32 `[R, C]`; `[j, c]` is how many tokens of channels 0 to c this rank
            sent to rank j.
        recv_channel_prefix_matrix: int32 `[R, C]`; `[i, c]` is where channel c begins among the rows
            from rank i.
        recv_src_idx: int32 `[N]`; the index of each received row among the tokens of its source.
        is_token_in_rank: bool `[T, R]`; where each token went.
        send_head: int32 `[T, R]`; a token's running number, from 0, among those of its channel that went to
            the rank; -1 if it did not go there.
    """

    rank_prefix_matrix: Tensor
    channel_prefix_matrix: Tensor
    recv_channel_prefix_matrix: Tensor
    recv_src_idx: Tensor
    is_token_in_rank: Tensor
    send_head: Tensor


class Received(NamedTuple):
    """What one rank gets from a dispatch: `[N, H]`, `[N, S]`, `[N, K]`, `[N, K]`, a count per own expert."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    num_recv_tokens_per_expert: list[int]
    handle: Handle


class Combined(NamedTuple):
    """What one rank gets from a combine: `[T, H]` and `[T, K]`."""

    x: Tensor
    topk_weights: Tensor | None


def local_experts(num_experts: int, num_ranks: int) -> list[range]:
    """Return the experts that each rank owns: runs as even as can be, the first ranks one longer.

    Example:
        >>> local_experts(7, 3)
        [range(0, 3), range(3, 5), range(5, 7)]
    """
    num_each, num_longer = divmod(num_experts, num_ranks)
    begins = [rank * num_each + min(rank, num_longer) for rank in range(num_ranks + 1)]
    return [range(begins[rank], begins[rank + 1]) for rank in range(num_ranks)]


def get_dispatch_layout(topk_idx_TK: Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Count where the tokens of one rank go; -1 means nowhere.

    A token counts once for a rank, however many experts it has there. For an expert every slot counts, so an
    expert named twice by a token counts twice.
    """
    is_token_in_rank_TR = torch.zeros(topk_idx_TK.shape[0], num_ranks, dtype=torch.bool)
    for rank, experts in enumerate(local_experts(num_experts, num_ranks)):
        is_token_in_rank_TR[:, rank] = _is_in(topk_idx_TK, experts).any(dim=1)
    num_tokens_per_expert = [int((topk_idx_TK == expert).sum()) for expert in range(num_experts)]
    return Layout(
        num_tokens_per_rank=is_token_in_rank_TR.sum(dim=0).int(),
        num_tokens_per_expert=torch.tensor(num_tokens_per_expert, dtype=torch.int32),
        is_token_in_rank=is_token_in_rank_TR,
    )


def make_handles(is_token_in_rank_RTR: Sequence[Tensor], num_sms: int) -> list[Handle]:
    """Return the handle of each rank for tokens that go where the masks say.

    A rank receives rows in the order of source ranks, and those of one source in the order they have there.
    The tokens of a source are cut into `num_sms // 2` channels (at least one) of equally many consecutive
    tokens, of which the last are shorter or empty.
    """
    num_channels = max(num_sms // 2, 1)
    num_sent_RR = torch.stack([mask_TR.sum(dim=0) for mask_TR in is_token_in_rank_RTR])
    num_sent_by_channel_RCR = [_count_by_channel(mask_TR, num_channels) for mask_TR in is_token_in_rank_RTR]
    handles = []
    for rank, mask_TR in enumerate(is_token_in_rank_RTR):
        num_sent_RC = num_sent_by_channel_RCR[rank].T
        num_received_RC = torch.stack([num_sent_CR[:, rank] for num_sent_CR in num_sent_by_channel_RCR])
        recv_src_idx_RN = [src_mask_TR[:, rank].nonzero().flatten() for src_mask_TR in is_token_in_rank_RTR]
        send_head_TR = torch.full(mask_TR.shape, -1)
        for channel in _channels(mask_TR.shape[0], num_channels):
            running_TR = mask_TR[channel].cumsum(dim=0) - 1
            send_head_TR[channel] = torch.where(mask_TR[channel], running_TR, -1)
        handles.append(
            Handle(
                rank_prefix_matrix=num_sent_RR.cumsum(dim=0).int(),
                channel_prefix_matrix=num_sent_RC.cumsum(dim=1).int(),
                recv_channel_prefix_matrix=(num_received_RC.cumsum(dim=1) - num_received_RC).int(),
                recv_src_idx=torch.cat(recv_src_idx_RN).int(),
                is_token_in_rank=mask_TR.clone(),
                send_head=send_head_TR.int(),
            )
        )
    return handles


def dispatch(
    x_RTH: Sequence[Tensor],
    layouts: Sequence[Layout],
    *,
    scales_RTS: Sequence[Tensor] | None = None,
    topk_idx_RTK: Sequence[Tensor] | None = None,
    topk_weights_RTK: Sequence[Tensor] | None = None,
    expert_alignment: int = 1,
    num_worst_tokens: int = 0,
    num_sms: int = 20,
) -> list[Received]:
    """Send every token once to each rank of its layout; return what each rank receives.

    Of a token's top-k slots a rank gets those of its own experts, numbered from 0; the others are -1 with
    weight 0. The counts per expert are rounded up to `expert_alignment`.

    With `num_worst_tokens` every rank gets that many rows and no counts. Past the rows received, `topk_idx`
    is -1; the other outputs are 0 here and anything in a real engine.
    """
    num_tokens_per_expert_E = torch.stack([layout.num_tokens_per_expert for layout in layouts]).sum(dim=0)
    handles = make_handles([layout.is_token_in_rank for layout in layouts], num_sms)
    if num_worst_tokens > 0:
        handles = [handle._replace(recv_src_idx=_lengthen(handle.recv_src_idx, num_worst_tokens)) for handle in handles]
    received = []
    for rank, experts in enumerate(local_experts(len(num_tokens_per_expert_E), len(x_RTH))):
        handle = handles[rank]
        topk_idx_NK = topk_weights_NK = None
        if topk_idx_RTK is not None and topk_weights_RTK is not None:
            topk_idx_NK = _rows_received(topk_idx_RTK, handle, rank, fill=-1)
            topk_weights_NK = _rows_received(topk_weights_RTK, handle, rank)
            is_local_NK = _is_in(topk_idx_NK, experts)
            topk_idx_NK = torch.where(is_local_NK, topk_idx_NK - experts.start, -1)
            topk_weights_NK = torch.where(is_local_NK, topk_weights_NK, 0.0)
        counts = [-(-int(num_tokens_per_expert_E[e]) // expert_alignment) * expert_alignment for e in experts]
        received.append(
            Received(
                x=_rows_received(x_RTH, handle, rank),
                scales=None if scales_RTS is None else _rows_received(scales_RTS, handle, rank),
                topk_idx=topk_idx_NK,
                topk_weights=topk_weights_NK,
                num_recv_tokens_per_expert=counts if num_worst_tokens == 0 else [],
                handle=handle,
            )
        )
    return received


def dispatch_cached(rows_RTH: Sequence[Tensor], handles: Sequence[Handle]) -> list[Tensor]:
    """Send rows (tokens or their scales) the way an earlier dispatch went; return what each rank gets."""
    return [_rows_received(rows_RTH, handle, rank) for rank, handle in enumerate(handles)]


def combine(
    x_RNH: Sequence[Tensor],
    handles: Sequence[Handle],
    *,
    topk_weights_RNK: Sequence[Tensor] | None = None,
    biases_RTH: Sequence[Sequence[Tensor]] | None = None,
) -> list[Combined]:
    """Bring rows back to where their tokens came from and add them; return the sums of each rank.

    A sum is made in float32, begins with the biases in their order, goes on with the rows in the order of the
    ranks that send them, and is rounded once, to the dtype of `x`. Weights are added alike and never
    multiplied with rows. A token that went nowhere gets its biases, or zeros.
    """
    combined = []
    for rank, handle in enumerate(handles):
        num_tokens = handle.is_token_in_rank.shape[0]
        sum_TH = torch.zeros(num_tokens, x_RNH[rank].shape[1])
        for bias_TH in [] if biases_RTH is None else biases_RTH[rank]:
            sum_TH += bias_TH.float()
        _add_rows_sent_back(sum_TH, x_RNH, handles, rank)
        weight_sum_TK = None
        if topk_weights_RNK is not None:
            weight_sum_TK = torch.zeros(num_tokens, topk_weights_RNK[rank].shape[1])
            _add_rows_sent_back(weight_sum_TK, topk_weights_RNK, handles, rank)
        combined.append(Combined(x=sum_TH.to(x_RNH[rank].dtype), topk_weights=weight_sum_TK))
    return combined


def _add_rows_sent_back(sum_TH: Tensor, x_RNH: Sequence[Tensor], handles: Sequence[Handle], src_rank: int) -> None:
    """Add to the sums of one rank the rows that each rank has of its tokens, rank by rank."""
    for rank, handle in enumerate(handles):
        rows = _rows_from(src_rank, handle, rank)
        sum_TH[handle.recv_src_idx[rows].long()] += x_RNH[rank][rows].float()


def _rows_received(rows_RTH: Sequence[Tensor], handle: Handle, rank: int, fill: int = 0) -> Tensor:
    """Return the rows that a rank receives, then `fill` in the rows that its handle has beyond them."""
    received_RNH = [
        rows_TH[handle.recv_src_idx[_rows_from(src_rank, handle, rank)].long()]
        for src_rank, rows_TH in enumerate(rows_RTH)
    ]
    return _lengthen(torch.cat(received_RNH), len(handle.recv_src_idx), fill)


def _rows_from(src_rank: int, handle: Handle, rank: int) -> slice:
    """Return which of the rows that `rank` received came from `src_rank`."""
    ends_R = handle.rank_prefix_matrix[:, rank].tolist()
    return slice(0 if src_rank == 0 else ends_R[src_rank - 1], ends_R[src_rank])


def _channels(num_tokens: int, num_channels: int) -> list[slice]:
    """Return the tokens of each channel."""
    num_each = -(-num_tokens // num_channels)
    return [slice(channel * num_each, (channel + 1) * num_each) for channel in range(num_channels)]


def _count_by_channel(mask_TR: Tensor, num_channels: int) -> Tensor:
    """Return `[C, R]`: how many tokens of each channel go to each rank."""
    return torch.stack([mask_TR[channel].sum(dim=0) for channel in _channels(mask_TR.shape[0], num_channels)])


def _is_in(topk_idx_TK: Tensor, experts: range) -> Tensor:
    return (topk_idx_TK >= experts.start) & (topk_idx_TK < experts.stop)


def _lengthen(rows_NH: Tensor, num_rows: int, fill: int = 0) -> Tensor:
    """Append rows of `fill` until there are `num_rows`."""
    padding = rows_NH.new_zeros(num_rows - len(rows_NH), *rows_NH.shape[1:])
    return torch.cat([rows_NH, padding.fill_(fill) if fill else padding])
