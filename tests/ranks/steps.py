"""The steps of an exchange as ranks make them, and what the reference says about each.

`dispatch`, `combine` and so on run on one rank; `expect_...` run in the test, for all ranks;
`assert_same_bits` compares. Nothing here is compared with a tolerance: what dispatch moves are bytes, and the
order of the sums of combine is defined (float32, from the biases through the ranks in ascending order,
rounded once).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deep_ep import Config, reference
from rank_pool import Rank
from strategies import Exchange, Inputs


def poison(buffer: Any) -> None:
    """Fill a rank's shared memory with bytes that are NaN in every float and -1 in every integer.

    Results that are still in use lie there too.
    """
    buffer.get_local_buffer_tensor(torch.uint8).fill_(0xFF)


def dispatch(buffer: Any, exchange: Exchange, inputs: Inputs, **flags: Any) -> tuple[Any, ...]:
    """Lay out and dispatch; return what dispatch returned."""
    per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(
        inputs.topk_idx, exchange.num_experts, **flags
    )
    return buffer.dispatch(
        inputs.rows,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=inputs.topk_idx if exchange.has_topk else None,
        topk_weights=inputs.topk_weights if exchange.has_topk else None,
        expert_alignment=exchange.expert_alignment,
        num_worst_tokens=exchange.num_worst_tokens,
        config=Config(num_sms=exchange.num_sms),
        **flags,
    )


def combine(
    buffer: Any,
    exchange: Exchange,
    inputs: Inputs,
    handle: Any,
    x: Tensor,
    weights: Tensor | None,
    **flags: Any,
) -> tuple[Any, ...]:
    """Combine with as many biases as the exchange has; return what combine returned."""
    bias: Any = (None, *inputs.biases[:1], inputs.biases)[len(inputs.biases)]
    config = Config(num_sms=exchange.num_sms)
    return buffer.combine(x, handle, topk_weights=weights, bias=bias, config=config, **flags)


def rebuild(handle: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return another handle, of the same numbers: all that a program may keep of one."""
    return tuple(item.clone() for item in handle)


def plain(dispatched: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what dispatch returned as (x, scales, topk_idx, topk_weights, counts, handle)."""
    rows, topk_idx, topk_weights, counts, handle, _ = dispatched
    x, scales = rows if isinstance(rows, tuple) else (rows, None)
    for tensor in (x, scales, topk_idx, topk_weights, *(handle or ())):
        assert tensor is None or (tensor.is_contiguous() and tensor.is_leaf and not tensor.requires_grad)
    return x, scales, topk_idx, topk_weights, counts, None if handle is None else tuple(handle)


def expect_dispatch(exchange: Exchange) -> list[reference.Received]:
    """Return what every rank must receive."""
    inputs = [exchange.inputs(rank) for rank in range(exchange.num_ranks)]
    layouts = [reference.get_dispatch_layout(i.topk_idx, exchange.num_experts, exchange.num_ranks) for i in inputs]
    has_scales = inputs[0].scales is not None
    return reference.dispatch(
        [i.x for i in inputs],
        layouts,
        scales_RTS=[i.scales for i in inputs] if has_scales else None,
        topk_idx_RTK=[i.topk_idx for i in inputs] if exchange.has_topk else None,
        topk_weights_RTK=[i.topk_weights for i in inputs] if exchange.has_topk else None,
        expert_alignment=exchange.expert_alignment,
        num_worst_tokens=exchange.num_worst_tokens,
        num_sms=exchange.num_sms,
    )


def expect_combine(exchange: Exchange, *, has_weights: bool) -> list[reference.Combined]:
    """Return what every rank must get when each combines its `expert_outputs`, before the sums are rounded."""
    handles = [received.handle for received in expect_dispatch(exchange)]
    outputs = [exchange.expert_outputs(rank, len(handle.recv_src_idx)) for rank, handle in enumerate(handles)]
    return reference.combine(
        [x.float() for x, _ in outputs],
        handles,
        topk_weights_RNK=[weights for _, weights in outputs] if has_weights else None,
        biases_RTH=[exchange.inputs(rank).biases for rank in range(exchange.num_ranks)],
    )


def assert_received(rank: int, actual: tuple[Any, ...], expected: reference.Received) -> None:
    """Compare what a rank got from `plain(dispatch(...))` with the reference.

    Past the rows received `num_worst_tokens` leaves everything open but the expert ids.
    """
    x, scales, topk_idx, topk_weights, counts, handle = actual
    assert counts == expected.num_recv_tokens_per_expert
    num_received = int(expected.handle.rank_prefix_matrix[-1, rank])
    assert x.shape == expected.x.shape
    assert_same_bits(x[:num_received], expected.x[:num_received])
    assert (scales is None) == (expected.scales is None)
    if scales is not None:
        assert scales.shape == expected.scales.shape
        assert_same_bits(scales[:num_received], expected.scales[:num_received])
    assert (topk_idx is None) == (topk_weights is None) == (expected.topk_idx is None)
    if topk_idx is not None:
        assert_same_bits(topk_idx, expected.topk_idx)
        assert topk_weights.shape == expected.topk_weights.shape
        assert_same_bits(topk_weights[:num_received], expected.topk_weights[:num_received])
    assert_same_handle(handle, expected.handle, num_received)


def assert_same_handle(actual: tuple[Tensor, ...], expected: reference.Handle, num_received: int) -> None:
    """Compare the six items of a handle."""
    assert len(actual) == 6
    for name, item, expected_item in zip(expected._fields, actual, expected, strict=True):
        assert item.shape == expected_item.shape, name
        rows = slice(num_received if name == "recv_src_idx" else None)
        assert_same_bits(item[rows], expected_item[rows], name)


def assert_same_bits(actual: Tensor, expected: Tensor, name: str = "tensor") -> None:
    """Compare tensors by dtype, shape and every bit; 0.0 and -0.0 are the same."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), name
    if expected.dtype == torch.float8_e4m3fn:
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    assert torch.equal(actual, expected), name


def run_dispatch(rank: Rank, exchange: Exchange) -> tuple[Any, ...]:
    """Be one rank of a dispatch."""
    buffer = rank.buffer()
    poison(buffer)
    return plain(dispatch(buffer, exchange, exchange.inputs(rank.rank)))


def run_exchange(rank: Rank, exchange: Exchange, has_weights: bool = False) -> tuple[Any, ...]:
    """Be one rank of a dispatch and of a combine of other rows."""
    buffer, inputs = rank.buffer(), exchange.inputs(rank.rank)
    poison(buffer)
    dispatched = dispatch(buffer, exchange, inputs)
    handle = dispatched[4]
    x, weights = exchange.expert_outputs(rank.rank, len(handle[3]))
    combined = combine(buffer, exchange, inputs, handle, x, weights if has_weights else None)
    return plain(dispatched), combined[:2]


def check_dispatch(pool: Any, exchange: Exchange) -> None:
    """Dispatch on ranks of the pool and compare with the reference."""
    results = pool.run(exchange.num_ranks, run_dispatch, exchange)
    for rank, expected in enumerate(expect_dispatch(exchange)):
        assert_received(rank, results[rank], expected)


def check_exchange(pool: Any, exchange: Exchange, *, has_weights: bool = False) -> None:
    """Dispatch and combine on ranks of the pool and compare both with the reference."""
    results = pool.run(exchange.num_ranks, run_exchange, exchange, has_weights)
    expected_received = expect_dispatch(exchange)
    expected_combined = expect_combine(exchange, has_weights=has_weights)
    for rank, (received, combined) in enumerate(results):
        assert_received(rank, received, expected_received[rank])
        assert_combined(exchange, combined, expected_combined[rank])


def assert_combined(exchange: Exchange, actual: tuple[Tensor, Tensor | None], expected: reference.Combined) -> None:
    """Compare what one rank got from combine with what `expect_combine` says."""
    x, weights = actual
    assert x.dtype == exchange.sum_dtype
    assert_rounded_once(x, expected.x)
    assert (weights is None) == (expected.topk_weights is None)
    if weights is not None:
        assert_same_bits(weights, expected.topk_weights, "combined_topk_weights")


def assert_rounded_once(actual: Tensor, sum32: Tensor) -> None:
    """Compare sums with float32 sums that have not been rounded to their dtype yet.

    The nearest value is right. Where two are equally near, the even one is, and for bfloat16 also the one that is
    further from zero: torch's own sum of bfloat16 rows takes that one on x86.
    """
    assert actual.shape == sum32.shape
    is_right = actual == sum32.to(actual.dtype)
    if actual.dtype == torch.bfloat16:
        bits = sum32.view(torch.int32)
        away = ((bits >> 16) + 1).to(torch.int16).view(torch.bfloat16)
        is_right |= (bits & 0xFFFF == 0x8000) & (actual == away)
    assert is_right.all(), "combined_x"
