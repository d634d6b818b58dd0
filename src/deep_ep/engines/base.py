"""What every engine takes and gives: the requests, the results and the handle.

`buffer.py` checks what a program passes and turns it into one of these requests; an engine trusts them. Shapes use
T for this rank's tokens, H for hidden, K for top-k, R for ranks, E for experts, L for the experts of one rank,
S for scales per token, N for rows received and C for channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from deep_ep.config import Config


class Handle(NamedTuple):
    """How the tokens of one dispatch went; DeepEP V1's handle, item by item.

    A plain tuple of the same tensors, or of copies of them, is as good. Dispatch does not keep references to it.

    Attributes:
        rank_prefix_matrix: `[R, R]` int32; item `[i][j]` counts the tokens that ranks 0 to i sent to rank j.
        channel_prefix_matrix: `[R, C]` int32; item `[j][c]` counts this rank's tokens for rank j in channels 0
            to c.
        recv_channel_prefix_matrix: `[R, C]` int32; item `[i][c]` is where channel c begins within the rows that
            came from rank i.
        recv_src_idx: `[N]` int32; the index that each received row had among its source's tokens.
        is_token_in_rank: `[T, R]` bool; which ranks each token went to.
        send_head: `[T, R]` int32; the running number of a token among those of its channel that went to the
            rank, or -1 if it did not go there.
    """

    rank_prefix_matrix: Tensor
    channel_prefix_matrix: Tensor
    recv_channel_prefix_matrix: Tensor
    recv_src_idx: Tensor
    is_token_in_rank: Tensor
    send_head: Tensor


class Layout(NamedTuple):
    """Where a rank's tokens go.

    Attributes:
        num_tokens_per_rank: `[R]` int32; each token counts once per rank.
        num_tokens_per_expert: `[E]` int32; each slot of a token's top-k counts.
        is_token_in_rank: `[T, R]` bool.
    """

    num_tokens_per_rank: Tensor
    num_tokens_per_expert: Tensor
    is_token_in_rank: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRequest:
    """A dispatch with new routing. `x` is `[T, H]`, `scales` `[T, S]`, the top-k tensors `[T, K]` or None."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    layout: Layout
    expert_alignment: int
    num_worst_tokens: int
    config: Config


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedDispatchRequest:
    """A dispatch that goes the way an earlier one went."""

    x: Tensor
    scales: Tensor | None
    handle: Handle
    config: Config


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchResult:
    """What a dispatch with new routing gives; `num_recv_tokens_per_expert` is aligned, and empty without a count."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    num_recv_tokens_per_expert: list[int]
    handle: Handle


@dataclass(frozen=True, slots=True, kw_only=True)
class CombineRequest:
    """A combine. `x` is `[N, H]`, `topk_weights` `[N, K]` or None, each bias `[T, H]`."""

    x: Tensor
    topk_weights: Tensor | None
    biases: tuple[Tensor, ...]
    handle: Handle
    config: Config


class Engine(Protocol):
    """Carries exchanges between the ranks of one group. Every method but `close` involves all ranks, in step."""

    device: torch.device

    def compute_layout(self, topk_idx: Tensor, num_experts: int) -> Layout:
        """Count where tokens go. Local: involves no peer."""

    def dispatch(self, request: DispatchRequest) -> DispatchResult:
        """Send tokens to the ranks of their experts."""

    def dispatch_cached(self, request: CachedDispatchRequest) -> tuple[Tensor, Tensor | None]:
        """Send tokens the way of an earlier dispatch; return rows and scales."""

    def combine(self, request: CombineRequest) -> tuple[Tensor, Tensor | None]:
        """Bring rows back and add them; return sums `[T, H]` and summed weights `[T, K]`."""

    def local_bytes(self) -> Tensor:
        """Return this rank's shared memory as a uint8 tensor."""

    def close(self) -> None:
        """Let go of the memory. Local: does not wait for any peer."""
