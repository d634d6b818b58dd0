"""The operators of `deep_ep.ops`, as torch is told of them: what they do, what they return, and their gradients.

A buffer is a number to them (`Buffer.op_id`), a handle a list of tensors. None of them returns what it was given, and
what they return does not overlap. `combine_with_weights` is the gradient of `dispatch`, `dispatch_cached` that of
`combine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deep_ep.buffer import Buffer, live_buffer
from deep_ep.config import combine_config, dispatch_config
from deep_ep.engines.base import Handle, NetworkHandle, RowFormat
from deep_ep.engines.fp8 import num_scale_columns, scale_dtype
from deep_ep.engines.routing import expert_range
from deep_ep.errors import UnsupportedError

_LIB: Any = torch.library.Library("deep_ep", "DEF")  # type: ignore[no-untyped-call]
_LIB.define(
    "dispatch(Tensor x, Tensor? scales, Tensor topk_idx, Tensor topk_weights, int buffer, int num_experts, "
    "int num_sms, int expert_alignment, SymInt num_worst_tokens)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor[])"
)
_LIB.define("combine_with_weights(Tensor x, Tensor topk_weights, Tensor[] handle, int buffer) -> (Tensor, Tensor)")
_LIB.define("combine(Tensor x, Tensor[] handle, int buffer) -> Tensor")
_LIB.define("dispatch_cached(Tensor x, Tensor[] handle, int buffer) -> Tensor")
_LIB.define(
    "low_latency_dispatch(Tensor x, Tensor topk_idx, int buffer, int num_max_dispatch_tokens_per_rank, "
    "int num_experts, str row_format) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIB.define(
    "low_latency_combine(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor src_info, Tensor layout_range, "
    "int buffer, int num_max_dispatch_tokens_per_rank, int num_experts, bool use_logfmt) -> Tensor"
)


_SWITCHES: dict[RowFormat, dict[str, Any]] = {
    RowFormat.BF16: {"use_fp8": False},
    RowFormat.FP8: {},
    RowFormat.FP8_ROUNDED: {"round_scale": True},
    RowFormat.FP8_UE8M0: {"round_scale": True, "use_ue8m0": True},
    RowFormat.MXFP8: {"use_mxfp8": True},
}

# Where a handle of six and one of ten (between hosts) keep what the sizes of results follow from.
_IN_RANK = {len(Handle._fields): 4, len(NetworkHandle._fields): 0}
_SRC = {len(Handle._fields): 3, len(NetworkHandle._fields): 7}

# What the operators do


def run_dispatch(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    buffer: int,
    num_experts: int,
    num_sms: int,
    expert_alignment: int,
    num_worst_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Lay out and dispatch: rows, scales, expert ids, weights, counts, and the items of the handle."""
    live = live_buffer(buffer)
    per_rank, per_rdma_rank, per_expert, is_token_in_rank, _ = live.get_dispatch_layout(topk_idx, num_experts)
    received, recv_idx, recv_weights, counts, handle, _ = live.dispatch(
        x if scales is None else (x, scales),
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=is_token_in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        expert_alignment=expert_alignment,
        num_worst_tokens=num_worst_tokens,
        config=dispatch_config(live.group_size, num_sms),
    )
    recv_x, recv_scales = received if isinstance(received, tuple) else (received, x.new_empty(received.size(0), 0))
    assert recv_idx is not None
    assert recv_weights is not None
    assert handle is not None
    return recv_x, recv_scales, recv_idx, recv_weights, torch.tensor(counts, dtype=torch.int64), list(handle)


def _combine_with_weights(x: Tensor, topk_weights: Tensor, handle: list[Tensor], buffer: int) -> tuple[Tensor, Tensor]:
    live = live_buffer(buffer)
    sums, weights, _ = live.combine(x, tuple(handle), topk_weights=topk_weights, config=_config_of(live, handle))
    assert weights is not None
    return sums, weights


def run_combine(x: Tensor, handle: Sequence[Tensor], buffer: int) -> Tensor:
    """Combine, and return the sums."""
    live = live_buffer(buffer)
    return live.combine(x, tuple(handle), config=_config_of(live, handle))[0]


def _dispatch_cached(x: Tensor, handle: list[Tensor], buffer: int) -> Tensor:
    live = live_buffer(buffer)
    received = live.dispatch(x, handle=tuple(handle), config=_config_of(live, handle))[0]
    assert isinstance(received, Tensor)
    return received


def _num_tokens(handle: list[Tensor]) -> Any:
    """Return how many tokens this rank had: the size of `is_token_in_rank`."""
    return handle[_IN_RANK[len(handle)]].shape[0]


def _num_recv(handle: list[Tensor]) -> Any:
    """Return how many rows this rank received: the size of `recv_src_idx` or `recv_src_meta`."""
    return handle[_SRC[len(handle)]].shape[0]


def _config_of(live: Buffer, handle: Sequence[Tensor]) -> Any:
    """Return a config with as many channels as the handle has; the program may have set another number since."""
    return combine_config(live.group_size, 2 * handle[1].size(1))


def _low_latency_dispatch(
    x: Tensor,
    topk_idx: Tensor,
    buffer: int,
    num_max_dispatch_tokens_per_rank: int,
    num_experts: int,
    row_format: str,
) -> tuple[Tensor, ...]:
    received, recv_count, handle, _, _ = live_buffer(buffer).low_latency_dispatch(
        x,
        topk_idx,
        num_max_dispatch_tokens_per_rank,
        num_experts,
        **_SWITCHES[RowFormat(row_format)],
    )
    recv_x, scales = received if isinstance(received, tuple) else (received, x.new_empty(0))
    return recv_x, scales, recv_count, handle[0], handle[1]


def _low_latency_combine(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    src_info: Tensor,
    layout_range: Tensor,
    buffer: int,
    num_max_dispatch_tokens_per_rank: int,
    num_experts: int,
    use_logfmt: bool,
) -> Tensor:
    handle = (src_info, layout_range, num_max_dispatch_tokens_per_rank, x.size(2), num_experts)
    live = live_buffer(buffer)
    return live.low_latency_combine(x, topk_idx, topk_weights, handle, use_logfmt=use_logfmt)[0]


# What they return, to a compiler: shapes, dtypes and strides


def _fake_dispatch(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    buffer: int,
    num_experts: int,
    num_sms: int,
    expert_alignment: int,  # noqa: ARG001
    num_worst_tokens: int,
) -> tuple[Any, ...]:
    live = live_buffer(buffer)
    num_ranks = live.group_size
    num_recv = num_worst_tokens or torch.library.get_ctx().new_dynamic_size()
    begin, end = expert_range(live.rank, num_experts, num_ranks)
    num_counts = 0 if num_worst_tokens else end - begin
    num_channels = dispatch_config(num_ranks, num_sms).num_channels

    return (
        x.new_empty(num_recv, x.shape[1]),
        x.new_empty(num_recv, 0) if scales is None else scales.new_empty(num_recv, scales.shape[1]),
        topk_idx.new_empty(num_recv, topk_idx.shape[1]),
        topk_weights.new_empty(num_recv, topk_weights.shape[1]),
        torch.empty(num_counts, dtype=torch.int64, device="cpu"),
        _fake_handle(x, live, num_recv, num_channels),
    )


def _fake_handle(x: Tensor, live: Buffer, num_recv: Any, num_channels: int) -> list[Tensor]:
    num_tokens, num_ranks, num_hosts = x.shape[0], live.group_size, live.topology.num_hosts

    def int32(*shape: Any) -> Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    in_rank = x.new_empty(num_tokens, num_ranks, dtype=torch.bool)
    of_ranks = int32(num_ranks, num_channels)
    if num_hosts == 1:
        square, src_idx, head = int32(num_ranks, num_ranks), int32(num_recv), int32(num_tokens, num_ranks)
        return [square, of_ranks, torch.empty_like(of_ranks), src_idx, in_rank, head]
    topology = live.topology
    num_sources = len(topology.sources(topology.rank))
    num_passed_on = torch.library.get_ctx().new_dynamic_size()
    num_local = len(next(ranks for ranks in topology.hosts if topology.rank in ranks))
    return [
        in_rank,
        int32(num_hosts, num_channels),
        of_ranks,
        int32(num_sources, num_channels),
        int32(num_sources),
        torch.empty_like(of_ranks),
        int32(num_ranks),
        x.new_empty(num_recv, 8, dtype=torch.uint8),
        int32(num_tokens, num_hosts),
        int32(num_passed_on, num_local),
    ]


def _fake_combine_with_weights(
    x: Tensor,
    topk_weights: Tensor,
    handle: list[Tensor],
    buffer: int,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    num_tokens = _num_tokens(handle)
    return x.new_empty(num_tokens, x.shape[1]), topk_weights.new_empty(num_tokens, topk_weights.shape[1])


def _fake_combine(x: Tensor, handle: list[Tensor], buffer: int) -> Tensor:  # noqa: ARG001
    return x.new_empty(_num_tokens(handle), x.shape[1])


def _fake_dispatch_cached(x: Tensor, handle: list[Tensor], buffer: int) -> Tensor:  # noqa: ARG001
    return x.new_empty(_num_recv(handle), x.shape[1])


def _fake_low_latency_dispatch(
    x: Tensor,
    topk_idx: Tensor,  # noqa: ARG001
    buffer: int,
    num_max_dispatch_tokens_per_rank: int,
    num_experts: int,
    row_format: str,
) -> tuple[Tensor, ...]:
    live = live_buffer(buffer)
    begin, end = expert_range(live.rank, num_experts, live.group_size)
    num_local, num_rows = end - begin, live.group_size * num_max_dispatch_tokens_per_rank
    kind = RowFormat(row_format)
    is_cast = kind is not RowFormat.BF16
    scales = x.new_empty(0)
    if is_cast:
        num_columns = num_scale_columns(x.shape[1], kind)
        # In memory, the rows of a scale column are neighbours.
        scales = x.new_empty(num_local, num_columns, num_rows, dtype=scale_dtype(kind)).transpose(1, 2)
    return (
        x.new_empty(num_local, num_rows, x.shape[1], dtype=torch.float8_e4m3fn if is_cast else x.dtype),
        scales,
        x.new_empty(num_local, dtype=torch.int32),
        x.new_empty(num_local, num_rows, dtype=torch.int32),
        x.new_empty(num_local, live.group_size, dtype=torch.int64),
    )


def _fake_low_latency_combine(
    x: Tensor,
    topk_idx: Tensor,
    *_: Any,
) -> Tensor:
    return x.new_empty(topk_idx.shape[0], x.shape[2])


# Their gradients


def save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Keep what the gradient of a dispatch needs."""
    ctx.save_for_backward(*output[5])
    ctx.buffer, ctx.has_scales = inputs[4], inputs[1] is not None


def dispatch_backward(ctx: Any, grad_x: Tensor, _: Any, __: Any, grad_weights: Tensor, *___: Any) -> tuple[Any, ...]:
    """Return the gradient of each input of `dispatch`: of `x` and of `topk_weights`, by one combine."""
    if ctx.has_scales:
        raise UnsupportedError(
            "deep_ep.dispatch of a pair of rows and scales has no gradient",
            hint="dispatch bfloat16 rows in training",
        )
    x, weights = torch.ops.deep_ep.combine_with_weights(grad_x, grad_weights, ctx.saved_tensors, ctx.buffer)
    return x, None, None, weights, None, None, None, None, None


def save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    """Keep what the gradient of a combine needs."""
    ctx.save_for_backward(*inputs[1])
    ctx.buffer = inputs[2]


def combine_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradient of each input of `combine`: of `x`, by a dispatch with its handle."""
    handle = ctx.saved_tensors
    return torch.ops.deep_ep.dispatch_cached(grad, handle, ctx.buffer), [None] * len(handle), None


def _refuse(what: str, hint: str) -> Any:
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG001
        raise UnsupportedError(what, hint)

    return backward


_TWICE = _refuse(
    "deep_ep.dispatch and deep_ep.combine have no second gradient, which backward through a gradient asks for",
    "call backward or grad without create_graph=True for what passes through them",
)
_LOW_LATENCY = _refuse(
    "low-latency calls have no gradient, which backward asks for",
    "train with deep_ep.dispatch and deep_ep.combine, or make low-latency calls under torch.no_grad()",
)


for _name, _function, _fake, _backward, _setup in (
    ("dispatch", run_dispatch, _fake_dispatch, dispatch_backward, save_dispatch),
    ("combine", run_combine, _fake_combine, combine_backward, save_combine),
    ("combine_with_weights", _combine_with_weights, _fake_combine_with_weights, _TWICE, None),
    ("dispatch_cached", _dispatch_cached, _fake_dispatch_cached, _TWICE, None),
    ("low_latency_dispatch", _low_latency_dispatch, _fake_low_latency_dispatch, _LOW_LATENCY, None),
    ("low_latency_combine", _low_latency_combine, _fake_low_latency_combine, _LOW_LATENCY, None),
):
    _LIB.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"deep_ep::{_name}", _fake, lib=_LIB)
    torch.library.register_autograd(f"deep_ep::{_name}", _backward, setup_context=_setup, lib=_LIB)
