"""What the first call costs on this machine: `deep-ep check --first-call`.

New ranks make a buffer, then a dispatch and a combine, and the same again a hundred times; all ranks begin each of them
together, and the slowest rank counts. Once with a plain buffer, once with `preinitialize=True`. The first pair is
verified, so what is timed is right.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from deep_ep.bench.ranks import Rank, run_ranks
from deep_ep.buffer import Buffer
from deep_ep.errors import DeepEPError
from deep_ep.phases import PHASES
from deep_ep.shapes import ExchangeShape

NUM_CALLS = 100
_TOLERANCE = 0.1

CPU_SHAPES = (
    ExchangeShape(hidden=2048, num_topk=4, num_experts=16, num_max_tokens_per_rank=256),
    ExchangeShape(hidden=2048, num_topk=4, num_experts=16, num_max_tokens_per_rank=32, is_low_latency=True),
)
GPU_SHAPES = (
    ExchangeShape(hidden=7168, num_topk=8, num_experts=256, num_max_tokens_per_rank=4096),
    ExchangeShape(
        hidden=7168, num_topk=8, num_experts=256, num_max_tokens_per_rank=128, is_low_latency=True, use_fp8=True
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstCall:
    """What one start of the ranks cost.

    Attributes:
        shape: Of the calls.
        is_preinitialized: Whether the buffer was warmed by its constructor.
        construct_ms: How long the constructor took, on the slowest rank.
        phases_ms: Where that time went: the most that any rank had of each phase.
        pairs_us: How long each dispatch and combine took together, on the slowest rank, from the first on.
    """

    shape: ExchangeShape
    is_preinitialized: bool
    construct_ms: float
    phases_ms: Mapping[str, float]
    pairs_us: Sequence[float]

    @property
    def first_us(self) -> float:
        """Return the time of the first pair."""
        return self.pairs_us[0]

    @property
    def median_us(self) -> float:
        """Return the median of the others."""
        return statistics.median(self.pairs_us[1:])

    @property
    def ratio(self) -> float:
        """Return how many times the median the first pair took."""
        return self.first_us / self.median_us


def measure(
    shapes: Sequence[ExchangeShape], num_ranks: int, device: str, *, preinitialize: bool, num_calls: int = NUM_CALLS
) -> list[FirstCall]:
    """Start ranks, and time the first calls of each shape on them, each with a buffer of its own.

    Args:
        shapes: The shapes, in this order.
        num_ranks: How many ranks.
        device: "cpu" or "cuda".
        preinitialize: As the constructor of the buffer takes it.
        num_calls: Pairs of calls after the first.
    """
    by_rank = run_ranks(num_ranks, measure_on_rank, shapes, preinitialize, num_calls, device=device)
    return [
        FirstCall(
            shape=shape,
            is_preinitialized=preinitialize,
            construct_ms=max(result[0] for result in results),
            phases_ms={name: max(result[1][name] for result in results) for name in PHASES},
            pairs_us=[max(times) for times in zip(*(result[2] for result in results), strict=True)],
        )
        for shape, results in zip(shapes, zip(*by_rank, strict=True), strict=True)
    ]


Measured = tuple[float, dict[str, float], list[float]]


def measure_on_rank(rank: Rank, shapes: Sequence[ExchangeShape], preinitialize: bool, num_calls: int) -> list[Measured]:
    """Return the milliseconds of the constructor and of its phases, and the microseconds of each pair, by shape."""
    return [_measure(rank, shape, preinitialize, num_calls) for shape in shapes]


def _measure(rank: Rank, shape: ExchangeShape, preinitialize: bool, num_calls: int) -> Measured:
    start_s = perf_counter()
    buffer = Buffer(
        rank.group,
        low_latency_mode=shape.is_low_latency,
        device=rank.device,
        preinitialize=preinitialize,
        shapes=[shape],
    )
    construct_ms = 1e3 * (perf_counter() - start_s)
    generator = torch.Generator().manual_seed(rank.rank)
    num_tokens = shape.num_max_tokens_per_rank
    x = torch.randint(-8, 9, (num_tokens, shape.hidden), generator=generator).to(torch.bfloat16).to(rank.device)
    scores = torch.rand(num_tokens, shape.num_experts, generator=generator)
    topk_idx = scores.topk(shape.num_topk).indices.to(rank.device)
    weights = torch.full((num_tokens, shape.num_topk), 1 / shape.num_topk, device=rank.device)
    make_pair = _low_latency_pair if shape.is_low_latency else _normal_pair
    pairs_us = []
    for number in range(1 + num_calls):
        _wait_for(rank.device)
        dist.barrier(rank.group)
        start_s = perf_counter()
        combined, factor = make_pair(buffer, shape, x, topk_idx, weights)
        _wait_for(rank.device)
        pairs_us.append(1e6 * (perf_counter() - start_s))
        if number == 0:
            _verify(combined, x, factor)
    phases_ms = dict(buffer.init_report.phases_ms)
    dist.barrier(rank.group)
    buffer.destroy()
    return construct_ms, phases_ms, pairs_us


def _normal_pair(buffer: Buffer, shape: ExchangeShape, x: Any, topk_idx: Any, weights: Any) -> tuple[Any, Any]:
    per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, shape.num_experts)
    recv_x, _, _, _, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=weights,
    )
    assert isinstance(recv_x, torch.Tensor)
    assert handle is not None
    combined, _, _ = buffer.combine(recv_x, handle)
    return combined, in_rank


def _low_latency_pair(buffer: Buffer, shape: ExchangeShape, x: Any, topk_idx: Any, weights: Any) -> tuple[Any, Any]:
    limit = shape.num_max_tokens_per_rank
    recv_x, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, limit, shape.num_experts, use_fp8=shape.use_fp8)
    if isinstance(recv_x, tuple):
        rows, scales = recv_x
        recv_x = (rows.float() * scales.repeat_interleave(128, 2)[..., : shape.hidden]).to(torch.bfloat16)
    combined, _, _ = buffer.low_latency_combine(recv_x, topk_idx, weights, handle)
    return combined, None


def _verify(combined: Any, x: Any, in_rank: Any) -> None:
    """Compare what came back with what was sent, times the ranks that had it in normal mode."""
    expected = x.float() if in_rank is None else x.float() * in_rank.sum(1, keepdim=True)
    if not torch.allclose(combined.float(), expected, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise DeepEPError("the first dispatch and combine did not give back what was sent")


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def draw(results: Sequence[FirstCall], path: str) -> None:
    """Write a picture: a bar for each constructor, cut into phases, and one for the first pair beside the median.

    Args:
        results: What to draw.
        path: The file; its kind is that of its name.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.4 + 0.9 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    start, calls = figure.subplots(1, 2, sharey=True)
    names = [label(result) for result in results]
    left = [0.0] * len(results)
    for name in PHASES:
        widths = [result.phases_ms[name] for result in results]
        start.barh(names, widths, left=left, label=name)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    start.set(xlabel="ms, most of any rank", title="constructor")
    start.legend(fontsize="small")
    places = range(len(results))
    calls.barh([place + 0.2 for place in places], [result.first_us for result in results], 0.4, label="first")
    calls.barh(
        [place - 0.2 for place in places], [result.median_us for result in results], 0.4, label="median of later"
    )
    for place, result in zip(places, results, strict=True):
        calls.text(result.first_us, place + 0.2, f" {result.ratio:.2f} x", va="center", fontsize="small")
    calls.set(xlabel="us, slowest rank", title="dispatch and combine")
    calls.margins(x=0.15)
    calls.legend(fontsize="small")
    figure.savefig(path, dpi=130)


def label(result: FirstCall) -> str:
    """Return what a result is called in tables and pictures."""
    mode = "low latency" if result.shape.is_low_latency else "normal"
    return f"{mode}, {'preinitialized' if result.is_preinitialized else 'plain'}"
