"""What follows from the shapes of a normal call alone: how its kernels are cut up, and which variants those are.

Everything here can be told without a GPU, so that kernels can be compiled ahead of time for calls that nobody has made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from deep_ep.engines.gpu_kernels import Kernels
from deep_ep.gpu_layout import StagingLayout
from deep_ep.shapes import ExchangeShape
from deep_ep.tuning import GpuTuning, combine_tile, next_power_of_two, split_programs, tile_columns, unit_rows

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_COUNT_WARPS, _NOTIFY_WARPS = 4, 8


class DispatchKind(NamedTuple):
    """What decides how a dispatch is cut up: its rows, what travels beside them, and the SMs it may use."""

    dtype: torch.dtype
    hidden: int
    align: int
    num_topk: int
    idx_dtype: torch.dtype
    num_scales: int
    has_meta: bool
    num_sms: int


class CombineKind(NamedTuple):
    """What decides how a combine is cut up."""

    dtype: torch.dtype
    hidden: int
    align: int
    num_topk: int
    num_biases: int
    num_sms: int


class Variant(NamedTuple):
    """A kernel, the values of its constants, and its warps per program: what is compiled and loaded as one."""

    kernel: Any
    constants: tuple[Any, ...]
    num_warps: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What all calls of one kind have in common."""

    constants: tuple[Any, ...]
    layout: StagingLayout
    unit_rows: int
    num_programs: int
    num_senders: int
    first_receiver: int


def word_of(align: int) -> torch.dtype:
    """Return the widest word that rows of an alignment can be moved in."""
    return _WORDS.get(align, torch.int64)


def count_variant(kernels: Kernels, num_topk: int, idx_dtype: torch.dtype) -> Variant:
    """Return the kernel that counts where tokens go; its second constant is the tokens of a program."""
    topk_block = next_power_of_two(max(num_topk, 1))
    constants = (kernels.type_of(idx_dtype), max(1024 // topk_block, 1), topk_block)
    return Variant(kernels.layout.count_tokens_kernel, constants, _COUNT_WARPS)


def notify_variant(kernels: Kernels, num_ranks: int, num_channels: int) -> Variant:
    """Return the kernel that exchanges the counts."""
    ranks_block = next_power_of_two(num_ranks)
    constants = (num_ranks, ranks_block, next_power_of_two(num_channels), max(2048 // ranks_block, 1), 256)
    return Variant(kernels.layout.notify_kernel, constants, _NOTIFY_WARPS)


def plan_dispatch(num_ranks: int, tuning: GpuTuning, type_of: Callable[[torch.dtype], Any], kind: DispatchKind) -> Plan:
    """Work out what all dispatches of one kind have in common."""
    dtype, hidden, align, num_topk, idx_dtype, num_scales, has_meta, num_sms = kind
    row_bytes = hidden * dtype.itemsize
    word, row_words = word_of(align), row_bytes // word_of(align).itemsize
    columns = tile_columns(row_words, 4096 // word.itemsize)
    constants = (
        num_ranks,
        next_power_of_two(num_ranks),
        type_of(word),
        align,
        row_words,
        max(tuning.push_bytes // (columns * word.itemsize), 1),
        columns,
        next_power_of_two(tuning.copy_bytes // word.itemsize),
        type_of(idx_dtype),
        next_power_of_two(num_topk) if num_topk else 0,
        next_power_of_two(num_scales) if num_scales else 0,
        has_meta,
        tuning.stream,
    )
    layout = StagingLayout(row_bytes, num_topk, idx_dtype.itemsize if num_topk else 0, num_scales)
    split = split_programs(num_sms, num_ranks, tuning.num_channels_per_peer)
    return Plan(constants, layout, unit_rows(tuning, row_bytes), *split)


def plan_combine(num_ranks: int, tuning: GpuTuning, type_of: Callable[[torch.dtype], Any], kind: CombineKind) -> Plan:
    """Work out what all combines of one kind have in common."""
    dtype, hidden, align, num_topk, num_biases, num_sms = kind
    row_bytes = hidden * dtype.itemsize
    word = word_of(align)
    tile_tokens, max_columns = combine_tile(tuning, num_ranks)
    constants = (
        num_ranks,
        next_power_of_two(num_ranks),
        type_of(dtype),
        type_of(word),
        align,
        hidden,
        row_bytes // word.itemsize,
        tile_tokens,
        tile_columns(hidden, max_columns),
        next_power_of_two(tuning.copy_bytes // word.itemsize),
        next_power_of_two(num_topk) if num_topk else 0,
        num_biases,
        tuning.stream,
    )
    split = split_programs(num_sms, num_ranks, tuning.num_channels_per_peer)
    return Plan(constants, StagingLayout(row_bytes, num_topk), unit_rows(tuning, row_bytes), *split)


def variants_of(kernels: Kernels, shape: ExchangeShape, num_ranks: int, tuning: GpuTuning) -> list[Variant]:
    """Return the kernels of a layer: layout, dispatch, the same with a handle, combine with and without weights.

    Rows are taken to begin at multiples of 16 bytes where their size allows it, as those of whole tensors do, and
    expert ids to be int64.

    Args:
        kernels: The kernel modules.
        shape: The shape of the calls; `num_sms` is not 0.
        num_ranks: Ranks of the group.
        tuning: How kernels are cut up.
    """
    hidden, num_topk, num_sms = shape.hidden, shape.num_topk, shape.num_sms
    row_dtype = torch.float8_e4m3fn if shape.use_fp8 else torch.bfloat16
    common = (num_ranks, tuning, kernels.type_of)
    bf16, align = torch.bfloat16, row_alignment(torch.bfloat16, hidden)
    dispatches = {
        DispatchKind(
            row_dtype, hidden, row_alignment(row_dtype, hidden), num_topk, torch.int64, shape.num_scales, True, num_sms
        ),
        DispatchKind(
            row_dtype, hidden, row_alignment(row_dtype, hidden), 0, torch.int64, shape.num_scales, False, num_sms
        ),
        # With a handle and without scales rows travel in the backward pass of a combine.
        DispatchKind(bf16, hidden, align, 0, torch.int64, 0, False, num_sms),
    }
    combines = [CombineKind(bf16, hidden, align, topk, 0, num_sms) for topk in (0, num_topk)]
    dispatch_kernel, combine_kernel = kernels.dispatch.dispatch_kernel, kernels.combine.combine_kernel
    return [
        count_variant(kernels, num_topk, torch.int64),
        notify_variant(kernels, num_ranks, max(num_sms // 2, 1)),
        *(Variant(dispatch_kernel, plan_dispatch(*common, kind).constants, tuning.num_warps) for kind in dispatches),
        *(Variant(combine_kernel, plan_combine(*common, kind).constants, tuning.num_warps) for kind in combines),
    ]


def row_alignment(dtype: torch.dtype, hidden: int) -> int:
    """Return the largest power of two, at most 16, that divides the bytes of a row."""
    row_bytes = hidden * dtype.itemsize | 16
    return row_bytes & -row_bytes
