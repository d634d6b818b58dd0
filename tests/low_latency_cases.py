"""One round of low-latency calls, compared with the specification element by element; for any engine and device.

Every rank makes the inputs of all ranks from the same seed, so each knows what it must get.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_ep import low_latency_reference as reference
from deep_ep.engines.base import (
    LowLatencyCombineRequest,
    LowLatencyDispatchRequest,
    LowLatencyDispatchResult,
    Pending,
    RowFormat,
)
from deep_ep.reference import local_experts

FORMATS = list(RowFormat)
_NUM_DIFFERENT_ROWS = 509


@dataclass(frozen=True)
class Case:
    """Shapes of a round; `num_tokens` None draws one for each rank, the last rank gets none if `has_empty_rank`."""

    num_max_tokens: int
    hidden: int
    num_topk: int
    num_experts: int
    row_format: RowFormat = RowFormat.BF16
    num_tokens: int | None = None
    idx_dtype: torch.dtype = torch.int64
    split: bool = False
    masked: float = 0.2
    has_empty_rank: bool = False
    skewed: bool = False
    repeated: bool = False
    wire_bits: int = 24
    scale: float = 1.0


@dataclass
class Inputs:
    """The inputs of all ranks."""

    x: list[Tensor]
    topk_idx: list[Tensor]
    topk_weights: list[Tensor]
    y: list[Tensor]


def make_inputs(case: Case, num_ranks: int, seed: int) -> Inputs:
    """Draw the inputs of all ranks."""
    generator = torch.Generator().manual_seed(seed)
    numbers = random.Random(seed)
    inputs = Inputs([], [], [], [])
    for rank in range(num_ranks):
        num_tokens = case.num_tokens if case.num_tokens is not None else numbers.randint(0, case.num_max_tokens)
        if case.has_empty_rank and rank == num_ranks - 1:
            num_tokens = 0
        x = torch.randn(num_tokens, case.hidden, generator=generator)
        # Some tokens are tiny, one is zero: scales have a least value.
        x *= torch.tensor([numbers.choice([1.0, 1e-3, 30.0, 1e-6, 0.0]) for _ in range(num_tokens)])[:, None]
        choice = torch.rand(num_tokens, case.num_experts, generator=generator)
        num_named = min(case.num_topk, case.num_experts)
        topk_idx = torch.full((num_tokens, case.num_topk), -1)
        topk_idx[:, :num_named] = choice.argsort(dim=1)[:, :num_named]
        if case.skewed:
            topk_idx[:, :num_named] = torch.arange(num_named)
        if case.repeated:
            topk_idx[:, -1] = topk_idx[:, 0]
        topk_idx[torch.rand(topk_idx.shape, generator=generator) < case.masked] = -1
        inputs.x.append(x.bfloat16())
        inputs.topk_idx.append(topk_idx.to(case.idx_dtype))
        inputs.topk_weights.append(torch.rand(num_tokens, case.num_topk, generator=generator))
        num_own = len(local_experts(case.num_experts, num_ranks)[rank])
        # Of some hundred different rows, as there may be hundreds of thousands.
        rows = (torch.randn(_NUM_DIFFERENT_ROWS, case.hidden, generator=generator) * case.scale).bfloat16()
        shape = (num_own, num_ranks * case.num_max_tokens)
        inputs.y.append(rows[torch.randint(_NUM_DIFFERENT_ROWS, shape, generator=generator)])
    return inputs


def expected_dispatch(case: Case, inputs: Inputs) -> list[reference.Received]:
    """Return what every rank must receive."""
    rows, scales = inputs.x, None
    if case.row_format is not RowFormat.BF16:
        options = {
            "round_scale": case.row_format is not RowFormat.FP8,
            "use_ue8m0": case.row_format in (RowFormat.FP8_UE8M0, RowFormat.MXFP8),
            "group_channels": 32 if case.row_format is RowFormat.MXFP8 else 128,
        }
        casts = [reference.cast_to_fp8(x, **options) for x in inputs.x]
        rows, scales = [cast.x for cast in casts], [cast.scales for cast in casts]
    return reference.dispatch(
        rows,
        [idx.long() for idx in inputs.topk_idx],
        num_max_tokens_per_rank=case.num_max_tokens,
        num_experts=case.num_experts,
        scales_RTS=scales,
    )


def start_dispatch(engine, case: Case, inputs: Inputs, rank: int, device) -> Pending[LowLatencyDispatchResult]:
    """Issue the dispatch of this rank."""
    return engine.dispatch(
        LowLatencyDispatchRequest(
            x=inputs.x[rank].to(device),
            topk_idx=inputs.topk_idx[rank].to(device),
            num_max_tokens_per_rank=case.num_max_tokens,
            num_experts=case.num_experts,
            row_format=case.row_format,
            recv_stats=None,
            wait_stats=None,
        ),
        split=case.split,
    )


def check_dispatch(case: Case, result: LowLatencyDispatchResult, expected: reference.Received) -> None:
    """Compare every real row, byte by byte."""
    assert torch.equal(result.recv_count.cpu(), expected.recv_count)
    assert torch.equal(result.handle.layout_range.cpu(), expected.layout_range)
    src_info = result.handle.src_info.cpu()
    x, scales = result.x.cpu(), None if result.scales is None else result.scales.cpu()
    assert x.shape == expected.x.shape
    assert x.dtype == expected.x.dtype
    if scales is not None:
        assert scales.shape == expected.scales.shape
        assert scales.dtype == expected.scales.dtype
        assert result.scales.stride(1) == 1
    for local, num_rows in enumerate(expected.recv_count.tolist()):
        rows = (local, slice(num_rows))
        assert torch.equal(src_info[rows], expected.src_info[rows])
        assert torch.equal(x[rows].view(torch.uint8), expected.x[rows].view(torch.uint8)), f"expert {local}"
        if scales is not None:
            bits, expected_bits = (s[rows].contiguous().view(torch.int32) for s in (scales, expected.scales))
            assert torch.equal(bits, expected_bits), f"expert {local}"


def poisoned(y: Tensor, received: reference.Received) -> Tensor:
    """Return rows for combine in which those that are not real are NaN."""
    y = y.clone()
    for local, num_rows in enumerate(received.recv_count.tolist()):
        y[local, num_rows:] = torch.nan
    return y


def start_combine(engine, case: Case, inputs: Inputs, y: Tensor, result, rank: int, device) -> Pending[Tensor]:
    """Issue the combine of this rank."""
    num_tokens = inputs.x[rank].size(0)
    return engine.combine(
        LowLatencyCombineRequest(
            x=y.to(device),
            topk_idx=inputs.topk_idx[rank].to(device),
            topk_weights=inputs.topk_weights[rank].to(device),
            handle=result.handle,
            use_logfmt=False,
            out=torch.full((num_tokens, case.hidden), torch.nan, dtype=torch.bfloat16, device=device),
            wait_stats=None,
        ),
        split=case.split,
    )


def expected_combine(
    case: Case, inputs: Inputs, received: list[reference.Received]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sums, and the sums of the absolute values of what is added, of all ranks."""
    idx = [idx.long() for idx in inputs.topk_idx]
    weights = inputs.topk_weights
    sums = reference.combine(inputs.y, idx, weights, received, num_experts=case.num_experts)
    sizes = reference.combine([y.abs() for y in inputs.y], idx, weights, received, num_experts=case.num_experts)
    return sums, sizes


def check_combine(case: Case, out: Tensor, expected: Tensor, size: Tensor) -> float:
    """Compare every element; return the largest error as a part of what is allowed.

    Allowed are half a step of the bf16 result, and for each sum under way its rounding and float32's own.
    """
    out = out.cpu().double()
    assert out.shape == expected.shape
    assert not out.isnan().any()
    half_step = torch.ldexp(torch.ones_like(expected), torch.frexp(expected).exponent - 9)
    allowed = half_step + size * (2.0 ** -(case.wire_bits - 8) + 2.0**-21) + 1e-38
    error = (out - expected).abs()
    assert bool((error <= allowed).all()), float((error / allowed).max())
    return float((error / allowed).max()) if error.numel() else 0.0


def run_round(engine, case: Case, rank: int, num_ranks: int, seed: int, device) -> None:
    """Dispatch and combine, and compare both."""
    inputs = make_inputs(case, num_ranks, seed)
    received = expected_dispatch(case, inputs)
    pending = start_dispatch(engine, case, inputs, rank, device)
    pending.finish()
    check_dispatch(case, pending.result, received[rank])
    sums, sizes = expected_combine(case, inputs, received)
    y = poisoned(inputs.y[rank], received[rank])
    combined = start_combine(engine, case, inputs, y, pending.result, rank, device)
    combined.finish()
    check_combine(case, combined.result, sums[rank], sizes[rank])
