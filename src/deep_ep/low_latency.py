"""The low-latency half of `Buffer`: fixed capacity, no wait on the host, hooks, with the interface of DeepEP V1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from deep_ep import checks
from deep_ep.engines.base import (
    LowLatencyCombineRequest,
    LowLatencyDispatchRequest,
    LowLatencyEngine,
    Masking,
    Pending,
    RowFormat,
)
from deep_ep.errors import ConfigError, DestroyedError
from deep_ep.events import EventOverlap
from deep_ep.latency import LatencyMonitor
from deep_ep.streams import Streams
from deep_ep.warmup import WarmupCalls

R = TypeVar("R")
Hook = Callable[[], None]


class LowLatencyCalls(WarmupCalls):
    """The low-latency calls of a buffer that was made with `low_latency_mode=True`."""

    rank: int
    group_size: int
    low_latency_mode: bool
    latency: LatencyMonitor
    enable_shrink: bool
    _low_latency: LowLatencyEngine | None
    _streams: Streams
    _device: torch.device
    _combine_buffer: Tensor | None = None
    count_expert_rows: Callable[[int, int], Tensor | None] | None = None

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        use_mxfp8: bool = False,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, tuple[Any, ...], EventOverlap, Hook | None]:
        """Send each token to its experts, into slots of fixed capacity.

        With T = `num_ranks * num_max_dispatch_tokens_per_rank` and L experts on this rank:

        Args:
            x: `[num_tokens, hidden]` bfloat16; any number of tokens up to the maximum, also none.
            topk_idx: `[num_tokens, num_topk]` int64 or int32; -1 for none.
            num_max_dispatch_tokens_per_rank: The most tokens that any rank sends; the same on all ranks, and free to
                change from call to call.
            num_experts: Experts on all ranks, split as in `get_dispatch_layout`.
            cumulative_local_expert_recv_stats: `[L]` int32; the rows of each expert are added to it.
            dispatch_wait_recv_cost_stats: `[num_ranks]` int64; the time spent waiting for each rank is added to it, in
                clock cycles on a GPU and nanoseconds on a CPU.
            use_fp8: Cast rows to float8_e4m3fn, with a scale for every 128 channels (the last run may be shorter).
            round_scale: Round scales up to powers of two.
            use_ue8m0: Return only their exponents, four in an int32; needs `round_scale`.
            async_finish: Return an event instead of making the current stream wait.
            return_recv_hook: Return a hook; rows have arrived once it has been called. Not with `async_finish`.
            use_mxfp8: Cast rows to MXFP8: a scale for every 32 channels, a power of two of which only the exponent is
                returned; `round_scale` and `use_ue8m0` are then as good as true.

        Returns:
            `recv_x` `[L, T, hidden]` bfloat16; with `use_fp8` a pair of float8_e4m3fn rows and scales `[L, T, hidden /
            128]` float32, or `[L, T, hidden / 512]` int32 with `use_ue8m0`, rounded up and with T innermost in memory.
            With `use_mxfp8` the scales are `[L, T, hidden / 128]` int32: byte j of item i of a row, from the lowest, is
            the exponent (plus 127) of channels 128 i + 32 j to 128 i + 32 j + 31.
            Of each expert the first `recv_count` rows are real, sorted by source rank, then by token.
            `recv_count` `[L]` int32; the handle for `low_latency_combine`; an event; and the hook, or None.

        Raises:
            ConfigError: If an argument breaks a rule; nothing has been sent.
            MismatchError: If the ranks disagree about the call.
            PeerTimeoutError: If a peer does not do its part in time.
        """
        engine = self._low_latency_running()
        _check_flags(async_finish, return_recv_hook)
        device, bf16 = self._device, (torch.bfloat16,)
        x = checks.check_tensor("x", x, device=device, shape=("num_tokens", "hidden"), dtypes=bf16)
        limit = checks.check_at_least("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1)
        if x.size(0) > limit:
            raise ConfigError(
                f"x must have at most num_max_dispatch_tokens_per_rank = {limit} tokens, got {x.size(0)}",
                hint="raise num_max_dispatch_tokens_per_rank on all ranks; each call may have another one",
            )
        num_experts = checks.check_at_least("num_experts", num_experts, 1)
        request = LowLatencyDispatchRequest(
            x=x,
            topk_idx=checks.check_topk_idx(topk_idx, x.size(0), num_experts, device),
            num_max_tokens_per_rank=limit,
            num_experts=num_experts,
            row_format=row_format(use_fp8, round_scale, use_ue8m0, use_mxfp8),
            recv_stats=self._recv_stats(
                cumulative_local_expert_recv_stats, num_experts, x.size(1) * (1 if use_fp8 else 2)
            ),
            wait_stats=self._wait_stats(
                "dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, "low_latency_dispatch", return_recv_hook
            ),
        )
        if request.row_format in (RowFormat.BF16, RowFormat.FP8):
            is_fp8, num_topk = request.row_format is RowFormat.FP8, request.topk_idx.size(1)
            if x.size(1) and num_topk:
                self._note_shape((x.size(1), num_topk, num_experts, limit, True, is_fp8, 0))
        result, event, hook = self._issue(
            "low_latency_dispatch",
            lambda: engine.dispatch(request, split=return_recv_hook),
            (request,),
            async_finish,
            return_recv_hook,
        )
        recv_x = result.x if result.scales is None else (result.x, result.scales)
        return recv_x, result.recv_count, result.handle, event, hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Bring rows back and add them, each multiplied by its weight, in float32 and with one rounding.

        Args:
            x: `[L, T, hidden]` bfloat16; what the experts made of the rows. Rows past the real ones are not read.
            topk_idx: `[num_tokens, num_topk]`, as it was dispatched.
            topk_weights: `[num_tokens, num_topk]` float32.
            handle: What `low_latency_dispatch` returned.
            use_logfmt: Let what crosses be less precise, as V1 does with its 10-bit format: on GPUs a sum of several
                rows then travels in 16 bits instead of 24. CPU ranks send bfloat16 rows in any case.
            zero_copy: Take rows from the tensor that `get_next_low_latency_combine_buffer` returned, not from `x`.
            async_finish: As in the dispatch, like the next one.
            return_recv_hook: See above.
            out: `[num_tokens, hidden]` bfloat16 to write the sums to, or None.
            combine_wait_recv_cost_stats: As in the dispatch.

        Returns:
            The sums `[num_tokens, hidden]` bfloat16, which is `out` if that was given; zeros for a token without an
            expert; an event; and the hook, or None.

        Raises:
            ConfigError: If an argument breaks a rule; nothing has been sent.
            MismatchError: If the ranks disagree about the call.
            PeerTimeoutError: If a peer does not do its part in time.
        """
        engine = self._low_latency_running()
        _check_flags(async_finish, return_recv_hook)
        device, bf16 = self._device, (torch.bfloat16,)
        checked = checks.check_low_latency_handle(handle, self.group_size, device)
        num_local_experts, num_rows = checked.src_info.shape
        shape = (num_local_experts, num_rows, checked.hidden)
        rows = checks.check_tensor("x", x, device=device, shape=shape, dtypes=bf16)
        if zero_copy:
            if use_logfmt:
                raise ConfigError("zero_copy and use_logfmt must not both be true, got both")
            if self._combine_buffer is None or self._combine_buffer.shape != rows.shape:
                raise ConfigError(
                    "zero_copy=True takes the rows from get_next_low_latency_combine_buffer, which was not called "
                    "with this handle"
                )
            rows, self._combine_buffer = self._combine_buffer, None
        idx = checks.check_topk_idx(topk_idx, "num_tokens", checked.num_experts, device)
        if topk_weights is None:
            raise ConfigError("topk_weights must be a tensor, got None: a low-latency combine is weighted")
        if out is not None and not out.is_contiguous():
            raise ConfigError(f"out must be contiguous, got strides {out.stride()}")
        shape_out = (idx.size(0), checked.hidden)
        request = LowLatencyCombineRequest(
            x=rows,
            topk_idx=idx,
            topk_weights=checks.check_tensor(
                "topk_weights", topk_weights, device=device, shape=tuple(idx.shape), dtypes=(torch.float32,)
            ),
            handle=checked,
            use_logfmt=use_logfmt,
            out=None if out is None else checks.check_tensor("out", out, device=device, shape=shape_out, dtypes=bf16),
            wait_stats=self._wait_stats(
                "combine_wait_recv_cost_stats", combine_wait_recv_cost_stats, "low_latency_combine", return_recv_hook
            ),
        )
        return self._issue(
            "low_latency_combine",
            lambda: engine.combine(request, split=return_recv_hook),
            (request,),
            async_finish,
            return_recv_hook,
        )

    def get_next_low_latency_combine_buffer(self, handle: tuple[Any, ...]) -> Tensor:
        """Return a tensor for experts to write to, from which the next combine with `zero_copy=True` takes its rows.

        Args:
            handle: What `low_latency_dispatch` returned.

        Returns:
            `[L, T, hidden]` bfloat16, uninitialised.
        """
        self._low_latency_running()
        checked = checks.check_low_latency_handle(handle, self.group_size, self._device)
        shape = (*checked.src_info.shape, checked.hidden)
        self._combine_buffer = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return self._combine_buffer

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Do what DeepEP V1 needs when normal calls have used the same memory; here there is nothing to clean.

        Signals lie apart from rows, and carry the number of their call, so no call can mistake what an earlier one
        left behind.

        Args:
            num_max_dispatch_tokens_per_rank: As in `low_latency_dispatch`, like the others.
            hidden: See above.
            num_experts: See above.
        """
        self._low_latency_running()
        checks.check_at_least("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1)
        checks.check_at_least("hidden", hidden, 1)
        checks.check_at_least("num_experts", num_experts, 1)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask a rank, or take it in again. The buffer must have been made with `enable_shrink=True`.

        Calls send nothing to a masked rank and take nothing from it: it counts no rows in a dispatch, and a combine
        leaves out the top-k slots that name its experts. A rank that does not come to a call within the time limit is
        masked by the call itself, which goes on without it; `low_latency_query_mask_buffer` shows that.

        All ranks make this call between the same two others; to take a rank in, that rank too. Handles of dispatches
        from before must not be used after a rank has been taken in.

        Args:
            rank_to_mask: The rank.
            mask: True to mask it, False to take it in.

        Raises:
            ConfigError: If there is no such rank, this rank is to mask itself, or the buffer was made with
                `enable_shrink=False`.
            PeerTimeoutError: If this rank is to be taken in, and the others do not do so within the time limit.
        """
        self._low_latency_running()
        self._check_maskable(rank_to_mask)
        engine = self._low_latency_masking()
        engine.mask(self._other_rank(rank_to_mask) if mask else rank_to_mask, is_masked=bool(mask))

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Write to a tensor which ranks are masked.

        Args:
            mask_status: `[num_ranks]` int32; 1 is written for each masked rank, 0 for the others.

        Raises:
            ConfigError: If it is another kind of tensor, or the buffer was made with `enable_shrink=False`.
        """
        self._low_latency_running()
        self._check_maskable(0)
        engine = self._low_latency_masking()
        status = checks.check_stats("mask_status", mask_status, torch.int32, self._device, self.group_size)
        if status is None:
            raise ConfigError("mask_status must be a tensor, got None")
        engine.write_masked(status)

    def low_latency_clean_mask_buffer(self) -> None:
        """Take all masked ranks in again; all ranks make this call between the same two others.

        Raises:
            ConfigError: If the buffer was made with `enable_shrink=False`.
            PeerTimeoutError: If this rank is masked, and the others do not take it in within the time limit.
        """
        self._low_latency_running()
        self._check_maskable(0)
        engine = self._low_latency_masking()
        engine.unmask_all()

    def _low_latency_masking(self) -> Masking:
        engine = self._low_latency_running()
        assert isinstance(engine, Masking), "the constructor has looked"
        return engine

    def _check_maskable(self, rank: int) -> None:
        if not self.enable_shrink:
            raise ConfigError("masking ranks needs a buffer made with enable_shrink=True, this one was made with False")
        if not 0 <= rank < self.group_size:
            raise ConfigError(f"rank must be from 0 to {self.group_size - 1}, got {rank}")

    def _other_rank(self, rank: int) -> int:
        if rank == self.rank:
            raise ConfigError(f"a rank must not mask itself, got {rank}", hint="mask it on all other ranks")
        return rank

    def _low_latency_running(self) -> LowLatencyEngine:
        if self._low_latency is not None:
            if self._warmup is not None:
                self._let_call_in(self._warmup)
            return self._low_latency
        if self.low_latency_mode:
            raise DestroyedError("this buffer has been destroyed", hint="make a new Buffer")
        raise ConfigError(
            "low-latency calls need a buffer made with low_latency_mode=True, this one was made with False"
        )

    def _issue(
        self,
        operation: str,
        call: Callable[[], Pending[R]],
        arguments: tuple[object, ...],
        async_finish: bool,
        has_hook: bool,
    ) -> tuple[R, EventOverlap, Hook | None]:
        """Run a call; both halves of one with a hook run on the stream that is current now."""
        run = self.latency.run
        if not has_hook:
            pending, event = self._streams.run(lambda: run(operation, call), arguments, None, async_finish)
            return pending.result, event, None
        pending = run(f"{operation}_send", call)
        finish, recv = pending.finish, f"{operation}_recv"
        return pending.result, EventOverlap(None), self._streams.bind(lambda: run(recv, finish))

    def _recv_stats(self, given: Tensor | None, num_experts: int, row_bytes: int) -> Tensor | None:
        """Return where a dispatch counts the rows of experts: what the program gave, or what metrics keep."""
        if given is None:
            return None if self.count_expert_rows is None else self.count_expert_rows(num_experts, row_bytes)
        return checks.check_stats("cumulative_local_expert_recv_stats", given, torch.int32, self._device)

    def _wait_stats(self, name: str, given: Tensor | None, operation: str, has_hook: bool) -> Tensor | None:
        """Return where a call counts its waits: what the program gave, or now and then what the monitor keeps."""
        if given is None:
            return self.latency.wait_stats(f"{operation}_send" if has_hook else operation)
        return checks.check_stats(name, given, torch.int64, self._device, self.group_size)


def _check_flags(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise ConfigError("async_finish and return_recv_hook must not both be true, got both")


def row_format(use_fp8: bool, round_scale: bool, use_ue8m0: bool, use_mxfp8: bool = False) -> RowFormat:
    """Return the format that V1's three switches, or our own one, stand for.

    Raises:
        ConfigError: If they contradict each other.
    """
    if use_mxfp8:
        if not use_fp8:
            raise ConfigError("use_mxfp8=True needs use_fp8=True, got use_fp8=False")
        return RowFormat.MXFP8
    if use_ue8m0 and not round_scale:
        raise ConfigError("use_ue8m0=True needs round_scale=True, got round_scale=False")
    if not use_fp8:
        if round_scale:
            raise ConfigError("round_scale=True needs use_fp8=True, got use_fp8=False")
        return RowFormat.BF16
    if use_ue8m0:
        return RowFormat.FP8_UE8M0
    return RowFormat.FP8_ROUNDED if round_scale else RowFormat.FP8
