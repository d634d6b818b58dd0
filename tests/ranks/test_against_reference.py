"""Any exchange does what the reference says, bit for bit."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
    poison,
    rebuild,
)

from deep_ep import reference
from deep_ep.events import EventOverlap
from strategies import FLOAT_KINDS, ROUTINGS, Exchange, exchanges


def lay_out(rank, exchange):
    return rank.buffer().get_dispatch_layout(exchange.inputs(rank.rank).topk_idx, exchange.num_experts)[:4]


@given(exchange=exchanges())
def test_layout_counts_as_the_reference(pool, exchange):
    for rank, (per_rank, per_rdma_rank, per_expert, in_rank) in enumerate(
        pool.run(exchange.num_ranks, lay_out, exchange)
    ):
        expected = reference.get_dispatch_layout(
            exchange.inputs(rank).topk_idx, exchange.num_experts, exchange.num_ranks
        )
        assert_same_bits(per_rank, expected.num_tokens_per_rank)
        assert_same_bits(per_expert, expected.num_tokens_per_expert)
        assert_same_bits(in_rank, expected.is_token_in_rank)
        assert per_rdma_rank is None


@given(exchange=exchanges())
def test_dispatch_moves_every_byte_as_the_reference(pool, exchange):
    check_dispatch(pool, exchange)


@given(exchange=exchanges(kinds=FLOAT_KINDS), has_weights=st.booleans())
def test_combine_adds_as_the_reference(pool, exchange, has_weights):
    check_exchange(pool, exchange, has_weights=has_weights)


def dispatch_again_and_combine(rank, exchange, num_repeats):
    """Use one dispatch many times, through its handle and through copies of it."""
    buffer, inputs = rank.buffer(), exchange.inputs(rank.rank)
    handle = dispatch(buffer, exchange, inputs)[4]
    received = []
    for num in range(num_repeats):
        handle = rebuild(handle)
        poison(buffer)
        again = buffer.dispatch(exchange.more_rows(rank.rank, num), handle=handle)
        assert again[1:5] == (None, None, None, None)
        # Copies, as the next round poisons the memory that results lie in.
        received.append([None if item is None else item.clone() for item in plain(again)[:2]])
    x, weights = exchange.expert_outputs(rank.rank, len(handle[3]))
    combined = combine(buffer, exchange, inputs, rebuild(handle), x, weights)[:2]
    return received, combined, tuple(handle)


@given(exchange=exchanges())
def test_a_cached_dispatch_goes_the_same_way_with_a_rebuilt_handle(pool, exchange):
    num_repeats = 2
    results = pool.run(exchange.num_ranks, dispatch_again_and_combine, exchange, num_repeats)
    handles = [received.handle for received in expect_dispatch(exchange)]
    expected_combined = expect_combine(exchange, has_weights=True)
    rows = [[exchange.more_rows(rank, num) for rank in range(exchange.num_ranks)] for num in range(num_repeats)]
    for rank, (received, combined, _) in enumerate(results):
        assert_combined(exchange, combined, expected_combined[rank])
        num_received = int(handles[rank].rank_prefix_matrix[-1, rank])
        for num, (x, scales) in enumerate(received):
            sent = [item if isinstance(item, tuple) else (item, None) for item in rows[num]]
            expected_x = reference.dispatch_cached([x for x, _ in sent], handles)[rank]
            assert x.shape == expected_x.shape
            assert_same_bits(x[:num_received], expected_x[:num_received])
            if scales is not None:
                expected_scales = reference.dispatch_cached([scales for _, scales in sent], handles)[rank]
                assert_same_bits(scales[:num_received], expected_scales[:num_received])


def go_there_and_back(rank, exchange):
    buffer, inputs = rank.buffer(), exchange.inputs(rank.rank)
    x, _, weights, _, handle, _ = dispatch(buffer, exchange, inputs)
    return buffer.combine(x, handle, topk_weights=weights)[:2]


@given(exchange=exchanges(kinds=("fp32",)))
def test_a_round_trip_multiplies_a_token_by_its_ranks_and_brings_its_weights_back(pool, exchange):
    results = pool.run(exchange.num_ranks, go_there_and_back, exchange)
    for rank, (combined_x, combined_weights) in enumerate(results):
        inputs = exchange.inputs(rank)
        layout = reference.get_dispatch_layout(inputs.topk_idx, exchange.num_experts, exchange.num_ranks)
        num_ranks_of_token = layout.is_token_in_rank.sum(dim=1, keepdim=True)
        expected = sum_of_copies(inputs.x, num_ranks_of_token)
        assert_same_bits(combined_x, expected)
        if exchange.has_topk:
            assert_same_bits(combined_weights, inputs.topk_weights.masked_fill(inputs.topk_idx < 0, 0.0))
        else:
            assert combined_weights is None


def sum_of_copies(x, num_copies):
    """Add each row to itself as often as its item of num_copies says, in float32."""
    total = x.new_zeros(x.shape)
    for copy in range(int(num_copies.max()) if num_copies.numel() else 0):
        total += x * (num_copies > copy)
    return total


def cross(rank, first, second):
    """Dispatch A, dispatch B, combine A, combine B."""
    buffer = rank.buffer()
    results = {}
    for name, exchange in (("a", first), ("b", second)):
        results[name] = dispatch(buffer, exchange, exchange.inputs(rank.rank))
    combined = {}
    for name, exchange in (("a", first), ("b", second)):
        handle = results[name][4]
        x, weights = exchange.expert_outputs(rank.rank, len(handle[3]))
        combined[name] = combine(buffer, exchange, exchange.inputs(rank.rank), handle, x, weights)[:2]
    return [(plain(results[name]), combined[name]) for name in "ab"]


@given(data=st.data())
def test_two_exchanges_in_flight_do_not_touch_each_other(pool, data):
    first = data.draw(exchanges(max_ranks=4))
    second = data.draw(exchanges(max_ranks=4))
    num_ranks = min(first.num_ranks, second.num_ranks)
    pair = [Exchange(**{**vars(e), "num_tokens": e.num_tokens[:num_ranks]}) for e in (first, second)]
    results = pool.run(num_ranks, cross, *pair)
    for which, exchange in enumerate(pair):
        received, combined = expect_dispatch(exchange), expect_combine(exchange, has_weights=True)
        for rank in range(num_ranks):
            assert_received(rank, results[rank][which][0], received[rank])
            assert_combined(exchange, results[rank][which][1], combined[rank])


def exchange_with_flags(rank, exchange, has_previous, async_finish, allocate_on_comm_stream):
    buffer, inputs = rank.buffer(), exchange.inputs(rank.rank)
    flags = {
        "previous_event": buffer.capture() if has_previous else None,
        "async_finish": async_finish,
        "allocate_on_comm_stream": allocate_on_comm_stream,
    }
    *_, layout_event = buffer.get_dispatch_layout(inputs.topk_idx, exchange.num_experts, **flags)
    dispatched = dispatch(buffer, exchange, inputs, **flags)
    dispatch_event, handle = dispatched[5], dispatched[4]
    again = buffer.dispatch(inputs.rows, handle=handle, **flags)
    x, weights = exchange.expert_outputs(rank.rank, len(handle[3]))
    combined = combine(buffer, exchange, inputs, handle, x, weights, **flags)
    for event in (layout_event, dispatch_event, again[5], combined[2]):
        assert isinstance(event, EventOverlap)
        assert (event.event is not None) == async_finish
        if async_finish:
            event.current_stream_wait()
            event.current_stream_wait()
        with event:
            pass
    return plain(dispatched), combined[:2]


@pytest.mark.parametrize(
    ("has_previous", "async_finish", "allocate_on_comm_stream"),
    list(itertools.product([False, True], repeat=3)),
)
def test_every_combination_of_stream_flags_gives_the_same(pool, has_previous, async_finish, allocate_on_comm_stream):
    """C54."""
    exchange = Exchange(num_tokens=(9, 0, 17), hidden=96, num_topk=3, num_experts=7, routing="holes", seed=54)
    results = pool.run(3, exchange_with_flags, exchange, has_previous, async_finish, allocate_on_comm_stream)
    received, combined = expect_dispatch(exchange), expect_combine(exchange, has_weights=True)
    for rank in range(3):
        assert_received(rank, results[rank][0], received[rank])
        assert_combined(exchange, results[rank][1], combined[rank])


@pytest.mark.parametrize("num_biases", [0, 1, 2])
@pytest.mark.parametrize("kind", FLOAT_KINDS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_and_every_number_of_biases(pool, routing, kind, num_biases):
    exchange = Exchange(
        num_tokens=(33, 1, 0, 20),
        hidden=72,
        num_topk=5,
        num_experts=11,
        routing=routing,
        kind=kind,
        sum_kind=kind,
        num_biases=num_biases,
        seed=1,
    )
    check_exchange(pool, exchange, has_weights=True)
