"""Warming a buffer before its first call: what is done, who waits for it, and where its time goes."""

import os
import threading
import time

import pytest
import torch

from deep_ep import Buffer, kernel_cache
from deep_ep.errors import ConfigError, MismatchError
from deep_ep.phases import PHASES, PhaseClock, phase
from deep_ep.shapes import ExchangeShape
from rank_pool import FreshRanks, PerRank

NORMAL = ExchangeShape(hidden=256, num_topk=3, num_experts=8, num_max_tokens_per_rank=24)
NORMAL_FP8 = ExchangeShape(hidden=256, num_topk=3, num_experts=8, num_max_tokens_per_rank=24, use_fp8=True)
LOW_LATENCY = ExchangeShape(
    hidden=256, num_topk=2, num_experts=6, num_max_tokens_per_rank=8, is_low_latency=True, use_fp8=True
)


def exchange(buffer, rank, seed=0):
    """Dispatch and combine; check that every token comes back as often as ranks had it."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randint(-64, 64, (24, 256), generator=generator).to(torch.bfloat16)
    topk_idx = torch.randint(8, (24, 3), generator=generator)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 8)
    recv_x, _, _, _, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=torch.rand(24, 3),
    )
    combined, _, _ = buffer.combine(recv_x, handle)
    assert torch.equal(combined.float(), x.float() * in_rank.sum(1, keepdim=True))


def count_growth(buffer):
    return buffer.runtime.exchanger.arena.num_bytes


def preinitialize(rank):
    buffer = Buffer(
        rank.group,
        device="cpu",
        low_latency_mode=True,
        preinitialize=True,
        shapes=[NORMAL, NORMAL_FP8.to_dict(), LOW_LATENCY],
    )
    before = count_growth(buffer)
    assert buffer.latency.snapshot() == {}, "exchanges that nobody asked for are not counted"
    exchange(buffer, rank.rank)
    buffer.low_latency_dispatch(torch.randn(5, 256, dtype=torch.bfloat16), torch.randint(6, (5, 2)), 8, 6)
    assert count_growth(buffer) == before, "memory was there"
    buffer.execute_dummy_operation()
    report = buffer.init_report
    buffer.destroy()
    return report


def test_preinitialized_buffers_are_ready_and_tell_where_time_went(pool):
    reports = pool.run(3, preinitialize)
    for report in reports:
        assert tuple(report.phases_ms) == PHASES
        assert sum(report.phases_ms.values()) == pytest.approx(report.wall_ms, rel=0.05)
        assert all(report.phases_ms[name] > 0 for name in ("allocate", "map_peers", "handshake", "dummy"))
        for name in ("allocate", "map_peers", "touch", "dummy"):
            assert report.max_phases_ms[name] == max(r.phases_ms[name] for r in reports)
        assert report.max_phases_ms["handshake"] >= report.phases_ms["handshake"]
        assert report.max_wall_ms >= report.wall_ms
        lines = str(report).splitlines()
        assert [line.split()[0] for line in lines] == ["phase", *PHASES, "wall"]


def warm_in_background(rank):
    buffer = Buffer(rank.group, device="cpu", low_latency_mode=True)
    assert sum(buffer.init_report.phases_ms.values()) == pytest.approx(buffer.init_report.wall_ms, rel=0.05)
    warmup = buffer.warmup_async(shapes=[NORMAL, LOW_LATENCY])
    report = warmup.wait(30)
    assert warmup.done()
    assert warmup.report is report
    assert sum(report.phases_ms.values()) == pytest.approx(report.wall_ms, rel=0.05)
    assert report.phases_ms["dummy"] > 0
    before = count_growth(buffer)
    exchange(buffer, rank.rank)
    assert count_growth(buffer) == before
    again = buffer.warmup_async()
    again.wait(30)
    exchange(buffer, rank.rank)
    buffer.destroy()


def test_a_buffer_is_warmed_in_the_background(pool):
    pool.run(2, warm_in_background)


def call_early(rank, seed):
    """Calls begin at once on some ranks and later on others; all of them are right, whoever was warmed."""
    buffer = Buffer(rank.group, device="cpu")
    warmup = buffer.warmup_async(shapes=[NORMAL])
    if (rank.rank + seed) % 2:
        warmup.wait(30) if seed % 3 == 0 else time.sleep(0.002 * seed)
    for step in range(3):
        exchange(buffer, rank.rank, step)
    warmup.wait(30)
    exchange(buffer, rank.rank, 3)
    buffer.destroy()


@pytest.mark.parametrize("seed", [1, 2, 4])
def test_calls_that_come_earlier_are_right(pool, seed):
    pool.run(3, call_early, seed)


def let_a_call_in(rank):
    """While the thread of rank 0 is held up in step 1, a call of both ranks goes through."""
    buffer = Buffer(rank.group, device="cpu")
    held, go_on = threading.Event(), threading.Event()

    def hold_up(shape):
        held.set()
        assert go_on.wait(30)

    if rank.rank == 0:
        buffer._prepare = hold_up
    warmup = buffer.warmup_async(shapes=[NORMAL])
    if rank.rank == 0:
        assert held.wait(30)
        warmup._has_call = True  # as if the call below had begun; rank 1 may call only after the votes
    go_on.set()
    exchange(buffer, rank.rank)
    report = warmup.wait(30)
    assert report.phases_ms["dummy"] == 0, "exchanges were left to the calls"
    buffer.destroy()


def test_a_call_does_not_wait_for_the_rest_of_the_warmup(pool):
    pool.run(2, let_a_call_in)


def refuse(rank):
    buffer = Buffer(rank.group, device="cpu")
    with pytest.raises(ConfigError, match="num_topk of a shape must be an integer of at least 1, got 0"):
        buffer.warmup_async(shapes=[{**NORMAL.to_dict(), "num_topk": 0}])
    with pytest.raises(ConfigError, match="hiden"):
        buffer.warmup_async(shapes=[{"hiden": 3}])
    with pytest.raises(ConfigError, match="low_latency_mode=True"):
        buffer.warmup_async(shapes=[LOW_LATENCY])
    warmup = buffer.warmup_async(shapes=[NORMAL if rank.rank == 0 else NORMAL_FP8])
    with pytest.raises(MismatchError, match="ranks 0 and 1 were told different ones"):
        warmup.wait(30)
    exchange(buffer, rank.rank)
    buffer.destroy()


def test_wrong_shapes_are_refused_and_the_buffer_stays_usable(pool):
    pool.run(2, refuse)


def destroy_while_warming(rank):
    buffer = Buffer(rank.group, device="cpu", low_latency_mode=True)
    buffer.warmup_async(shapes=[LOW_LATENCY])
    buffer.destroy()


def test_a_buffer_may_be_destroyed_while_it_is_warmed(pool):
    for _ in range(3):
        pool.run(2, destroy_while_warming)


def use_and_leave(rank):
    buffer = Buffer(rank.group, device="cpu")
    exchange(buffer, rank.rank)


def start_without_being_told(rank):
    buffer = Buffer(rank.group, device="cpu", preinitialize=True)
    before = count_growth(buffer)
    exchange(buffer, rank.rank)
    shapes = buffer._shapes
    return count_growth(buffer) == before > 0, [(shape.hidden, shape.num_max_tokens_per_rank) for shape in shapes]


def test_what_a_program_used_is_prepared_at_its_next_start(tmp_path):
    # Every rank has a cache of its own; what counts is what rank 0 has seen.
    env = PerRank([{"DEEP_EP_CACHE_DIR": str(tmp_path / str(rank))} for rank in range(2)])
    for function, expected in (
        (use_and_leave, [None, None]),
        (start_without_being_told, [(True, [(256, 32)])] * 2),
    ):
        with FreshRanks(2, function, env=env) as ranks:
            assert ranks.results() == expected


def test_the_cache_is_not_that_of_the_user():
    assert not os.path.samefile(kernel_cache._folder("seen"), os.path.expanduser("~"))
    assert str(kernel_cache._folder("seen")).startswith(os.environ["DEEP_EP_CACHE_DIR"])


def test_time_counts_for_the_innermost_phase(monkeypatch):
    now_ns = [0]
    monkeypatch.setattr("deep_ep.phases.perf_counter_ns", lambda: now_ns[0])
    clock = PhaseClock()
    with clock.running(), phase("load"):
        now_ns[0] += 5
        with phase("compile"):
            now_ns[0] += 70
        now_ns[0] += 1
    with phase("dummy"):
        now_ns[0] += 1000  # no clock is running
    assert clock.ns == dict.fromkeys(PHASES, 0) | {"load": 6, "compile": 70}
