"""The first call beside the later ones, over many starts: with and without `preinitialize=True`, and in the background.

    python benchmarks/first_call.py --processes 20 --json benchmarks/results/first_call_cpu.json
    bash tests/gpu/with_mps.sh python benchmarks/first_call.py --device cuda --processes 20 --json ...

Each start is a new set of processes, in which both modes are measured one after the other, in turns. A pair is a
dispatch and a combine; ranks begin it together, the slowest counts, and the first one is verified. The cache of kernels
is a new folder: the first start of each mode, `cold`, compiles into it, and all others find it warm. `background`
measures `warmup_async`: how long the call takes, the longest time for which the main thread, which does nothing but
look at the clock, did not run meanwhile, and the same without a warm-up. `no_compile` forbids compiling and makes the
calls. `latency_host_us` is what timing costs a call.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path


def measure_background(rank, shape):
    """Return how long `warmup_async` took to return, the longest stall without and with it, and its length, in ms."""
    from deep_ep import Buffer

    buffer = Buffer(rank.group, low_latency_mode=shape.is_low_latency, device=rank.device)

    def longest_stall_ms(is_over):
        longest, last = 0.0, time.perf_counter()
        while not is_over():
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        return 1e3 * longest

    end = time.perf_counter() + 0.3
    idle_ms = longest_stall_ms(lambda: time.perf_counter() > end)
    start = time.perf_counter()
    warmup = buffer.warmup_async(shapes=[shape])
    returned_ms = 1e3 * (time.perf_counter() - start)
    stall_ms = longest_stall_ms(warmup.done)
    report = warmup.wait()
    buffer.destroy()
    return {
        "returned_ms": returned_ms,
        "longest_stall_ms": stall_ms,
        "longest_stall_without_ms": idle_ms,
        "wall_ms": report.wall_ms,
        "phases_ms": dict(report.phases_ms),
    }


def measure_phases(rank, shape):
    """Return the wall time of a preinitialized constructor by the clock outside, and the sum of its phases, in ms."""
    from deep_ep import Buffer

    start = time.perf_counter()
    buffer = Buffer(
        rank.group, low_latency_mode=shape.is_low_latency, device=rank.device, preinitialize=True, shapes=[shape]
    )
    wall_ms = 1e3 * (time.perf_counter() - start)
    sum_ms = sum(buffer.init_report.phases_ms.values())
    buffer.destroy()
    return {"wall_ms": wall_ms, "sum_of_phases_ms": sum_ms}


def make_calls_without_compiling(rank, shapes):
    """Make the first calls with a `triton.compile` that refuses; return whether they were right."""
    import triton

    from deep_ep.check import first_call

    def refuse(*_, **__):
        raise RuntimeError("compilation is forbidden here")

    triton.compile = refuse
    first_call.measure_on_rank(rank, shapes, False, 2)
    return True


def measure_host(num_calls=20000):
    """Return the microseconds that `buffer.latency` costs a call that does nothing."""
    import torch

    from deep_ep.latency import LatencyMonitor

    devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    costs = {}
    for name in devices:
        monitor = LatencyMonitor(0, 8, torch.device(name), [0] * 8)

        def seconds(call):
            start = time.perf_counter()
            for _ in range(num_calls):
                call()
            return time.perf_counter() - start

        def nothing():
            return None

        def timed(monitor=monitor, nothing=nothing):
            monitor.run("combine", nothing)

        costs[name] = (
            1e6 * (min(seconds(timed) for _ in range(5)) - min(seconds(nothing) for _ in range(5))) / num_calls
        )
    return costs


def summary(values):
    return {"median": statistics.median(values), "worst": max(values), "best": min(values)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--processes", type=int, default=20, help="starts with preinitialize=True, for each mode")
    parser.add_argument("--plain", type=int, default=5, help="starts without, for each mode")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--json")
    args = parser.parse_args()

    folder = tempfile.TemporaryDirectory(prefix="first-call-")
    os.environ["DEEP_EP_CACHE_DIR"] = folder.name  # of this process and of all that it starts

    import torch

    from deep_ep.bench import facts
    from deep_ep.bench.ranks import run_ranks
    from deep_ep.check import first_call

    shapes = first_call.GPU_SHAPES if args.device == "cuda" else first_call.CPU_SHAPES
    record = {
        "what": "first dispatch + combine beside the median of the next ones, us, slowest rank",
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "num_ranks": args.ranks,
        "num_cores": len(os.sched_getaffinity(0)),
        "versions": facts.versions(),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "latency_host_us": measure_host(),
        "modes": {},
    }
    begin = time.perf_counter()

    def save():
        record["seconds"] = round(time.perf_counter() - begin, 1)
        record["load_average"] = os.getloadavg()  # ranks that have no core to themselves show it in what is worst
        if args.json:
            Path(args.json).write_text(json.dumps(record, indent=1) + "\n")

    def starts(name, preinitialize, num_starts):
        """Start the ranks several times, with both modes in turn at the front."""
        runs = [
            first_call.measure(
                shapes[:: (-1) ** number], args.ranks, args.device, preinitialize=preinitialize, num_calls=args.calls
            )
            for number in range(num_starts)
        ]
        for shape in shapes:
            mode = "low_latency" if shape.is_low_latency else "normal"
            mine = [run for both in runs for run in both if run.shape == shape]
            found = record["modes"].setdefault(mode, {"shape": shape.to_dict()})
            found[name] = {
                "num_starts": num_starts,
                "ratio": summary([run.ratio for run in mine]),
                "first_us": summary([run.first_us for run in mine]),
                "median_us": summary([run.median_us for run in mine]),
                "construct_ms": summary([run.construct_ms for run in mine]),
                "phases_ms": {p: statistics.median(run.phases_ms[p] for run in mine) for p in mine[0].phases_ms},
            }
            print(f"{mode}, {name}: first / median {json.dumps(found[name]['ratio'])}", flush=True)
        save()

    if args.device == "cuda":
        starts("cold", True, 1)
    starts("preinitialized", True, args.processes)
    starts("plain", False, args.plain)
    for shape in shapes:
        found = record["modes"]["low_latency" if shape.is_low_latency else "normal"]
        found["preinitialize_adds_ms"] = (
            found["preinitialized"]["construct_ms"]["median"] - found["plain"]["construct_ms"]["median"]
        )
        found["background"] = run_ranks(args.ranks, measure_background, shape, device=args.device)
        found["phases"] = run_ranks(args.ranks, measure_phases, shape, device=args.device)
        print(json.dumps({k: found[k] for k in ("preinitialize_adds_ms", "background", "phases")}), flush=True)
        save()
    if args.device == "cuda":
        record["no_compile"] = all(run_ranks(args.ranks, make_calls_without_compiling, shapes, device=args.device))
        save()
    folder.cleanup()


if __name__ == "__main__":
    main()
