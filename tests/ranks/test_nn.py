"""`deep_ep.nn.ExpertParallel`: any list of experts and any router."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from deep_ep import ops
from deep_ep.errors import ConfigError
from deep_ep.nn import ExpertParallel, TopKRouter, local_experts

pytestmark = pytest.mark.timeout(600)

HIDDEN, NUM_EXPERTS, NUM_TOPK = 20, 7, 3


def make_experts():
    """Experts of different kinds."""
    torch.manual_seed(9)
    return [
        nn.Sequential(nn.Linear(HIDDEN, 8 + number), nn.GELU(), nn.Linear(8 + number, HIDDEN))
        if number % 2
        else nn.Linear(HIDDEN, HIDDEN)
        for number in range(NUM_EXPERTS)
    ]


def make_layer(rank, dtype=torch.float32):
    experts = make_experts()
    mine = [experts[number] for number in local_experts(NUM_EXPERTS, rank.buffer())]
    torch.manual_seed(10)
    router = TopKRouter(HIDDEN, NUM_EXPERTS, NUM_TOPK)
    return ExpertParallel(router, mine, rank.buffer(), NUM_EXPERTS).to(dtype)


def run_at_home(x):
    """All experts on this rank; every expert sees every token."""
    torch.manual_seed(10)
    router, experts = TopKRouter(HIDDEN, NUM_EXPERTS, NUM_TOPK), make_experts()
    tokens = x.reshape(-1, HIDDEN)
    weights, idx = router(tokens)
    gates = torch.zeros(len(tokens), NUM_EXPERTS).scatter(1, idx, weights)
    out = sum(gates[:, [number]] * expert(tokens) for number, expert in enumerate(experts))
    return out.view(x.shape), router, experts


def tokens_of(rank, shape):
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(20 + rank.rank))


def compare(rank, shape, wrap=lambda layer: layer):
    layer = make_layer(rank)
    x = tokens_of(rank, shape).requires_grad_()
    x_at_home = x.detach().clone().requires_grad_()
    out = wrap(layer)(x)
    expected, router, experts = run_at_home(x_at_home)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for result in (out, expected):
        (result * result.detach().cos()).sum().backward()
    torch.testing.assert_close(x.grad, x_at_home.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.router.weight.grad, router.weight.grad, rtol=1e-4, atol=1e-5)
    for param in [param for expert in experts for param in expert.parameters()]:
        dist.all_reduce(param.grad, group=rank.group)
    for number, expert in zip(local_experts(NUM_EXPERTS, rank.buffer()), layer.experts, strict=True):
        for param, want in zip(expert.parameters(), experts[number].parameters(), strict=True):
            torch.testing.assert_close(param.grad, want.grad, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(layer(x), out)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("shape", [(13,), (2, 3, 4)], ids=str)
def test_it_gives_what_all_experts_on_one_rank_give(pool, num_ranks, shape):
    pool.run(num_ranks, compare, shape)


def more_ranks_than_tokens(rank):
    compare(rank, (rank.rank % 2,))


def test_ranks_may_have_no_token(pool):
    pool.run(4, more_ranks_than_tokens)


def under_checkpoints(rank):
    contexts = functools.partial(create_selective_checkpoint_contexts, ops.COMMUNICATION_OPS)
    compare(rank, (9,), lambda layer: functools.partial(checkpoint, layer, use_reentrant=False))
    compare(rank, (9,), lambda layer: functools.partial(checkpoint, layer, use_reentrant=False, context_fn=contexts))


def test_it_can_be_checkpointed(pool):
    pool.run(2, under_checkpoints)


def compiled(rank):
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        compare(rank, (9,), lambda layer: torch.compile(layer, backend="aot_eager", fullgraph=True))


def test_it_compiles_as_one_graph(pool):
    pool.run(2, compiled, timeout_s=240.0)


def in_bfloat16(rank):
    layer = make_layer(rank, torch.bfloat16)
    x = tokens_of(rank, (11,)).bfloat16()
    out = layer(x)
    assert out.dtype == torch.bfloat16
    expected, _, _ = run_at_home(x.float())
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.05)
    out.sum().backward()
    assert all(param.grad.dtype == torch.bfloat16 for param in layer.parameters())


def test_it_works_in_bfloat16(pool):
    pool.run(2, in_bfloat16)


def miscount(rank):
    share = len(local_experts(NUM_EXPERTS, rank.buffer()))
    with pytest.raises(ConfigError, match=rf"this rank's {share} of num_experts=7, .* got 1"):
        ExpertParallel(TopKRouter(HIDDEN, NUM_EXPERTS, NUM_TOPK), [nn.Identity()], rank.buffer(), NUM_EXPERTS)


def test_a_wrong_number_of_experts_is_refused(pool):
    pool.run(2, miscount)
