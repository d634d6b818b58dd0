"""Casting rows to fp8 with a scale for each run of channels, in plain torch (`deep_ep.engines.base.RowFormat`)."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_ep.engines.base import RowFormat

_SCALES_PER_PACK = 4
_MAX_E4M3 = 448.0
_INVERSE = torch.tensor(1.0 / _MAX_E4M3)  # rounded to float32, as V1 has it
_MIN_AMAX = 1e-4


def num_scale_columns(hidden: int, row_format: RowFormat) -> int:
    """Return how many items the scales of one row have."""
    num_groups = -(-hidden // row_format.group_channels)
    if row_format is RowFormat.BF16:
        return 0
    return -(-num_groups // _SCALES_PER_PACK) if row_format.is_packed else num_groups


def scale_dtype(row_format: RowFormat) -> torch.dtype:
    """Return the dtype of scales."""
    return torch.int32 if row_format.is_packed else torch.float32


def cast_rows(x: Tensor, row_format: RowFormat) -> tuple[Tensor, Tensor]:
    """Cast rows `[T, H]` to fp8; the last group of a row may be short.

    Returns:
        `[T, H]` float8_e4m3fn and the scales: a float32 for each run, or four exponents in an int32.
    """
    num_tokens, hidden = x.shape
    group_channels = row_format.group_channels
    num_groups = -(-hidden // group_channels)
    padded = torch.zeros(num_tokens, num_groups * group_channels)
    padded[:, :hidden] = x
    groups = padded.view(num_tokens, num_groups, group_channels)
    amax = groups.abs().amax(2).clamp(min=_MIN_AMAX)
    if row_format is RowFormat.FP8:
        # A number divided by a tensor is a product with the inverse to torch: two roundings.
        factor, scales = torch.tensor(_MAX_E4M3) / amax, amax * _INVERSE
    else:
        scales = _round_up_to_power_of_two(amax * _INVERSE)
        factor = 1.0 / scales
    scaled = (groups * factor.unsqueeze(2)).clamp(-_MAX_E4M3, _MAX_E4M3)
    data = scaled.view(padded.shape)[:, :hidden].to(torch.float8_e4m3fn)
    return data, _pack_exponents(scales) if row_format.is_packed else scales


def _round_up_to_power_of_two(values: Tensor) -> Tensor:
    """Round positive, normal float32 values up, on their bits: add one to the exponent if any fraction bit is set."""
    bits = values.view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def _pack_exponents(scales: Tensor) -> Tensor:
    """Put the exponents of four neighbours into an int32, the first in the lowest byte; missing ones are 0."""
    num_tokens, num_groups = scales.shape
    num_packs = -(-num_groups // _SCALES_PER_PACK)
    exponents = torch.zeros(num_tokens, num_packs * _SCALES_PER_PACK, dtype=torch.uint8)
    exponents[:, :num_groups] = (scales.view(torch.int32) >> 23).to(torch.uint8)
    return exponents.view(torch.int32)
