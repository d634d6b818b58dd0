"""What ranks do while a fault is injected: random exchanges, every element compared, the fault, then the report."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import time

import torch

from deep_ep import Buffer
from deep_ep.errors import CapacityError, DeepEPError, PeerTimeoutError
from deep_ep.memory import cpu
from deep_ep.reference import local_experts
from rank_pool import Rank

NUM_CALLS = 5


class Inputs:
    """What every rank brings to one random exchange; all ranks draw the same."""

    def __init__(self, num_ranks: int, seed: int) -> None:
        numbers = random.Random(seed)
        self.num_experts = numbers.randint(num_ranks, 4 * num_ranks)
        self.hidden = numbers.choice([32, 200, 515])
        self.num_max_tokens = 12
        num_topk = numbers.randint(1, min(4, self.num_experts))
        generator = torch.Generator().manual_seed(seed)
        self.x, self.topk_idx, self.weights = [], [], []
        for _ in range(num_ranks):
            num_tokens = numbers.randint(0, self.num_max_tokens)
            self.x.append(torch.randn(num_tokens, self.hidden, generator=generator).bfloat16())
            order = torch.rand(num_tokens, self.num_experts, generator=generator).argsort(1)
            self.topk_idx.append(order[:, :num_topk].contiguous())
            self.weights.append(torch.rand(num_tokens, num_topk, generator=generator))
        self.experts = local_experts(self.num_experts, num_ranks)


def exchange(rank: Rank, buffer: Buffer, seed: int) -> None:
    """Make one exchange, normal or low-latency, and compare every element."""
    inputs = Inputs(rank.num_ranks, seed)
    x, idx, weights = inputs.x[rank.rank], inputs.topk_idx[rank.rank], inputs.weights[rank.rank]
    is_named = [torch.isin(i, torch.tensor(inputs.experts[rank.rank])) for i in inputs.topk_idx]
    if seed % 2:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, inputs.num_experts)
        recv_x, _, _, _, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=idx,
            topk_weights=weights,
        )
        assert torch.equal(recv_x, torch.cat([rows[n.any(1)] for rows, n in zip(inputs.x, is_named, strict=True)]))
        combined, _, _ = buffer.combine(recv_x, handle)
        expected = x.float() * in_rank.sum(1, keepdim=True)
    else:
        received, count, handle, _, _ = buffer.low_latency_dispatch(
            x, idx, inputs.num_max_tokens, inputs.num_experts, use_fp8=False
        )
        for local, expert in enumerate(inputs.experts[rank.rank]):
            rows = torch.cat([r[(i == expert).any(1)] for r, i in zip(inputs.x, inputs.topk_idx, strict=True)])
            assert torch.equal(received[local, : int(count[local])], rows)
        combined, _, _ = buffer.low_latency_combine(received, idx, weights, handle)
        expected = x.float() * weights.sum(1, keepdim=True)
    torch.testing.assert_close(combined.float(), expected, rtol=2e-2, atol=2e-2)


def report(error: DeepEPError, began_s: float) -> dict[str, object]:
    missing = error.missing_ranks if isinstance(error, PeerTimeoutError) else None
    return {
        "error": type(error).__name__,
        "missing": missing,
        "after_s": time.monotonic() - began_s,
        "message": str(error),
    }


def meet_a_fault(rank: Rank, kind: str, victim: int, seed: int, limit_s: float) -> dict[str, object]:
    """Exchange, have the fault if this rank is the victim, and tell what comes of it. Every rank then destroys."""
    is_victim = rank.rank == victim
    rank.meet("here")
    if kind in ("out of memory", "shared memory full", "file size limit"):
        return fail_to_allocate(rank, kind, is_victim, seed)
    buffer = Buffer(rank.group, low_latency_mode=True, timeout_s=limit_s)
    numbers = random.Random(seed)
    fault_at = numbers.randrange(NUM_CALLS)
    is_inside = numbers.random() < 0.5
    answer: dict[str, object] = {}
    began_s = time.monotonic()
    try:
        for call in range(NUM_CALLS):
            if is_victim and call == fault_at and kind in FAULTS:
                if is_inside:
                    strike_inside(buffer, kind, limit_s, numbers)
                else:
                    FAULTS[kind](limit_s, numbers)
            began_s = time.monotonic()
            exchange(rank, buffer, NUM_CALLS * seed + call)
    except DeepEPError as error:
        answer = report(error, began_s)
    end(buffer, kind, is_victim, numbers)
    return answer


def strike_inside(buffer: Buffer, kind: str, limit_s: float, numbers: random.Random) -> None:
    """Have the fault in the middle of the next call: when rows are written, and not yet announced."""
    control = buffer.runtime.exchanger.control
    announce_rows = control.announce_rows

    def strike(number: int, *, has_failed: bool) -> None:
        control.announce_rows = announce_rows
        FAULTS[kind](limit_s, numbers)
        announce_rows(number, has_failed=has_failed)

    control.announce_rows = strike


def kill(limit_s: float, numbers: random.Random) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(limit_s: float, numbers: random.Random) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def throw(limit_s: float, numbers: random.Random) -> None:
    raise RuntimeError("a fault of the program")


def leave(limit_s: float, numbers: random.Random) -> None:
    os._exit(7)


def come_late(limit_s: float, numbers: random.Random) -> None:
    time.sleep(numbers.random() * limit_s / 3)


def come_too_late(limit_s: float, numbers: random.Random) -> None:
    time.sleep(2 * limit_s)


def fork(limit_s: float, numbers: random.Random) -> None:
    """Fork, as data loaders do, with a child that ends at some time, and that the buffer must not mind."""
    pid = os.fork()
    if pid == 0:
        time.sleep(numbers.random() * 0.2)
        os._exit(0)
    if numbers.random() < 0.5:
        os.waitpid(pid, 0)


FAULTS = {
    "kill": kill,
    "stop": stop,
    "exception": throw,
    "exit": leave,
    "late": come_late,
    "too late": come_too_late,
    "fork": fork,
}


def end(buffer: Buffer, kind: str, is_victim: bool, numbers: random.Random) -> None:
    if kind == "no destroy":
        return
    if kind == "destroy at different times" and is_victim:
        time.sleep(numbers.random())
    buffer.destroy()
    if kind == "exit apart" and is_victim:
        time.sleep(2.0)


def fail_to_allocate(rank: Rank, kind: str, is_victim: bool, seed: int) -> dict[str, object]:
    """Have one rank not get its memory; then try again, with enough of it."""
    posix_fallocate = os.posix_fallocate
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_victim and kind == "file size limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    elif is_victim:
        number = errno.ENOMEM if kind == "out of memory" else errno.ENOSPC

        def fail(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        cpu.os.posix_fallocate = fail
    began_s = time.monotonic()
    try:
        Buffer(rank.group, num_nvl_bytes=8 << 20, low_latency_mode=True)
    except CapacityError as error:
        answer = report(error, began_s)
    else:
        answer = {}
    os.posix_fallocate = posix_fallocate
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    rank.meet("memory is back")
    buffer = Buffer(rank.group, low_latency_mode=True)
    for call in range(2):
        exchange(rank, buffer, NUM_CALLS * seed + call)
    buffer.destroy()
    return answer


def use_in_opposite_order(rank: Rank, kind: str, victim: int, seed: int, limit_s: float) -> dict[str, object]:
    """Use two buffers, the victim in the opposite order of the others."""
    buffers = [Buffer(rank.group, low_latency_mode=True, timeout_s=limit_s) for _ in range(2)]
    exchange(rank, buffers[0], NUM_CALLS * seed)
    answer: dict[str, object] = {}
    for buffer in buffers if rank.rank != victim else buffers[::-1]:
        began_s = time.monotonic()
        try:
            exchange(rank, buffer, NUM_CALLS * seed + 1)
        except DeepEPError as error:
            answer = report(error, began_s)
            break
    for buffer in buffers:
        buffer.destroy()
    return answer
