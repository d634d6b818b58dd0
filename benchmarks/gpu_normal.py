"""Normal mode between GPUs of one host, at the level of the engine: right first, then how long.

    python benchmarks/gpu_normal.py --ranks 2 [--sms 24] [--cases train,small] [--out results.json]

With fewer GPUs than ranks, ranks share GPUs (start MPS first). Each figure is the median over iterations of the time
between two CUDA events, after the ranks have met and the L2 cache was flushed; then the mean over ranks. `floor_us` is
the time that the bytes of a call take at the bandwidths that were measured: those that cross a link at `--link` GB/s,
and all that one GPU reads and writes at `--copy` GB/s (times the ranks that share it).
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

CASES = {
    "train": {"tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256},
    "narrow": {"tokens": 4096, "hidden": 2048, "topk": 8, "experts": 128},
    "small": {"tokens": 1024, "hidden": 4096, "topk": 2, "experts": 8},
    "tiny": {"tokens": 128, "hidden": 7168, "topk": 8, "experts": 256},
}


def make_inputs(case, src, device, seed=0):
    """Return what rank `src` sends; every rank can make the inputs of every other."""
    generator = torch.Generator(device=device).manual_seed(seed * 1000 + src)
    shape = (case["tokens"], case["hidden"])
    x = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    scores = torch.rand(case["tokens"], case["experts"], generator=generator, device=device)
    topk_weights, topk_idx = scores.topk(case["topk"], dim=-1)
    return x, topk_idx, topk_weights.float()


def to_fp8(x):
    blocks = x.float().view(x.size(0), -1, 128)
    scales = blocks.abs().amax(dim=2).clamp(1e-4) / 448
    return (blocks / scales.unsqueeze(2)).to(torch.float8_e4m3fn).view(x.shape), scales


def flat(t):
    return t.view(torch.uint8)


class Bench:
    def __init__(self, rank, num_ranks, device, engine, num_sms, args):
        from deep_ep.config import Config

        self.rank, self.num_ranks, self.device, self.engine, self.args = rank, num_ranks, device, engine, args
        self.config = Config(num_sms)
        self.shared_by = num_ranks / min(num_ranks, torch.cuda.device_count())
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        self.one = torch.ones(1, device=device if dist.get_backend() == "nccl" else "cpu")

    def dispatch(self, x, scales, topk_idx, topk_weights, layout, worst=0):
        from deep_ep.engines.base import DispatchRequest

        return self.engine.dispatch(
            DispatchRequest(
                x=x,
                scales=scales,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                layout=layout,
                expert_alignment=1,
                num_worst_tokens=worst,
                config=self.config,
            )
        )

    def cached(self, x, scales, handle):
        from deep_ep.engines.base import CachedDispatchRequest

        return self.engine.dispatch_cached(CachedDispatchRequest(x=x, scales=scales, handle=handle, config=self.config))

    def combine(self, x, weights, handle):
        from deep_ep.engines.base import CombineRequest

        return self.engine.combine(
            CombineRequest(x=x, topk_weights=weights, biases=(), handle=handle, config=self.config)
        )

    def time_us(self, function):
        times, host = [], []
        for i in range(self.args.iters + 3):
            self.flush.zero_()
            dist.all_reduce(self.one)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            before = time.perf_counter()
            function()
            host.append((time.perf_counter() - before) * 1e6)
            end.record()
            end.synchronize()
            if i >= 3:
                times.append(begin.elapsed_time(end) * 1000)
        self.host_us = statistics.median(host[3:])
        return self.mean(statistics.median(times))

    def graph_us(self, function, repeats=20):
        """Return the time per call of calls back to back in a CUDA graph."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                function()
        times = []
        for _ in range(8):
            dist.barrier()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / repeats)
        return self.mean(statistics.median(times[2:]))

    def mean(self, value):
        total = torch.tensor([float(value)], dtype=torch.float64, device=self.one.device)
        dist.all_reduce(total)
        return total.item() / self.num_ranks

    def run(self, case):
        from deep_ep.engines.base import Layout

        engine, rank = self.engine, self.rank
        inputs = [make_inputs(case, src, self.device) for src in range(self.num_ranks)]
        masks = []
        num_local = case["experts"] // self.num_ranks
        for _, idx, _ in inputs:
            mask = torch.zeros(case["tokens"], self.num_ranks, dtype=torch.bool, device=self.device)
            mask.scatter_(1, idx // num_local, True)
            masks.append(mask)
        want_x = torch.cat([inputs[s][0][masks[s][:, rank]] for s in range(self.num_ranks)])
        x, idx, weights = inputs[rank]
        layout = engine.compute_layout(idx, case["experts"])
        assert torch.equal(layout.is_token_in_rank, masks[rank]), "layout"
        out = self.dispatch(x, None, idx, weights, layout)
        assert torch.equal(flat(out.x), flat(want_x)), "dispatch"
        got, _ = self.cached(x, None, out.handle)
        assert torch.equal(flat(got), flat(want_x)), "cached dispatch"
        y, y_weights = self.combine(out.x, out.topk_weights, out.handle)
        want_y = (x.float() * masks[rank].sum(1, keepdim=True)).bfloat16()
        assert torch.equal(y, want_y), "combine"
        assert torch.equal(y_weights, weights), "weights"
        x8, scales = to_fp8(x)
        out8 = self.dispatch(x8, scales, idx, weights, layout)
        want8 = [to_fp8(inputs[s][0]) for s in range(self.num_ranks)]
        assert torch.equal(
            flat(out8.x), torch.cat([flat(want8[s][0])[masks[s][:, rank]] for s in range(self.num_ranks)])
        )
        assert torch.equal(out8.scales, torch.cat([want8[s][1][masks[s][:, rank]] for s in range(self.num_ranks)]))
        assert isinstance(layout, Layout)
        sent = masks[rank].sum().item()
        own = masks[rank][:, rank].sum().item()
        row = case["hidden"] * 2
        result = {"sent_rows": sent, "remote_rows": sent - own, "received_rows": want_x.size(0)}
        del inputs, want_x, want8, got, want_y
        result["layout_us"] = self.time_us(lambda: engine.compute_layout(idx, case["experts"]))
        result["dispatch_us"] = self.time_us(lambda: self.dispatch(x, None, idx, weights, layout))
        result["dispatch_cached_us"] = self.time_us(lambda: self.cached(x, None, out.handle))
        result["dispatch_cached_host_us"] = self.host_us
        result["dispatch_fp8_us"] = self.time_us(lambda: self.dispatch(x8, scales, idx, weights, layout))
        result["dispatch_fp8_cached_us"] = self.time_us(lambda: self.cached(x8, scales, out.handle))
        z = torch.randn_like(out.x)
        result["combine_us"] = self.time_us(lambda: self.combine(z, out.topk_weights, out.handle))
        result["combine_host_us"] = self.host_us
        if self.args.graph:
            result["graph_dispatch_cached_us"] = self.graph_us(lambda: self.cached(x, None, out.handle))
            result["graph_combine_us"] = self.graph_us(lambda: self.combine(z, out.topk_weights, out.handle))
        # Dispatch: read and store own rows and remote rows, read and store what was staged. Combine: likewise, and
        # own rows are only read.
        remote, received = sent - own, want_rows(out)
        dispatch_bytes = row * (2 * sent + 2 * (received - own))
        combine_bytes = row * (2 * (received - own) + sent + case["tokens"])
        link = remote * row / self.args.link / 1e3 if self.shared_by == 1 else 0
        result["dispatch_floor_us"] = max(link, dispatch_bytes * self.shared_by / self.args.copy / 1e3)
        result["combine_floor_us"] = max(link, combine_bytes * self.shared_by / self.args.copy / 1e3)
        return {k: round(self.mean(v), 1) for k, v in result.items()}


def want_rows(out):
    return out.x.size(0)


def worker(rank, num_ranks, port, args):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    backend = "nccl" if torch.cuda.device_count() >= num_ranks else "gloo"
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group(backend, rank=rank, world_size=num_ranks)
    from deep_ep.engines.gpu import GpuEngine
    from deep_ep.memory.rendezvous import Rendezvous
    from deep_ep.tuning import GpuTuning

    results = {}
    for tuning in [json.loads(t) for t in args.tuning]:
        num_sms = tuning.pop("sms", args.sms)
        staging_bytes = tuning.pop("bytes", 1 << 20)
        begin = time.perf_counter()
        engine = GpuEngine(
            Rendezvous(dist.group.WORLD),
            staging_bytes,
            args.timeout,
            device,
            tuning=GpuTuning(**{k: tuple(v) if isinstance(v, list) else v for k, v in tuning.items()}),
        )
        construct_s = time.perf_counter() - begin
        bench = Bench(rank, num_ranks, device, engine, num_sms, args)
        for name in args.cases.split(","):
            result = bench.run(CASES[name])
            key = f"{name} sms={num_sms} {json.dumps(tuning)}"
            results[key] = result
            if rank == 0:
                print(key, json.dumps(result), flush=True)
        engine.check()
        if rank == 0:
            print(f"construct {construct_s:.2f} s, staging {engine._staging.num_bytes:,} bytes", flush=True)
        torch.cuda.synchronize()
        dist.barrier()
        engine.close()
    if rank == 0 and args.out:
        Path(args.out).write_text(json.dumps(record(args, results), indent=1))
    dist.barrier()
    os._exit(0)


def record(args, results):
    driver = (
        subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True
        )
        .stdout.strip()
        .splitlines()
    )
    import triton

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpus": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": args.commit,
        "ranks": args.ranks,
        "iterations": args.iters,
        "results": results,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sms", type=int, default=24)
    parser.add_argument("--cases", default="train")
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--timeout", type=float, default=10.0)
    parser.add_argument("--link", type=float, default=389.0, help="GB/s between GPUs, one way")
    parser.add_argument("--copy", type=float, default=4000.0, help="GB/s of device memory, reads and writes together")
    parser.add_argument("--tuning", nargs="*", default=["{}"], help="JSON of GpuTuning fields, and sms, bytes")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    mp.spawn(worker, args=(arguments.ranks, 20000 + os.getpid() % 20000, arguments), nprocs=arguments.ranks)
