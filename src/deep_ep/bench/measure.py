"""One case: verified, then timed beside torch.distributed in the same run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from deep_ep.bench import oracle
from deep_ep.bench.case import Case
from deep_ep.bench.clock import CLOCKS, time_calls, time_graphs
from deep_ep.bench.oracle import LowLatencyCalls, NormalCalls
from deep_ep.bench.ranks import Rank
from deep_ep.bench.rival import TorchExchange
from deep_ep.buffer import Buffer
from deep_ep.config import Config
from deep_ep.low_latency_reference import GROUP_CHANNELS
from deep_ep.reference import local_experts

Record = dict[str, Any]


def measure(rank: Rank, buffer: Buffer, case: Case, num_iterations: int) -> Record:
    """Verify a case and time its calls; all ranks together.

    Returns:
        The fields of the case; `num_claims` that held; `sent_bytes`, the rows of the busiest rank that go to any
        rank, counted once per rank (normal) or per expert (low latency); the times of the calls in us; of the rival
        in `torch_..._us` and the ratios, if there is a rival; and GB/s of dispatch and combine.

    Raises:
        VerificationError: If a result is wrong; then nothing is timed.
    """
    num_claims = oracle.require_verified(rank, buffer, case)
    time_mode = _time_normal if case.mode == "normal" else _time_low_latency
    times = time_mode(rank, buffer, case, num_iterations)
    dispatch_bytes, combine_bytes = _sent_bytes(rank, case)
    record: Record = {
        **asdict(case),
        "num_ranks": rank.num_ranks,
        "device": rank.device.type,
        "num_claims": num_claims,
        "sent_bytes": dispatch_bytes,
        "combine_sent_bytes": combine_bytes,
        "clock": CLOCKS["graph" if case.mode != "normal" and rank.device.type == "cuda" else rank.device.type],
        **times,
    }
    for call, num_bytes in (("dispatch", dispatch_bytes), ("combine", combine_bytes)):
        record[f"{call}_gb_per_s"] = num_bytes / times[f"{call}_us"] / 1e3
        if f"torch_{call}_us" in times:
            record[f"{call}_ratio"] = times[f"torch_{call}_us"] / times[f"{call}_us"]
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in record.items()}


def _time_normal(rank: Rank, buffer: Buffer, case: Case, num_iterations: int) -> dict[str, float]:
    calls = NormalCalls(buffer, case, rank)
    recv_x, *_, handle, _ = calls.dispatch()
    y = _random_rows(recv_x[0] if isinstance(recv_x, tuple) else recv_x)
    timed = {
        "dispatch_us": calls.dispatch,
        "dispatch_cached_us": lambda: calls.cached(handle),
        "combine_us": lambda: calls.combine(y, handle),
    }
    del recv_x
    return time_calls(rank, timed | _rival_calls(rank, case), num_iterations)


def _time_low_latency(rank: Rank, buffer: Buffer, case: Case, num_iterations: int) -> dict[str, float]:
    calls = LowLatencyCalls(buffer, case, rank)
    recv_x, _, handle, *_ = calls.dispatch()
    y = _random_rows(recv_x[0] if isinstance(recv_x, tuple) else recv_x)

    def pair() -> None:
        *_, handle, _, _ = calls.dispatch()
        calls.combine(y, handle)

    timed = {
        "dispatch_us": calls.dispatch,
        "combine_us": lambda: calls.combine(y, handle),
        "pair_us": pair,
    }
    rival = _rival_calls(rank, case)
    if rank.device.type == "cuda":
        return time_graphs(rank, timed, num_iterations) | (time_calls(rank, rival, num_iterations) if rival else {})
    return time_calls(rank, timed | rival, num_iterations)


def time_sms(rank: Rank, buffer: Buffer, case: Case, num_sms: int, num_iterations: int) -> dict[str, float]:
    """Return the times of cached dispatch and combine with so many SMs."""
    calls, config = NormalCalls(buffer, case, rank), Config(num_sms)
    recv_x, *_, handle, _ = calls.dispatch(config=config)
    y = _random_rows(recv_x[0] if isinstance(recv_x, tuple) else recv_x)
    timed = {
        "dispatch_us": lambda: calls.dispatch(config=config),
        "dispatch_cached_us": lambda: calls.cached(handle, config=config),
        "combine_us": lambda: calls.combine(y, handle, config=config),
    }
    return time_calls(rank, timed, num_iterations)


def _rival_calls(rank: Rank, case: Case) -> dict[str, Any]:
    """Return the calls of torch.distributed; none for CUDA tensors between ranks that share a GPU."""
    if rank.device.type == "cuda" and not rank.has_nccl:
        return {}
    rival, inputs = TorchExchange(case.num_experts), case.inputs(rank.rank, rank.num_ranks).to(rank.device)
    rival.verify(*inputs)
    rows, weights, sent = rival.dispatch(*inputs)
    y = _random_rows(rows)
    # A low-latency combine is weighted, a normal one is not.
    factors = weights if case.mode != "normal" else None
    return {
        "torch_dispatch_us": lambda: rival.dispatch(*inputs),
        "torch_combine_us": lambda: rival.combine(y, sent, factors),
    }


def _random_rows(like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, dtype=torch.bfloat16, device=like.device)


def _sent_bytes(rank: Rank, case: Case) -> tuple[int, int]:
    """Return the bytes of rows, and scales, of a dispatch, and those of a combine, on the busiest rank."""
    topk_idx = case.inputs(rank.rank, rank.num_ranks).topk_idx
    num_rows = int((topk_idx >= 0).sum())
    if case.mode == "normal":
        ends = torch.tensor([owned.stop for owned in local_experts(case.num_experts, rank.num_ranks)])
        dst_rank = torch.where(topk_idx >= 0, torch.bucketize(topk_idx, ends, right=True), -1)
        num_rows = sum(int((dst_rank == dst).any(1).sum()) for dst in range(rank.num_ranks))
    row_bytes = 2 * case.hidden if case.dtype == "bf16" else case.hidden + 4 * -(-case.hidden // GROUP_CHANNELS)
    most = rank.slowest({"num_rows": num_rows})["num_rows"]
    return int(most) * row_bytes, int(most) * 2 * case.hidden
