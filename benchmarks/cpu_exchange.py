"""Time dispatch and combine on CPU ranks, beside what torch.distributed (Gloo) needs for the same on the same cores.

It is `deep-ep bench` with the sizes and routings of the README, and with what a training loop takes of memory. Every
line is checked first, rows bit by bit and sums element by element, against `deep_ep.reference`; a wrong result ends the
program.

A time is the median over iterations of one call, layout included, and of the ranks the slowest. GB/s counts one copy of
a token per rank that it goes to, for both sides.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch

from deep_ep import Buffer
from deep_ep.bench import facts
from deep_ep.bench.case import Case
from deep_ep.bench.clock import CLOCKS
from deep_ep.bench.measure import measure
from deep_ep.bench.oracle import NormalCalls
from deep_ep.bench.ranks import Rank, run_ranks

HIDDEN = 2048
SIZES = {"64 KB": 64 << 10, "256 KB": 256 << 10, "1 MB": 1 << 20, "8 MB": 8 << 20, "32 MB": 32 << 20}


def make_case(size: str, num_experts: int, topk: int) -> Case:
    num_tokens = SIZES[size] // (2 * HIDDEN)
    return Case(name=size, num_tokens=num_tokens, hidden=HIDDEN, num_topk=topk, num_experts=num_experts)


def measure_size(rank: Rank, buffer: Buffer, case: Case, iterations: int) -> dict[str, Any]:
    record = measure(rank, buffer, case, iterations)
    times = {name.replace("torch_", "gloo_"): value for name, value in record.items() if name.endswith("_us")}
    return {
        "size": case.name,
        "num_ranks": rank.num_ranks,
        "num_tokens": case.num_tokens,
        "hidden": case.hidden,
        "topk": case.num_topk,
        "num_experts": case.num_experts,
        "sent_bytes": record["sent_bytes"],
        **times,
        "dispatch_ratio": record["dispatch_ratio"],
        "combine_ratio": record["combine_ratio"],
    }


def measure_memory(rank: Rank, case: Case) -> dict[str, Any]:
    """Compare the peak of resident memory over a training-like loop with the bytes that the loop's tensors hold."""
    buffer = Buffer(rank.group, device="cpu")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # begin a new peak
    before_bytes = resident_bytes("VmRSS")
    calls = NormalCalls(buffer, case, rank)
    held_bytes = 0
    for _ in range(10):
        recv_x, _, _, _, handle, _ = calls.dispatch()
        y = recv_x * 2
        combined, _, _ = calls.combine(y, handle)
        held_bytes = max(held_bytes, sum(t.numel() * t.element_size() for t in (calls.x, recv_x, y, combined)))
    peak_bytes = resident_bytes("VmHWM") - before_bytes
    buffer.destroy()
    return {
        "case": "memory",
        "size": case.name,
        "held_bytes": held_bytes,
        "peak_bytes": peak_bytes,
        "peak_ratio": round(peak_bytes / held_bytes, 2),
    }


def resident_bytes(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


def show(record: dict[str, Any]) -> None:
    """Print one line of the table on stdout."""
    cells = [f"{record['size']:>7} {record['num_experts']:>4}/{record['topk']:<3}"]
    for call in ("dispatch", "combine"):
        us, gloo_us = record[f"{call}_us"], record[f"gloo_{call}_us"]
        cells.append(
            f"{us:>8.0f} us {record['sent_bytes'] / us / 1e3:>6.2f} GB/s  Gloo {gloo_us:>8.0f} us"
            f"  {record[f'{call}_ratio']:>5.1f} x"
        )
    print("  |  ".join(cells), flush=True)


def run_rank(rank: Rank, args: argparse.Namespace) -> None:
    """Measure; rank 0 reports a record at a time."""
    buffer = Buffer(rank.group, device="cpu")
    for size in args.sizes:
        for num_experts, topk in args.routings:
            record = measure_size(rank, buffer, make_case(size, num_experts, topk), args.iterations)
            if rank.rank == 0:
                rank.report(record)
    buffer.destroy()
    record = measure_memory(rank, make_case(args.sizes[-1], *args.routings[0]))
    if rank.rank == 0:
        rank.report(record)


def show_memory(memory: dict[str, Any]) -> None:
    held, peak = memory["held_bytes"] / 2**20, memory["peak_bytes"] / 2**20
    words = f"{memory['size']} of x: tensors hold {held:.0f} MiB, resident memory peaks at {peak:.0f} MiB"
    print(f"{words} ({memory['peak_ratio']} x)")


def environment() -> dict[str, Any]:
    return {
        "cpu": facts.look().processor,
        "num_cores": os.cpu_count(),
        **{name: value for name, value in facts.versions().items() if value is not None},
        "torch": torch.__version__,
        "clock": CLOCKS["cpu"],
        "routing": "uniform: top-k of random scores",
    }


def parse_routing(text: str) -> tuple[int, int]:
    num_experts, topk = text.split("/")
    return int(num_experts), int(topk)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES), help="bytes of x per rank")
    parser.add_argument(
        "--routings", nargs="+", type=parse_routing, default=[(8, 4), (32, 4)], help="EXPERTS/TOPK, like 8/2"
    )
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each case instead of a table")
    parser.add_argument("--out", help="also write all records to this file")
    args = parser.parse_args()
    records: list[dict[str, Any]] = []

    def on_report(record: dict[str, Any]) -> None:
        records.append(record)
        if args.json:
            print(json.dumps(record), flush=True)
        else:
            show_memory(record) if "peak_bytes" in record else show(record)

    if not args.json:
        print(f"{args.ranks} ranks on {os.cpu_count()} cores, rows of {HIDDEN} bfloat16; checked against the oracle")
        print(f"{'x':>7} {'exp/k':<8}  |  {'dispatch (layout included)':^53}  |  {'combine':^53}", flush=True)
    run_ranks(args.ranks, run_rank, args, timeout_s=3600.0, on_report=on_report)
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"environment": environment(), "records": records}, file, indent=1)


if __name__ == "__main__":
    main()
