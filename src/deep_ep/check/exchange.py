"""One verified exchange on every path that this machine has."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from deep_ep.bench import oracle
from deep_ep.bench.case import Case
from deep_ep.bench.ranks import Rank, run_ranks
from deep_ep.errors import DeepEPError

CASES = (
    Case(num_tokens=64, hidden=1024, num_topk=4, num_experts=16, routing="zipf"),
    Case(num_tokens=64, hidden=1024, num_topk=4, num_experts=16, dtype="fp8"),
    Case(mode="low-latency", num_tokens=32, hidden=1024, num_topk=4, num_experts=16, dtype="fp8"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePath:
    """A way that rows can take.

    Attributes:
        name: In words.
        device: "cpu" or "cuda".
        variables: Gives the environment variables that make a rank take it.
    """

    name: str
    device: str
    variables: Callable[[int], dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an exchange went.

    Attributes:
        path: The path that was to be taken.
        num_ranks: How many ranks there were.
        num_claims: How many claims held.
        seconds: How long all of it took, the start of the ranks included.
        topology: How each rank reached each other.
        error: What spoke against a claim, None if nothing did.
    """

    path: str
    num_ranks: int
    num_claims: int
    seconds: float
    topology: str
    error: str | None


def _set(variables: dict[str, str], _: int) -> dict[str, str]:
    return variables


def _two_hosts(rank: int) -> dict[str, str]:
    """Let ranks of this machine play two hosts, in turn."""
    return {"DEEP_EP_NODE_ID": f"host-{rank % 2}"}


def paths(num_gpus: int, num_ranks: int) -> list[ExchangePath]:
    """Return the paths between ranks of this machine."""
    found = [ExchangePath(name="CPU ranks, shared host memory", device="cpu", variables=partial(_set, {}))]
    if num_ranks > 1:
        name = "CPU ranks, network, as if on two hosts"
        found.append(ExchangePath(name=name, device="cpu", variables=_two_hosts))
    if num_gpus:
        direct = "GPU peer access" if num_gpus > 1 else "one GPU"
        for name, switch in ((f"GPU ranks, {direct}", "1"), ("GPU ranks, pinned host memory", "0")):
            variables = partial(_set, {"DEEP_EP_USE_P2P": switch})
            found.append(ExchangePath(name=name, device="cuda", variables=variables))
    return found


def try_path(path: ExchangePath, num_ranks: int, timeout_s: float) -> Outcome:
    """Bring ranks up and verify an exchange of every kind between them."""
    began, num_claims, table, error = time.monotonic(), 0, "", None
    try:
        results: list[Any] = run_ranks(
            num_ranks, exchange, device=path.device, variables=path.variables, timeout_s=timeout_s
        )
        num_claims, table = results[0]
    except DeepEPError as raised:
        error = str(raised)
    seconds = time.monotonic() - began
    return Outcome(
        path=path.name, num_ranks=num_ranks, num_claims=num_claims, seconds=seconds, topology=table, error=error
    )


def exchange(rank: Rank) -> tuple[int, str]:
    """Verify every case on this rank; return how many claims held, and how each rank reaches each other."""
    buffer = oracle.make_buffer(rank, *CASES)
    try:
        return sum(oracle.require_verified(rank, buffer, case) for case in CASES), buffer.topology.table()
    finally:
        buffer.destroy()
