"""What a low-latency call's shapes alone decide: where its words and slots lie, and how its kernel is cut up.

A plan is made once for each combination of shapes that does not include the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deep_ep.engines.base import RowFormat
from deep_ep.engines.gpu_kernels import Kernels
from deep_ep.engines.gpu_plans import Variant, row_alignment
from deep_ep.low_latency_layout import CombineLayout, DispatchLayout
from deep_ep.shapes import ExchangeShape
from deep_ep.tuning import next_power_of_two

_TILE_VALUES = 8192
"""Values that a program of four warps holds in registers at a time."""
_EXPERTS_BLOCK = 8
_NATIVE_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class LowLatencyTuning:
    """How the kernels are cut up. Only `wire_bits` must be the same on all ranks.

    Attributes:
        num_warps: Warps per program.
        programs_per_sm: Programs per streaming multiprocessor, of the launches of all ranks that share it. They wait
            for each other, so kernels are compiled with few enough registers that so many fit at once.
        wire_bits: Bits in which the sum of several rows travels: 32, 24 or 16. The error that this adds is at most
            2**-24, 2**-16 or 2**-8 of that sum; the result has one of 2**-8 from its own rounding.
    """

    num_warps: int = 4
    programs_per_sm: int = 3
    wire_bits: int = 24


@dataclass(frozen=True, slots=True)
class Shape:
    """What all plans depend on.

    Attributes:
        num_ranks: Ranks of the group.
        hidden: Channels of a row.
        num_topk: Top-k slots per token.
        num_max_tokens: The most tokens that a rank sends.
        num_experts: Of all ranks.
        idx_dtype: Of the expert ids.
        align: Bytes that divide the addresses of rows, at most 16.
    """

    num_ranks: int
    hidden: int
    num_topk: int
    num_max_tokens: int
    num_experts: int
    idx_dtype: torch.dtype
    align: int


@dataclass(frozen=True, slots=True)
class Programs:
    """How the programs of a launch share the work: one, the announcers, the senders, and all but the first receive.

    Attributes:
        first_sender: The number of the first sender; announcers are those from 1 on before it.
        num_senders: How many senders there are.
        num_useful: How many programs a launch that only receives has use for.
        num_most: How many fit on the device at once.
    """

    first_sender: int
    num_senders: int
    num_useful: int
    num_most: int

    def count(self, *, sends: bool, receives: bool) -> int:
        """Return the size of a launch's grid. Where rows are few, those who receive them have nothing else to do."""
        num_sending = self.first_sender + self.num_senders if sends else 0
        return max(min(num_sending + self.num_useful * receives, self.num_most), num_sending)


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """Layout, the values of the kernel's constants, and scales per row."""

    layout: DispatchLayout
    constants: tuple[object, ...]

    def programs(self, num_tokens: int, num_max_programs: int) -> Programs:
        """Return how the programs of a launch share the work.

        Example: for 128 tokens of 2 ranks, 256 experts and at most 396 programs there are the first, 32 announcers,
        128 senders and 235 others; a launch that only receives has 257 programs.
        """
        layout = self.layout
        num_announcers = min(-(-layout.num_experts // _EXPERTS_BLOCK), max((num_max_programs - 1) // 4, 1))
        num_senders = min(max(num_tokens, 1), max(num_max_programs - 1 - num_announcers, 1))
        num_rows = layout.num_ranks * layout.num_max_tokens
        return Programs(1 + num_announcers, num_senders, 1 + num_rows, num_max_programs)


@dataclass(frozen=True, slots=True)
class CombinePlan:
    """Layout, the values of the kernel's constants, and into how many parts a receiver cuts rows."""

    layout: CombineLayout
    constants: tuple[object, ...]
    num_parts: int

    def programs(self, num_tokens: int, num_max_programs: int) -> Programs:
        """Return how the programs of a launch share the work."""
        layout = self.layout
        num_announcers = min(max(num_tokens, 1), max((num_max_programs - 1) // 3, 1))
        num_sums = layout.num_ranks * layout.num_max_tokens * layout.num_pieces
        num_senders = min(max(num_sums, 1), max(num_max_programs - 1 - num_announcers, 1))
        return Programs(1 + num_announcers, num_senders, 1 + max(num_tokens, 1) * self.num_parts, num_max_programs)


def plan_dispatch(
    shape: Shape,
    row_format: RowFormat,
    type_of: Callable[[torch.dtype], object],
    *,
    has_native_fp8: bool,
    programs_per_sm: int,
) -> DispatchPlan:
    """Work out what follows from the shapes of a dispatch."""
    is_fp8, is_packed = row_format is not RowFormat.BF16, row_format.is_packed
    num_groups = -(-shape.hidden // row_format.group_channels)
    num_scales = 0 if not is_fp8 else -(-num_groups // 4) if is_packed else num_groups
    row_bytes = shape.hidden if is_fp8 else 2 * shape.hidden
    layout = DispatchLayout(
        shape.num_ranks, shape.num_max_tokens, shape.num_experts, shape.num_topk, row_bytes, num_scales
    )
    word = {1: torch.uint8, 2: torch.int16}.get(row_bytes & -row_bytes, torch.int32)
    row_words = row_bytes // word.itemsize
    topk = next_power_of_two(max(shape.num_topk, 1))
    constants = (
        shape.num_ranks,
        next_power_of_two(shape.num_ranks),
        shape.hidden,
        min(next_power_of_two(max(num_groups, 4)), _TILE_VALUES // row_format.group_channels),
        row_format.group_channels,
        type_of(shape.idx_dtype),
        topk,
        _tokens_at_once(topk, topk),
        _tokens_at_once(topk, _EXPERTS_BLOCK),
        shape.align,
        type_of(word),
        row_words,
        min(next_power_of_two(row_words), 4096),
        is_fp8,
        has_native_fp8,
        is_packed or row_format is RowFormat.FP8_ROUNDED,
        is_packed,
        num_scales,
        next_power_of_two(max(num_scales, 1)),
        layout.slot_bytes,
        layout.scales_offset,
        layout.routes_offset,
        programs_per_sm,
    )
    return DispatchPlan(layout, constants)


def plan_combine(
    shape: Shape, wire_bits: int, out_align: int, type_of: Callable[[torch.dtype], object], *, programs_per_sm: int
) -> CombinePlan:
    """Work out what follows from the shapes of a combine."""
    layout = CombineLayout(shape.num_ranks, shape.num_max_tokens, shape.num_topk, shape.hidden, wire_bits)
    topk = next_power_of_two(max(shape.num_topk, 1))
    columns = min(layout.piece_channels, _TILE_VALUES // min(next_power_of_two(shape.num_ranks), 8))
    constants = (
        shape.num_ranks,
        next_power_of_two(shape.num_ranks),
        shape.hidden,
        type_of(shape.idx_dtype),
        topk,
        _tokens_at_once(topk, topk),
        shape.align,
        out_align,
        layout.piece_channels,
        next_power_of_two(layout.num_pieces),
        columns,
        wire_bits - 16,
        type_of(torch.int16 if wire_bits == 32 else torch.uint8),
        layout.slot_bytes,
        layout.low_offset // (2 if wire_bits == 32 else 1),
        programs_per_sm,
    )
    return CombinePlan(layout, constants, -(-shape.hidden // columns))


def variants_of(
    kernels: Kernels, shape: ExchangeShape, num_ranks: int, tuning: LowLatencyTuning, *, has_native_fp8: bool
) -> list[Variant]:
    """Return the kernels of a layer: dispatch and combine, each as one launch and as two halves.

    Rows are taken to begin at multiples of 16 bytes where their size allows it, as those of whole tensors do, and
    expert ids to be int64.
    """
    plan_shape = Shape(
        num_ranks,
        shape.hidden,
        shape.num_topk,
        shape.num_max_tokens_per_rank,
        shape.num_experts,
        torch.int64,
        row_alignment(torch.bfloat16, shape.hidden),
    )
    row_format = RowFormat.FP8 if shape.use_fp8 else RowFormat.BF16
    programs_per_sm = programs_that_fit(tuning, has_native_fp8=has_native_fp8)
    dispatch = plan_dispatch(
        plan_shape, row_format, kernels.type_of, has_native_fp8=has_native_fp8, programs_per_sm=programs_per_sm
    )
    combine = plan_combine(
        plan_shape, tuning.wire_bits, plan_shape.align, kernels.type_of, programs_per_sm=programs_per_sm
    )
    return [
        Variant(kernel, (*plan.constants, *halves), tuning.num_warps)
        for kernel, plan in (
            (kernels.low_latency_dispatch.dispatch_kernel, dispatch),
            (kernels.low_latency_combine.combine_kernel, combine),
        )
        for halves in ((True, True), (True, False), (False, True))
    ]


def programs_that_fit(tuning: LowLatencyTuning, *, has_native_fp8: bool) -> int:
    """Return how many programs per streaming multiprocessor kernels are compiled for.

    One less where the GPU has no instruction for fp8: a cast without it needs more registers.
    """
    return tuning.programs_per_sm if has_native_fp8 else max(tuning.programs_per_sm - 1, 1)


def has_native_fp8(capability: tuple[int, int]) -> bool:
    """Return whether GPUs of a compute capability convert to and from fp8 themselves."""
    return capability >= _NATIVE_FP8_CAPABILITY


def _tokens_at_once(topk: int, num_experts: int) -> int:
    """Return how many tokens are compared with a block of experts at a time."""
    return min(max(_TILE_VALUES // (topk * num_experts), 1), 1024)
