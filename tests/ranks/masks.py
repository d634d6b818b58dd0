"""What ranks do in test_masks.py, and what must come of it while some of them are masked."""

from __future__ import annotations

import os
import signal

import torch
from steps import dispatch as normal_dispatch
from test_low_latency_mode import Case, dispatch, plain_received
from test_low_latency_mode import expect as expect_unmasked

from deep_ep import Buffer
from deep_ep.errors import MaskedError, PeerTimeoutError
from deep_ep.reference import local_experts
from rank_pool import Rank
from strategies import Exchange

TIMEOUT_S = 4.0
NORMAL = Exchange(num_tokens=(9, 14, 6), hidden=96, num_topk=3, num_experts=6)


def case_of(seed: int, row_format: str = "bf16") -> Case:
    return Case((5, 3, 4), hidden=256, num_experts=6, row_format=row_format, routing="distinct", seed=seed)


def without(case: Case, masked: set[int]):
    """Return the inputs of all ranks as if masked ranks had no tokens and nobody named their experts."""
    inputs = []
    experts = local_experts(case.num_experts, case.num_ranks)
    for rank in range(case.num_ranks):
        x, idx, weights = case.inputs(rank)
        if rank in masked:
            x, idx, weights = x[:0], idx[:0], weights[:0]
        for gone in masked:
            idx = torch.where((idx >= experts[gone][0]) & (idx <= experts[gone][-1]), -1, idx)
        inputs.append((x, idx, weights))
    return inputs


def expect(case: Case, masked: set[int], masked_in_combine: set[int] | None = None):
    """Return what every rank receives, and every rank's sums."""
    inputs = without(case, masked)
    weights = [w for _, _, w in inputs]
    if masked_in_combine is not None:
        gone = [idx for _, idx, _ in without(case, masked_in_combine)]
        weights = [torch.where(idx == -1, 0.0, w) if len(idx) else w for idx, w in zip(gone, weights, strict=True)]
    return expect_unmasked(case, inputs, weights)


def check_received(case: Case, received, expected) -> None:
    x, scales, count, (src_info, layout_range) = received
    assert count.tolist() == expected.recv_count.tolist()
    assert torch.equal(layout_range, expected.layout_range)
    for local, num_rows in enumerate(count.tolist()):
        rows = (local, slice(num_rows))
        assert torch.equal(x[rows].view(torch.uint8), expected.x[rows].view(torch.uint8))
        assert torch.equal(src_info[rows], expected.src_info[rows])
        if scales is not None:
            assert torch.equal(scales[rows], expected.scales[rows])


def exchange(rank: Rank, buffer: Buffer, case: Case, masked: set[int], has_hooks: bool = False) -> None:
    """Dispatch and combine, and compare with what must come when so many ranks are masked."""
    expected, sums = expect(case, masked)
    x, idx, weights = case.inputs(rank.rank)
    recv_x, count, handle, _, hook = dispatch(buffer, case, x, idx, return_recv_hook=has_hooks)
    if hook is not None:
        hook()
    received = plain_received(recv_x, count, handle)
    check_received(case, received, expected[rank.rank])
    y = case.outputs(rank.rank, received[0].shape)
    combined, _, hook = buffer.low_latency_combine(y, idx, weights, handle, return_recv_hook=has_hooks)
    if hook is not None:
        hook()
    torch.testing.assert_close(combined.float(), sums[rank.rank].float(), rtol=1e-2, atol=1e-2)


def masked_of(buffer: Buffer) -> list[int]:
    status = torch.full((buffer.group_size,), -1, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


def make(rank: Rank) -> Buffer:
    return Buffer(rank.group, low_latency_mode=True, enable_shrink=True, timeout_s=TIMEOUT_S)


def mask_and_take_in(rank: Rank, row_format: str, has_hooks: bool) -> None:
    """Mask a rank that is well, go on without it, take it in, and mask another one."""
    buffer = Buffer(rank.group, low_latency_mode=True, enable_shrink=True)
    seed = 0
    for gone in (1, 0, 2):
        exchange(rank, buffer, case_of(seed := seed + 1, row_format), set(), has_hooks)
        if rank.rank != gone:
            buffer.low_latency_update_mask_buffer(gone, True)
            assert masked_of(buffer) == [int(r == gone) for r in range(3)]
            for _ in range(2):
                exchange(rank, buffer, case_of(seed := seed + 1, row_format), {gone}, has_hooks)
        else:
            seed += 2
        rank.meet(f"{row_format} {has_hooks}: without {gone}")
        buffer.low_latency_update_mask_buffer(gone)
        assert masked_of(buffer) == [0, 0, 0]
        exchange(rank, buffer, case_of(seed := seed + 1, row_format), set(), has_hooks)
    buffer.destroy()


def lose_a_rank(rank: Rank, gone: int, moment: str, row_format: str) -> list[int]:
    """Go on after a rank has been killed at some moment of the second exchange."""
    buffer = make(rank)
    exchange(rank, buffer, case_of(1, row_format), set())
    case, is_gone = case_of(2, row_format), rank.rank == gone
    x, idx, weights = case.inputs(rank.rank)
    if is_gone and moment == "before dispatch":
        os.kill(os.getpid(), signal.SIGKILL)
    control = buffer.runtime.exchanger.control
    announce_rows = control.announce_rows

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if is_gone and moment == "in dispatch":
        control.announce_rows = die
    recv_x, count, handle, _, _ = dispatch(buffer, case, x, idx)
    masked = {gone} if "dispatch" in moment else set()
    received = plain_received(recv_x, count, handle)
    expected, sums = expect(case, masked, {gone})
    check_received(case, received, expected[rank.rank])
    if is_gone and moment == "before combine":
        os.kill(os.getpid(), signal.SIGKILL)
    control.announce_rows = die if is_gone else announce_rows
    y = case.outputs(rank.rank, received[0].shape)
    combined, _, _ = buffer.low_latency_combine(y, idx, weights, handle)
    torch.testing.assert_close(combined.float(), sums[rank.rank].float(), rtol=1e-2, atol=1e-2)
    for seed in range(3, 6):
        exchange(rank, buffer, case_of(seed, row_format), {gone})
    masked_ranks = masked_of(buffer)
    buffer.destroy()
    return masked_ranks


def be_late(rank: Rank, late: int) -> str:
    """Mask a rank that stops for long, tell it when it wakes, and take it in again."""
    buffer = make(rank)
    exchange(rank, buffer, case_of(1), set())
    told = ""
    if rank.rank == late:
        rank.store.wait(["masked"])
        try:
            exchange(rank, buffer, case_of(2), set())
        except MaskedError as error:
            told = str(error)
    else:
        for seed in (2, 3, 4):
            exchange(rank, buffer, case_of(seed), {late})
        rank.store.set("masked", "")
    rank.meet("all are awake")
    buffer.low_latency_clean_mask_buffer()
    for seed in (5, 6):
        exchange(rank, buffer, case_of(seed), set())
    buffer.destroy()
    return told


def normal_without(rank: Rank, gone: int) -> list[int]:
    """Lose a rank in normal mode: be told, mask it, repeat the call and use an old handle too."""
    buffer = make(rank)
    inputs = NORMAL.inputs(rank.rank)
    first = normal_dispatch(buffer, NORMAL, inputs)
    handle = first[4]
    counts = (handle[0] - torch.nn.functional.pad(handle[0], (0, 0, 1, 0))[:-1])[:, rank.rank].tolist()
    if rank.rank == gone:
        os.kill(os.getpid(), signal.SIGKILL)
    missing = []
    for _ in range(2):  # until the program says that it knows, it is told each time
        try:
            normal_dispatch(buffer, NORMAL, inputs)
        except PeerTimeoutError as error:
            missing += error.missing_ranks
    buffer.mask(gone)
    recv_x, recv_idx, _, _, new_handle, _ = normal_dispatch(buffer, NORMAL, inputs)
    others = [r for r in range(3) if r != gone]
    x = [NORMAL.inputs(r).x for r in others]
    sent = [NORMAL.inputs(r).topk_idx for r in others]
    mine = [((idx // 2) == rank.rank).any(1) for idx in sent]
    assert torch.equal(recv_x, torch.cat([rows[named] for rows, named in zip(x, mine, strict=True)]))
    # Combine adds one copy for each rank that is left and was named.
    combined, _, _ = buffer.combine(recv_x, new_handle)
    idx = inputs.topk_idx
    copies = sum(((idx // 2) == r).any(1).float() for r in others)
    torch.testing.assert_close(combined.float(), inputs.x.float() * copies[:, None], rtol=2e-2, atol=2e-2)
    # With the old handle, the rows of the rank that is gone are zeros.
    again, _, _, _, _, _ = buffer.dispatch(inputs.x, handle=handle)
    begin = sum(counts[:gone])
    assert again[begin : begin + counts[gone]].abs().sum() == 0
    rest = torch.cat([again[:begin], again[begin + counts[gone] :]])
    assert torch.equal(rest, recv_x)
    combined, _, _ = buffer.combine(again, handle)
    torch.testing.assert_close(combined.float(), inputs.x.float() * copies[:, None], rtol=2e-2, atol=2e-2)
    buffer.destroy()
    assert recv_idx is not None
    return missing
