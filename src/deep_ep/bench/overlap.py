"""How much of an exchange hides behind computing.

Three times are taken: of the exchange alone, of a matrix product alone, which is made about as long, and of both. The
part of the shorter one that does not show in the third is the overlap: 100 % if both take no longer than the longer
one, 0 % if they take as long as one after the other.

In low-latency mode the product is computed between the call and its hook. In normal mode on GPUs it is computed while a
call with `async_finish` is under way. In normal mode on CPU ranks nothing overlaps: a call is done when it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deep_ep.bench.case import Case
from deep_ep.bench.clock import time_calls
from deep_ep.bench.oracle import LowLatencyCalls, NormalCalls
from deep_ep.bench.ranks import Rank
from deep_ep.buffer import Buffer

_COLUMNS = 1024


def measure_overlap(rank: Rank, buffer: Buffer, case: Case, num_iterations: int) -> dict[str, float]:
    """Return the three times in us, and the overlap from 0 to 1.

    Example:
        An exchange of 100 us and a product of 110 us that together take 120 us overlap by 0.9.
    """
    start = _start_low_latency(rank, buffer, case) if case.mode != "normal" else _start_normal(rank, buffer, case)

    def exchange() -> None:
        start()()

    exchange_us = time_calls(rank, {"": exchange}, num_iterations)[""]
    product = _product(rank, exchange_us)

    def both() -> None:
        finish = start()
        product()
        finish()

    times = time_calls(rank, {"exchange_us": exchange, "compute_us": product, "both_us": both}, num_iterations)
    alone = times["exchange_us"] + times["compute_us"]
    shorter = min(times["exchange_us"], times["compute_us"])
    return times | {"overlap": min(max((alone - times["both_us"]) / shorter, 0.0), 1.0)}


def _start_low_latency(rank: Rank, buffer: Buffer, case: Case) -> Callable[[], Callable[[], None]]:
    calls = LowLatencyCalls(buffer, case, rank)

    def start() -> Callable[[], None]:
        hook: Callable[[], None] = calls.dispatch(return_recv_hook=True)[-1]
        return hook

    return start


def _start_normal(rank: Rank, buffer: Buffer, case: Case) -> Callable[[], Callable[[], None]]:
    calls = NormalCalls(buffer, case, rank)
    handle = calls.dispatch()[4]

    def start() -> Callable[[], None]:
        event: Any = calls.cached(handle, async_finish=True)[-1]
        if event.event is None:
            return lambda: None
        wait: Callable[[], None] = event.current_stream_wait
        return wait

    return start


def _product(rank: Rank, target_us: float) -> Callable[[], Any]:
    """Return a matrix product that takes about so long on every rank."""
    a, b = (torch.randn(_COLUMNS, _COLUMNS, device=rank.device, dtype=torch.float32) for _ in range(2))
    num_rows = 32
    us = time_calls(rank, {"": lambda: a[:num_rows] @ b}, 8)[""]
    repeats = max(round(target_us / us), 1)

    def compute() -> Any:
        for _ in range(repeats):
            result = a[:num_rows] @ b
        return result

    return compute
