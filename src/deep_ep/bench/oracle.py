"""Exchanges through `deep_ep.Buffer`, and the claims about them that are checked before anything is timed.

Each rank makes the inputs of all ranks and works out with `deep_ep.reference` and `deep_ep.low_latency_reference` what
it must get. Rows that were moved are compared byte by byte; sums with half a step of bfloat16 beside what the format of
the wire adds. Rows that are not real are NaN where experts write, and ranks agree about the outcome of every claim.

What an expert makes of a row, here: the row times a factor that tells experts (or ranks) apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep import low_latency_reference, reference
from deep_ep.bench.case import Case, Inputs
from deep_ep.bench.ranks import Rank
from deep_ep.buffer import Buffer
from deep_ep.errors import DeepEPError
from deep_ep.low_latency_reference import cast_to_fp8

_WIRE_BITS = 24
"""Bits in which a low-latency combine on GPUs sends the sum of several rows."""


class VerificationError(DeepEPError):
    """What a call returned is not what the specification says."""


class Claim(NamedTuple):
    """One claim and what speaks against it, which is None if it holds."""

    name: str
    error: str | None


class NormalCalls:
    """The calls of one case in normal mode, as a program makes them.

    Attributes:
        x: What is dispatched: rows, or a pair of rows and scales.
        inputs: What this rank brings.
    """

    def __init__(self, buffer: Buffer, case: Case, rank: Rank) -> None:
        self.buffer, self.case = buffer, case
        inputs = case.inputs(rank.rank, rank.num_ranks)
        self.x: Any = inputs.x.to(rank.device)
        if case.dtype == "fp8":
            self.x = tuple(tensor.to(rank.device) for tensor in cast_to_fp8(inputs.x))
        self.inputs = inputs.to(rank.device)

    def layout(self) -> Any:
        """Count where tokens go."""
        return self.buffer.get_dispatch_layout(self.inputs.topk_idx, self.case.num_experts)

    def dispatch(self, **flags: Any) -> Any:
        """Dispatch with new routing, layout included."""
        per_rank, _, per_expert, in_rank, _ = self.layout()
        return self.buffer.dispatch(
            self.x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=self.inputs.topk_idx,
            topk_weights=self.inputs.topk_weights,
            **flags,
        )

    def cached(self, handle: Any, **flags: Any) -> Any:
        """Dispatch the way of an earlier one."""
        return self.buffer.dispatch(self.x, handle=handle, **flags)

    def combine(self, y: Tensor, handle: Any, **flags: Any) -> Any:
        """Bring rows back."""
        return self.buffer.combine(y, handle, **flags)


class LowLatencyCalls:
    """The calls of one case in low-latency mode."""

    def __init__(self, buffer: Buffer, case: Case, rank: Rank) -> None:
        self.buffer, self.case = buffer, case
        self.inputs = case.inputs(rank.rank, rank.num_ranks).to(rank.device)
        self.num_max_tokens = max(case.num_tokens, 1)

    def dispatch(self, **flags: Any) -> Any:
        """Dispatch."""
        return self.buffer.low_latency_dispatch(
            self.inputs.x,
            self.inputs.topk_idx,
            self.num_max_tokens,
            self.case.num_experts,
            use_fp8=self.case.dtype == "fp8",
            **flags,
        )

    def combine(self, y: Tensor, handle: Any, **flags: Any) -> Any:
        """Bring rows back."""
        return self.buffer.low_latency_combine(y, self.inputs.topk_idx, self.inputs.topk_weights, handle, **flags)


def make_buffer(rank: Rank, *cases: Case) -> Buffer:
    """Return a buffer that needs no more memory for these cases: twice what a rank may receive."""
    num_bytes = 0
    for case in cases:
        num_rows = rank.num_ranks * case.num_tokens
        if case.mode != "normal":
            num_rows *= -(-case.num_experts // rank.num_ranks) if rank.device.type == "cpu" else 0
        num_bytes = max(num_bytes, 2 * num_rows * (2 * case.hidden + 64))
    has_low_latency = any(case.mode != "normal" for case in cases)
    return Buffer(rank.group, num_nvl_bytes=num_bytes, low_latency_mode=has_low_latency, device=rank.device)


def first_failure(rank: Rank, buffer: Buffer, cases: Sequence[Case]) -> str | None:
    """Verify cases until a claim fails; return what speaks against it, None if all hold."""
    for case in cases:
        for claim in verify(rank, buffer, case):
            if claim.error is not None:
                return f"{claim.name} of {case.shape}: {claim.error}"
    return None


def verify(rank: Rank, buffer: Buffer, case: Case) -> Iterator[Claim]:
    """Make every call of a case, and compare all that it returns; all ranks together.

    Yields:
        The claims, about which the ranks agree. Where one fails, those that build on it do not come.
    """
    claims = _normal_claims(rank, buffer, case) if case.mode == "normal" else _low_latency_claims(rank, buffer, case)
    for name, check in claims:
        error = None
        try:
            check()
        except DeepEPError as raised:
            error = f"rank {rank.rank}: {raised}"
        errors: list[str | None] = [None] * rank.num_ranks
        dist.all_gather_object(errors, error)
        told = next((error for error in errors if error is not None), None)
        yield Claim(name, told)
        if told is not None:
            return


def require_verified(rank: Rank, buffer: Buffer, case: Case) -> int:
    """Verify a case; return how many claims held.

    Raises:
        VerificationError: If one does not hold.
    """
    claims = list(verify(rank, buffer, case))
    for claim in claims:
        if claim.error is not None:
            raise VerificationError(f"{claim.name} of {case.shape} is wrong: {claim.error}")
    return len(claims)


Checks = Iterator[tuple[str, Callable[[], None]]]


def _normal_claims(rank: Rank, buffer: Buffer, case: Case) -> Checks:
    calls = NormalCalls(buffer, case, rank)
    everyone = [case.inputs(src, rank.num_ranks).to(rank.device) for src in range(rank.num_ranks)]
    with torch.device(rank.device):
        layouts = [reference.get_dispatch_layout(i.topk_idx, case.num_experts, rank.num_ranks) for i in everyone]
        rows, scales = _rows_sent(everyone, case)
        wanted = reference.dispatch(
            rows,
            layouts,
            scales_RTS=scales,
            topk_idx_RTK=[i.topk_idx for i in everyone],
            topk_weights_RTK=[i.topk_weights for i in everyone],
        )
    mine = wanted[rank.rank]
    got: dict[str, Any] = {}

    def check_layout() -> None:
        per_rank, _, per_expert, in_rank, _ = calls.layout()
        _same("num_tokens_per_rank", per_rank, layouts[rank.rank].num_tokens_per_rank)
        _same("num_tokens_per_expert", per_expert, layouts[rank.rank].num_tokens_per_expert)
        _same("is_token_in_rank", in_rank, layouts[rank.rank].is_token_in_rank)

    def check_dispatch() -> None:
        recv_x, recv_idx, recv_weights, counts, got["handle"], _ = calls.dispatch()
        _same_rows(recv_x, mine.x, mine.scales)
        _same("recv_topk_idx", recv_idx, mine.topk_idx)
        _same("recv_topk_weights", recv_weights, mine.topk_weights)
        if list(counts) != mine.num_recv_tokens_per_expert:
            raise VerificationError(f"counts per expert are {counts}, not {mine.num_recv_tokens_per_expert}")
        got["weights"] = recv_weights

    def check_cached() -> None:
        recv_x, *_ = calls.cached(got["handle"])
        _same_rows(recv_x, mine.x, mine.scales)

    def check_combine() -> None:
        outputs = [_rows_of_experts(received.x, case.dtype, src + 1) for src, received in enumerate(wanted)]
        combined, weights, _ = calls.combine(outputs[rank.rank], got["handle"], topk_weights=got["weights"])
        with torch.device(rank.device):
            sums, slack = _sums(buffer, outputs, wanted, rank.rank)
        _near("combined_x", combined, sums, slack)
        _same("combined_topk_weights", weights, torch.where(calls.inputs.topk_idx >= 0, calls.inputs.topk_weights, 0.0))

    yield "Layout", check_layout
    yield "Dispatch", check_dispatch
    yield "Cached dispatch", check_cached
    yield "Combine", check_combine


def _sums(
    buffer: Buffer, outputs: list[Tensor], received: list[reference.Received], rank: int
) -> tuple[Tensor, Tensor]:
    """Return the float32 sums of a combine, and how far off they may be beside half a step of the result.

    Between hosts, the sum of each host is rounded too, before the hosts are added: half a step of it.
    """
    handles = [one.handle for one in received]
    sums, sizes = (
        reference.combine(rows, handles)[rank].x
        for rows in ([y.float() for y in outputs], [y.float().abs() for y in outputs])
    )
    return sums, sizes * (2.0**-21 if buffer.topology.num_hosts == 1 else 2.0**-8)


def _low_latency_claims(rank: Rank, buffer: Buffer, case: Case) -> Checks:
    calls = LowLatencyCalls(buffer, case, rank)
    everyone = [case.inputs(src, rank.num_ranks).to(rank.device) for src in range(rank.num_ranks)]
    topk_idx = [i.topk_idx for i in everyone]
    with torch.device(rank.device):
        rows, scales = _rows_sent(everyone, case)
        wanted = low_latency_reference.dispatch(
            rows,
            topk_idx,
            num_max_tokens_per_rank=calls.num_max_tokens,
            num_experts=case.num_experts,
            scales_RTS=scales,
        )
    mine = wanted[rank.rank]
    got: dict[str, Any] = {}

    def check_dispatch(*, has_hook: bool) -> None:
        recv_x, recv_count, handle, _, hook = calls.dispatch(return_recv_hook=has_hook)
        if has_hook:
            hook()
        recv_x, recv_scales = recv_x if case.dtype == "fp8" else (recv_x, None)
        _same("recv_count", recv_count, mine.recv_count)
        for local, num_rows in enumerate(mine.recv_count.tolist()):
            real = (local, slice(num_rows))
            _same(f"recv_x of expert {local}", _bytes(recv_x[real]), mine.x[real])
            if mine.scales is not None and recv_scales is not None:
                _same(f"scales of expert {local}", recv_scales[real], mine.scales[real])
        got["handle"] = handle

    def check_combine(*, has_hook: bool) -> None:
        outputs = []
        for owned, received in zip(reference.local_experts(case.num_experts, rank.num_ranks), wanted, strict=True):
            factors = torch.arange(owned.start + 1, owned.stop + 1, device=rank.device).view(-1, 1, 1)
            outputs.append(_rows_of_experts(received.x, case.dtype, factors))
        y = outputs[rank.rank].clone()
        for local, num_rows in enumerate(mine.recv_count.tolist()):
            y[local, num_rows:] = torch.nan
        combined, _, hook = calls.combine(y, got["handle"], return_recv_hook=has_hook)
        if has_hook:
            hook()
        weights = [i.topk_weights for i in everyone]
        with torch.device(rank.device):
            sums, sizes = (
                low_latency_reference.combine(rows, topk_idx, weights, wanted, num_experts=case.num_experts)[rank.rank]
                for rows in (outputs, [rows.abs() for rows in outputs])
            )
        _near("combined_x", combined, sums, sizes * (2.0 ** -(_WIRE_BITS - 8) + 2.0**-21))

    yield "Dispatch", lambda: check_dispatch(has_hook=False)
    yield "Combine", lambda: check_combine(has_hook=False)
    yield "Dispatch with hook", lambda: check_dispatch(has_hook=True)
    yield "Combine with hook", lambda: check_combine(has_hook=True)


def _rows_sent(everyone: list[Inputs], case: Case) -> tuple[list[Tensor], list[Tensor] | None]:
    """Return the rows of all ranks as bytes, and their scales."""
    if case.dtype == "bf16":
        return [_bytes(inputs.x) for inputs in everyone], None
    casts = [cast_to_fp8(inputs.x) for inputs in everyone]
    return [_bytes(cast.x) for cast in casts], [cast.scales for cast in casts]


def _rows_of_experts(row_bytes: Tensor, dtype: str, factor: Tensor | int) -> Tensor:
    """Return what experts make of rows that are given as bytes: bfloat16."""
    rows = row_bytes.view(torch.bfloat16 if dtype == "bf16" else torch.float8_e4m3fn).float()
    return (rows * (1.0 + torch.as_tensor(factor, device=rows.device) / 8)).bfloat16()


def _bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)


def _same_rows(recv_x: Any, wanted: Tensor, wanted_scales: Tensor | None) -> None:
    rows, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    _same("recv_x", _bytes(rows), wanted)
    if wanted_scales is not None:
        _same("recv_scales", scales, wanted_scales)


def _same(name: str, got: Tensor | None, wanted: Tensor | None) -> None:
    """Compare bit by bit."""
    if got is None or wanted is None:
        raise VerificationError(f"{name} is missing")
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        raise VerificationError(f"{name} is {list(got.shape)} {got.dtype}, not {list(wanted.shape)} {wanted.dtype}")
    if not torch.equal(got, wanted):
        num_wrong = int((got != wanted).reshape(len(got), -1).any(1).sum())
        raise VerificationError(f"{num_wrong} of {len(got)} rows of {name} differ from the specification")


def _near(name: str, got: Tensor, sums: Tensor, slack: Tensor) -> None:
    """Compare sums: half a step of bfloat16, and what is added on the way."""
    if got.shape != sums.shape:
        raise VerificationError(f"{name} is {list(got.shape)}, not {list(sums.shape)}")
    half_step = torch.ldexp(torch.ones_like(sums), torch.frexp(sums).exponent - 9)
    is_wrong = ~((got.to(sums.dtype) - sums).abs() <= half_step + slack + 1e-38)
    if bool(is_wrong.any()):
        raise VerificationError(f"{int(is_wrong.any(1).sum())} of {len(got)} rows of {name} are not the sum")
