"""First calls between GPUs: refused cold in a capture, right while a warm-up runs, and compiled by nobody after one.

Ranks share the GPUs there are; with fewer GPUs than ranks, run under `with_mps.sh`.
"""

import pytest
import torch

from deep_ep import Buffer
from deep_ep.bench.ranks import run_ranks
from deep_ep.check.first_call import measure_on_rank
from deep_ep.errors import CapacityError, UnsupportedError
from deep_ep.shapes import ExchangeShape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("default"),
]
NORMAL = ExchangeShape(hidden=1024, num_topk=4, num_experts=16, num_max_tokens_per_rank=64)
LOW_LATENCY = ExchangeShape(hidden=1024, num_topk=4, num_experts=16, num_max_tokens_per_rank=16, is_low_latency=True)


def capture_cold_and_warm(rank):
    buffer = Buffer(rank.group, low_latency_mode=True, device=rank.device)
    x = torch.randint(-8, 9, (16, 1024), device=rank.device).bfloat16()
    topk_idx = torch.rand(16, 16, device=rank.device).topk(4).indices
    weights = torch.full((16, 4), 0.25, device=rank.device)

    def calls():
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 16, 16, use_fp8=False)
        return buffer.low_latency_combine(recv_x, topk_idx, weights, handle)[0]

    with pytest.raises((CapacityError, UnsupportedError), match="hint"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        calls()
    buffer.warmup_async(shapes=[LOW_LATENCY]).wait(60)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        combined = calls()
    for _ in range(3):
        combined.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(combined, x)
    buffer.destroy()


def test_a_capture_needs_a_warm_buffer():
    run_ranks(2, capture_cold_and_warm, device="cuda")


def call_while_warming(rank):
    buffer = Buffer(rank.group, device=rank.device)
    warmup = buffer.warmup_async(shapes=[NORMAL])
    if rank.rank == 1:
        warmup.wait(60)
    for step in range(4):
        x = torch.randint(-8, 9, (64, 1024), device=rank.device).bfloat16()
        topk_idx = torch.rand(64, 16, device=rank.device).topk(4).indices
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 16)
        recv_x, _, _, _, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=torch.rand(64, 4, device=rank.device),
        )
        combined, _, _ = buffer.combine(recv_x, handle)
        assert torch.equal(combined.float(), x.float() * in_rank.sum(1, keepdim=True)), step
    warmup.wait(60)
    buffer.destroy()


def test_calls_while_a_warmup_runs_are_right():
    run_ranks(2, call_while_warming, device="cuda")


def call_without_compiling(rank):
    import triton

    from deep_ep.kernels import launch

    shapes = [NORMAL, LOW_LATENCY]
    measure_on_rank(rank, shapes, True, 1)
    launch._loaded.clear()

    def refuse(*_, **__):
        raise RuntimeError("compilation is forbidden here")

    triton.compile = refuse
    measure_on_rank(rank, shapes, False, 1)


def test_what_is_in_the_cache_is_not_compiled():
    run_ranks(2, call_without_compiling, device="cuda")
