"""What the ranks of the interpreted tests do."""

import torch

import low_latency_cases as cases
from deep_ep.engines.gpu_low_latency import GpuLowLatencyEngine
from deep_ep.engines.low_latency_plans import LowLatencyTuning
from deep_ep.memory.rendezvous import Rendezvous
from rank_pool import Rank


def make_engine(rank: Rank, timeout_s: float = 30.0, wire_bits: int = 24) -> GpuLowLatencyEngine:
    return GpuLowLatencyEngine(
        Rendezvous(rank.group), timeout_s, torch.device("cpu"), tuning=LowLatencyTuning(wire_bits=wire_bits)
    )


def run_rounds(rank: Rank, all_cases: list[cases.Case]) -> int:
    """Run rounds of all cases on one engine."""
    engine = make_engine(rank, wire_bits=all_cases[0].wire_bits)
    for seed, case in enumerate(all_cases):
        try:
            cases.run_round(engine, case, rank.rank, rank.num_ranks, seed, "cpu")
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
    num_bytes = engine.num_bytes()
    engine.close()
    return num_bytes
