"""What `buffer.latency` tells of real calls, and of a peer that is late."""

import logging
import threading

import torch

from deep_ep import Buffer


def _exchange(buffer, num_tokens=16, hidden=64, num_experts=8):
    x = torch.randn(num_tokens, hidden, dtype=torch.bfloat16)
    topk_idx = torch.randint(num_experts, (num_tokens, 2))
    weights = torch.rand(num_tokens, 2)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    recv_x, _, _, _, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=weights,
    )
    buffer.dispatch(x, handle=handle)
    buffer.combine(recv_x, handle)


def _low_latency_exchange(buffer, has_hook):
    x, topk_idx = torch.randn(4, 128, dtype=torch.bfloat16), torch.randint(8, (4, 2))
    recv_x, _, handle, _, hook = buffer.low_latency_dispatch(
        x, topk_idx, 8, 8, use_fp8=False, return_recv_hook=has_hook
    )
    if has_hook:
        hook()
    _, _, hook = buffer.low_latency_combine(recv_x, topk_idx, torch.rand(4, 2), handle, return_recv_hook=has_hook)
    if has_hook:
        hook()


def _count_calls(rank):
    buffer = Buffer(rank.group, low_latency_mode=True, device="cpu")
    for _ in range(3):
        _exchange(buffer)
    _low_latency_exchange(buffer, has_hook=False)
    _low_latency_exchange(buffer, has_hook=True)
    stats = buffer.latency.snapshot()
    buffer.destroy()
    assert all(0 < s.median_us <= s.p99_us and s.first_us > 0 for s in stats.values())
    return {operation: s.num_calls for operation, s in stats.items()}


def test_every_kind_of_call_is_counted(pool):
    expected = dict.fromkeys(("get_dispatch_layout", "dispatch", "cached_dispatch", "combine"), 3)
    expected |= {f"low_latency_{call}{half}": 1 for call in ("dispatch", "combine") for half in ("", "_send", "_recv")}
    assert pool.run(2, _count_calls) == [expected] * 2


class _Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def _be_late(rank):
    buffer = Buffer(rank.group, device="cpu")
    _exchange(buffer)
    handler = _Messages()
    logging.getLogger("deep_ep").addHandler(handler)
    buffer.latency.set_threshold_us("dispatch", 500_000)
    rank.meet("before the late call")
    if rank.rank == 2:
        threading.Event().wait(1.0)  # what is tested is that somebody is late
    _exchange(buffer)
    logging.getLogger("deep_ep").removeHandler(handler)
    waits_us = buffer.latency.peer_waits_us()
    buffer.destroy()
    return [message.split("; ")[1] for message in handler.messages if "dispatch took" in message], waits_us


def test_a_late_peer_is_named(pool):
    results = pool.run(3, _be_late)
    for messages, waits_us in results[:2]:
        assert messages == ["it waited longest for rank 2"]
        assert max(waits_us) == waits_us[2] > 500_000
    assert results[2][0] == []
