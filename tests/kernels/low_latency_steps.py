"""What ranks do in test_low_latency_protocol.py."""

import interpreter_fixes
import pytest
import torch

import low_latency_cases as cases
from deep_ep.engines.gpu_low_latency import GpuLowLatencyEngine
from deep_ep.engines.low_latency_plans import LowLatencyTuning
from deep_ep.errors import CapacityError, PeerTimeoutError
from deep_ep.memory.rendezvous import Rendezvous
from deep_ep.shapes import ExchangeShape
from rank_pool import Rank


def make_engine(rank: Rank, timeout_s: float) -> GpuLowLatencyEngine:
    interpreter_fixes.install()
    return GpuLowLatencyEngine(Rendezvous(rank.group), timeout_s, torch.device("cpu"))


def refuse_a_third(rank: Rank) -> str:
    """Have two dispatches in flight, be refused a third, finish them in the other order and find both right."""
    engine = make_engine(rank, 60.0)
    case = cases.Case(2, 128, 2, 4, num_tokens=2, split=True)
    rounds = [cases.make_inputs(case, rank.num_ranks, seed) for seed in (1, 2)]
    pending = [cases.start_dispatch(engine, case, inputs, rank.rank, "cpu") for inputs in rounds]
    with pytest.raises(CapacityError) as refused:
        cases.start_dispatch(engine, case, rounds[0], rank.rank, "cpu")
    for inputs, one in zip(reversed(rounds), reversed(pending), strict=True):
        one.finish()
        cases.check_dispatch(case, one.result, cases.expected_dispatch(case, inputs)[rank.rank])
    cases.run_round(engine, case, rank.rank, rank.num_ranks, 3, "cpu")
    engine.close()
    return str(refused.value)


def wait_in_vain(rank: Rank) -> str:
    """Rank 0 calls once more than rank 1; return what it is told."""
    engine = make_engine(rank, 0.5)
    case = cases.Case(1, 128, 1, 2, num_tokens=1, masked=0.0)
    engine.reserve(ExchangeShape(hidden=128, num_topk=2, num_experts=4, num_max_tokens_per_rank=8, is_low_latency=True))
    message = ""
    if rank.rank == 0:
        cases.start_dispatch(engine, case, cases.make_inputs(case, rank.num_ranks, 1), 0, "cpu")
        with pytest.raises(PeerTimeoutError) as told:
            engine.check()
        message = str(told.value)
    rank.meet("over")
    return message


def sum_in_bits(rank: Rank, wire_bits: int) -> None:
    """Combine with sums of so many bits; the error must be within what those allow."""
    interpreter_fixes.install()
    tuning = LowLatencyTuning(wire_bits=wire_bits)
    engine = GpuLowLatencyEngine(Rendezvous(rank.group), 60.0, torch.device("cpu"), tuning=tuning)
    case = cases.Case(3, 200, 4, 4, num_tokens=3, masked=0.0, wire_bits=wire_bits)
    cases.run_round(engine, case, rank.rank, rank.num_ranks, wire_bits, "cpu")
    engine.close()
