"""The GPU engine: ranks are processes with GPUs of one host, rows move through memory that all of them can address.

The kernels say how (`deep_ep.kernels.signal` has the protocol). Here is what happens on the host: outputs are allocated
with torch, addresses and sizes go to the kernels, and everything runs on the current stream. Only a dispatch with new
routing waits: for the kernel that exchanges the counts, through pinned memory. Nothing else synchronises, so cached
dispatch, dispatch with `num_worst_tokens` and combine can be captured in CUDA graphs.

**Staging** is as large as the largest exchange so far needed. A dispatch with new routing learns from the counts what
every rank needs, so all ranks decide alike when to make it larger. `_num_max_staged` remembers the most rows that any
routing staged: a cached dispatch or a combine with wider rows can tell from it, without asking anyone, whether its rows
will fit, and again all ranks decide alike.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any, Protocol

import torch
from torch import Tensor

from deep_ep import gpu_layout
from deep_ep.config import Config
from deep_ep.engines.base import (
    CachedDispatchRequest,
    CombineRequest,
    DispatchRequest,
    DispatchResult,
    Handle,
    Layout,
)
from deep_ep.engines.gpu_kernels import Kernels, load_kernels
from deep_ep.engines.gpu_plans import (
    CombineKind,
    DispatchKind,
    Plan,
    Variant,
    count_variant,
    notify_variant,
    plan_combine,
    plan_dispatch,
    variants_of,
    word_of,
)
from deep_ep.errors import CapacityError, ConfigError, DestroyedError, PeerTimeoutError
from deep_ep.gpu_layout import StagingLayout
from deep_ep.memory.cuda import CudaMemory
from deep_ep.memory.rendezvous import AllGather, Rendezvous
from deep_ep.memory.staged import StagedMemory
from deep_ep.shapes import ExchangeShape
from deep_ep.tuning import GpuTuning

_MIN_STAGING_BYTES = 1 << 20
_SPINS_PER_SECOND = 4000
"""About as often as the interpreter can look at a signal."""


class _Memory(Protocol):
    num_bytes: int
    table: Tensor

    def local_bytes(self) -> Tensor: ...
    def close(self) -> None: ...


class GpuEngine:
    """Exchanges between GPUs of one host (`deep_ep.engines.base.Engine`). All ranks construct one together.

    Args:
        rendezvous: The ranks.
        num_bytes: Bytes of staging to begin with; a dispatch that needs more makes all ranks allocate more.
        timeout_s: How long a kernel waits for a peer.
        device: This rank's GPU; the CPU if the kernels are interpreted.
        use_peer_access: Whether GPUs address each other's memory; if not, they go through pinned host memory.
        tuning: How kernels are cut up, the same on all ranks.

    Raises:
        ConfigError: If the group has more ranks than one host can have.
        CapacityError: If memory could not be had.
        UnsupportedError: If the ranks cannot share memory.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        num_bytes: int,
        timeout_s: float,
        device: torch.device,
        *,
        use_peer_access: bool = True,
        tuning: GpuTuning | None = None,
    ) -> None:
        self.device, self.timeout_s = device, timeout_s
        self.rank, self.num_ranks = rendezvous.rank, rendezvous.num_ranks
        if self.num_ranks > gpu_layout.MAX_RANKS:
            raise ConfigError(f"a host has at most {gpu_layout.MAX_RANKS} ranks, this group has {self.num_ranks}")
        self._plans: dict[Any, Plan] = {}
        self._tuning = tuning or GpuTuning()
        self._all_gather: AllGather = rendezvous.all_gather
        self._memory_class: type[CudaMemory | StagedMemory] = (
            CudaMemory if use_peer_access and device.type == "cuda" else StagedMemory
        )
        self._is_interpreted = device.type == "cpu"
        self._timeout = int(timeout_s * (_SPINS_PER_SECOND if self._is_interpreted else 1e9))
        self._kernels: Kernels | None = None
        self._control: _Memory | None = self._memory_class(
            gpu_layout.CONTROL_BYTES, self.rank, self._all_gather, device
        )
        self._staging: _Memory | None = self._memory_class(
            max(num_bytes, _MIN_STAGING_BYTES), self.rank, self._all_gather, device
        )
        self._num_max_staged = 0
        self._slots: dict[StagingLayout, tuple[int, tuple[int, int, int, int]]] = {}
        self._ticket = 0
        self._state = torch.zeros(gpu_layout.STATE_WORDS, dtype=torch.int64, device=device)
        self._record, self._record_words = self._pinned_words(gpu_layout.RECORD_WORDS)
        self._totals, self._totals_words = self._pinned_words(gpu_layout.TOTALS_WORDS)
        self._record_words[gpu_layout.RECORD_BROKEN] = self._state.data_ptr() + 8 * gpu_layout.STATE_BROKEN
        # Where a dispatch that nobody waits for writes its totals.
        self._unread_totals = torch.zeros(gpu_layout.TOTALS_WORDS, dtype=torch.int64, device=device)

    @property
    def tuning(self) -> GpuTuning:
        """How kernels are cut up. May be replaced between calls, on all ranks alike."""
        return self._tuning

    @tuning.setter
    def tuning(self, tuning: GpuTuning) -> None:
        self._tuning = tuning
        self._plans.clear()

    def compute_layout(self, topk_idx: Tensor, num_experts: int) -> Layout:
        """Count where tokens go."""
        kernels = self._running()
        num_tokens, num_topk = topk_idx.shape
        counts = torch.zeros(self.num_ranks + num_experts, dtype=torch.int32, device=self.device)
        per_rank, per_expert = counts[: self.num_ranks], counts[self.num_ranks :]
        is_token_in_rank = torch.empty(num_tokens, self.num_ranks, dtype=torch.bool, device=self.device)
        if num_tokens:
            variant = count_variant(kernels, num_topk, topk_idx.dtype)
            _, tokens_block, _ = variant.constants
            kernels.launch(
                variant.kernel,
                -(-num_tokens // tokens_block),
                (
                    topk_idx.data_ptr(),
                    per_rank.data_ptr(),
                    per_expert.data_ptr(),
                    is_token_in_rank.data_ptr(),
                    num_tokens,
                    num_topk,
                    num_experts,
                    self.num_ranks,
                ),
                variant.constants,
                variant.num_warps,
            )
        return Layout(per_rank, per_expert, is_token_in_rank)

    def dispatch(self, request: DispatchRequest) -> DispatchResult:
        """Send tokens to the ranks of their experts."""
        self._running()
        x, topk_idx, num_channels = request.x, request.topk_idx, request.config.num_channels
        num_experts = request.layout.num_tokens_per_expert.numel()
        if num_channels > gpu_layout.MAX_CHANNELS or num_experts > gpu_layout.MAX_EXPERTS:
            raise ConfigError(
                f"at most {gpu_layout.MAX_CHANNELS} channels and {gpu_layout.MAX_EXPERTS} experts are supported, "
                f"got {num_channels} and {num_experts}"
            )
        num_worst_tokens = request.num_worst_tokens
        handle = self._notify(request, num_channels, num_experts, waits=num_worst_tokens == 0)
        per_expert: list[int] = []
        if num_worst_tokens == 0:
            num_recv, num_staged, per_expert = self._wait_for_totals(num_experts, request.expert_alignment)
        else:
            num_recv = num_staged = num_worst_tokens
        self._num_max_staged = max(self._num_max_staged, num_staged)
        recv_src_idx = torch.empty(num_recv, dtype=torch.int32, device=self.device)
        recv_topk_idx = recv_topk_weights = None
        if topk_idx is not None:
            recv_topk_idx = torch.empty(num_recv, topk_idx.size(1), dtype=topk_idx.dtype, device=self.device)
            recv_topk_weights = torch.empty(num_recv, topk_idx.size(1), dtype=torch.float32, device=self.device)
        handle = handle._replace(recv_src_idx=recv_src_idx)
        recv_x, recv_scales = self._move(
            x,
            request.scales,
            handle,
            request.config,
            (topk_idx, request.topk_weights, recv_topk_idx, recv_topk_weights, num_experts),
        )
        return DispatchResult(
            x=recv_x,
            scales=recv_scales,
            topk_idx=recv_topk_idx,
            topk_weights=recv_topk_weights,
            num_recv_tokens_per_expert=per_expert,
            handle=handle,
        )

    def dispatch_cached(self, request: CachedDispatchRequest) -> tuple[Tensor, Tensor | None]:
        """Send tokens the way of an earlier dispatch; return rows and scales."""
        return self._move(request.x, request.scales, request.handle, request.config, None)

    def combine(self, request: CombineRequest) -> tuple[Tensor, Tensor | None]:
        """Bring rows back and add them."""
        kernels = self._running()
        x, weights, handle, tuning = request.x, request.topk_weights, request.handle, self.tuning
        num_tokens, hidden = handle.is_token_in_rank.size(0), x.size(1)
        num_topk = 0 if weights is None else weights.size(1)
        align = min([_words(x, hidden)[1], *(_alignment(bias) for bias in request.biases)])
        kind = CombineKind(x.dtype, hidden, align, num_topk, len(request.biases), request.config.num_sms)
        plan = self._plans.get(kind)
        if plan is None:
            plan = self._plans[kind] = plan_combine(self.num_ranks, tuning, kernels.type_of, kind)
        staging, num_slots, offsets = self._ensure_staging(plan.layout)
        combined_x = torch.empty(num_tokens, hidden, dtype=x.dtype, device=self.device)
        combined_weights = None
        if weights is not None:
            combined_weights = torch.empty(num_tokens, num_topk, dtype=torch.float32, device=self.device)
        bias_0, bias_1 = (*request.biases, None, None)[:2]
        kernels.launch(
            kernels.combine.combine_kernel,
            plan.num_programs,
            (
                x.data_ptr(),
                _address(weights),
                _address(bias_0),
                _address(bias_1),
                handle.send_head.data_ptr(),
                handle.channel_prefix_matrix.data_ptr(),
                handle.rank_prefix_matrix.data_ptr(),
                combined_x.data_ptr(),
                _address(combined_weights),
                self._control_table(),
                staging.table.data_ptr(),
                self._state.data_ptr(),
                self._record.data_ptr(),
                offsets[2],
                num_slots,
                num_tokens,
                x.size(0),
                handle.channel_prefix_matrix.size(1),
                num_topk,
                self.rank,
                plan.unit_rows,
                plan.num_senders,
                plan.first_receiver,
                self._timeout,
            ),
            plan.constants,
            tuning.num_warps,
        )
        return combined_x, combined_weights

    def variants(self, shape: ExchangeShape) -> list[Variant]:
        """Return the kernels that calls of a shape launch."""
        return variants_of(self._running(), shape, self.num_ranks, self.tuning)

    def reserve(self, shape: ExchangeShape) -> None:
        """Get memory for calls of a shape, whatever their routing; all ranks do so together."""
        self._num_max_staged = max(self._num_max_staged, self.num_ranks * shape.num_max_tokens_per_rank)
        fp8_or_bf16 = 1 if shape.use_fp8 else 2
        self._ensure_staging(StagingLayout(fp8_or_bf16 * shape.hidden, shape.num_topk, 8, shape.num_scales))
        self._ensure_staging(StagingLayout(2 * shape.hidden, shape.num_topk))

    def set_timeout(self, timeout_s: float) -> None:
        """Wait so long for a peer from now on."""
        self.timeout_s = timeout_s
        self._timeout = int(timeout_s * (_SPINS_PER_SECOND if self._is_interpreted else 1e9))

    def local_bytes(self) -> Tensor:
        """Return this rank's staging memory as a uint8 tensor."""
        self._running()
        assert self._staging is not None
        return self._staging.local_bytes()

    def close(self) -> None:
        """Let go of the memory. Waits for this GPU's own work only."""
        for memory in (self._control, self._staging):
            if memory is not None:
                memory.close()
        self._control = self._staging = None

    def check(self) -> None:
        """Raise what a kernel found wrong, if any did. Costs a look at pinned memory.

        Raises:
            PeerTimeoutError: If a peer did not do its part in time.
            CapacityError: If rows did not fit where the caller or the handle put them.
        """
        words = self._record_words
        kind = words[gpu_layout.RECORD_KIND]
        if kind == 0:
            return
        who, seen = words[gpu_layout.RECORD_WHO], words[gpu_layout.RECORD_SEEN]
        what, peer = who >> 32, who & 0xFFFFFFFF
        if kind == gpu_layout.KIND_TIMEOUT:
            raise PeerTimeoutError(
                f"rank {self.rank}: waited {self.timeout_s} s for rank {peer} and {gpu_layout.AWAITED[what]} "
                f"(launch {words[gpu_layout.RECORD_LAUNCH]}, last seen {seen >> 32})",
                missing_ranks=[peer],
                hint="look for an error on that rank, or raise DEEP_EP_TIMEOUT_S",
            )
        if kind == gpu_layout.KIND_OUTPUT_FULL:
            raise CapacityError(
                f"rank {self.rank}: {seen} rows came, more than the num_worst_tokens or handle of the call holds",
                hint="raise num_worst_tokens to the most tokens that all ranks together may send",
            )
        raise CapacityError(
            f"rank {self.rank}: an exchange needs {seen} rows of staging memory on rank {peer}, more than there are",
            hint="raise num_nvl_bytes",
        )

    def _running(self) -> Kernels:
        """Check that calls are possible; load the kernels at the first one."""
        if self._control is None:
            raise DestroyedError("this engine has been closed", hint="make a new Buffer")
        self.check()
        if self._kernels is None:
            self._kernels = load_kernels()
        return self._kernels

    def _notify(self, request: DispatchRequest, num_channels: int, num_experts: int, *, waits: bool) -> Handle:
        """Launch the exchange of counts; return the handle, yet without `recv_src_idx`."""
        kernels = self._running()
        num_ranks, is_token_in_rank = self.num_ranks, request.layout.is_token_in_rank
        num_tokens = is_token_in_rank.size(0)
        sizes = [num_tokens * num_ranks, num_ranks * num_ranks, num_ranks * num_channels, num_ranks * num_channels]
        parts = torch.split(torch.empty(sum(sizes), dtype=torch.int32, device=self.device), sizes)
        send_head = parts[0].view(num_tokens, num_ranks)
        rank_prefix_matrix = parts[1].view(num_ranks, num_ranks)
        channel_prefix_matrix = parts[2].view(num_ranks, num_channels)
        recv_channel_prefix_matrix = parts[3].view(num_ranks, num_channels)
        variant = notify_variant(kernels, num_ranks, num_channels)
        self._ticket += 1
        kernels.launch(
            variant.kernel,
            num_channels + 1,
            (
                is_token_in_rank.data_ptr(),
                request.layout.num_tokens_per_expert.data_ptr(),
                send_head.data_ptr(),
                channel_prefix_matrix.data_ptr(),
                rank_prefix_matrix.data_ptr(),
                recv_channel_prefix_matrix.data_ptr(),
                self._control_table(),
                self._state.data_ptr(),
                self._record.data_ptr(),
                self._totals.data_ptr() if waits else self._unread_totals.data_ptr(),
                self._ticket,
                num_tokens,
                num_channels,
                num_experts if waits else 0,
                self.rank,
                self._timeout,
            ),
            variant.constants,
            variant.num_warps,
        )
        return Handle(
            rank_prefix_matrix,
            channel_prefix_matrix,
            recv_channel_prefix_matrix,
            rank_prefix_matrix,
            is_token_in_rank,
            send_head,
        )

    def _wait_for_totals(self, num_experts: int, alignment: int) -> tuple[int, int, list[int]]:
        """Wait for the counts; return rows received, most rows staged by any rank, and aligned expert counts."""
        words, ticket = self._totals_words, self._ticket
        # The stream may have other work before the counts; the kernel has its own limit for peers.
        deadline = time.monotonic() + 2 * self.timeout_s + 60
        while words[gpu_layout.TOTALS_TICKET] != ticket:
            os.sched_yield()  # lets go of the GIL
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"rank {self.rank}: the counts of a dispatch did not come, as earlier work has not ended",
                    missing_ranks=[],
                )
        self.check()
        num_each, num_longer = divmod(num_experts, self.num_ranks)
        num_own = num_each + (self.rank < num_longer)
        begin = gpu_layout.TOTALS_EXPERTS
        per_expert = [-(-n // alignment) * alignment for n in words[begin : begin + num_own]]
        return words[gpu_layout.TOTALS_RECV], words[gpu_layout.TOTALS_STAGED], per_expert

    def _move(
        self,
        x: Tensor,
        scales: Tensor | None,
        handle: Handle,
        config: Config,
        meta: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, int] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Launch the exchange of rows; `meta` is what belongs to them in a new routing. Return rows and scales."""
        kernels, tuning = self._running(), self.tuning
        num_recv, hidden = handle.recv_src_idx.numel(), x.size(1)
        topk_idx, topk_weights, recv_topk_idx, recv_topk_weights, num_experts = meta or (None, None, None, None, 0)
        num_topk = 0 if topk_idx is None else topk_idx.size(1)
        num_scales = 0 if scales is None else scales.size(1)
        idx_dtype = torch.int64 if topk_idx is None else topk_idx.dtype
        _, align, row_words = _words(x, hidden)
        kind = DispatchKind(x.dtype, hidden, align, num_topk, idx_dtype, num_scales, meta is not None, config.num_sms)
        plan = self._plans.get(kind)
        if plan is None:
            plan = self._plans[kind] = plan_dispatch(self.num_ranks, tuning, kernels.type_of, kind)
        staging, num_slots, offsets = self._ensure_staging(plan.layout)
        recv_x = torch.empty(num_recv, hidden, dtype=x.dtype, device=self.device)
        recv_scales = None
        if scales is not None:
            recv_scales = torch.empty(num_recv, num_scales, dtype=scales.dtype, device=self.device)
        kernels.launch(
            kernels.dispatch.dispatch_kernel,
            plan.num_programs,
            (
                x.data_ptr(),
                _address(scales),
                _address(topk_idx),
                _address(topk_weights),
                handle.send_head.data_ptr(),
                handle.channel_prefix_matrix.data_ptr(),
                handle.rank_prefix_matrix.data_ptr(),
                recv_x.data_ptr(),
                _address(recv_scales),
                _address(recv_topk_idx),
                _address(recv_topk_weights),
                handle.recv_src_idx.data_ptr(),
                self._control_table(),
                staging.table.data_ptr(),
                self._state.data_ptr(),
                self._record.data_ptr(),
                *offsets,
                row_words,
                num_slots,
                x.size(0),
                num_recv,
                handle.channel_prefix_matrix.size(1),
                num_topk,
                num_scales,
                0 if scales is None else scales.stride(0),
                0 if scales is None else scales.stride(1),
                num_experts,
                self.rank,
                _unit_tokens(x.size(0), plan.unit_rows),
                plan.num_senders,
                plan.first_receiver,
                self._timeout,
            ),
            plan.constants,
            tuning.num_warps,
        )
        return recv_x, recv_scales

    def _control_table(self) -> int:
        assert self._control is not None
        return self._control.table.data_ptr()

    def _ensure_staging(self, layout: StagingLayout) -> tuple[_Memory, int, tuple[int, int, int, int]]:
        """Return staging that fits any routing so far on every rank, how many rows it holds, and its offsets.

        All ranks call this alike, and so all of them or none allocate anew.
        """
        assert self._staging is not None
        num_slots, offsets = self._slots.get(layout, (-1, (0, 0, 0, 0)))
        if num_slots < self._num_max_staged:
            num_slots = layout.num_slots(self._staging.num_bytes)
            if num_slots < self._num_max_staged:
                self._grow_staging(layout)
                num_slots = layout.num_slots(self._staging.num_bytes)
            offsets = layout.offsets(num_slots)
            self._slots[layout] = num_slots, offsets
        return self._staging, num_slots, offsets

    def _grow_staging(self, layout: StagingLayout) -> None:
        assert self._staging is not None
        num_rows = self._num_max_staged
        num_bytes = layout.num_bytes(num_rows + num_rows // 8)
        if not self._is_interpreted:
            if torch.cuda.is_current_stream_capturing():
                raise CapacityError(
                    f"{layout.num_bytes(num_rows):,} bytes of staging memory are needed and "
                    f"{self._staging.num_bytes:,} are there, which cannot change while a CUDA graph is captured",
                    hint=f"make the Buffer with num_nvl_bytes={num_bytes}, or run the call once before the capture",
                )
            # Once every rank has come here, nobody writes to the old memory any more.
            torch.cuda.synchronize(self.device)
            self.check()
        self._all_gather([num_bytes])
        self._staging.close()
        self._staging = self._memory_class(num_bytes, self.rank, self._all_gather, self.device)
        self._slots = {}

    def _pinned_words(self, num_words: int) -> tuple[Tensor, Any]:
        """Return words that kernels write and the host reads, as a tensor and as an array."""
        pinned = torch.zeros(num_words, dtype=torch.int64, pin_memory=not self._is_interpreted)
        return pinned, (ctypes.c_int64 * num_words).from_address(pinned.data_ptr())


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _alignment(tensor: Tensor) -> int:
    """Return the largest power of two, at most 16, that divides a tensor's address."""
    address = tensor.data_ptr() | 16
    return address & -address


def _words(x: Tensor, hidden: int) -> tuple[torch.dtype, int, int]:
    """Return the widest word that rows of `x` can be moved in, their alignment in bytes, and words per row."""
    row_bytes = hidden * x.element_size() | 16
    align = min(row_bytes & -row_bytes, _alignment(x))
    word = word_of(align)
    return word, align, hidden * x.element_size() // word.itemsize


def _unit_tokens(num_tokens: int, unit_tokens: int) -> int:
    """Return the size of a sender's units: larger than usual if there would be too many."""
    most = unit_tokens * gpu_layout.MAX_UNITS
    return unit_tokens * max(-(-num_tokens // most), 1)
