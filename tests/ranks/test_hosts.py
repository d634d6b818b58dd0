"""Groups that span hosts: the same rows in the same order as on one host, and V1's handle of ten.

The hosts are made with DEEP_EP_NODE_ID on one machine: ranks of different words share nothing but the network.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import assert_same_bits, combine, dispatch, expect_dispatch, plain, poison, rebuild

from deep_ep import Config, network_reference, reference
from deep_ep.errors import ConfigError, UnsupportedError
from rank_pool import environment
from strategies import FLOAT_KINDS, ROUTINGS, Exchange, exchanges

BUFFERS = {}


def buffer_on(rank, hosts):
    """Return a buffer whose ranks are on hosts named by letters, like "AAB"."""
    key = (hosts, id(rank.group))
    if key not in BUFFERS:
        from deep_ep import Buffer

        with environment(DEEP_EP_NODE_ID=hosts[rank.rank]):
            BUFFERS[key] = Buffer(rank.group, num_nvl_bytes=1 << 20, num_rdma_bytes=1 << 20)
    return BUFFERS[key]


def host_lists(hosts):
    return [[r for r, name in enumerate(hosts) if name == host] for host in sorted(set(hosts), key=hosts.index)]


def lay_out(rank, hosts, exchange):
    return buffer_on(rank, hosts).get_dispatch_layout(exchange.inputs(rank.rank).topk_idx, exchange.num_experts)[:4]


def run_exchange(rank, hosts, exchange, has_weights, num_repeats=1):
    """Dispatch, dispatch again by a rebuilt handle, and combine other rows."""
    buffer, inputs = buffer_on(rank, hosts), exchange.inputs(rank.rank)
    poison(buffer)
    dispatched = dispatch(buffer, exchange, inputs)
    handle = rebuild(dispatched[4])
    again = []
    for num in range(num_repeats):
        rows = buffer.dispatch(exchange.more_rows(rank.rank, num), handle=handle, config=Config(exchange.num_sms))
        assert rows[1:5] == (None, None, None, None)
        again.append(plain(rows)[:2])
    x, weights = exchange.expert_outputs(rank.rank, len(handle[7]))
    combined = combine(buffer, exchange, inputs, handle, x, weights if has_weights else None)
    return plain(dispatched), again, combined[:2]


def check_exchange(pool, hosts, exchange, *, has_weights=True):
    results = pool.run(len(hosts), run_exchange, hosts, exchange, has_weights)
    check_results(hosts, exchange, results, has_weights)


def check_results(hosts, exchange, results, has_weights):
    ranks = range(len(hosts))
    received, lists = expect_dispatch(exchange), host_lists(hosts)
    masks = [item.handle.is_token_in_rank for item in received]
    handles = network_reference.make_handles(masks, lists, exchange.num_sms)
    one_host = [item.handle for item in received]
    outputs = [exchange.expert_outputs(rank, len(one_host[rank].recv_src_idx)) for rank in ranks]
    sums = network_reference.combine(
        [x for x, _ in outputs],
        masks,
        lists,
        topk_weights_RNK=[weights for _, weights in outputs] if has_weights else None,
        biases_RTH=[exchange.inputs(rank).biases for rank in ranks],
    )
    more = [exchange.more_rows(rank, 0) for rank in ranks]
    more_x = [rows[0] if isinstance(rows, tuple) else rows for rows in more]
    again_x = reference.dispatch_cached(more_x, one_host)
    for rank, (dispatched, again, combined) in enumerate(results):
        assert_received(rank, dispatched, received[rank], handles[rank])
        num_rows = int(handles[rank].recv_gbl_rank_prefix_sum[-1])
        assert_same_bits(again[0][0][:num_rows], again_x[rank][:num_rows])
        if isinstance(more[0], tuple):
            scales = reference.dispatch_cached([item[1] for item in more], one_host)
            assert_same_bits(again[0][1][:num_rows], scales[rank][:num_rows])
        magnitude = reference.combine([x.float().abs() for x, _ in outputs], one_host)[rank].x
        assert_near(combined[0], sums[rank].x, magnitude)
        assert (combined[1] is None) == (not has_weights)
        if has_weights:
            torch.testing.assert_close(combined[1], sums[rank].topk_weights, rtol=1e-6, atol=1e-5)


def assert_near(actual, expected, magnitude):
    """Compare sums that were rounded twice, element by element.

    Each rounding may go either way where two values are equally near (`rows.TokenRows.sum`): one unit in the last place
    of a host's sum, which is at most the sum of the magnitudes of its rows, and one of the result.
    """
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    eps = torch.finfo(actual.dtype).eps
    limit = eps * magnitude + eps * expected.float().abs() + 1e-6
    assert ((actual.float() - expected.float()).abs() <= limit).all()


def assert_received(rank, actual, expected, handle):
    x, scales, topk_idx, topk_weights, counts, actual_handle = actual
    num_rows = int(handle.recv_gbl_rank_prefix_sum[-1])
    assert counts == expected.num_recv_tokens_per_expert
    assert x.shape == expected.x.shape
    assert_same_bits(x[:num_rows], expected.x[:num_rows])
    assert (scales is None) == (expected.scales is None)
    if scales is not None:
        assert_same_bits(scales[:num_rows], expected.scales[:num_rows])
    assert (topk_idx is None) == (topk_weights is None) == (expected.topk_idx is None)
    if topk_idx is not None:
        assert_same_bits(topk_idx, expected.topk_idx)
        assert_same_bits(topk_weights[:num_rows], expected.topk_weights[:num_rows])
    assert len(actual_handle) == 10
    for name, item, expected_item in zip(handle._fields, actual_handle, handle, strict=True):
        if name == "recv_src_meta":
            assert len(item) == len(expected.handle.recv_src_idx)
            item = item[:num_rows]
        assert_same_bits(item, expected_item, name)


HOSTS = ("AB", "AABB", "AAB", "ABB", "ABAB", "ABC", "AAABB")


@pytest.mark.parametrize("hosts", HOSTS)
def test_layouts_count_tokens_once_per_host(pool, hosts):
    exchange = Exchange(num_tokens=tuple(range(3, 3 + len(hosts))), num_experts=9, num_topk=3)
    for rank, (per_rank, per_host, per_expert, in_rank) in enumerate(pool.run(len(hosts), lay_out, hosts, exchange)):
        expected = reference.get_dispatch_layout(exchange.inputs(rank).topk_idx, 9, len(hosts))
        assert_same_bits(per_rank, expected.num_tokens_per_rank)
        assert_same_bits(per_expert, expected.num_tokens_per_expert)
        assert_same_bits(in_rank, expected.is_token_in_rank)
        by_host = [expected.is_token_in_rank[:, ranks].any(1).sum() for ranks in host_lists(hosts)]
        assert_same_bits(per_host, torch.stack(by_host).int())


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("hosts", HOSTS)
def test_every_routing_on_hosts_of_any_size(pool, hosts, routing):
    num_tokens = tuple((33, 1, 0, 20, 7)[: len(hosts)])
    check_exchange(pool, hosts, Exchange(num_tokens=num_tokens, num_topk=4, num_experts=11, routing=routing))


@settings(max_examples=60)
@given(exchange=exchanges(max_ranks=5), data=st.data(), has_weights=st.booleans())
def test_any_exchange_is_what_the_reference_says(pool, exchange, data, has_weights):
    hosts = data.draw(st.sampled_from([name for name in HOSTS if len(name) == max(exchange.num_ranks, 2)]))
    num_tokens = (exchange.num_tokens * 2)[: len(hosts)]
    check_exchange(pool, hosts, dataclasses.replace(exchange, num_tokens=num_tokens), has_weights=has_weights)


@pytest.mark.parametrize("num_biases", [0, 1, 2])
@pytest.mark.parametrize("kind", FLOAT_KINDS)
def test_rows_in_several_chunks(pool, kind, num_biases):
    """800 rows of 4 KB and more make chunks of 256 KB and more."""
    exchange = Exchange(
        num_tokens=(800, 650, 1, 700),
        hidden=2048,
        num_topk=2,
        num_experts=8,
        kind=kind,
        sum_kind=kind,
        num_biases=num_biases,
    )
    check_exchange(pool, "AABB", exchange)


def refused(rank, hosts):
    from deep_ep import Buffer

    errors = []
    Buffer.set_communication_mode(use_rdma=False)
    try:
        buffer_on(rank, hosts)
    except UnsupportedError as error:
        errors.append(str(error))
    finally:
        Buffer.set_communication_mode(use_rdma=None)
    try:
        Buffer.set_communication_mode(use_rdma="yes")
    except ConfigError as error:
        errors.append(str(error))
    buffer = rank.buffer()
    for call in (buffer.internode_dispatch, buffer.internode_combine):
        try:
            call(torch.zeros(0, 4), ())
        except ConfigError as error:
            errors.append(str(error))
    return errors


def test_what_is_for_hosts_is_refused_on_one_and_the_other_way_round(pool):
    for errors in pool.run(3, refused, "XXY"):
        assert len(errors) == 4
        assert "spans 2: X (ranks [0, 1]), Y (ranks [2])" in errors[0]
        assert "use_rdma must be True, False or None, got 'yes'" in errors[1]
        assert "internode_dispatch is for groups that span hosts" in errors[2]
        assert "internode_combine is for groups that span hosts" in errors[3]
