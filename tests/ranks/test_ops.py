"""Dispatch and combine with gradients, compiled, and under checkpoints (`deep_ep.ops`)."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import deep_ep
from deep_ep import Buffer, ops
from deep_ep.engines.routing import expert_range
from deep_ep.errors import DestroyedError, UnsupportedError

pytestmark = pytest.mark.timeout(600)

NUM_EXPERTS, NUM_TOPK, HIDDEN = 5, 3, 24
COMPILE_TIMEOUT_S = 240.0


def inputs_of(rank, num_tokens=None, dtype=torch.float32):
    """This rank's tokens, routing and weights, with -1 among the ids; fresh leaves that require gradients."""
    generator = torch.Generator().manual_seed(11 + rank)
    num_tokens = 7 + 2 * rank if num_tokens is None else num_tokens
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    idx = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(NUM_TOPK).indices
    idx[torch.rand(idx.shape, generator=generator) < 0.2] = -1
    weights = torch.rand(num_tokens, NUM_TOPK, generator=generator)
    return x.requires_grad_(), idx, weights.requires_grad_()


def matrices():
    """All experts."""
    return torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(5)) / HIDDEN**0.5


def own_matrices(rank):
    begin, end = expert_range(rank.rank, NUM_EXPERTS, rank.num_ranks)
    return matrices()[begin:end].requires_grad_()


def block(x, idx, weights, experts, buffer, **options):
    """A layer whose sizes a compiler can follow: each expert sees every row, and most count for nothing."""
    received = deep_ep.dispatch(x, idx, weights, buffer, num_experts=NUM_EXPERTS, **options)
    is_real = (received.topk_idx >= 0).any(1, keepdim=True)
    rows = torch.where(is_real, received.x, 0)
    y = torch.zeros_like(rows)
    for number in range(experts.size(0)):
        gate = torch.where(received.topk_idx == number, received.topk_weights, 0).sum(1, keepdim=True)
        y = y + gate.to(rows.dtype) * torch.relu(rows @ experts[number].to(rows.dtype))
    return deep_ep.combine(y, received.handle, buffer)


@torch.enable_grad()
def expect(x, idx, weights):
    """The same layer with all experts at home; returns output, and gradients of x, of weights and of the experts."""
    x, weights = x.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
    experts = matrices().requires_grad_()
    made = torch.relu(torch.einsum("th,ehd->ted", x.float(), experts))
    chosen = made[torch.arange(len(x))[:, None], idx.clamp(min=0)]
    out = (chosen * (weights * (idx >= 0))[..., None]).sum(1)
    (out * out.detach().cos()).sum().backward()
    return out.detach(), x.grad, weights.grad, experts.grad


def run(function, rank, buffer, **options):
    """Run a layer forward and backward; compare with `expect`; return output and gradients."""
    x, idx, weights = inputs_of(rank.rank)
    experts = own_matrices(rank)
    out = function(x, idx, weights, experts, buffer, **options)
    (out * out.detach().cos()).sum().backward()
    wanted = expect(x, idx, weights)
    dist.all_reduce(wanted[3], group=rank.group)
    begin, end = expert_range(rank.rank, NUM_EXPERTS, rank.num_ranks)
    actual = (out.detach(), x.grad, weights.grad, experts.grad)
    for tensor, want in zip(actual, (*wanted[:3], wanted[3][begin:end]), strict=True):
        torch.testing.assert_close(tensor, want, rtol=1e-4, atol=1e-5)
    return actual


class Calls:
    """Keeps a list of the exchanges of a buffer."""

    def __init__(self, monkeypatch):
        self.names: list[str] = []
        for name in ("dispatch", "combine"):
            monkeypatch.setattr(Buffer, name, self._recorded(name, getattr(Buffer, name)))

    def _recorded(self, name, method):
        @functools.wraps(method)
        def call(buffer, *args, **kwargs):
            self.names.append("cached dispatch" if kwargs.get("handle") is not None else name)
            return method(buffer, *args, **kwargs)

        return call


FORWARD, BACKWARD = ["dispatch", "combine"], ["cached dispatch", "combine"]


def train_eagerly(rank, options):
    x, _, weights = inputs_of(rank.rank)
    run(block, rank, rank.buffer(), **options)
    with torch.no_grad():
        out = block(x, inputs_of(rank.rank)[1], weights, own_matrices(rank), rank.buffer())
    assert not out.requires_grad
    with torch.inference_mode():
        block(*inputs_of(rank.rank), own_matrices(rank), rank.buffer())


@pytest.mark.parametrize("options", [{}, {"num_worst_tokens": 64}, {"expert_alignment": 8}], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_gradients_are_those_of_all_experts_at_home(pool, num_ranks, options):
    pool.run(num_ranks, train_eagerly, options)


def train_between_hosts(rank):
    with pytest.MonkeyPatch().context() as patch:
        patch.setenv("DEEP_EP_NODE_ID", f"host-{rank.rank % 2}")
        buffer = Buffer(rank.group, device="cpu", timeout_s=COMPILE_TIMEOUT_S)
    assert buffer.topology.num_hosts == 2
    run(block, rank, buffer)
    run(torch.compile(block, backend="aot_eager", fullgraph=True), rank, buffer)
    x, idx, weights = (tensor.detach() for tensor in inputs_of(rank.rank))
    torch.library.opcheck(
        torch.ops.deep_ep.dispatch.default, (x, None, idx, weights, buffer.op_id, NUM_EXPERTS, 20, 1, 0)
    )


def test_gradients_cross_hosts(pool):
    pool.run(3, train_between_hosts, timeout_s=COMPILE_TIMEOUT_S)


def route_to_one_rank(rank):
    """C18: rank 0 gets no row, and takes part in forward and backward all the same."""
    x, idx, weights = inputs_of(rank.rank)
    idx = torch.full_like(idx, NUM_EXPERTS - 1)
    idx[:, 1:] = -1
    received = deep_ep.dispatch(x, idx, weights, rank.buffer(), num_experts=NUM_EXPERTS)
    assert (received.x.size(0) == 0) == (rank.rank == 0)
    deep_ep.combine(received.x * 2, received.handle, rank.buffer()).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))


def test_c18_a_rank_that_receives_nothing_takes_part_backward(pool):
    pool.run(2, route_to_one_rank)


def weigh_before_and_after(rank):
    """C84: the weight of a slot multiplies a row before its expert, or what the expert made of it."""
    experts = own_matrices(rank)
    for is_before in (True, False):
        x, idx, weights = inputs_of(rank.rank)
        received = deep_ep.dispatch(x, idx, weights, rank.buffer(), num_experts=NUM_EXPERTS)
        y = torch.zeros_like(received.x)
        for number in range(experts.size(0)):
            gate = torch.where(received.topk_idx == number, received.topk_weights, 0).sum(1, keepdim=True)
            row = received.x * gate if is_before else received.x
            made = torch.relu(row @ experts[number])
            y = y + (made if is_before else made * gate)
        out = deep_ep.combine(y, received.handle, rank.buffer())
        (out * out.detach().cos()).sum().backward()
        # Weights are positive, and relu(w * z) = w * relu(z): both orders are the same function of the weights.
        _, _, grad, _ = expect(x, idx, weights)
        assert (weights.grad[idx >= 0].abs() > 0).any()
        assert not weights.grad[idx < 0].any()
        torch.testing.assert_close(weights.grad, grad, rtol=1e-4, atol=1e-5)


def test_c84_the_router_gets_the_gradient_of_its_weights(pool):
    pool.run(2, weigh_before_and_after)


def compile_block(rank, backend, options):
    """Compile without a break; other routing, and a call without gradients, go through the same code."""
    torch._dynamo.reset()
    buffer = Buffer(rank.group, timeout_s=COMPILE_TIMEOUT_S, device="cpu")  # a peer may compile for longer
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    with warnings.catch_warnings(), pytest.MonkeyPatch().context() as patch:
        warnings.simplefilter("ignore")  # the compiler calls what torch itself has deprecated
        calls = Calls(patch)
        for _ in range(2):
            run(compiled, rank, buffer, **options)
        assert calls.names == (FORWARD + BACKWARD) * 2
        with torch.no_grad():
            x, idx, weights = inputs_of(rank.rank)
            idx = (idx + 1) % NUM_EXPERTS
            out = compiled(x, idx, weights, own_matrices(rank), buffer, **options)
            torch.testing.assert_close(out, expect(x, idx, weights)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "options"),
    [("aot_eager", {}), ("aot_eager", {"num_worst_tokens": 64}), ("inductor", {})],
    ids=["aot_eager, unbacked sizes", "aot_eager, worst case", "inductor, unbacked sizes"],
)
def test_a_block_compiles_as_one_graph(pool, backend, options):
    pool.run(2, compile_block, backend, options, timeout_s=COMPILE_TIMEOUT_S)


def two_layers(x, idx, weights, experts, buffer, wrap):
    once = wrap(lambda x, weights: block(x, idx, weights, experts, buffer))
    return once(once(x, weights) + x, weights)


def checkpoint_layers(rank):
    buffer, results, names = rank.buffer(), {}, {}
    contexts = functools.partial(create_selective_checkpoint_contexts, ops.COMMUNICATION_OPS)
    wraps = {
        "none": lambda f: f,
        "full": lambda f: functools.partial(checkpoint, f, use_reentrant=False),
        "selective": lambda f: functools.partial(checkpoint, f, use_reentrant=False, context_fn=contexts),
    }
    with pytest.MonkeyPatch().context() as patch:
        calls = Calls(patch)
        for kind, wrap in wraps.items():
            x, idx, weights = inputs_of(rank.rank)
            experts = own_matrices(rank)
            calls.names.clear()
            out = two_layers(x, idx, weights, experts, buffer, wrap)
            out.square().sum().backward()
            names[kind], results[kind] = list(calls.names), (out.detach(), x.grad, weights.grad, experts.grad)
    for kind in ("full", "selective"):
        for tensor, want in zip(results[kind], results["none"], strict=True):
            assert torch.equal(tensor, want), kind
    return names


def test_selective_checkpoints_send_nothing_twice_and_full_ones_in_order(pool):
    for names in pool.run(2, checkpoint_layers):
        assert names["none"] == FORWARD * 2 + BACKWARD * 2
        assert names["selective"] == names["none"]
        assert names["full"] == FORWARD * 2 + (FORWARD + BACKWARD) * 2


def differentiate_twice(rank):
    x, idx, weights = inputs_of(rank.rank)
    out = block(x, idx, weights, own_matrices(rank), rank.buffer())
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="no second gradient"):
        gradient.sum().backward()


def test_a_second_gradient_is_refused(pool):
    pool.run(2, differentiate_twice)


def check_operators(rank):
    """Run torch's own checks of what operators say about themselves, on full results: no row is left as it was."""
    buffer = Buffer(rank.group, low_latency_mode=True, device="cpu")
    number = buffer.op_id
    x, idx, weights = inputs_of(rank.rank)
    received = deep_ep.dispatch(x.detach(), idx, weights.detach(), buffer, num_experts=NUM_EXPERTS)
    handle, y = list(received.handle), torch.randn_like(received.x)
    detached = (x.detach(), torch.rand(len(x), 2), idx, weights.detach())
    check, operators = torch.library.opcheck, torch.ops.deep_ep
    check(operators.dispatch.default, (x, None, idx, weights, number, NUM_EXPERTS, 20, 1, 0))
    check(operators.dispatch.default, (*detached, number, NUM_EXPERTS, 20, 1, 0))
    check(operators.combine.default, (y.requires_grad_(), handle, number))
    check(operators.dispatch_cached.default, (x.detach(), handle, number))
    check(operators.combine_with_weights.default, (y.detach(), received.topk_weights, handle, number))
    rows = torch.randn(4, 160).bfloat16()
    everywhere = torch.arange(NUM_EXPERTS).expand(4, -1).contiguous()
    for row_format in ("bf16", "fp8", "fp8_rounded", "fp8_ue8m0", "mxfp8"):
        check(operators.low_latency_dispatch.default, (rows, everywhere, number, 4, NUM_EXPERTS, row_format))
    got = deep_ep.low_latency_dispatch(
        rows, everywhere, buffer, num_max_dispatch_tokens_per_rank=4, num_experts=NUM_EXPERTS, use_fp8=False
    )
    ones = torch.ones(4, NUM_EXPERTS)
    check(
        operators.low_latency_combine.default, (got.x, everywhere, ones, *got.handle[:2], number, 4, NUM_EXPERTS, False)
    )
    out = deep_ep.low_latency_combine(got.x, everywhere, ones, got.handle, buffer)
    assert torch.equal(out, rows * NUM_EXPERTS)
    fp8, scales = deep_ep.low_latency_dispatch(
        rows, everywhere, buffer, num_max_dispatch_tokens_per_rank=4, num_experts=NUM_EXPERTS
    ).x
    assert (fp8.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    with pytest.raises(UnsupportedError, match="low-latency calls have no gradient"):
        deep_ep.low_latency_combine(got.x.requires_grad_(), everywhere, ones, got.handle, buffer).sum().backward()


def test_operators_pass_the_checks_of_torch(pool):
    pool.run(2, check_operators)


def dispatch_pairs(rank):
    x, idx, weights = inputs_of(rank.rank)
    scales = torch.rand(len(x), 3)
    pair = (x.detach().to(torch.float8_e4m3fn), scales)
    received = deep_ep.dispatch(pair, idx, weights, rank.buffer(), num_experts=NUM_EXPERTS)
    again = rank.buffer().dispatch(pair, handle=received.handle)[0]
    assert torch.equal(received.x[0].view(torch.uint8), again[0].view(torch.uint8))
    assert torch.equal(received.x[1], again[1])
    assert received.num_tokens_per_expert.tolist() == [
        int((received.topk_idx == number).sum()) for number in range(len(received.num_tokens_per_expert))
    ]
    assert received.topk_weights.requires_grad
    with pytest.raises(UnsupportedError, match="rows and scales has no gradient"):
        received.topk_weights.sum().backward()


def test_pairs_travel_without_gradients(pool):
    pool.run(2, dispatch_pairs)


def drop_the_buffer(rank):
    buffer = Buffer(rank.group, device="cpu")
    x, idx, weights = inputs_of(rank.rank)
    received = deep_ep.dispatch(x, idx, weights, buffer, num_experts=NUM_EXPERTS)
    handle = received.handle
    out = deep_ep.combine(received.x * 1, handle, buffer)
    del buffer
    with pytest.raises(DestroyedError, match="is gone"):
        out.sum().backward()


def test_backward_without_its_buffer_says_so(pool):
    pool.run(2, drop_the_buffer)


def change_the_channels(rank):
    """A program may set another number of SMs between forward and backward, and between calls of compiled code."""
    num_sms, buffer = Buffer.num_sms, Buffer(rank.group, timeout_s=COMPILE_TIMEOUT_S, device="cpu")
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    try:
        for function in (block, compiled):
            x, idx, weights = inputs_of(rank.rank)
            out = function(x, idx, weights, own_matrices(rank), buffer)
            Buffer.set_num_sms(num_sms + 4)
            out.sum().backward()
            run(function, rank, buffer)
            Buffer.set_num_sms(num_sms)
    finally:
        Buffer.set_num_sms(num_sms)


def test_the_number_of_sms_may_change_at_any_time(pool):
    pool.run(2, change_the_channels, timeout_s=COMPILE_TIMEOUT_S)


def see_fake_tensors(rank):
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    x, idx, weights = (tensor.detach() for tensor in inputs_of(rank.rank))
    buffer = rank.buffer()
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        arguments = [mode.from_tensor(tensor) for tensor in (x, idx, weights)]
        received = deep_ep.dispatch(*arguments, buffer, num_experts=NUM_EXPERTS)
        out = deep_ep.combine(received.x, received.handle, buffer)
    assert isinstance(received.x.size(0), torch.SymInt)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    assert isinstance(out, Tensor)


def test_fake_tensors_send_nothing(pool):
    pool.run(1, see_fake_tensors)
