"""Low-latency mode on GPUs: checks every element against the specification, then times calls in CUDA graphs.

    python benchmarks/gpu_low_latency.py --ranks 2 --gpus 2
    python benchmarks/gpu_low_latency.py --ranks 8 --gpus 1     # needs CUDA MPS, or waits are cut into time slices

Times are of the slowest rank: the median over replays, per call.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / part) for part in ("tests", "src")]

import torch
import torch.distributed as dist

import low_latency_cases as cases
from deep_ep.engines.base import RowFormat
from deep_ep.engines.gpu_low_latency import GpuLowLatencyEngine
from deep_ep.engines.low_latency_plans import LowLatencyTuning
from deep_ep.low_latency_layout import low_latency_num_bytes
from deep_ep.memory.rendezvous import Rendezvous

Case = cases.Case
CHECKED = [
    Case(16, 7168, 8, 256, RowFormat.FP8),
    Case(128, 7168, 8, 256, RowFormat.FP8),
    Case(128, 7168, 8, 256, RowFormat.BF16, num_tokens=128),
    Case(128, 7168, 8, 256, RowFormat.FP8_UE8M0, split=True),
    Case(5, 7168, 8, 256, RowFormat.FP8, num_tokens=1),
    Case(40, 2880, 4, 30, RowFormat.FP8_ROUNDED, has_empty_rank=True),
    Case(40, 2880, 4, 30, RowFormat.BF16, idx_dtype=torch.int32),
    Case(33, 300, 10, 65, RowFormat.FP8, split=True),
    Case(200, 7, 3, 5, RowFormat.FP8_UE8M0, repeated=True),
    Case(64, 2048, 8, 64, RowFormat.FP8, skewed=True, masked=0.0),
    Case(30, 512, 33, 129, RowFormat.FP8),
    Case(128, 7168, 8, 256, RowFormat.FP8, masked=1.0),
]


def run_rank(args):
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))
    dist.init_process_group("gloo")
    tuning = LowLatencyTuning(wire_bits=args.wire_bits, num_warps=args.num_warps, programs_per_sm=args.programs_per_sm)
    engine = GpuLowLatencyEngine(Rendezvous(dist.group.WORLD), 10.0, device, tuning=tuning)
    say = print if rank == 0 else (lambda *_, **__: None)
    records = []
    if not args.no_check:
        for seed, case in enumerate(CHECKED[: args.cases]):
            began = time.perf_counter()
            cases.run_round(engine, with_bits(case, args), rank, num_ranks, seed, device)
            say(f"right: {case} {time.perf_counter() - began:.1f} s", flush=True)
        check_overlap(engine, args, rank, num_ranks, device)
        say("right: two dispatches in flight, a third refused", flush=True)
        check_graphs(engine, args, rank, num_ranks, device)
        say(f"right: graphs of odd and even numbers of calls, {args.replays} replays, eager calls between", flush=True)
    for num_tokens in args.tokens:
        record = measure(engine, args, num_tokens, rank, num_ranks, device)
        record["shared_bytes"] = low_latency_num_bytes(128, 7168, num_ranks, 256, wire_bits=args.wire_bits)
        records.append(record)
        say(json.dumps(record), flush=True)
    if rank == 0 and args.json:
        facts = {
            "gpu": torch.cuda.get_device_name(device),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "gpus": args.gpus,
            "ranks": num_ranks,
        }
        Path(args.json).write_text(json.dumps({"facts": facts, "records": records}, indent=1))
    dist.barrier()
    os._exit(0)


def with_bits(case, args):
    return Case(**{**case.__dict__, "wire_bits": args.wire_bits})


class Round:
    """Inputs, what must come out, and tensors on the GPU for calls that are made many times."""

    def __init__(self, case, rank, num_ranks, seed, device):
        self.case, self.rank, self.device = case, rank, device
        self.inputs = cases.make_inputs(case, num_ranks, seed)
        self.received = cases.expected_dispatch(case, self.inputs)
        self.sums, self.sizes = cases.expected_combine(case, self.inputs, self.received)
        self.y = cases.poisoned(self.inputs.y[rank], self.received[rank]).to(device)
        for kind in ("x", "topk_idx", "topk_weights"):
            tensors = getattr(self.inputs, kind)
            tensors[rank] = tensors[rank].to(device)

    def dispatch(self, engine):
        return cases.start_dispatch(engine, self.case, self.inputs, self.rank, self.device)

    def combine(self, engine, result):
        return cases.start_combine(engine, self.case, self.inputs, self.y, result, self.rank, self.device)

    def pair(self, engine):
        dispatched = self.dispatch(engine)
        dispatched.finish()
        combined = self.combine(engine, dispatched.result)
        combined.finish()
        return dispatched.result, combined.result

    def check(self, result, out):
        cases.check_dispatch(self.case, result, self.received[self.rank])
        cases.check_combine(self.case, out, self.sums[self.rank], self.sizes[self.rank])


def check_overlap(engine, args, rank, num_ranks, device):
    from deep_ep.errors import CapacityError

    base = with_bits(Case(16, 7168, 8, 256, RowFormat.FP8, split=True), args)
    first, second = (Round(base, rank, num_ranks, seed, device) for seed in (70, 71))
    for _ in range(5):
        a, b = first.dispatch(engine), second.dispatch(engine)
        try:
            first.dispatch(engine)
        except CapacityError as error:
            assert "2 low-latency calls are in flight" in str(error), error
        else:
            raise AssertionError("a third call was not refused")
        a.finish()
        c = first.combine(engine, a.result)
        b.finish()
        d = second.combine(engine, b.result)
        c.finish()
        d.finish()
        first.check(a.result, c.result)
        second.check(b.result, d.result)


def capture(make):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        make()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = make()
    return graph, outputs


def check_graphs(engine, args, rank, num_ranks, device):
    shapes = [(16, RowFormat.FP8, False), (16, RowFormat.FP8, True), (128, RowFormat.BF16, False)]
    rounds = [
        Round(with_bits(Case(m, 7168, 8, 256, f, split=split), args), rank, num_ranks, 80 + i, device)
        for i, (m, f, split) in enumerate(shapes)
    ]

    def odd():
        rounds[2].dispatch(engine).finish()
        return rounds[2].pair(engine)

    graphs = [capture(lambda: rounds[0].pair(engine)), capture(lambda: rounds[1].pair(engine)), capture(odd)]
    for turn in range(args.replays):
        for graph, _ in graphs:
            graph.replay()
        if turn % 16 == 0:
            rounds[0].dispatch(engine).finish()
        if turn % 64 == 0:
            # A host may run ahead of its peers by more than the time that a kernel waits.
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    engine.check()
    for one, (_, outputs) in zip(rounds, graphs, strict=True):
        one.check(*outputs)
        for tensor in (outputs[0].x.view(torch.uint8), outputs[1].view(torch.uint8)):
            tensor.fill_(0xFF)
    for graph, _ in reversed(graphs):
        graph.replay()
    torch.cuda.synchronize()
    for one, (_, outputs) in zip(rounds, graphs, strict=True):
        one.check(*outputs)


def measure(engine, args, num_tokens, rank, num_ranks, device):
    case = with_bits(Case(128, 7168, 8, 256, RowFormat.FP8, num_tokens=num_tokens, masked=0.0), args)
    one = Round(case, rank, num_ranks, num_tokens, device)
    kept, _ = one.pair(engine)

    def pairs():
        for _ in range(args.calls):
            outputs = one.pair(engine)
        return outputs

    def dispatches():
        for _ in range(args.calls):
            one.dispatch(engine)

    def combines():
        for _ in range(args.calls):
            one.combine(engine, kept)

    record = {"num_tokens": num_tokens, "wire_bits": args.wire_bits}
    for name, make in (("pair_us", pairs), ("dispatch_us", dispatches), ("combine_us", combines)):
        graph, outputs = capture(make)
        record[name] = slowest(time_graph(graph, args))
        if outputs is not None:
            one.check(*outputs)
        del graph
    return record


def time_graph(graph, args):
    times = []
    for _ in range(5):
        graph.replay()
    for _ in range(args.samples):
        torch.cuda.synchronize()
        dist.barrier()
        # Begins together, whatever the barrier's own spread was.
        graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / args.calls)
    return statistics.median(times)


def slowest(value):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return round(max(everyone), 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--replays", type=int, default=500)
    parser.add_argument("--wire-bits", type=int, default=24)
    parser.add_argument("--num-warps", type=int, default=4)
    parser.add_argument("--programs-per-sm", type=int, default=3)
    parser.add_argument("--cases", type=int, default=len(CHECKED), help="how many of the checked cases to run")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(args)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(args.ranks):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(args.ranks), "LOCAL_RANK": str(rank % args.gpus),
                            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=env))
    failed = [rank.wait() for rank in ranks]
    sys.exit(any(failed))


if __name__ == "__main__":
    main()
