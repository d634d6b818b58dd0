"""Exchanges to verify and to time: their shapes, their names, and the tensors that every rank brings.

A rank makes the tensors of all ranks from a seed, so each knows what it must get without being told.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deep_ep.errors import ConfigError

ROUTINGS = ("uniform", "zipf", "one-hot")


class Inputs(NamedTuple):
    """What one rank brings: `x` `[T, H]` bfloat16, `topk_idx` `[T, K]` int64, `topk_weights` `[T, K]` float32."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor

    def to(self, device: torch.device) -> Inputs:
        """Return the same on a device."""
        return Inputs(*(tensor.to(device) for tensor in self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One exchange, the same on every rank.

    Attributes:
        name: What it is called in tables.
        mode: "normal" or "low-latency".
        num_tokens: Of each rank.
        hidden: Size of a token's row.
        num_topk: Experts of a token.
        num_experts: On all ranks.
        dtype: Of the rows that a dispatch sends: "bf16", or "fp8" with a scale for every 128 channels.
        routing: "uniform": random experts. "zipf": the i-th most popular expert is chosen 1/i as often as the first.
            "one-hot": every token names expert 0 and no other. Else a file that `torch.save` wrote: `topk_idx`
            `[num_tokens, num_topk]` for all ranks alike, or `[num_ranks, num_tokens, num_topk]`.
        seed: Of what is random.
    """

    name: str = "custom"
    mode: str = "normal"
    num_tokens: int = 128
    hidden: int = 2048
    num_topk: int = 4
    num_experts: int = 8
    dtype: str = "bf16"
    routing: str = "uniform"
    seed: int = 1

    def __post_init__(self) -> None:
        for name, least in (("num_tokens", 0), ("hidden", 1), ("num_topk", 1), ("num_experts", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.num_topk > self.num_experts:
            raise ConfigError(
                f"num_topk must be at most num_experts, got num_topk={self.num_topk}, num_experts={self.num_experts}"
            )
        if self.routing not in ROUTINGS and not Path(self.routing).is_file():
            raise ConfigError(f"routing must be one of {', '.join(ROUTINGS)} or a file, got {self.routing!r}")

    @property
    def shape(self) -> str:
        """The shape in words."""
        words = f"{self.num_tokens} x {self.hidden}, top-{self.num_topk} of {self.num_experts}"
        return words + (f", {self.dtype}" if self.dtype != "bf16" else "")

    def inputs(self, rank: int, num_ranks: int) -> Inputs:
        """Return what a rank brings, on the CPU; the same each time."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + rank)
        x = torch.randn(self.num_tokens, self.hidden, generator=generator).bfloat16()
        topk_idx = self._route(rank, num_ranks, generator)
        topk_weights = torch.rand(topk_idx.shape, generator=generator) + 0.5
        return Inputs(x, topk_idx, topk_weights)

    def _route(self, rank: int, num_ranks: int, generator: torch.Generator) -> Tensor:
        if self.routing not in ROUTINGS:
            return _routing_of_file(self.routing, rank, num_ranks, self)
        if self.routing == "one-hot":
            topk_idx = torch.full((self.num_tokens, self.num_topk), -1)
            topk_idx[:, 0] = 0
            return topk_idx
        # The k largest of log p + Gumbel noise are k draws without replacement.
        noise = -torch.empty(self.num_tokens, self.num_experts).exponential_(generator=generator).log()
        if self.routing == "zipf":
            # The same experts are popular with all ranks.
            order = torch.randperm(self.num_experts, generator=torch.Generator().manual_seed(self.seed))
            noise -= (order + 1).float().log()
        return noise.topk(self.num_topk).indices


def load_routing(path: str) -> Tensor:
    """Return the expert ids of a file.

    Raises:
        ConfigError: If it holds no such tensor.
    """
    try:
        topk_idx = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise ConfigError(f"{path} could not be read as a file of torch.save: {error}") from None
    if not isinstance(topk_idx, Tensor) or topk_idx.dim() not in (2, 3) or topk_idx.is_floating_point():
        raise ConfigError(
            f"{path} must hold expert ids [num_tokens, num_topk] or [num_ranks, num_tokens, num_topk], "
            f"got {getattr(topk_idx, 'shape', type(topk_idx).__name__)}"
        )
    return topk_idx.long()


@lru_cache(maxsize=2)
def _load_once(path: str) -> Tensor:
    return load_routing(path)


def _routing_of_file(path: str, rank: int, num_ranks: int, case: Case) -> Tensor:
    topk_idx = _load_once(path)
    if topk_idx.dim() == 3 and topk_idx.size(0) != num_ranks:
        raise ConfigError(f"{path} has the routing of {topk_idx.size(0)} ranks, but there are {num_ranks}")
    mine = topk_idx[rank] if topk_idx.dim() == 3 else topk_idx
    if tuple(mine.shape) != (case.num_tokens, case.num_topk) or bool((mine >= case.num_experts).any()):
        raise ConfigError(
            f"{path} must hold ids below {case.num_experts} for {case.num_tokens} tokens with top-{case.num_topk}, "
            f"got shape {list(mine.shape)}"
        )
    return mine


def with_routing(case: Case, routing: str) -> Case:
    """Return the case with another routing; a file brings its own numbers of tokens and of slots."""
    if routing in ROUTINGS:
        return replace(case, routing=routing)
    if not Path(routing).is_file():
        raise ConfigError(f"routing must be one of {', '.join(ROUTINGS)} or a file, got {routing!r}")
    topk_idx = load_routing(routing)
    num_experts = max(case.num_experts, int(topk_idx.max()) + 1 if topk_idx.numel() else 1, topk_idx.size(-1))
    num_tokens, num_topk = topk_idx.shape[-2:]
    return replace(case, routing=routing, num_tokens=num_tokens, num_topk=num_topk, num_experts=num_experts)


def _low_latency(name: str, num_tokens: int, dtype: str = "fp8") -> Case:
    return Case(
        name=name, mode="low-latency", num_tokens=num_tokens, hidden=7168, num_topk=8, num_experts=256, dtype=dtype
    )


CASES = {
    case.name: case
    for case in (
        Case(name="tiny", num_tokens=16),
        Case(name="medium", num_tokens=256),
        Case(name="large", num_tokens=2048),
        Case(name="chat", mode="low-latency", num_tokens=32, dtype="bf16"),
        Case(name="train", num_tokens=4096, hidden=7168, num_topk=8, num_experts=256),
        Case(name="train-fp8", num_tokens=4096, hidden=7168, num_topk=8, num_experts=256, dtype="fp8"),
        Case(name="narrow", num_tokens=4096, hidden=2048, num_topk=8, num_experts=128),
        Case(name="mixtral", num_tokens=1024, hidden=4096, num_topk=2, num_experts=8),
        _low_latency("decode-1", 1),
        _low_latency("decode-8", 8),
        _low_latency("decode-32", 32),
        _low_latency("decode", 128),
    )
}
"""The named cases. x of `tiny` is 64 KB, of `medium` 1 MB, of `large` 8 MB."""

DEFAULT_CASES = {"cpu": ("tiny", "medium", "large", "chat"), "cuda": ("train", "train-fp8", "mixtral", "decode")}
"""What is timed if no case is named."""
