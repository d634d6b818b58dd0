"""Low-latency mode in groups that span hosts, element by element against its specification."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hosts import HOSTS

from deep_ep.engines.base import RowFormat
from deep_ep.errors import DestroyedError, MismatchError
from low_latency_cases import (
    FORMATS,
    Case,
    check_combine,
    check_dispatch,
    expected_combine,
    expected_dispatch,
    make_inputs,
    poisoned,
    run_round,
    start_combine,
    start_dispatch,
)
from rank_pool import environment

BUFFERS = {}
CPU = torch.device("cpu")


def buffer_on(rank, hosts):
    key = (hosts, id(rank.group))
    if key not in BUFFERS:
        from deep_ep import Buffer

        with environment(DEEP_EP_NODE_ID=hosts[rank.rank]):
            BUFFERS[key] = Buffer(rank.group, num_rdma_bytes=1 << 20, low_latency_mode=True)
    return BUFFERS[key]


def rounds(rank, hosts, cases):
    for seed, case in enumerate(cases):
        run_round(buffer_on(rank, hosts)._low_latency, case, rank.rank, rank.num_ranks, seed, CPU)


@pytest.mark.parametrize("row_format", FORMATS)
@pytest.mark.parametrize("hosts", HOSTS)
def test_every_format_on_hosts_of_any_size(pool, hosts, row_format):
    cases = [
        Case(7, 256, 3, 6, row_format),
        Case(7, 200, 3, 7, row_format, split=True, has_empty_rank=True),
        Case(5, 64, 4, 9, row_format, repeated=True, masked=0.0),
        Case(5, 64, 2, 1, row_format, skewed=True, idx_dtype=torch.int32),
    ]
    pool.run(len(hosts), rounds, hosts, cases)


CASES = st.builds(
    Case,
    num_max_tokens=st.integers(1, 20),
    hidden=st.sampled_from([1, 7, 64, 128, 200, 513]),
    num_topk=st.integers(1, 9),
    num_experts=st.integers(1, 24),
    row_format=st.sampled_from(FORMATS),
    idx_dtype=st.sampled_from([torch.int64, torch.int32]),
    split=st.booleans(),
    masked=st.sampled_from([0.0, 0.2, 1.0]),
    has_empty_rank=st.booleans(),
    skewed=st.booleans(),
    repeated=st.booleans(),
)


@settings(max_examples=60)
@given(case=CASES, hosts=st.sampled_from(HOSTS))
def test_any_round_is_what_the_specification_says(pool, case, hosts):
    pool.run(len(hosts), rounds, hosts, [case])


def calls_in_flight(rank, hosts):
    """Two of each at a time; odd ranks call their hooks in the other order, and one of them a call later."""
    engine = buffer_on(rank, hosts)._low_latency
    cases = [Case(9, 128, 3, 8, split=True), Case(4, 72, 2, 5, RowFormat.FP8, split=True)]
    inputs = [make_inputs(case, rank.num_ranks, seed) for seed, case in enumerate(cases)]
    expected = [expected_dispatch(case, given_) for case, given_ in zip(cases, inputs, strict=True)]
    order = (0, 1) if rank.rank % 2 else (1, 0)
    pending = [start_dispatch(engine, case, given_, rank.rank, CPU) for case, given_ in zip(cases, inputs, strict=True)]
    for which in order:
        pending[which].finish()
        check_dispatch(cases[which], pending[which].result, expected[which][rank.rank])
    combines = []
    for which, case in enumerate(cases):
        y = poisoned(inputs[which].y[rank.rank], expected[which][rank.rank])
        combines.append(start_combine(engine, case, inputs[which], y, pending[which].result, rank.rank, CPU))
    for which in reversed(order):
        combines[which].finish()
        sums, sizes = expected_combine(cases[which], inputs[which], expected[which])
        check_combine(cases[which], combines[which].result, sums[rank.rank], sizes[rank.rank])


def test_two_calls_in_flight_are_finished_in_any_order(pool):
    pool.run(4, calls_in_flight, "AABB")
    pool.run(5, calls_in_flight, "AAABB")


def late_hook(rank, hosts):
    """One rank makes its next call before it calls its hook; the others wait in theirs."""
    engine = buffer_on(rank, hosts)._low_latency
    case = Case(6, 64, 2, 8, split=True)
    inputs = make_inputs(case, rank.num_ranks, 5)
    expected = expected_dispatch(case, inputs)
    first = start_dispatch(engine, case, inputs, rank.rank, CPU)
    if rank.rank != 1:
        first.finish()
    second = start_dispatch(engine, case, inputs, rank.rank, CPU)
    for pending in (first, second):
        if pending is second or rank.rank == 1:
            pending.finish()
        check_dispatch(case, pending.result, expected[rank.rank])


def test_a_rank_that_calls_its_hook_late_keeps_nobody_waiting(pool):
    pool.run(4, late_hook, "AABB")


def through_the_buffer(rank, hosts):
    """Flags, statistics and reduced precision, through the public calls."""
    buffer = buffer_on(rank, hosts)
    case = Case(8, 256, 3, 8, RowFormat.FP8, num_tokens=8)
    inputs = make_inputs(case, rank.num_ranks, 3)
    expected = expected_dispatch(case, inputs)
    stats, waits = torch.ones(2, dtype=torch.int32), torch.zeros(rank.num_ranks, dtype=torch.int64)
    mine = [part[rank.rank] for part in (inputs.x, inputs.topk_idx, inputs.topk_weights)]
    _, count, handle, event, hook = buffer.low_latency_dispatch(
        mine[0],
        mine[1],
        case.num_max_tokens,
        case.num_experts,
        cumulative_local_expert_recv_stats=stats,
        dispatch_wait_recv_cost_stats=waits,
        async_finish=True,
    )
    event.current_stream_wait()
    assert hook is None
    assert torch.equal(stats, count + 1)
    assert int(waits[rank.rank]) == 0
    assert int(waits.max()) > 0
    assert torch.equal(count, expected[rank.rank].recv_count)
    sums, sizes = expected_combine(case, inputs, expected)
    for use_logfmt, wire_bits in ((False, 24), (True, 16)):
        y = poisoned(inputs.y[rank.rank], expected[rank.rank])
        out, _, _ = buffer.low_latency_combine(y, mine[1], mine[2], handle, use_logfmt=use_logfmt)
        check_combine(Case(**(vars(case) | {"wire_bits": wire_bits})), out, sums[rank.rank], sizes[rank.rank])


def test_the_public_calls_between_hosts(pool):
    pool.run(4, through_the_buffer, "AABB")


def disagree(rank, hosts):
    buffer_on(rank, hosts)
    buffer = BUFFERS.pop((hosts, id(rank.group)))  # of no use to other tests afterwards
    engine = buffer._low_latency
    case = Case(6, 64, 2, 8, num_tokens=5)
    other = Case(6, 128, 2, 8, num_tokens=5) if hosts[rank.rank] == "B" else case
    try:
        pending = start_dispatch(engine, other, make_inputs(other, rank.num_ranks, 1), rank.rank, CPU)
        pending.finish()
    except MismatchError as error:
        text = str(error)
    with pytest.raises(DestroyedError, match="the ranks disagree about"):
        start_dispatch(engine, case, make_inputs(case, rank.num_ranks, 1), rank.rank, CPU)
    return text


def test_hosts_that_disagree_are_told(pool):
    for text in pool.run(4, disagree, "AABB"):
        assert "the ranks disagree about" in text
