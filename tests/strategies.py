"""Exchanges to try: small descriptions that every rank turns into the same tensors from a seed.

A description is drawn by hypothesis or written down in a test; `Exchange.inputs(rank)` makes the tensors of a
rank. Data are never zeros, so that a row that was not written shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

ROUTINGS = ("uniform", "skewed", "one expert", "few ranks", "holes", "masked rows", "duplicates", "nowhere")
FLOAT_KINDS = ("bf16", "fp16", "fp32")
OTHER_KINDS = ("fp8 row-major scales", "fp8 column-major scales", "fp8 packed scales", "uint8", "int16")
_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "uint8": torch.uint8,
    "int16": torch.int16,
}


class Inputs(NamedTuple):
    """What one rank brings to an exchange."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor
    biases: tuple[Tensor, ...]

    @property
    def rows(self) -> Tensor | tuple[Tensor, Tensor]:
        """The `x` argument of dispatch."""
        return self.x if self.scales is None else (self.x, self.scales)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One dispatch and combine over several ranks.

    Attributes:
        num_tokens: Of each rank; their number is the number of ranks.
        kind: Of the rows of dispatch, one of FLOAT_KINDS or OTHER_KINDS.
        sum_kind: Of the rows of combine, one of FLOAT_KINDS.
        has_topk: Whether dispatch is given expert ids and weights.
        num_spare_tokens: With None the receivers are told counts; else `num_worst_tokens` is the most rows
            that a rank can get, and this many more.
    """

    num_tokens: tuple[int, ...]
    hidden: int = 64
    num_topk: int = 2
    num_experts: int = 8
    routing: str = "uniform"
    kind: str = "bf16"
    sum_kind: str = "bf16"
    topk_idx_dtype: torch.dtype = torch.int64
    has_topk: bool = True
    expert_alignment: int = 1
    num_spare_tokens: int | None = None
    num_biases: int = 0
    num_sms: int = 20
    seed: int = 0

    @property
    def sum_dtype(self) -> torch.dtype:
        return _DTYPES[self.sum_kind]

    @property
    def num_ranks(self) -> int:
        return len(self.num_tokens)

    @property
    def num_worst_tokens(self) -> int:
        return 0 if self.num_spare_tokens is None else max(sum(self.num_tokens) + self.num_spare_tokens, 1)

    def inputs(self, rank: int) -> Inputs:
        """Return what a rank brings."""
        generator = self._generator(rank, 0)
        num_tokens = self.num_tokens[rank]
        x, scales = _rows(self.kind, num_tokens, self.hidden, generator)
        return Inputs(
            x=x,
            scales=scales,
            topk_idx=self._route(num_tokens, generator).to(self.topk_idx_dtype),
            topk_weights=torch.rand(num_tokens, self.num_topk, generator=generator) + 0.5,
            biases=tuple(_rows(self.sum_kind, num_tokens, self.hidden, generator)[0] for _ in range(self.num_biases)),
        )

    def more_rows(self, rank: int, num: int) -> Tensor | tuple[Tensor, Tensor]:
        """Return other rows for the same tokens, as the `x` of a cached dispatch; `num` tells them apart."""
        x, scales = _rows(self.kind, self.num_tokens[rank], self.hidden, self._generator(rank, 1 + num))
        return x if scales is None else (x, scales)

    def expert_outputs(self, rank: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return rows and weights to combine, independent of what was dispatched."""
        generator = self._generator(rank, 0x5EED)
        x, _ = _rows(self.sum_kind, num_rows, self.hidden, generator)
        return x, torch.randn(num_rows, self.num_topk, generator=generator)

    def _generator(self, rank: int, purpose: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.seed * 64 + rank) * 65536 + purpose)

    def _route(self, num_tokens: int, generator: torch.Generator) -> Tensor:
        """Return `[num_tokens, num_topk]` expert ids."""
        shape = (num_tokens, self.num_topk)
        if self.routing == "nowhere":
            return torch.full(shape, -1)
        if self.routing == "duplicates":
            return torch.randint(self.num_experts, shape, generator=generator)
        if self.routing == "one expert":
            # Slots beyond the first would name it twice.
            idx = torch.full(shape, -1)
            idx[:, :1] = torch.randint(self.num_experts, (1,), generator=self._generator(0, 0xE))
            return idx
        scores = torch.rand(num_tokens, self.num_experts, generator=generator)
        if self.routing == "skewed":
            scores *= torch.linspace(1.0, 0.1, self.num_experts) ** 4
        num_open = self.num_experts
        if self.routing == "few ranks":
            num_open = -(-self.num_experts // 3)
        best = scores[:, :num_open].argsort(dim=1, descending=True)[:, : self.num_topk]
        idx = torch.full(shape, -1)
        idx[:, : best.shape[1]] = best
        if self.routing == "holes":
            idx[torch.rand(shape, generator=generator) < 0.5] = -1
        if self.routing == "masked rows":
            idx[torch.rand(num_tokens, generator=generator) < 0.5] = -1
        return idx


def _rows(kind: str, num_rows: int, hidden: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Return rows of a kind, and their scales if it has any."""
    if kind in ("uint8", "int16"):
        return torch.randint(1, 256, (num_rows, hidden), generator=generator).to(_DTYPES[kind]), None
    values = torch.randn(num_rows, hidden, generator=generator)
    values += values.sign() * 2.0**-6
    if not kind.startswith("fp8"):
        return values.to(_DTYPES[kind]), None
    num_scales = -(-hidden // 128)
    scales = torch.rand(num_rows, num_scales, generator=generator) + 0.5
    if kind == "fp8 column-major scales":
        scales = scales.T.contiguous().T
    if kind == "fp8 packed scales":
        scales = torch.randint(1, 2**31 - 1, (num_rows, -(-num_scales // 4)), generator=generator).int()
    return values.to(torch.float8_e4m3fn), scales


@st.composite
def exchanges(draw, *, kinds: tuple[str, ...] = FLOAT_KINDS + OTHER_KINDS, max_ranks: int = 8) -> Exchange:
    """Draw an exchange; it shrinks to one rank, no token and the plainest of everything."""
    num_ranks = draw(st.integers(1, max_ranks))
    has_topk = draw(st.sampled_from([True, True, True, False]))
    return Exchange(
        num_tokens=tuple(draw(st.lists(st.integers(0, 24), min_size=num_ranks, max_size=num_ranks))),
        hidden=draw(st.sampled_from([1, 7, 16, 64, 128, 200, 513, 2880])),
        num_topk=draw(st.integers(1, 12)),
        num_experts=draw(st.integers(1, 40)),
        routing=draw(st.sampled_from(ROUTINGS)),
        kind=draw(st.sampled_from(kinds)),
        sum_kind=draw(st.sampled_from(FLOAT_KINDS)),
        topk_idx_dtype=draw(st.sampled_from([torch.int64, torch.int32])),
        has_topk=has_topk,
        expert_alignment=draw(st.sampled_from([1, 2, 16, 128])),
        num_spare_tokens=draw(st.sampled_from([None, None, 0, 5])) if has_topk else None,
        num_biases=draw(st.integers(0, 2)),
        num_sms=draw(st.sampled_from([20, 2, 3, 1, 24, 64])),
        seed=draw(st.integers(0, 2**16)),
    )
