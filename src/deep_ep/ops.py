"""Dispatch and combine as operators of torch: with gradients, for `torch.compile` and for checkpointing.

`deep_ep.dispatch` and `deep_ep.combine` are each other's gradient. A model needs nothing else around its experts:

    received = deep_ep.dispatch(x, topk_idx, topk_weights, buffer, num_experts=num_experts)
    y = ...                                   # [num_recv, hidden], what this rank's experts make of received.x
    out = deep_ep.combine(y, received.handle, buffer)

**Gradients.** Backward of dispatch is a combine, also of the gradients of `topk_weights`; backward of combine is a
dispatch with the handle. Both are exchanges, so what one rank computes backward all ranks must: let what comes out of
dispatch flow into what goes into combine on every rank, also where no row arrived. Gradients of gradients are refused.

**Compiling.** The operators are `torch.ops.deep_ep.dispatch` and so on, registered when this module is imported. A
dispatch has as many rows as arrive: an unbacked size to the compiler, or `num_worst_tokens` if that is given. Exchanges
that do not depend on each other (say, of two micro-batches) should be in graphs of their own, since a compiler may
order them as it likes, and all ranks must make the same calls in the same order.

**Checkpointing.** `COMMUNICATION_OPS` names what to keep so that nothing is sent twice:

    contexts = functools.partial(create_selective_checkpoint_contexts, deep_ep.ops.COMMUNICATION_OPS)
    y = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)

Without it, a checkpoint repeats exchanges in backward, in the order in which backward reaches its layers, which is the
same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from deep_ep.buffer import Buffer
from deep_ep.low_latency import row_format
from deep_ep.operators import (
    combine_backward,
    dispatch_backward,
    run_combine,
    run_dispatch,
    save_combine,
    save_dispatch,
)

Handle = tuple[Tensor, ...]


class Dispatched(NamedTuple):
    """What arrived at this rank.

    Attributes:
        x: `[num_recv, hidden]`, or a pair with `[num_recv, num_scales]` if a pair was sent; sorted by source rank, then
            by the token's index there.
        topk_idx: `[num_recv, num_topk]`; ids among this rank's experts, -1 for others.
        topk_weights: `[num_recv, num_topk]` float32, 0 for others.
        num_tokens_per_expert: `[num_local_experts]` int64 on the CPU, aligned; empty with `num_worst_tokens`.
        handle: Tensors for `combine`; as good as the handle of `Buffer.dispatch`.
    """

    x: Any
    topk_idx: Tensor
    topk_weights: Tensor
    num_tokens_per_expert: Tensor
    handle: Handle


class LowLatencyDispatched(NamedTuple):
    """What arrived at this rank's experts; see `Buffer.low_latency_dispatch`.

    Attributes:
        x: `[L, T, hidden]` bfloat16, or a pair of float8_e4m3fn and scales.
        recv_count: `[L]` int32; the first rows of each expert are real.
        handle: For `low_latency_combine`, and for `Buffer.low_latency_combine`.
    """

    x: Any
    recv_count: Tensor
    handle: tuple[Tensor, Tensor, int, int, int]


def dispatch(
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor,
    topk_weights: Tensor,
    buffer: Buffer,
    *,
    num_experts: int,
    expert_alignment: int = 1,
    num_worst_tokens: int = 0,
) -> Dispatched:
    """Send each token once to every rank that owns one of its experts; gradients flow to `x` and `topk_weights`.

    Args:
        x: `[num_tokens, hidden]` of any dtype; or a pair of that and scales, through which no gradient flows.
        topk_idx: `[num_tokens, num_topk]` int64 or int32; -1 for none.
        topk_weights: `[num_tokens, num_topk]` float32.
        buffer: What to send through; it must outlive the backward pass.
        num_experts: Experts on all ranks.
        expert_alignment: As for `Buffer.dispatch`, like the next.
        num_worst_tokens: See above.

    Raises:
        ConfigError, MismatchError, CapacityError, PeerTimeoutError: As `Buffer.dispatch`.
    """
    rows, scales = x if isinstance(x, tuple) else (x, None)
    inputs: tuple[Any, ...] = (rows, scales, topk_idx, topk_weights, buffer.op_id, num_experts, Buffer.num_sms)
    inputs += (expert_alignment, num_worst_tokens)
    if not _is_plain(rows, topk_weights):
        recv_x, recv_scales, recv_idx, recv_weights, counts, handle = torch.ops.deep_ep.dispatch(*inputs)
    elif torch.is_grad_enabled() and (rows.requires_grad or topk_weights.requires_grad):
        others: list[Any] = []
        apply: Any = _DispatchWithGradient.apply
        recv_x, recv_weights = apply(rows, topk_weights, inputs, others)
        recv_scales, recv_idx, counts, handle = others
    else:
        recv_x, recv_scales, recv_idx, recv_weights, counts, handle = run_dispatch(*inputs)
    received = recv_x if scales is None else (recv_x, recv_scales)
    return Dispatched(received, recv_idx, recv_weights, counts, tuple(handle))


def combine(x: Tensor, handle: Sequence[Tensor], buffer: Buffer) -> Tensor:
    """Send each row back to where its token came from, and add up the rows of each token; gradients flow to `x`.

    Args:
        x: `[num_recv, hidden]` bfloat16, float16 or float32; a row for every row that the dispatch returned.
        handle: What that dispatch returned.
        buffer: What to send through.

    Returns:
        `[num_tokens, hidden]`: sums over the ranks, in float32 and rounded once. They are not weighted.

    Raises:
        ConfigError, MismatchError, CapacityError, PeerTimeoutError: As `Buffer.combine`.
    """
    if not _is_plain(x):
        sums: Tensor = torch.ops.deep_ep.combine(x, handle, buffer.op_id)
    elif torch.is_grad_enabled() and x.requires_grad:
        apply: Any = _CombineWithGradient.apply
        sums = apply(x, handle, buffer.op_id)
    else:
        sums = run_combine(x, handle, buffer.op_id)
    return sums


def low_latency_dispatch(
    x: Tensor,
    topk_idx: Tensor,
    buffer: Buffer,
    *,
    num_max_dispatch_tokens_per_rank: int,
    num_experts: int,
    use_fp8: bool = True,
    round_scale: bool = False,
    use_ue8m0: bool = False,
    use_mxfp8: bool = False,
) -> LowLatencyDispatched:
    """Send each token to its experts, into slots of fixed capacity; without gradients.

    The arguments are those of `Buffer.low_latency_dispatch`.
    """
    kind = row_format(use_fp8, round_scale, use_ue8m0, use_mxfp8)
    recv_x, recv_scales, recv_count, src_info, layout_range = torch.ops.deep_ep.low_latency_dispatch(
        x, topk_idx, buffer.op_id, num_max_dispatch_tokens_per_rank, num_experts, str(kind)
    )
    handle = (src_info, layout_range, num_max_dispatch_tokens_per_rank, x.shape[1], num_experts)
    return LowLatencyDispatched((recv_x, recv_scales) if use_fp8 else recv_x, recv_count, handle)


def low_latency_combine(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    handle: tuple[Tensor, Tensor, int, int, int],
    buffer: Buffer,
    *,
    use_logfmt: bool = False,
) -> Tensor:
    """Bring rows back and add them, each multiplied by its weight; without gradients.

    The arguments are those of `Buffer.low_latency_combine`.
    """
    src_info, layout_range, num_max_tokens, _, num_experts = handle
    sums: Tensor = torch.ops.deep_ep.low_latency_combine(
        x, topk_idx, topk_weights, src_info, layout_range, buffer.op_id, num_max_tokens, num_experts, use_logfmt
    )
    return sums


def _is_plain(*tensors: Tensor) -> bool:
    """Tell whether nobody looks on: no compiler, no checkpoint that keeps results, no fake or other kind of tensor.

    Then a call skips the operator, whose gradient costs some 20 us more on the host than a `torch.autograd.Function`.
    """
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return False
    return all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)


class _DispatchWithGradient(torch.autograd.Function):
    """The operator `dispatch`, for eager calls; hands over by a list what has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, topk_weights: Tensor, inputs: tuple[Any, ...], others: list[Any]) -> Any:  # noqa: ARG004
        output = run_dispatch(*inputs)
        recv_x, recv_scales, recv_idx, recv_weights, counts, handle = output
        others += recv_scales, recv_idx, counts, handle
        save_dispatch(ctx, inputs, output)
        return recv_x, recv_weights

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor) -> Any:
        grads = dispatch_backward(ctx, grad_x, None, None, grad_weights)
        return grads[0], grads[3], None, None


class _CombineWithGradient(torch.autograd.Function):
    """The operator `combine`, for eager calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Sequence[Tensor], buffer: int) -> Tensor:
        save_combine(ctx, (x, handle, buffer), x)
        return run_combine(x, handle, buffer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return combine_backward(ctx, grad)[0], None, None


COMMUNICATION_OPS = [
    getattr(torch.ops.deep_ep, _name).default
    for _name in ("dispatch", "combine", "low_latency_dispatch", "low_latency_combine")
]
"""The operators that exchange tokens, to keep the results of when activations are recomputed."""
