"""What every engine takes and gives: the requests, the results and the handle.

`buffer.py` checks what a program passes and turns it into one of these requests; an engine trusts them. Shapes use
T for this rank's tokens, H for hidden, K for top-k, R for ranks, E for experts, L for the experts of one rank,
S for scales per token, N for rows received, C for channels and D for hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

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

    @property
    def num_rows(self) -> int:
        """Return the rows that this rank received; with `num_worst_tokens`, the rows there are."""
        return self.recv_src_idx.size(0)


class NetworkHandle(NamedTuple):
    """How the tokens of one dispatch between hosts went; DeepEP V1's handle of ten, item by item.

    Between hosts a token travels to one rank of the destination host, its relay, which passes it on inside
    (`deep_ep.topology`). G is the number of ranks that this rank is the relay of, itself included; with hosts of equal
    size that is D. P is the number of tokens that this rank passes on, its own tokens for its own host included: they
    are sorted by source rank, then by the token's index there.

    Attributes:
        is_token_in_rank: `[T, R]` bool; which ranks each token went to.
        rdma_channel_prefix_matrix: `[D, C]` int32; item `[h][c]` counts this rank's tokens for host h in channels 0
            to c.
        gbl_channel_prefix_matrix: `[R, C]` int32; likewise for rank j.
        recv_rdma_channel_prefix_matrix: `[G, C]` int32; item `[i][c]` counts the tokens that this rank passes on for
            the i-th of its sources in channels 0 to c.
        recv_rdma_rank_prefix_sum: `[G]` int32; the tokens that this rank passes on for its sources up to the i-th.
        recv_gbl_channel_prefix_matrix: `[R, C]` int32; the first row that this rank received from channel c of rank i.
        recv_gbl_rank_prefix_sum: `[R]` int32; the rows that this rank received from ranks 0 to i.
        recv_src_meta: `[N, 8]` uint8; for each received row two int32 words: the host it came from, and a bit for each
            rank of this host (up to 32) that the token went to.
        send_rdma_head: `[T, D]` int32; the running number of a token among those of its channel that went to the host,
            or -1 if it did not go there.
        send_nvl_head: `[P, ranks of this host]` int32; the running number of a passed-on token among those of its
            channel and source that went to the local rank, or -1.
    """

    is_token_in_rank: Tensor
    rdma_channel_prefix_matrix: Tensor
    gbl_channel_prefix_matrix: Tensor
    recv_rdma_channel_prefix_matrix: Tensor
    recv_rdma_rank_prefix_sum: Tensor
    recv_gbl_channel_prefix_matrix: Tensor
    recv_gbl_rank_prefix_sum: Tensor
    recv_src_meta: Tensor
    send_rdma_head: Tensor
    send_nvl_head: Tensor

    @property
    def num_rows(self) -> int:
        """Return the rows that this rank received; with `num_worst_tokens`, the rows there are."""
        return self.recv_src_meta.size(0)


class Layout(NamedTuple):
    """Where a rank's tokens go.

    Attributes:
        num_tokens_per_rank: `[R]` int32; each token counts once per rank.
        num_tokens_per_expert: `[E]` int32; each slot of a token's top-k counts.
        is_token_in_rank: `[T, R]` bool.
        num_tokens_per_host: `[D]` int32; each token counts once per host. None where there is one host.
    """

    num_tokens_per_rank: Tensor
    num_tokens_per_expert: Tensor
    is_token_in_rank: Tensor
    num_tokens_per_host: Tensor | None = None


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
    handle: Handle | NetworkHandle


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

    def set_timeout(self, timeout_s: float) -> None:
        """Wait so long for a peer from now on."""

    def local_bytes(self) -> Tensor:
        """Return this rank's shared memory as a uint8 tensor."""

    def close(self) -> None:
        """Let go of the memory. Local: does not wait for any peer."""


class RowFormat(StrEnum):
    """How the rows of a low-latency dispatch arrive.

    With one of the fp8 formats the sender casts each run of 128 channels (the last may be shorter) with a scale of its
    own: `scale = amax / 448`, where amax is at least 1e-4. `FP8_ROUNDED` rounds scales up to powers of two, and
    `FP8_UE8M0` sends only the exponents of those, four in an int32, the first channels in the lowest byte. `MXFP8` is
    that with runs of 32 channels.
    """

    BF16 = "bf16"
    FP8 = "fp8"
    FP8_ROUNDED = "fp8_rounded"
    FP8_UE8M0 = "fp8_ue8m0"
    MXFP8 = "mxfp8"

    @property
    def group_channels(self) -> int:
        """Return how many channels share a scale."""
        return 32 if self is RowFormat.MXFP8 else 128

    @property
    def is_packed(self) -> bool:
        """Tell whether scales are exponents, four in an int32."""
        return self in (RowFormat.FP8_UE8M0, RowFormat.MXFP8)


class LowLatencyHandle(NamedTuple):
    """How the tokens of one low-latency dispatch went; DeepEP V1's handle, item by item.

    Attributes:
        src_info: `[L, R * M]` int32; the index that each received row has among its source's tokens.
        layout_range: `[L, R]` int64; for each expert and source rank, how many rows (low 32 bits) begin at which row
            (high 32 bits).
        num_max_dispatch_tokens_per_rank: M.
        hidden: H.
        num_experts: E.
    """

    src_info: Tensor
    layout_range: Tensor
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LowLatencyDispatchRequest:
    """A low-latency dispatch.

    Attributes:
        x: `[T, H]` bfloat16.
        topk_idx: `[T, K]` int64 or int32; -1 for none.
        num_max_tokens_per_rank: M, the most tokens that any rank sends; the same on all ranks.
        num_experts: E.
        row_format: How rows arrive.
        recv_stats: `[L]` int32 to add the rows per expert to, or None.
        wait_stats: `[R]` int64 to add the time spent waiting for each rank to, or None.
    """

    x: Tensor
    topk_idx: Tensor
    num_max_tokens_per_rank: int
    num_experts: int
    row_format: RowFormat
    recv_stats: Tensor | None
    wait_stats: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LowLatencyDispatchResult:
    """What a low-latency dispatch gives.

    Attributes:
        x: `[L, R * M, H]` bfloat16 or float8_e4m3fn; of expert e the first `recv_count[e]` rows are real, sorted by
            source rank, then by token.
        scales: `[L, R * M, S]`, with the rows innermost in memory, or None.
        recv_count: `[L]` int32.
        handle: For the combine.
    """

    x: Tensor
    scales: Tensor | None
    recv_count: Tensor
    handle: LowLatencyHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class LowLatencyCombineRequest:
    """A low-latency combine.

    Attributes:
        x: `[L, R * M, H]` bfloat16; what the experts made of the rows.
        topk_idx: `[T, K]`, as it was dispatched.
        topk_weights: `[T, K]` float32.
        handle: What the dispatch gave.
        use_logfmt: Whether what crosses may be less precise.
        out: `[T, H]` bfloat16 to write to, or None.
        wait_stats: As in the dispatch.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    handle: LowLatencyHandle
    use_logfmt: bool
    out: Tensor | None
    wait_stats: Tensor | None


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Pending(Generic[R]):
    """A call whose sending half has been issued.

    Attributes:
        result: What it returns; valid after `finish`.
        finish: Issues the receiving half on the current stream.
    """

    result: R
    finish: Callable[[], None]


@runtime_checkable
class Masking(Protocol):
    """An engine whose ranks may be masked."""

    def mask(self, rank: int, *, is_masked: bool) -> None:
        """Mask a rank, or take it in again."""

    def unmask_all(self) -> None:
        """Take all ranks in again."""

    def write_masked(self, mask_status: Tensor) -> None:
        """Write 1 for each masked rank and 0 for the others to `[R]` int32."""


class LowLatencyEngine(Protocol):
    """Carries low-latency exchanges: fixed capacity, no host wait, at most two results in flight.

    A call that is not split is complete when it returns, and its `finish` does nothing.
    """

    def dispatch(self, request: LowLatencyDispatchRequest, *, split: bool) -> Pending[LowLatencyDispatchResult]:
        """Send each token once to every rank that owns one of its experts; split in two halves, or as one."""

    def combine(self, request: LowLatencyCombineRequest, *, split: bool) -> Pending[Tensor]:
        """Bring rows back and add them, weighted: `[T, H]` bfloat16; split in two halves, or as one."""

    def set_timeout(self, timeout_s: float) -> None:
        """Wait so long for a peer from now on."""

    def local_bytes(self) -> Tensor:
        """Return the memory that this rank's rows arrive in, as a uint8 tensor."""

    def close(self) -> None:
        """Let go of the memory."""
