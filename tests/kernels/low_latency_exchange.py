"""Low-latency rounds between real processes, every element compared; run by test_interpreted_low_latency.py.

TRITON_INTERPRET=1 python tests/kernels/low_latency_exchange.py --ranks 2
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import interpreter_fixes

import low_latency_cases as cases
from deep_ep.engines.base import RowFormat
from deep_ep.engines.gpu_low_latency import GpuLowLatencyEngine
from deep_ep.memory.rendezvous import Rendezvous

CASES = [
    cases.Case(4, 256, 3, 6),
    cases.Case(3, 200, 2, 5, RowFormat.FP8, split=True),
    cases.Case(5, 128, 4, 7, RowFormat.FP8_UE8M0, has_empty_rank=True, idx_dtype=torch.int32),
    cases.Case(2, 130, 2, 4, RowFormat.FP8_ROUNDED, repeated=True, skewed=True),
    cases.Case(3, 7, 1, 3, masked=1.0),
    cases.Case(4, 200, 3, 5, RowFormat.MXFP8),
]


def run_rank(rank: int, num_ranks: int, store: str) -> None:
    interpreter_fixes.install()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    engine = GpuLowLatencyEngine(Rendezvous(dist.group.WORLD), 60.0, torch.device("cpu"))
    for seed, case in enumerate(CASES):
        cases.run_round(engine, case, rank, num_ranks, seed, "cpu")
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    num_ranks = parser.parse_args().ranks
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(num_ranks, os.path.join(folder, "store")), nprocs=num_ranks)
