"""Shapes and routings that broke other libraries; each compared with the reference, bit for bit."""

import pytest
import torch
from steps import (
    assert_combined,
    assert_received,
    assert_same_bits,
    check_dispatch,
    check_exchange,
    combine,
    dispatch,
    expect_combine,
    expect_dispatch,
    plain,
    run_dispatch,
)

from deep_ep import Buffer
from rank_pool import RankPool
from strategies import Exchange

SHAPES = {
    "C1 hidden 2880": Exchange(num_tokens=(64, 61), hidden=2880, num_topk=4, num_experts=128),
    "C6 top-10 of 512": Exchange(num_tokens=(40, 33, 20, 7), hidden=2048, num_topk=10, num_experts=512),
    "C10 33 experts a rank": Exchange(num_tokens=(5,) * 8, num_topk=8, num_experts=264),
    "C10 17 experts a rank": Exchange(num_tokens=(50, 40), num_topk=8, num_experts=34),
    "C12 3 ranks": Exchange(num_tokens=(20, 7, 13), hidden=7168, num_topk=8, num_experts=36),
    "C12 5 ranks": Exchange(num_tokens=(9, 8, 7, 6, 5), hidden=7168, num_topk=8, num_experts=60),
    "C12 6 ranks": Exchange(num_tokens=(9, 8, 7, 6, 5, 4), hidden=7168, num_topk=8, num_experts=72),
    "C12 7 ranks": Exchange(num_tokens=(9, 8, 7, 6, 5, 4, 3), hidden=7168, num_topk=8, num_experts=84),
    "C13 one rank": Exchange(num_tokens=(100,), hidden=1024, num_topk=2, num_experts=16),
    "C14 smoke shape": Exchange(num_tokens=(128, 128), hidden=1024, num_topk=2, num_experts=16),
    "C17 an empty rank": Exchange(num_tokens=(0, 128), hidden=7168, num_topk=8, num_experts=64),
    "C19 all ranks empty": Exchange(num_tokens=(0, 0, 0), hidden=7168, num_topk=8, num_experts=64),
    "C32 holes": Exchange(num_tokens=(80, 90), num_topk=8, num_experts=32, routing="holes"),
    "C32 fully masked rows": Exchange(num_tokens=(80, 90), num_topk=8, num_experts=32, routing="masked rows"),
    "C33 duplicates": Exchange(num_tokens=(80, 90), num_topk=8, num_experts=16, routing="duplicates"),
    "fewer experts than ranks": Exchange(num_tokens=(9, 0, 4, 11), num_topk=1, num_experts=2),
    "top-32": Exchange(num_tokens=(30, 31), num_topk=32, num_experts=64),
    "hidden 1": Exchange(num_tokens=(30, 31), hidden=1),
    "long rows": Exchange(num_tokens=(2, 3), hidden=65537),
}


@pytest.mark.parametrize("exchange", SHAPES.values(), ids=SHAPES.keys())
def test_any_shape_goes_there_and_back(pool, exchange):
    check_exchange(pool, exchange, has_weights=True)


@pytest.fixture(scope="module")
def large_pool():
    pool = RankPool(num_ranks=64)
    yield pool
    pool.close()


def test_sixteen_ranks_with_28_experts_each(large_pool):
    """C10."""
    exchange = Exchange(num_tokens=tuple(range(16)), hidden=256, num_topk=8, num_experts=448)
    check_exchange(large_pool, exchange, has_weights=True)


def test_sixty_four_ranks(large_pool):
    exchange = Exchange(num_tokens=tuple(rank % 7 for rank in range(64)), num_topk=8, num_experts=100)
    check_exchange(large_pool, exchange, has_weights=True)


def empty_rank_rotates(rank, num_steps):
    buffer = rank.buffer()
    results = []
    for step in range(num_steps):
        exchange = rotated(step, rank.num_ranks)
        inputs = exchange.inputs(rank.rank)
        dispatched = dispatch(buffer, exchange, inputs)
        x, weights = exchange.expert_outputs(rank.rank, len(dispatched[4][3]))
        results.append((plain(dispatched), combine(buffer, exchange, inputs, dispatched[4], x, weights)[:2]))
    return results


def rotated(step, num_ranks):
    num_tokens = tuple(0 if rank == step % num_ranks else 1 + (7 * step + rank) % 40 for rank in range(num_ranks))
    return Exchange(num_tokens=num_tokens, hidden=32, num_topk=8, num_experts=24, seed=step)


def test_each_rank_in_turn_has_no_tokens(pool):
    """C17."""
    num_steps = 100
    results = pool.run(3, empty_rank_rotates, num_steps)
    for step in range(num_steps):
        received = expect_dispatch(rotated(step, 3))
        combined = expect_combine(rotated(step, 3), has_weights=True)
        for rank in range(3):
            assert_received(rank, results[rank][step][0], received[rank])
            assert_combined(rotated(step, 3), results[rank][step][1], combined[rank])


class Dispatch(torch.autograd.Function):
    """Dispatch whose gradient is combine, as training programs write it."""

    @staticmethod
    def forward(ctx, x, buffer, exchange, inputs):
        recv_x, _, _, _, handle, _ = dispatch(buffer, exchange, inputs._replace(x=x))
        ctx.buffer = buffer
        ctx.save_for_backward(*handle)
        ctx.mark_non_differentiable(*handle)
        return recv_x, *handle

    @staticmethod
    def backward(ctx, grad, *_):
        grad_x, _, _ = ctx.buffer.combine(grad.contiguous(), ctx.saved_tensors)
        return grad_x, None, None, None


class Combine(torch.autograd.Function):
    """Combine whose gradient is a cached dispatch."""

    @staticmethod
    def forward(ctx, y, buffer, *handle):
        ctx.buffer = buffer
        ctx.save_for_backward(*handle)
        return buffer.combine(y, handle)[0]

    @staticmethod
    def backward(ctx, grad):
        grad_y, *_ = ctx.buffer.dispatch(grad.contiguous(), handle=ctx.saved_tensors)
        return grad_y, *[None] * (1 + len(ctx.saved_tensors))


def forward_and_backward(rank, exchange):
    inputs = exchange.inputs(rank.rank)
    x = inputs.x.clone().requires_grad_()
    recv_x, *handle = Dispatch.apply(x, rank.buffer(), exchange, inputs)
    combined = Combine.apply(recv_x * 3.0, rank.buffer(), *handle)
    combined.backward(torch.full_like(combined, 0.5))
    return recv_x.shape, combined.detach(), x.grad


def test_a_rank_that_receives_nothing_trains(pool):
    """C18."""
    # Only the experts of rank 0 are chosen, so rank 1 receives nothing.
    exchange = Exchange(num_tokens=(20, 30), hidden=1024, num_topk=2, num_experts=6, routing="few ranks", kind="fp32")
    results = pool.run(2, forward_and_backward, exchange)
    assert [tuple(result[0]) for result in results] == [(50, 1024), (0, 1024)]
    for rank, (_, combined, grad) in enumerate(results):
        assert_same_bits(combined, exchange.inputs(rank).x * 3.0)
        assert_same_bits(grad, torch.full_like(grad, 1.5))


@pytest.mark.parametrize("num_tokens", [(0, 0), (0, 5), (5, 0)])
def test_fp8_dispatch_without_rows_keeps_shapes(pool, num_tokens):
    """C20."""
    exchange = Exchange(
        num_tokens=num_tokens,
        hidden=7168,
        routing="nowhere" if 5 in num_tokens else "uniform",
        kind="fp8 row-major scales",
    )
    for x, scales, *_ in pool.run(2, run_dispatch, exchange):
        assert (x.shape, x.dtype) == ((0, 7168), torch.float8_e4m3fn)
        assert (scales.shape, scales.dtype) == ((0, 56), torch.float32)
    check_dispatch(pool, exchange)


def test_all_tokens_to_one_expert(pool):
    """C31."""
    check_exchange(
        pool,
        Exchange(num_tokens=(4096, 4096), hidden=64, num_topk=1, num_experts=8, routing="one expert"),
        has_weights=True,
    )


def test_int32_and_int64_expert_ids_give_the_same(pool):
    """C36."""
    results = {}
    for dtype in (torch.int32, torch.int64):
        exchange = Exchange(num_tokens=(30, 20), num_topk=4, routing="holes", topk_idx_dtype=dtype)
        results[dtype] = pool.run(2, run_dispatch, exchange)
    for narrow, wide in zip(results[torch.int32], results[torch.int64], strict=True):
        assert (narrow[2].dtype, wide[2].dtype) == (torch.int32, torch.int64)
        assert_same_bits(narrow[2].long(), wide[2])
        assert_same_bits(narrow[0], wide[0])
        assert_same_bits(narrow[3], wide[3])
        assert narrow[4] == wide[4]


def dispatch_strided(rank, exchange):
    """Give every tensor with strides of its own, and combine with such ones."""
    inputs = exchange.inputs(rank.rank)
    strided = inputs._replace(
        x=every_second_column(inputs.x),
        topk_idx=inputs.topk_idx.T.contiguous().T,
        topk_weights=every_second_column(inputs.topk_weights),
        biases=tuple(every_second_column(bias) for bias in inputs.biases),
    )
    assert not any(t.is_contiguous() for t in (strided.x, strided.topk_idx, strided.topk_weights))
    dispatched = dispatch(rank.buffer(), exchange, strided)
    x, weights = exchange.expert_outputs(rank.rank, len(dispatched[4][3]))
    combined = combine(
        rank.buffer(), exchange, strided, dispatched[4], every_second_column(x), every_second_column(weights)
    )
    return plain(dispatched), combined[:2]


def every_second_column(tensor):
    wide = tensor.new_zeros(tensor.shape[0], 2 * tensor.shape[1])
    wide[:, ::2] = tensor
    return wide[:, ::2]


def test_strides_of_inputs_do_not_matter(pool):
    """C37, C39."""
    exchange = Exchange(num_tokens=(30, 21), hidden=48, num_topk=4, num_biases=2)
    results = pool.run(2, dispatch_strided, exchange)
    received, combined = expect_dispatch(exchange), expect_combine(exchange, has_weights=True)
    for rank in range(2):
        assert_received(rank, results[rank][0], received[rank])
        assert_combined(exchange, results[rank][1], combined[rank])


def test_combine_without_weights_gives_none(pool):
    """C41."""
    check_exchange(pool, Exchange(num_tokens=(30, 21), has_topk=False), has_weights=False)


def round_trip_quantised(rank, num_tokens):
    """Send rows that are zero in whole or in blocks, quantised as programs do, and look at what arrives."""
    generator = torch.Generator().manual_seed(rank.rank)
    x = torch.randn(num_tokens, 512, generator=generator)
    x[::3] = 0.0
    x[:, 128:256] = 0.0
    blocks = x.view(num_tokens, 4, 128)
    scales = blocks.abs().amax(dim=2).clamp(min=1e-4) / 448.0
    quantised = (blocks / scales.unsqueeze(2)).to(torch.float8_e4m3fn).view(num_tokens, 512)
    exchange = Exchange(num_tokens=(num_tokens,) * 2, hidden=512)
    inputs = exchange.inputs(rank.rank)._replace(x=quantised, scales=scales)
    (recv_x, recv_scales), *_ = dispatch(rank.buffer(), exchange, inputs)
    assert (recv_scales > 0).all()
    return (recv_x.float().view(-1, 4, 128) * recv_scales.unsqueeze(2)).view(-1, 512)


def test_zero_rows_and_blocks_stay_zero_under_fp8(pool):
    """C43."""
    for received in pool.run(2, round_trip_quantised, 24):
        assert received.isfinite().all()
        assert (received[:, 128:256] == 0).all()
        assert (received == 0).all(dim=1).any()
        assert (received != 0).any(dim=1).any()


def exchange_over_two_gib(rank, num_tokens, row_bytes):
    """Dispatch more than 2**31 bytes to this one rank and combine them; return whether all went and came."""
    counter = torch.arange(num_tokens * row_bytes // 8)
    # Masked so that every two bytes are a finite bfloat16, which is then the sum of itself.
    counter.bitwise_and_(0x3FFF_3FFF_3FFF_3FFF)
    sent = counter.view(torch.uint8).view(num_tokens, row_bytes)
    buffer = Buffer(rank.group)
    recv_x, _, _, _, handle, _ = buffer.dispatch(
        sent,
        num_tokens_per_rank=torch.tensor([num_tokens], dtype=torch.int32),
        is_token_in_rank=torch.ones(num_tokens, 1, dtype=torch.bool),
        num_tokens_per_expert=torch.tensor([num_tokens], dtype=torch.int32),
    )
    has_gone = torch.equal(recv_x, sent)
    combined_x, _, _ = buffer.combine(recv_x.view(torch.bfloat16), handle)
    has_come = torch.equal(combined_x.view(torch.int64).flatten(), counter)
    buffer.destroy()
    return has_gone, has_come


def test_offsets_beyond_32_bits(pool):
    """C15: bytes at offsets of more than 2**31 go where they belong, and come back."""
    num_tokens, row_bytes = 2052, 1 << 20
    assert num_tokens * row_bytes > 2**31
    assert pool.run(1, exchange_over_two_gib, num_tokens, row_bytes, timeout_s=240.0) == [(True, True)]
