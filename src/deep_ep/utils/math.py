"""Small calculations on sizes and tensors, with the names and results of DeepEP's module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GROUP_CHANNELS = 128
_MAX_E4M3 = 448.0
_MIN_AMAX = 1e-4


def calc_diff(x: Tensor, y: Tensor) -> float:
    """Return how unlike two tensors are: 0 for equal ones, towards 1 for others.

    It is one minus twice the product of the tensors over the sum of their squares, in float64, after one was added to
    every item so that tensors of zeros can be compared. It looks at the whole: compare element by element as well.
    """
    x, y = x.double() + 1, y.double() + 1
    return 1.0 - (2 * (x * y).sum() / (x.square() + y.square()).sum()).item()


def safe_div(a: float, b: float) -> float:
    """Return a / b, where nothing divided by nothing is 0.

    Raises:
        ZeroDivisionError: If only `b` is 0.
    """
    return 0.0 if a == 0 and b == 0 else a / b


def ceil_div(x: int, y: int) -> int:
    """Return x / y, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """Return the smallest multiple of y that is not below x."""
    return ceil_div(x, y) * y


def per_token_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast rows to fp8, with a scale for each run of 128 channels; the last run of a row may be shorter.

    Args:
        x: `[num_tokens, hidden]` of any float dtype; no token at all is fine.

    Returns:
        `[num_tokens, hidden]` float8_e4m3fn and `[num_tokens, ceil(hidden / 128)]` float32. A scale is the largest
        absolute value of its run, but at least 1e-4, over 448.
    """
    num_tokens, hidden = x.shape
    groups = _in_groups(x.float())
    amax = groups.abs().amax(2, keepdim=True).clamp(min=_MIN_AMAX)
    data = (groups * (_MAX_E4M3 / amax)).view(num_tokens, groups.size(1) * GROUP_CHANNELS)[:, :hidden]
    return data.to(torch.float8_e4m3fn).contiguous(), (amax / _MAX_E4M3).squeeze(2)


def per_token_cast_back(x_fp8: Tensor, x_scales: Tensor) -> Tensor:
    """Return the bfloat16 rows that fp8 rows and their scales stand for.

    Args:
        x_fp8: `[num_tokens, hidden]` float8_e4m3fn.
        x_scales: `[num_tokens, ceil(hidden / 128)]` float32; or `[num_tokens, ceil(hidden / 512)]` int32, which hold
            the exponents of four scales each, that of the first run in the lowest byte.
    """
    num_tokens, hidden = x_fp8.shape
    if x_fp8.numel() == 0:
        return x_fp8.to(torch.bfloat16)
    if x_scales.dtype == torch.int32:
        exponents = x_scales.reshape(num_tokens, -1).contiguous().view(torch.uint8)
        x_scales = (exponents.to(torch.int32) << 23).view(torch.float32)
    groups = _in_groups(x_fp8.float())
    scales = x_scales.reshape(num_tokens, -1)[:, : groups.size(1)]
    rows = (groups * scales.unsqueeze(2)).view(num_tokens, -1)
    return rows[:, :hidden].to(torch.bfloat16).contiguous()


def inplace_unique(x: Tensor, num_slots: int) -> None:
    """Replace each row by its distinct values in descending order, and -1 behind them.

    Args:
        x: `[num_tokens, num_values]` of integers below `num_slots`; negative ones are dropped.
        num_slots: One more than the largest value there can be.

    Example:
        >>> x = torch.tensor([[2, 5, 2, -1]])
        >>> inplace_unique(x, 8)
        >>> x
        tensor([[ 5,  2, -1, -1]])
    """
    has_value = torch.zeros(x.size(0), num_slots + 1, dtype=torch.bool, device=x.device)
    has_value.scatter_(1, torch.where(x < 0, num_slots, x).long(), value=True)
    values = torch.arange(num_slots, dtype=x.dtype, device=x.device)
    found = torch.where(has_value[:, :num_slots], values, -1).sort(1, descending=True).values
    num_kept = min(num_slots, x.size(1))
    x.fill_(-1)
    x[:, :num_kept] = found[:, :num_kept]


def create_grouped_scores(scores: Tensor, group_idx: Tensor, num_groups: int) -> Tensor:
    """Keep the scores of the chosen groups of experts and make those of the others 0.

    Args:
        scores: `[num_tokens, num_experts]`.
        group_idx: `[num_tokens, num_chosen]` int64; the groups that each token may choose experts from.
        num_groups: Groups of equally many consecutive experts.
    """
    num_tokens, num_experts = scores.shape
    is_chosen = torch.zeros(num_tokens, num_groups, dtype=torch.bool, device=scores.device)
    is_chosen.scatter_(1, group_idx, value=True)
    return scores * is_chosen.repeat_interleave(num_experts // num_groups, dim=1)


def hash_tensor(t: Tensor) -> int:
    """Return the sum of a tensor's memory as int32 words, or as bytes if it is no whole number of words."""
    flat = t.contiguous().view(-1).view(torch.uint8)
    return int((flat.view(torch.int32) if flat.numel() % 4 == 0 else flat).sum().item())


def hash_tensors(*tensors: Any) -> int:
    """Combine the hashes of tensors, also within tuples and lists, by exclusive or; others are passed over."""
    value = 0
    for item in tensors:
        if isinstance(item, (tuple, list)):
            value ^= hash_tensors(*item)
        elif isinstance(item, Tensor):
            value ^= hash_tensor(item)
    return value


def count_bytes(*tensors: Any) -> int:
    """Return the bytes of tensors, also within tuples and lists; None has none."""
    total = 0
    for item in tensors:
        if isinstance(item, (tuple, list)):
            total += count_bytes(*item)
        elif item is not None:
            total += item.numel() * item.element_size()
    return total


def _in_groups(x: Tensor) -> Tensor:
    """View rows as runs of 128 channels, the last one filled up with zeros."""
    num_groups = ceil_div(x.size(1), GROUP_CHANNELS)
    padded = torch.nn.functional.pad(x, (0, num_groups * GROUP_CHANNELS - x.size(1)))
    return padded.view(x.size(0), num_groups, GROUP_CHANNELS)
