"""Mixed normal and low-latency exchanges of random shapes for a long time, every element compared.

python tests/faults/soak.py --minutes 30 --ranks 2 --json benchmarks/results/soak_cpu.json --plot docs/figures/soak.png

Writes, per interval, resident memory, open descriptors and the median and 99th percentile of the time of an exchange.
Memory and descriptors must be flat: their last values are compared with those after a tenth of the time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import ranks
from deep_ep import Buffer
from forked_ranks import ForkedRanks
from rank_pool import Rank

GROWTH_BYTES = 32 << 20


def soak(rank: Rank, seconds: float, interval_s: float) -> list[dict[str, float]]:
    """Exchange until time is up; return a sample per interval."""
    buffer = Buffer(rank.group, low_latency_mode=True)
    began_s = sampled_s = time.monotonic()
    samples, times_s, seed = [], [], 0
    while True:
        before_s = time.monotonic()
        ranks.exchange(rank, buffer, seed)
        times_s.append(time.monotonic() - before_s)
        seed += 1
        if seed % 50:
            continue
        # All ranks stop after the same exchange: rank 0 says when.
        is_over = buffer.runtime.exchanger.control.all_gather([int(time.monotonic() - began_s > seconds)])[0][0]
        if time.monotonic() - sampled_s > interval_s or is_over:
            sampled_s = time.monotonic()
            times_s.sort()
            gc.collect()
            samples.append(
                {
                    "after_s": round(sampled_s - began_s, 1),
                    "num_exchanges": seed,
                    "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
                    "num_descriptors": len(os.listdir("/proc/self/fd")),
                    "median_us": round(times_s[len(times_s) // 2] * 1e6),
                    "p99_us": round(times_s[len(times_s) * 99 // 100] * 1e6),
                }
            )
            times_s = []
        if is_over:
            buffer.destroy()
            return samples


def plot(samples: list[dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, figsize=(8, 7), sharex=True)
    minutes = [sample["after_s"] / 60 for sample in samples]
    axes[0].plot(minutes, [sample["resident_bytes"] / 2**20 for sample in samples])
    axes[0].set_ylabel("resident MiB")
    axes[1].plot(minutes, [sample["num_descriptors"] for sample in samples])
    axes[1].set_ylabel("descriptors")
    axes[2].plot(minutes, [sample["median_us"] for sample in samples], label="median")
    axes[2].plot(minutes, [sample["p99_us"] for sample in samples], label="p99")
    axes[2].set_ylabel("us per exchange, checked")
    axes[2].set_yscale("log")
    axes[2].legend()
    axes[2].set_xlabel("minutes")
    for axis in axes[:2]:
        axis.set_ylim(bottom=0)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--interval-s", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    seconds = 60 * arguments.minutes
    with ForkedRanks(arguments.ranks, soak, seconds, arguments.interval_s) as group:
        everyone = group.results(timeout_s=seconds + 120)
    early, late = everyone[0][len(everyone[0]) // 10], everyone[0][-1]
    is_flat = (
        late["resident_bytes"] <= early["resident_bytes"] + GROWTH_BYTES
        and late["num_descriptors"] <= early["num_descriptors"]
    )
    if arguments.json:
        record = {"minutes": arguments.minutes, "num_ranks": arguments.ranks, "is_flat": is_flat, "ranks": everyone}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    if arguments.plot:
        plot(everyone[0], arguments.plot)
    print(f"{late['num_exchanges']} exchanges on {arguments.ranks} ranks, every element right; flat: {is_flat}")
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
