"""Low-latency mode on CPU ranks against its specification, element by element."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deep_ep import Buffer
from deep_ep import low_latency_reference as reference
from deep_ep.errors import ConfigError, DeepEPError, MismatchError

FORMATS = {
    "bf16": {"use_fp8": False},
    "fp8": {},
    "fp8_rounded": {"round_scale": True},
    "fp8_ue8m0": {"round_scale": True, "use_ue8m0": True},
    "mxfp8": {"use_mxfp8": True},
}


@dataclass(frozen=True)
class Case:
    """One exchange, the same for every rank; `inputs` gives what a rank brings."""

    num_tokens: tuple[int, ...]
    hidden: int = 256
    num_topk: int = 3
    num_experts: int = 6
    num_spare: int = 2
    row_format: str = "bf16"
    routing: str = "uniform"
    seed: int = 0

    @property
    def num_ranks(self):
        return len(self.num_tokens)

    @property
    def num_max_tokens(self):
        return max(*self.num_tokens, 1) + self.num_spare

    def inputs(self, rank):
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        shape = (self.num_tokens[rank], self.num_topk)
        x = torch.randn(shape[0], self.hidden, generator=generator).bfloat16()
        idx = torch.randint(self.num_experts, shape, generator=generator)
        if self.routing == "distinct":
            idx = torch.rand(shape[0], self.num_experts, generator=generator).argsort(1)[:, : self.num_topk]
        elif self.routing == "one expert":
            idx = torch.full(shape, self.num_experts - 1)
        elif self.routing == "holes":
            idx[torch.rand(shape, generator=generator) < 0.5] = -1
        return x, idx.contiguous(), torch.randn(shape, generator=generator)

    def outputs(self, rank, shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(7 + rank + self.seed)).bfloat16()


def ll_buffer(rank):
    """Return the low-latency buffer of these ranks, made at its first use and then kept."""
    if not hasattr(rank, "low_latency_buffer"):
        rank.low_latency_buffer = Buffer(rank.group, low_latency_mode=True)
    return rank.low_latency_buffer


def dispatch(buffer, case, x, idx, **flags):
    return buffer.low_latency_dispatch(
        x, idx, case.num_max_tokens, case.num_experts, **FORMATS[case.row_format], **flags
    )


def plain_received(recv_x, count, handle):
    x, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    return x.clone(), None if scales is None else scales.clone(), count.clone(), tuple(handle[:2])


def exchange(rank, case, has_hooks):
    buffer = ll_buffer(rank)
    x, idx, weights = case.inputs(rank.rank)
    recv_x, count, handle, event, hook = dispatch(buffer, case, x, idx, return_recv_hook=has_hooks)
    assert event.event is None
    assert (hook is not None) == has_hooks
    if hook is not None:
        hook()
    received = plain_received(recv_x, count, handle)
    y = case.outputs(rank.rank, received[0].shape)
    out = torch.full((len(x), case.hidden), torch.nan, dtype=torch.bfloat16)
    combined, _, hook = buffer.low_latency_combine(y, idx, weights, handle, out=out, return_recv_hook=has_hooks)
    if hook is not None:
        hook()
    assert combined.data_ptr() == out.data_ptr()
    return received, combined


def expect(case, inputs=None, weights=None):
    """Return what every rank receives, and every rank's sums; of other inputs or weights than the case's, if given."""
    inputs = inputs or [case.inputs(rank) for rank in range(case.num_ranks)]
    rows, scales = [x for x, _, _ in inputs], None
    flags = {name: value for name, value in FORMATS[case.row_format].items() if name != "use_fp8"}
    if flags.pop("use_mxfp8", False):
        flags = {"round_scale": True, "use_ue8m0": True, "group_channels": 32}
    if case.row_format != "bf16":
        casts = [reference.cast_to_fp8(x, **flags) for x in rows]
        rows, scales = [cast.x for cast in casts], [cast.scales for cast in casts]
    received = reference.dispatch(
        rows,
        [idx for _, idx, _ in inputs],
        num_max_tokens_per_rank=case.num_max_tokens,
        num_experts=case.num_experts,
        scales_RTS=scales,
    )
    outputs = [case.outputs(rank, tuple(part.x.shape)) for rank, part in enumerate(received)]
    weights = weights or [w for _, _, w in inputs]
    sums = reference.combine(outputs, [idx for _, idx, _ in inputs], weights, received, num_experts=case.num_experts)
    return received, sums


def assert_as_reference(case, results):
    received, sums = expect(case)
    for rank, ((x, scales, count, (src_info, layout_range)), combined) in enumerate(results):
        want = received[rank]
        assert (x.shape, x.dtype) == (want.x.shape, want.x.dtype)
        assert torch.equal(count, want.recv_count)
        assert torch.equal(layout_range, want.layout_range)
        for expert, num_rows in enumerate(count.tolist()):
            assert torch.equal(x[expert, :num_rows].view(torch.uint8), want.x[expert, :num_rows].view(torch.uint8))
            assert torch.equal(src_info[expert, :num_rows], want.src_info[expert, :num_rows])
            if scales is not None:
                assert torch.equal(scales[expert, :num_rows], want.scales[expert, :num_rows])
        assert_near(combined, sums[rank])


def assert_near(combined, sums):
    """A float32 sum, rounded once: half a unit of bfloat16, and a little for the float32 roundings before."""
    error = (combined.double() - sums).abs()
    assert bool((error <= sums.abs() * 2**-8 + 1e-5).all()), float(error.max())


CASES = st.builds(
    Case,
    num_tokens=st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple),
    hidden=st.sampled_from([1, 8, 127, 128, 200, 512, 640]),
    num_topk=st.integers(1, 5),
    num_experts=st.integers(5, 13),
    num_spare=st.integers(0, 3),
    row_format=st.sampled_from(list(FORMATS)),
    routing=st.sampled_from(["uniform", "distinct", "one expert", "holes"]),
    seed=st.integers(0, 10**6),
)


@given(case=CASES, has_hooks=st.booleans())
def test_an_exchange_is_as_the_reference_says(pool, case, has_hooks):
    assert_as_reference(case, pool.run(case.num_ranks, exchange, case, has_hooks))


@pytest.mark.parametrize("row_format", ["fp8_ue8m0", "mxfp8"])
@pytest.mark.parametrize("hidden", [2688, 2880, 7168])
def test_any_hidden_size_goes_without_padding(pool, hidden, row_format):
    """C2, C3, C8."""
    case = Case((5, 9), hidden=hidden, row_format=row_format, routing="distinct")
    assert_as_reference(case, pool.run(2, exchange, case, False))


def read_mxfp8(rank):
    """Read one row by the documented layout: byte j of item i is the exponent of channels 128 i + 32 j and on."""
    x = torch.tensor([[2.0**e] * 32 for e in (0, 3, -5, 8, 1)]).view(1, 160).bfloat16()
    (data, scales), count, *_ = ll_buffer(rank).low_latency_dispatch(x, torch.tensor([[0]]), 1, 1, use_mxfp8=True)
    assert count.tolist() == [1]
    assert (data.shape, scales.shape, scales.dtype) == ((1, 1, 160), (1, 1, 2), torch.int32)
    exponents = scales[0].contiguous().view(torch.uint8)[0]
    # The least power of two not below 2 ** e / 448 is 2 ** (e - 8); missing channels have 0.
    assert exponents.tolist() == [127 - 8, 127 - 5, 127 - 13, 127, 127 - 7, 0, 0, 0]
    back = data[0].float().view(5, 32) * torch.exp2(exponents[:5].float() - 127)[:, None]
    assert torch.equal(back.view(1, 160), x.float())


def test_mxfp8_scales_lie_as_documented(pool):
    pool.run(1, read_mxfp8)


def change_shapes(rank, cases):
    return [exchange(rank, case, case.seed % 2 == 1) for case in cases]


def test_hidden_and_capacity_may_change_from_call_to_call(pool):
    """C17 and C26: an empty rank rotates, nothing is cleaned in between."""
    cases = [
        Case((0, 4, 2), hidden=384, seed=1),
        Case((4, 0, 3), hidden=64, num_spare=9, seed=2),
        Case((1, 5, 0), hidden=384, row_format="fp8", seed=3),
        Case((0, 0, 0), seed=4),
    ]
    results = pool.run(3, change_shapes, cases)
    for i, case in enumerate(cases):
        assert_as_reference(case, [per_rank[i] for per_rank in results])


def two_in_flight(rank, first, second, is_swapped):
    """Dispatch A and B, finish them in either order, combine A and B."""
    buffer = ll_buffer(rank)
    cases = (first, second)
    inputs = [case.inputs(rank.rank) for case in cases]
    begun = [dispatch(buffer, case, i[0], i[1], return_recv_hook=True) for case, i in zip(cases, inputs, strict=True)]
    for _, _, _, _, hook in reversed(begun) if is_swapped and rank.rank == 0 else begun:
        hook()
    results = []
    for case, (_, idx, weights), (recv_x, count, handle, _, _) in zip(cases, inputs, begun, strict=True):
        received = plain_received(recv_x, count, handle)
        y = case.outputs(rank.rank, received[0].shape)
        results.append((received, buffer.low_latency_combine(y, idx, weights, handle)[0]))
    return results


@pytest.mark.parametrize("is_swapped", [False, True], ids=["in order", "hooks swapped on one rank"])
def test_two_dispatches_may_be_in_flight(pool, is_swapped):
    """C46."""
    first, second = Case((4, 7), seed=5), Case((6, 2), hidden=512, row_format="fp8", seed=6)
    results = pool.run(2, two_in_flight, first, second, is_swapped)
    assert_as_reference(first, [per_rank[0] for per_rank in results])
    assert_as_reference(second, [per_rank[1] for per_rank in results])


def repeat_one_rank_routing(rank, num_repeats):
    buffer = ll_buffer(rank)
    generator = torch.Generator().manual_seed(rank.rank)
    idx = torch.arange(8).repeat(64, 1)
    weights = torch.ones(64, 8)
    for _ in range(num_repeats):
        x = torch.randint(0, 2, (64, 512), generator=generator).bfloat16()
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, 64, 64, use_fp8=False)
        combined, _, _ = buffer.low_latency_combine(recv_x.clone(), idx, weights, handle)
        assert torch.equal(combined, 8 * x)


def test_all_tokens_to_one_rank_are_summed_exactly(pool):
    """C27 and C29, in CI size."""
    pool.run(4, repeat_one_rank_routing, 30)


def normal_and_low_latency(rank, case):
    buffer = ll_buffer(rank)
    first = exchange(rank, case, False)
    x, idx, weights = case.inputs(rank.rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, case.num_experts)
    recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=idx,
        topk_weights=weights,
    )
    buffer.clean_low_latency_buffer(case.num_max_tokens, case.hidden, case.num_experts)
    second = exchange(rank, case, True)
    _, weights_back, _ = buffer.combine(recv_x, handle, topk_weights=recv_weights)
    assert torch.equal(weights_back, torch.where(idx >= 0, weights, 0.0))
    return first, second


def test_normal_and_low_latency_calls_share_a_buffer(pool):
    """C49."""
    case = Case((3, 8), routing="holes", row_format="fp8", seed=8)
    results = pool.run(2, normal_and_low_latency, case)
    for i in range(2):
        assert_as_reference(case, [per_rank[i] for per_rank in results])


def stats_and_zero_copy(rank, case):
    buffer = ll_buffer(rank)
    x, idx, weights = case.inputs(rank.rank)
    recv_stats = torch.full((case.num_experts // case.num_ranks,), 100, dtype=torch.int32)
    wait_stats = torch.zeros(case.num_ranks, dtype=torch.int64)
    recv_x, count, handle, _, _ = dispatch(
        buffer, case, x, idx, cumulative_local_expert_recv_stats=recv_stats, dispatch_wait_recv_cost_stats=wait_stats
    )
    assert torch.equal(recv_stats, 100 + count)
    assert bool((wait_stats >= 0).all())
    received = plain_received(recv_x, count, handle)
    y = case.outputs(rank.rank, received[0].shape)
    buffer.get_next_low_latency_combine_buffer(handle).copy_(y)
    ignored = torch.full_like(y, torch.nan)
    combined, _, _ = buffer.low_latency_combine(ignored, idx, weights, handle, zero_copy=True)
    with pytest.raises(ConfigError, match="get_next_low_latency_combine_buffer"):
        buffer.low_latency_combine(ignored, idx, weights, handle, zero_copy=True)
    return received, combined


def test_statistics_are_added_and_zero_copy_takes_the_given_buffer(pool):
    case = Case((6, 3), seed=9)
    assert_as_reference(case, pool.run(2, stats_and_zero_copy, case))


REFUSED = {
    "too many tokens": (lambda a: a.update(num_max_dispatch_tokens_per_rank=3), "num_max_dispatch_tokens_per_rank = 3"),
    "mxfp8 without fp8": (lambda a: a.update(use_mxfp8=True, use_fp8=False), "use_fp8"),
    "ue8m0 without round_scale": (lambda a: a.update(use_ue8m0=True), "round_scale"),
    "float rows": (lambda a: a.update(x=a["x"].float()), "bfloat16"),
    "hook and event": (lambda a: a.update(async_finish=True, return_recv_hook=True), "async_finish"),
    "an expert that is not": (lambda a: a["topk_idx"].fill_(99), "99"),
    "wrong statistics": (
        lambda a: a.update(dispatch_wait_recv_cost_stats=torch.zeros(9, dtype=torch.int64)),
        "cost_stats",
    ),
}


def refuse_then_work(rank, case, name):
    """Rank 0 calls badly, is refused, and calls well; its peers do not notice."""
    buffer = ll_buffer(rank)
    if rank.rank == 0:
        x, idx, _ = case.inputs(0)
        arguments = {"x": x, "topk_idx": idx, "num_max_dispatch_tokens_per_rank": 20, "num_experts": case.num_experts}
        change, words = REFUSED[name]
        change(arguments)
        with pytest.raises(ConfigError, match=words):
            buffer.low_latency_dispatch(**arguments)
    return exchange(rank, case, False)


@pytest.mark.parametrize("name", list(REFUSED))
def test_bad_input_is_refused_before_anything_is_sent(pool, name):
    """C23 and C44."""
    case = Case((5, 4), seed=10)
    assert_as_reference(case, pool.run(2, refuse_then_work, case, name))


def disagree(rank, case):
    buffer = ll_buffer(rank)
    x, idx, _ = case.inputs(rank.rank)
    with pytest.raises(MismatchError, match="num_max_tokens_per_rank"):
        buffer.low_latency_dispatch(x, idx, 20 + rank.rank, case.num_experts)
    return exchange(rank, case, False)


def test_ranks_that_disagree_about_capacity_all_raise(pool):
    """C22."""
    case = Case((5, 4), seed=11)
    assert_as_reference(case, pool.run(2, disagree, case))


def use_without_mode(rank):
    x = torch.randn(2, 8).bfloat16()
    with pytest.raises(DeepEPError, match="low_latency_mode=True"):
        rank.buffer().low_latency_dispatch(x, torch.zeros(2, 1, dtype=torch.int64), 4, 2)


def test_low_latency_calls_need_a_buffer_made_for_them(pool):
    pool.run(1, use_without_mode)
