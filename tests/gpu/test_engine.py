"""Claims about the GPU engine that need a GPU: right exchanges, graph replays, late ranks, no recompiling.

Ranks share the GPUs there are; with fewer GPUs than ranks, run under `with_mps.sh`.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("default"),
]
STRESS = Path(__file__).parent / "exchange_stress.py"


@pytest.mark.parametrize("options", ["--ranks 1", "--ranks 2", "--ranks 3 --staged", "--ranks 8", "--ranks 2 --load"])
def test_random_exchanges_move_every_element(options):
    command = [sys.executable, "-W", "ignore", str(STRESS), *options.split(), "--exchanges", "20"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def run_ranks(num_ranks, function):
    port = 20000 + os.getpid() % 20000
    mp.spawn(enter, args=(num_ranks, port, function), nprocs=num_ranks)


def enter(rank, num_ranks, port, function):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    function(rank, num_ranks)
    dist.barrier()


def make_engine(timeout_s=20.0, num_bytes=1 << 24):
    from deep_ep.engines.gpu import GpuEngine
    from deep_ep.memory.rendezvous import Rendezvous

    device = torch.device("cuda", torch.cuda.current_device())
    return GpuEngine(Rendezvous(dist.group.WORLD), num_bytes, timeout_s, device)


def make_tokens(rank, num_tokens, hidden, num_experts, topk, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed * 100 + rank)
    x = torch.randn(num_tokens, hidden, generator=generator, device="cuda").bfloat16()
    weights, idx = torch.rand(num_tokens, num_experts, generator=generator, device="cuda").topk(topk)
    return x, idx, weights


def dispatch(engine, x, idx, weights, num_experts, num_worst=0, num_sms=4):
    from deep_ep.config import Config
    from deep_ep.engines.base import DispatchRequest

    layout = engine.compute_layout(idx, num_experts)
    return engine.dispatch(
        DispatchRequest(
            x=x,
            scales=None,
            topk_idx=idx,
            topk_weights=weights,
            layout=layout,
            expert_alignment=1,
            num_worst_tokens=num_worst,
            config=Config(num_sms),
        )
    )


def combine(engine, out, num_sms=4):
    from deep_ep.config import Config
    from deep_ep.engines.base import CombineRequest

    return engine.combine(
        CombineRequest(x=out.x, topk_weights=out.topk_weights, biases=(), handle=out.handle, config=Config(num_sms))
    )


def replay_a_captured_exchange(rank, num_ranks):
    engine = make_engine()
    num_experts, num_worst = 2 * num_ranks, 200
    x, idx, weights = make_tokens(rank, 50, 256, num_experts, 2, seed=0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        combine(engine, dispatch(engine, x, idx, weights, num_experts, num_worst))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = dispatch(engine, x, idx, weights, num_experts, num_worst)
        y, _ = combine(engine, out)
    for seed in range(1, 12):
        everyone = [make_tokens(r, 50, 256, num_experts, 2, seed) for r in range(num_ranks)]
        for held, new in zip((x, idx, weights), everyone[rank], strict=True):
            held.copy_(new)
        out.topk_idx.fill_(77)
        graph.replay()
        if seed % 3 == 0:  # eager calls and replays may mix
            dispatch(engine, *everyone[rank], num_experts)
        torch.cuda.synchronize()
        engine.check()
        goes = [(i // 2 == rank).any(1) for _, i, _ in everyone]
        want = torch.cat([e[0][g] for e, g in zip(everyone, goes, strict=True)])
        assert torch.equal(out.x[: len(want)], want)
        assert bool((out.topk_idx[len(want) :] == -1).all())
        num_copies = torch.stack([(idx // 2 == r).any(1) for r in range(num_ranks)]).sum(0)
        assert torch.equal(y, (x.float() * num_copies[:, None]).bfloat16())
    dist.barrier()
    engine.close()


def test_a_captured_exchange_replays_with_new_routing():
    run_ranks(2, replay_a_captured_exchange)


def leave_one_rank_alone(rank, num_ranks):
    from deep_ep.errors import PeerTimeoutError

    engine = make_engine(timeout_s=2.0)
    x, idx, weights = make_tokens(rank, 30, 256, 2 * num_ranks, 2, seed=0)
    dispatch(engine, x, idx, weights, 2 * num_ranks)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(PeerTimeoutError, match="rank 1") as caught:
            dispatch(engine, x, idx, weights, 2 * num_ranks)
        assert caught.value.missing_ranks == [1]
        assert time.monotonic() - begin < 10
        with pytest.raises(PeerTimeoutError):
            dispatch(engine, x, idx, weights, 2 * num_ranks)
        assert torch.ones(3, device="cuda").sum().item() == 3  # the context survived
    dist.barrier()
    engine.close()


def test_a_late_rank_is_named_and_the_context_survives():
    run_ranks(2, leave_one_rank_alone)


def use_many_batch_sizes(rank, _):
    from deep_ep.kernels.launch import num_compiled

    engine = make_engine()
    generator = torch.Generator().manual_seed(rank)
    counts = []
    for step in range(3000):
        num_tokens = int(torch.randint(0, 300, (1,), generator=generator))
        x, idx, weights = make_tokens(rank, num_tokens, 256, 4, 2, seed=step)
        combine(engine, dispatch(engine, x, idx, weights, 4))
        counts.append(num_compiled())
    assert counts[0] == counts[-1] <= 4
    dist.barrier()
    engine.close()


def test_batch_sizes_never_compile_anew():
    run_ranks(1, use_many_batch_sizes)


def close_and_open(rank, num_ranks):
    for _ in range(50):
        engine = make_engine(num_bytes=64 << 20)
        x, idx, weights = make_tokens(rank, 30, 256, 2 * num_ranks, 2, seed=0)
        dispatch(engine, x, idx, weights, 2 * num_ranks)
        torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info()
        dist.barrier()
        engine.close()
        engine.close()
        dist.barrier()
        del engine
    now, _ = torch.cuda.mem_get_info()
    assert now >= free


def test_fifty_engines_leak_nothing():
    run_ranks(2, close_and_open)
