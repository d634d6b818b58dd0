"""Time dispatch and combine on CPU ranks, beside what torch.distributed (Gloo) needs for the same on the same cores.

The rival is what programs do without this library: sort the (token, expert) pairs, tell each rank how many come, send
rows and weights with `all_to_all_single`, and add up what comes back with `index_add_`. Both sides are timed in turn,
in the same processes. Every line is checked first, rows bit by bit and sums element by element, against
`deep_ep.reference`; a wrong result ends the program.

A time is the median over iterations of one call, layout included, and of the ranks the slowest. GB/s counts one copy of
a token per rank that it goes to, for both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import deep_ep
from deep_ep import Buffer, reference

HIDDEN = 2048
RUN_LENGTH = 5
SIZES = {"64 KB": 64 << 10, "256 KB": 256 << 10, "1 MB": 1 << 20, "8 MB": 8 << 20, "32 MB": 32 << 20}


class GlooExchange:
    """The same exchange over `torch.distributed`: one copy of a token per expert, no sharing of copies."""

    def __init__(self, num_experts: int) -> None:
        self.num_ranks = dist.get_world_size()
        self.num_experts = num_experts

    def dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Any:
        expert = topk_idx.view(-1)
        order = expert.argsort(stable=True)
        token = order // topk_idx.size(1)
        counts = torch.bincount(expert, minlength=self.num_experts)
        recv_counts = torch.empty_like(counts)
        dist.all_to_all_single(recv_counts, counts)
        send_splits = counts.view(self.num_ranks, -1).sum(1).tolist()
        recv_splits = recv_counts.view(self.num_ranks, -1).sum(1).tolist()
        recv_x = x.new_empty(sum(recv_splits), x.size(1))
        dist.all_to_all_single(recv_x, x.index_select(0, token), recv_splits, send_splits)
        recv_weights = topk_weights.new_empty(sum(recv_splits))
        dist.all_to_all_single(recv_weights, topk_weights.view(-1).index_select(0, order), recv_splits, send_splits)
        return recv_x, recv_weights, (token, send_splits, recv_splits, x.size(0))

    def combine(self, y: torch.Tensor, handle: Any) -> torch.Tensor:
        token, send_splits, recv_splits, num_tokens = handle
        back = y.new_empty(len(token), y.size(1))
        dist.all_to_all_single(back, y, send_splits, recv_splits)
        return y.new_zeros(num_tokens, y.size(1)).index_add_(0, token, back)


def dispatch(buffer: Buffer, x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Any:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    return buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=weights,
    )


def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensor of every rank; first dimensions may differ."""
    sizes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, tensor.size(0))
    everyone = [tensor.new_zeros(max(sizes), *tensor.shape[1:]) for _ in sizes]
    padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    dist.all_gather(everyone, padded)
    return [other[:size] for other, size in zip(everyone, sizes, strict=True)]


def check(buffer: Buffer, rival: GlooExchange, x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor) -> None:
    """Compare one exchange of both sides with the oracle; raise if anything differs."""
    rank = dist.get_rank()
    recv_x, recv_idx, recv_weights, counts, handle, _ = dispatch(buffer, x, topk_idx, weights, rival.num_experts)
    y = torch.randn(recv_x.shape).to(recv_x.dtype)
    combined, combined_weights, _ = buffer.combine(y, handle, topk_weights=recv_weights)
    everyone = [gather(tensor) for tensor in (x, topk_idx, weights, y)]
    layouts = [reference.get_dispatch_layout(idx, rival.num_experts, rival.num_ranks) for idx in everyone[1]]
    wanted = reference.dispatch(everyone[0], layouts, topk_idx_RTK=everyone[1], topk_weights_RTK=everyone[2])
    mine = wanted[rank]
    for name, got, want in (
        ("recv_x", recv_x.view(torch.int16), mine.x.view(torch.int16)),
        ("recv_topk_idx", recv_idx, mine.topk_idx),
        ("recv_topk_weights", recv_weights, mine.topk_weights),
        ("combined weights", combined_weights, weights),
    ):
        assert torch.equal(got, want), f"{name} of rank {rank} is not what the reference gives"
    assert counts == mine.num_recv_tokens_per_expert, "counts per expert differ"
    sums = reference.combine([y_.float() for y_ in everyone[3]], [w.handle for w in wanted])[rank].x
    # Rounded to nearest: at most half a unit in the last place of bfloat16 away from the float32 sum.
    assert bool(((combined.float() - sums).abs() <= sums.abs() * 2**-8).all()), "combined_x is off"
    rival_x, _, rival_handle = rival.dispatch(x, topk_idx, weights)
    num_copies = (topk_idx >= 0).sum(1, keepdim=True)
    rival_sum = rival.combine(rival_x, rival_handle).float()
    assert torch.allclose(rival_sum, x.float() * num_copies, rtol=2**-6), "the rival's sum is off"


def time_in_turn(calls: dict[str, Callable[[], Any]], iterations: int) -> dict[str, float]:
    """Return the median time of each call in us, of the slowest rank.

    Calls take turns in runs of five, of which the first, which also waits for the ranks to meet, does not count.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(-(-iterations // (RUN_LENGTH - 1)) + 1):
        for name, call in calls.items():
            dist.barrier()
            for _ in range(RUN_LENGTH):
                begin = time.perf_counter()
                result = call()
                times[name].append((time.perf_counter() - begin) * 1e6)
                del result
    counted = [[t for i, t in enumerate(run) if i % RUN_LENGTH and i >= RUN_LENGTH] for run in times.values()]
    medians = torch.tensor([statistics.median(samples) for samples in counted])
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(times, medians.tolist(), strict=True))


def measure(buffer: Buffer, name: str, num_experts: int, topk: int, iterations: int) -> dict[str, Any]:
    num_tokens = SIZES[name] // (2 * HIDDEN)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1000 * rank + num_tokens)
    x = torch.randn(num_tokens, HIDDEN).bfloat16()
    topk_idx = torch.rand(num_tokens, num_experts).topk(topk).indices
    weights = torch.rand(num_tokens, topk)
    rival = GlooExchange(num_experts)
    check(buffer, rival, x, topk_idx, weights)
    recv_x, *_, handle, _ = dispatch(buffer, x, topk_idx, weights, num_experts)
    rival_x, _, rival_handle = rival.dispatch(x, topk_idx, weights)
    y, rival_y = torch.randn(recv_x.shape).bfloat16(), torch.randn(rival_x.shape).bfloat16()
    times = time_in_turn(
        {
            "dispatch_us": lambda: dispatch(buffer, x, topk_idx, weights, num_experts),
            "gloo_dispatch_us": lambda: rival.dispatch(x, topk_idx, weights),
            "dispatch_cached_us": lambda: buffer.dispatch(x, handle=handle),
            "combine_us": lambda: buffer.combine(y, handle),
            "gloo_combine_us": lambda: rival.combine(rival_y, rival_handle),
        },
        iterations,
    )
    num_copies = torch.tensor([handle[4].sum().item()])
    dist.all_reduce(num_copies, dist.ReduceOp.MAX)
    return {
        "size": name,
        "num_ranks": num_ranks,
        "num_tokens": num_tokens,
        "hidden": HIDDEN,
        "topk": topk,
        "num_experts": num_experts,
        "sent_bytes": int(num_copies.item()) * HIDDEN * 2,
        **{key: round(value, 1) for key, value in times.items()},
        "dispatch_ratio": round(times["gloo_dispatch_us"] / times["dispatch_us"], 2),
        "combine_ratio": round(times["gloo_combine_us"] / times["combine_us"], 2),
    }


def measure_memory(name: str, num_experts: int, topk: int) -> dict[str, Any]:
    """Compare the peak of resident memory over a training-like loop with the bytes that the loop's tensors hold."""
    num_tokens = SIZES[name] // (2 * HIDDEN)
    buffer = Buffer(dist.group.WORLD, device="cpu")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # begin a new peak
    before_bytes = resident_bytes("VmRSS")
    x = torch.randn(num_tokens, HIDDEN).bfloat16()
    topk_idx = torch.rand(num_tokens, num_experts).topk(topk).indices
    weights = torch.rand(num_tokens, topk)
    held_bytes = 0
    for _ in range(10):
        recv_x, _, _, _, handle, _ = dispatch(buffer, x, topk_idx, weights, num_experts)
        y = recv_x * 2
        combined, _, _ = buffer.combine(y, handle)
        held_bytes = max(held_bytes, sum(t.numel() * t.element_size() for t in (x, recv_x, y, combined)))
    peak_bytes = resident_bytes("VmHWM") - before_bytes
    buffer.destroy()
    return {
        "case": "memory",
        "size": name,
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


def run_rank(rank: int, args: argparse.Namespace, store_path: str) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // args.ranks))
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=args.ranks)
    buffer = Buffer(dist.group.WORLD, device="cpu")
    records = []
    if rank == 0 and not args.json:
        print(f"{args.ranks} ranks on {os.cpu_count()} cores, rows of {HIDDEN} bfloat16; checked against the oracle")
        print(f"{'x':>7} {'exp/k':<8}  |  {'dispatch (layout included)':^53}  |  {'combine':^53}")
    for name in args.sizes:
        for num_experts, topk in args.routings:
            record = measure(buffer, name, num_experts, topk, args.iterations)
            records.append(record)
            if rank == 0:
                print(json.dumps(record), flush=True) if args.json else show(record)
    memory = measure_memory(args.sizes[-1], *args.routings[0])
    records.append(memory)
    if rank == 0:
        held, peak = memory["held_bytes"] / 2**20, memory["peak_bytes"] / 2**20
        words = f"{memory['size']} of x: tensors hold {held:.0f} MiB, resident memory peaks at {peak:.0f} MiB"
        print(json.dumps(memory) if args.json else f"{words} ({memory['peak_ratio']} x)")
    if rank == 0 and args.out:
        with open(args.out, "w") as file:
            json.dump({"environment": environment(), "records": records}, file, indent=1)
    buffer.destroy()
    dist.destroy_process_group()


def environment() -> dict[str, Any]:
    command = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")
    return {
        "cpu": model,
        "num_cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "deep_ep": deep_ep.__version__,
        "commit": commit,
        "clock": "time.perf_counter around one call in a loop of calls, median, slowest rank",
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
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(args, os.path.join(folder, "store")), nprocs=args.ranks)


if __name__ == "__main__":
    main()
