"""What normal mode means where a group spans hosts: what differs from `deep_ep.reference`, in plain torch.

Rows arrive as on one host, so `deep_ep.reference.dispatch` holds for them. The handle is another one, and sums are made
in two steps, on each host and then over the hosts. Hosts are lists of ranks, in the order of their lowest ranks.

Letters at the end of a name give the shape of a tensor, as in `deep_ep.reference`; D are hosts, G the ranks that a rank
is the relay of, P the tokens that a rank passes on and L the ranks of its host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deep_ep.reference import Combined

Hosts = Sequence[Sequence[int]]


class NetworkHandle(NamedTuple):
    """How one dispatch went, as one rank knows it: V1's handle of ten, in its order.

    Attributes:
        is_token_in_rank: bool `[T, R]`; where each token went.
        rdma_channel_prefix_matrix: int32 `[D, C]`; tokens of channels 0 to c that this rank sent to host d.
        gbl_channel_prefix_matrix: int32 `[R, C]`; tokens of channels 0 to c that this rank sent to rank r.
        recv_rdma_channel_prefix_matrix: int32 `[G, C]`; tokens of channels 0 to c that this rank passes on for its
            g-th source.
        recv_rdma_rank_prefix_sum: int32 `[G]`; tokens that it passes on for its sources 0 to g.
        recv_gbl_channel_prefix_matrix: int32 `[R, C]`; the first row received from channel c of rank r.
        recv_gbl_rank_prefix_sum: int32 `[R]`; rows received from ranks 0 to r.
        recv_src_meta: uint8 `[N, 8]`; int32 source host, then int32 with a bit for each local rank that the token
            went to.
        send_rdma_head: int32 `[T, D]`; a token's running number among those of its channel for the host, or -1.
        send_nvl_head: int32 `[P, L]`; a passed-on token's running number among those of its source's channel for the
            local rank, or -1.
    """

    is_token_in_rank: Tensor
    rdma_channel_prefix_matrix: Tensor
    gbl_channel_prefix_matrix: Tensor
    recv_rdma_channel_prefix_matrix: Tensor
    recv_rdma_rank_prefix_sum: Tensor
    recv_gbl_channel_prefix_matrix: Tensor
    recv_gbl_rank_prefix_sum: Tensor
    recv_src_meta: Tensor
    send_rdma_head: Tensor
    send_nvl_head: Tensor


def relay(source: int, hosts: Hosts, host: int) -> int:
    """Return the rank of a host that passes on what a source sends there."""
    index = next(list(ranks).index(source) for ranks in hosts if source in ranks)
    return hosts[host][index % len(hosts[host])]


def make_handles(is_token_in_rank_RTR: Sequence[Tensor], hosts: Hosts, num_sms: int) -> list[NetworkHandle]:
    """Return the handle of each rank for tokens that go where the masks say."""
    num_channels = max(num_sms // 2, 1)
    num_ranks = len(is_token_in_rank_RTR)
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    host_masks_RTD = [
        torch.stack([mask_TR[:, list(ranks)].any(1) for ranks in hosts], 1) for mask_TR in is_token_in_rank_RTR
    ]
    handles = []
    for rank, mask_TR in enumerate(is_token_in_rank_RTR):
        host = host_of[rank]
        local_ranks = list(hosts[host])
        sources = [source for source in range(num_ranks) if relay(source, hosts, host) == rank]
        starts: list[list[int]] = []
        ends, metas, total = [], [], 0
        for source, source_mask_TR in enumerate(is_token_in_rank_RTR):
            starts.append([])
            for channel in _channels(len(source_mask_TR), num_channels):
                starts[-1].append(total)
                for token in range(len(source_mask_TR))[channel]:
                    if source_mask_TR[token, rank]:
                        total += 1
                        bits = sum(1 << i for i, peer in enumerate(local_ranks[:32]) if source_mask_TR[token, peer])
                        metas.append([host_of[source], bits - (1 << 32) * (bits >> 31)])
            ends.append(total)
        passed_GPL, passed_ends_GC = [], []
        for source in sources:
            is_passed_T = host_masks_RTD[source][:, host]
            heads_TL = _running_numbers(is_token_in_rank_RTR[source][:, local_ranks], num_channels)
            passed_GPL.append(heads_TL[is_passed_T])
            passed_ends_GC.append(_channel_ends(is_passed_T.unsqueeze(1), num_channels)[0])
        handles.append(
            NetworkHandle(
                is_token_in_rank=mask_TR.clone(),
                rdma_channel_prefix_matrix=_channel_ends(host_masks_RTD[rank], num_channels),
                gbl_channel_prefix_matrix=_channel_ends(mask_TR, num_channels),
                recv_rdma_channel_prefix_matrix=torch.stack(passed_ends_GC),
                recv_rdma_rank_prefix_sum=torch.stack([line[-1] for line in passed_ends_GC]).cumsum(0).int(),
                recv_gbl_channel_prefix_matrix=torch.tensor(starts).int(),
                recv_gbl_rank_prefix_sum=torch.tensor(ends).int(),
                recv_src_meta=torch.tensor(metas).view(-1, 2).int().view(torch.uint8),
                send_rdma_head=_running_numbers(host_masks_RTD[rank], num_channels),
                send_nvl_head=torch.cat(passed_GPL),
            )
        )
    return handles


def combine(
    x_RNH: Sequence[Tensor],
    is_token_in_rank_RTR: Sequence[Tensor],
    hosts: Hosts,
    *,
    topk_weights_RNK: Sequence[Tensor] | None = None,
    biases_RTH: Sequence[Sequence[Tensor]] | None = None,
) -> list[Combined]:
    """Bring rows back and add them, on each host and then over the hosts.

    The sum of a host is made in float32, goes through its ranks in ascending order, and is rounded to the dtype of `x`.
    The sum of a token is made in float32, begins with the biases in their order, goes on with the sums of the hosts in
    their order, and is rounded likewise. Weights are added alike.
    """
    combined = []
    for source, mask_TR in enumerate(is_token_in_rank_RTR):
        biases = [] if biases_RTH is None else biases_RTH[source]
        x_TH = _add_over_hosts(source, x_RNH, is_token_in_rank_RTR, hosts, biases)
        weights_TK = None
        if topk_weights_RNK is not None:
            weights_TK = _add_over_hosts(source, topk_weights_RNK, is_token_in_rank_RTR, hosts, [])
        assert len(x_TH) == len(mask_TR)
        combined.append(Combined(x=x_TH, topk_weights=weights_TK))
    return combined


def _add_over_hosts(
    source: int, rows_RNH: Sequence[Tensor], masks_RTR: Sequence[Tensor], hosts: Hosts, biases: Sequence[Tensor]
) -> Tensor:
    num_tokens, dtype = len(masks_RTR[source]), rows_RNH[0].dtype
    sum_TH = torch.zeros(num_tokens, rows_RNH[0].shape[1])
    for bias_TH in biases:
        sum_TH += bias_TH.float()
    for ranks in hosts:
        host_sum_TH = torch.zeros_like(sum_TH)
        for rank in ranks:
            first = sum(int(mask_TR[:, rank].sum()) for mask_TR in masks_RTR[:source])
            tokens = masks_RTR[source][:, rank].nonzero().flatten()
            host_sum_TH[tokens] += rows_RNH[rank][first : first + len(tokens)].float()
        sum_TH += host_sum_TH.to(dtype).float()
    return sum_TH.to(dtype)


def _channels(num_tokens: int, num_channels: int) -> list[slice]:
    """Return the tokens of each channel."""
    num_each = -(-num_tokens // num_channels)
    return [slice(channel * num_each, (channel + 1) * num_each) for channel in range(num_channels)]


def _channel_ends(mask_TR: Tensor, num_channels: int) -> Tensor:
    """Return int32 `[R, C]`: how many tokens of channels 0 to c go to each column."""
    counts_CR = torch.stack([mask_TR[channel].sum(0) for channel in _channels(len(mask_TR), num_channels)])
    return counts_CR.cumsum(0).T.int().contiguous()


def _running_numbers(mask_TR: Tensor, num_channels: int) -> Tensor:
    """Return int32 `[T, R]`: a token's number among those of its channel that go to a column, or -1."""
    numbers_TR = torch.full(mask_TR.shape, -1)
    for channel in _channels(len(mask_TR), num_channels):
        running_TR = mask_TR[channel].cumsum(0) - 1
        numbers_TR[channel] = torch.where(mask_TR[channel], running_TR, -1)
    return numbers_TR.int()
