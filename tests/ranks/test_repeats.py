"""Many calls on one buffer: the same in, the same out, whatever came in between."""

import torch
from steps import (
    assert_combined,
    assert_received,
    assert_rounded_once,
    assert_same_bits,
    combine,
    dispatch,
    expect_combine,
    expect_dispatch,
    plain,
    run_exchange,
)

from deep_ep import Buffer, reference
from strategies import Exchange


def dispatch_with_one_handle(rank, exchange, num_calls):
    buffer = rank.buffer()
    handle = dispatch(buffer, exchange, exchange.inputs(rank.rank))[4]
    handle_before = [item.clone() for item in handle]
    results = []
    for num in range(num_calls):
        recv_x = buffer.dispatch(exchange.more_rows(rank.rank, num), handle=handle)[0]
        results.append(recv_x.clone())
        combined_x, _, _ = buffer.combine(recv_x, handle)
        results.append(combined_x)
    assert all(torch.equal(item, before) for item, before in zip(handle, handle_before, strict=True))
    return results


def test_a_handle_serves_a_hundred_dispatches_and_combines(pool):
    """C51."""
    exchange = Exchange(num_tokens=(20, 31, 4), hidden=32, num_topk=4)
    num_calls = 100
    results = pool.run(3, dispatch_with_one_handle, exchange, num_calls)
    handles = [received.handle for received in expect_dispatch(exchange)]
    for num in range(num_calls):
        received = reference.dispatch_cached([exchange.more_rows(rank, num) for rank in range(3)], handles)
        combined = reference.combine([x.float() for x in received], handles)
        for rank in range(3):
            assert_same_bits(results[rank][2 * num], received[rank])
            assert_rounded_once(results[rank][2 * num + 1], combined[rank].x)


def test_the_same_inputs_give_the_same_bits(pool):
    """C79."""
    exchange = Exchange(num_tokens=(60, 41, 50, 12), hidden=200, num_topk=6, num_experts=32, num_biases=2)
    first, *others = [pool.run(4, run_exchange, exchange, True) for _ in range(5)]
    for again in others:
        for (received, combined), (received_again, combined_again) in zip(first, again, strict=True):
            for item, item_again in zip(
                (*received[:4], *combined), (*received_again[:4], *combined_again), strict=True
            ):
                assert item is item_again is None or torch.equal(item, item_again)


def interleaved(step):
    """Decode steps of few tokens, with a prefill in between now and then."""
    num_tokens = 128 if step % 5 == 4 else 2 ** (step % 4)
    return Exchange(num_tokens=(num_tokens, num_tokens), hidden=48, num_topk=4, num_experts=16, seed=step % 40)


def run_interleaved(rank, num_steps):
    buffer = Buffer(rank.group, num_nvl_bytes=1 << 20)
    results = {}
    for step in range(num_steps):
        exchange = interleaved(step)
        inputs = exchange.inputs(rank.rank)
        dispatched = dispatch(buffer, exchange, inputs)
        x, weights = exchange.expert_outputs(rank.rank, len(dispatched[4][3]))
        combined = combine(buffer, exchange, inputs, dispatched[4], x, weights)
        recv_x, combined_x = dispatched[0].clone(), combined[0]
        if step >= 40:
            assert torch.equal(recv_x, results[step % 40][0][0])
            assert torch.equal(combined_x, results[step % 40][1][0])
        else:
            results[step] = (tuple(plain(dispatched)), combined[:2])
    return results


def test_large_and_small_batches_in_turn(pool):
    """C58, without graphs."""
    results = pool.run(2, run_interleaved, 400)
    for step in range(40):
        received = expect_dispatch(interleaved(step))
        combined = expect_combine(interleaved(step), has_weights=True)
        for rank in range(2):
            assert_received(rank, results[rank][step][0], received[rank])
            assert_combined(interleaved(step), results[rank][step][1], combined[rank])


def run_random_sizes(rank, num_steps):
    """Make round trips of random sizes; return how many times the buffer grew."""
    buffer = Buffer(rank.group)
    num_growths = 0
    generator = torch.Generator().manual_seed(59)
    for step in range(num_steps):
        num_tokens = tuple(torch.randint(1, 8193, (2,), generator=generator).tolist())
        exchange = Exchange(num_tokens=num_tokens, hidden=8, num_topk=2, num_experts=4, seed=step)
        inputs = exchange.inputs(rank.rank)
        memory_before = buffer.get_local_buffer_tensor(torch.uint8).data_ptr()
        recv_x, _, weights, _, handle, _ = dispatch(buffer, exchange, inputs)
        combined_x, combined_weights, _ = buffer.combine(recv_x, handle, topk_weights=weights)
        assert combined_x.shape == inputs.x.shape
        assert torch.equal(combined_weights, inputs.topk_weights)
        num_growths += buffer.get_local_buffer_tensor(torch.uint8).data_ptr() != memory_before
        del recv_x, weights, handle
    return num_growths


def test_random_batch_sizes_need_no_preparation_of_their_own(pool):
    """C59: the buffer grows a few times, not with every new size."""
    assert max(pool.run(2, run_random_sizes, 300)) <= 12
