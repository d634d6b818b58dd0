"""Measure what metrics cost a call on the host.

    python benchmarks/metrics_overhead.py [--json FILE]

The exchange is replaced by a function that returns what was made before. Times are those of the thread on the CPU, the
least mean of several runs, adding up included; checked: every call is counted once.
"""

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from deep_ep.bench.facts import versions
from deep_ep.latency import LatencyMonitor
from deep_ep.metrics import BufferMetrics

NUM_CALLS, NUM_RUNS, NUM_LOCAL_EXPERTS = 8192, 10, 32


def time_us(latency, request, result) -> float:
    def call(_):
        return result

    times_s = []
    for _ in range(NUM_RUNS):
        begin_s = time.thread_time()
        for _ in range(NUM_CALLS):
            latency.run("dispatch", call, request)
        times_s.append((time.thread_time() - begin_s) / NUM_CALLS)
    return min(times_s) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record to this file")
    args = parser.parse_args()
    cpu = torch.device("cpu")
    latency = LatencyMonitor(0, 1, cpu)
    topology = SimpleNamespace(local_ranks=(0,))
    buffer = SimpleNamespace(rank=0, group_size=1, latency=latency, topology=topology, count_expert_rows=None)
    counts = list(range(NUM_LOCAL_EXPERTS))
    request = SimpleNamespace(
        layout=SimpleNamespace(num_tokens_per_expert=torch.zeros(NUM_LOCAL_EXPERTS)), num_worst_tokens=0
    )
    result = SimpleNamespace(x=torch.zeros(4, 4), num_recv_tokens_per_expert=counts)
    plain_us = time_us(latency, request, result)
    metrics = BufferMetrics(buffer, 0, cpu)
    with_metrics_us = time_us(latency, request, result)
    metrics.fold()
    num_calls = NUM_CALLS * NUM_RUNS
    assert metrics.moved_bytes["dispatch"] == num_calls * result.x.nbytes
    assert [metrics.expert_tokens[expert] for expert in range(NUM_LOCAL_EXPERTS)] == [num_calls * n for n in counts]
    record = {
        "what": f"host time of a dispatch beyond the exchange, {NUM_LOCAL_EXPERTS} local experts, least of runs",
        "us": {"without metrics": round(plain_us, 3), "with metrics": round(with_metrics_us, 3)},
        "versions": versions(),
    }
    print(json.dumps(record, indent=2))
    if args.json:
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
