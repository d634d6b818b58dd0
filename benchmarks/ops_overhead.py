"""Measure what `deep_ep.dispatch` and `deep_ep.combine` cost on the host beyond the exchange itself.

    python benchmarks/ops_overhead.py [--json FILE]

The exchange is replaced by a function that returns tensors made before, and is called through the friendly functions:
plain, with gradients, and as an operator; beside them, a `torch.autograd.Function` that does nothing else. Times are
those of the thread on the CPU, the least mean of several runs, so that other programs matter little.
"""

import argparse
import gc
import json
import os
import platform
import socket
import subprocess
import time

import torch
import torch.distributed as dist

import deep_ep
from deep_ep import Buffer, operators, ops

NUM_CALLS, NUM_RUNS = 2000, 15


def time_us(function) -> float:
    gc.disable()
    times_s = []
    for _ in range(NUM_RUNS):
        begin_s = time.thread_time()
        for _ in range(NUM_CALLS):
            function()
        times_s.append((time.thread_time() - begin_s) / NUM_CALLS)
    gc.enable()
    return min(times_s) * 1e6


class Nothing(torch.autograd.Function):
    """What any gradient of our own costs at least."""

    @staticmethod
    def forward(ctx, x, y):  # noqa: ARG004
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        return grad, None


def measure() -> dict[str, float]:
    buffer = Buffer(dist.group.WORLD, device="cpu")
    x, weights = torch.randn(4, 16), torch.rand(4, 2)
    idx = torch.tensor([[0, 1]] * 4)
    args = (idx, weights, buffer)
    received = deep_ep.dispatch(x, *args, num_experts=4)
    assert torch.equal(received.x, x)  # one rank: every token comes back
    assert torch.equal(deep_ep.combine(received.x, received.handle, buffer), x)
    results = (received.x, x.new_empty(4, 0), *received[1:4], list(received.handle))
    sums = torch.randn(4, 16)
    ops.run_dispatch, ops.run_combine = lambda *_: results, lambda *_: sums
    with_grad, y = x.clone().requires_grad_(), received.x
    y_with_grad = y.clone().requires_grad_()
    handle = received.handle
    times = {
        "dispatch": time_us(lambda: deep_ep.dispatch(x, *args, num_experts=4)),
        "combine": time_us(lambda: deep_ep.combine(y, handle, buffer)),
        "dispatch with gradient": time_us(lambda: deep_ep.dispatch(with_grad, *args, num_experts=4)),
        "combine with gradient": time_us(lambda: deep_ep.combine(y_with_grad, handle, buffer)),
        "an empty autograd function": time_us(lambda: Nothing.apply(with_grad, sums)),
    }
    library = torch.library.Library("deep_ep_overhead", "DEF")
    library.define(str(torch.ops.deep_ep.combine.default._schema).replace("deep_ep::", ""))
    library.impl("combine", lambda *_: sums, "CompositeExplicitAutograd")
    operator = torch.ops.deep_ep_overhead.combine
    torch.library.register_autograd(
        "deep_ep_overhead::combine", operators.combine_backward, setup_context=operators.save_combine, lib=library
    )
    with torch.no_grad():
        times["the operator combine"] = time_us(lambda: operator(y, list(handle), buffer.op_id))
    times["the operator combine with gradient"] = time_us(lambda: operator(y_with_grad, list(handle), buffer.op_id))
    return times


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file to write the record to")
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    dist.init_process_group("gloo", rank=0, world_size=1)
    torch.set_num_threads(1)
    times = measure()
    for name, us in times.items():
        print(f"{name:36} {us:6.2f} us")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    record = {
        "what": "host time beyond the exchange, CPU time of the thread, least of runs",
        "us": {name: round(us, 3) for name, us in times.items()},
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "deep_ep": deep_ep.__version__},
        "machine": platform.processor() or platform.machine(),
        "commit": commit,
    }
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(record, file, indent=2)
            file.write("\n")
    dist.destroy_process_group()
