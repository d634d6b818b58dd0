"""What low-latency mode means: the tensors of all ranks in, the results of all ranks out, in plain torch.

Like `deep_ep.reference`, this file is a specification: it sends nothing, keeps nothing, shares no code with the
engines and is imported by tests and tools only. Dispatch is defined bit for bit; a combine is a sum, which engines may
make in any order and in float32, so it is given in float64 to measure them by.

Letters at the end of a name give the shape of a tensor: T tokens of one rank, K top-k slots, H hidden, S scales of a
token, G groups of 128 channels, E experts, L experts of one rank, R ranks, M the most tokens that a rank may send,
N = R * M rows that an expert has room for. A leading R means a list with one tensor for each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deep_ep.reference import local_experts

GROUP_CHANNELS = 128
MAX_FP8 = 448.0
MIN_AMAX = 1e-4


class Cast(NamedTuple):
    """Rows in fp8: float8_e4m3fn `[T, H]`, and scales `[T, S]`, float32 or int32."""

    x: Tensor
    scales: Tensor


class Received(NamedTuple):
    """What one rank gets from a dispatch.

    Attributes:
        x: `[L, N, H]`; of expert e the first `recv_count[e]` rows are real, sorted by source rank, then by token.
            The others are 0 here and anything in a real engine, and so it is with `scales` and `src_info`.
        scales: `[L, N, S]`, or None.
        recv_count: int32 `[L]`.
        src_info: int32 `[L, N]`; the index of each row among the tokens of its source.
        layout_range: int64 `[L, R]`; how many rows (low 32 bits) of each source begin where (high 32 bits).
    """

    x: Tensor
    scales: Tensor | None
    recv_count: Tensor
    src_info: Tensor
    layout_range: Tensor


def cast_to_fp8(
    x_TH: Tensor, *, round_scale: bool = False, use_ue8m0: bool = False, group_channels: int = GROUP_CHANNELS
) -> Cast:
    """Cast finite bfloat16 rows to fp8, with a scale for each group of 128 channels, or of 32 for MXFP8.

    The last group is shorter if H is not a multiple of that. With amax the largest absolute value of a group, but at
    least 1e-4, everything in float32 with one rounding per operation:

    - a scale is amax * (1 / 448), and values are multiplied with 448 / amax;
    - with `round_scale`, a scale is the smallest power of two that is not less, and values are multiplied with the
      inverse of that;
    - with `use_ue8m0`, which goes with `round_scale`, of each scale remains the biased exponent, one byte; four of
      them make an int32, the first in the lowest byte, and bytes for which there is no group are 0.

    Values are rounded to the nearest fp8 number, ties to even.

    Example:
        >>> cast = cast_to_fp8(torch.tensor([[7.0, -3.5]]).bfloat16(), round_scale=True)
        >>> cast.x.float(), cast.scales  # 7 / 448 is 2 ** -6 exactly
        (tensor([[ 448., -224.]]), tensor([[0.0156]]))
    """
    num_tokens, hidden = x_TH.shape
    num_groups = -(-hidden // group_channels)
    padded = torch.zeros(num_tokens, num_groups * group_channels)
    padded[:, :hidden] = x_TH.float()
    groups = padded.view(num_tokens, num_groups, group_channels)
    amax_TG = groups.abs().amax(dim=2).clamp(min=MIN_AMAX)
    scales_TG = amax_TG * torch.tensor(1.0 / MAX_FP8)
    factors_TG = torch.tensor(MAX_FP8) / amax_TG
    if round_scale:
        exponents_TG = _ceil_log2(scales_TG)
        scales_TG, factors_TG = torch.exp2(exponents_TG), torch.exp2(-exponents_TG)
    values = (groups * factors_TG[:, :, None]).clamp(-MAX_FP8, MAX_FP8)
    rows_TH = values.view(num_tokens, num_groups * group_channels)[:, :hidden].to(torch.float8_e4m3fn)
    return Cast(rows_TH.contiguous(), _pack_exponents(scales_TG) if use_ue8m0 else scales_TG)


def dequantize(cast: Cast, *, group_channels: int = GROUP_CHANNELS) -> Tensor:
    """Return the float32 `[T, H]` values that fp8 rows stand for."""
    num_tokens, hidden = cast.x.shape
    scales_TG = cast.scales
    if scales_TG.dtype == torch.int32:
        exponents = scales_TG.contiguous().view(torch.uint8).view(num_tokens, -1).int()
        scales_TG = (exponents << 23).view(torch.float32)
    return cast.x.float() * scales_TG.repeat_interleave(group_channels, dim=1)[:, :hidden]


def dispatch(
    x_RTH: Sequence[Tensor],
    topk_idx_RTK: Sequence[Tensor],
    *,
    num_max_tokens_per_rank: int,
    num_experts: int,
    scales_RTS: Sequence[Tensor] | None = None,
) -> list[Received]:
    """Send every token once to each expert that it names; return what each rank receives.

    Rows come as they are: `cast_to_fp8` makes those of an fp8 dispatch. -1 names no expert. An expert that a token
    names twice gets it once; in `combine` both slots count.
    """
    num_rows = len(x_RTH) * num_max_tokens_per_rank
    return [
        _receive(experts, x_RTH, topk_idx_RTK, scales_RTS, num_rows)
        for experts in local_experts(num_experts, len(x_RTH))
    ]


def combine(
    x_RLNH: Sequence[Tensor],
    topk_idx_RTK: Sequence[Tensor],
    topk_weights_RTK: Sequence[Tensor],
    received: Sequence[Received],
    *,
    num_experts: int,
) -> list[Tensor]:
    """Add, for each token, its rows times its weights; return float64 `[T, H]` of each rank.

    A token adds `topk_weights[t, k] * row` for each slot k that names an expert; one that names none gets zeros.
    """
    hidden = x_RLNH[0].shape[2]
    sums_RTH = [torch.zeros(len(idx), hidden, dtype=torch.float64) for idx in topk_idx_RTK]
    for rank, experts in enumerate(local_experts(num_experts, len(x_RLNH))):
        for local, expert in enumerate(experts):
            for src_rank, (topk_idx_TK, weights_TK) in enumerate(zip(topk_idx_RTK, topk_weights_RTK, strict=True)):
                rows = _rows_from(received[rank].layout_range, local, src_rank)
                token = received[rank].src_info[local, rows].long()
                weight = (weights_TK[token].double() * (topk_idx_TK[token] == expert)).sum(dim=1)
                sums_RTH[src_rank][token] += weight[:, None] * x_RLNH[rank][local, rows].double()
    return sums_RTH


def _receive(
    experts: range,
    x_RTH: Sequence[Tensor],
    topk_idx_RTK: Sequence[Tensor],
    scales_RTS: Sequence[Tensor] | None,
    num_rows: int,
) -> Received:
    """Return what the rank that owns these experts receives."""
    num_ranks, num_local = len(x_RTH), len(experts)
    x_LNH = x_RTH[0].new_zeros(num_local, num_rows, x_RTH[0].shape[1])
    scales_LNS = None if scales_RTS is None else scales_RTS[0].new_zeros(num_local, num_rows, scales_RTS[0].shape[1])
    src_info_LN = torch.zeros(num_local, num_rows, dtype=torch.int32)
    recv_count_L = torch.zeros(num_local, dtype=torch.int32)
    layout_range_LR = torch.zeros(num_local, num_ranks, dtype=torch.int64)
    for local, expert in enumerate(experts):
        begin = 0
        for src_rank in range(num_ranks):
            token = (topk_idx_RTK[src_rank] == expert).any(dim=1).nonzero().flatten()
            rows = slice(begin, begin + len(token))
            x_LNH[local, rows] = x_RTH[src_rank][token]
            if scales_LNS is not None and scales_RTS is not None:
                scales_LNS[local, rows] = scales_RTS[src_rank][token]
            src_info_LN[local, rows] = token.int()
            layout_range_LR[local, src_rank] = (begin << 32) | len(token)
            begin += len(token)
        recv_count_L[local] = begin
    return Received(x_LNH, scales_LNS, recv_count_L, src_info_LN, layout_range_LR)


def _rows_from(layout_range_LR: Tensor, local: int, src_rank: int) -> slice:
    begin_and_count = int(layout_range_LR[local, src_rank])
    begin, num_rows = begin_and_count >> 32, begin_and_count & 0xFFFFFFFF
    return slice(begin, begin + num_rows)


def _ceil_log2(values: Tensor) -> Tensor:
    """Return the smallest integers e with 2 ** e >= value, for positive normal float32 values, exactly."""
    bits = values.view(torch.int32)
    return ((bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0)).float()


def _pack_exponents(scales_TG: Tensor) -> Tensor:
    """Return int32 `[T, ceil(G / 4)]`: the exponent bytes of powers of two."""
    num_tokens, num_groups = scales_TG.shape
    packed = torch.zeros(num_tokens, -(-num_groups // 4) * 4, dtype=torch.uint8)
    packed[:, :num_groups] = (scales_TG.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return packed.view(torch.int32)
