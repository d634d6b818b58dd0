"""What a profile decides of a buffer, and that a buffer of the hinted size never needs more."""

import logging

import torch

from deep_ep import Buffer
from rank_pool import environment


def _read_time_limits(rank):
    limits_s = []
    for text, arguments in (
        ("", {}),
        ("", {"profile": "large"}),
        ("7", {"profile": "large"}),
        ("7", {"profile": "large", "timeout_s": 3.0}),
    ):
        with environment(DEEP_EP_TIMEOUT_S=text):
            buffer = Buffer(rank.group, device="cpu", **arguments)
        limits_s.append(buffer.runtime.exchanger.control.timeout_s)
        name = buffer.profile.name
        buffer.destroy()
        assert name == arguments.get("profile", "small")
    return limits_s


def test_time_limit_is_of_the_argument_the_environment_or_the_profile(pool):
    assert pool.run(2, _read_time_limits) == [[100.0, 300.0, 7.0, 3.0]] * 2


class _Growth(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        if "bytes of shared memory" in record.getMessage():
            self.messages.append(record.getMessage())


def _send_all_to_one(rank, num_nvl_bytes):
    num_tokens, hidden, num_topk, num_experts = 33, 96, 3, 8
    buffer = Buffer(rank.group, num_nvl_bytes=num_nvl_bytes, device="cpu")
    growth = _Growth()
    logger = logging.getLogger("deep_ep")
    level = logger.level
    logger.addHandler(growth)
    logger.setLevel(logging.INFO)
    for _ in range(4):
        x = torch.randn(num_tokens, hidden, dtype=torch.bfloat16)
        topk_idx = torch.zeros(num_tokens, num_topk, dtype=torch.int64)  # all of them to rank 0
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
        recv_x, _, _, _, handle, _ = buffer.dispatch(
            (x, torch.randn(num_tokens, 2)),
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=torch.rand(num_tokens, num_topk),
        )
        buffer.combine(recv_x[0], handle)  # receives while the dispatched rows live
        assert recv_x[0].size(0) == (num_tokens * rank.num_ranks if rank.rank == 0 else 0)
        del recv_x
    logger.setLevel(level)
    logger.removeHandler(growth)
    buffer.destroy()
    return len(growth.messages)


def test_a_buffer_of_the_hinted_size_never_grows(pool):
    hint = Buffer.get_buffer_size_hint(33, 96 * 2, 4, num_topk=3, num_scales=2)
    assert pool.run(4, _send_all_to_one, hint.num_nvl_bytes) == [0] * 4
    assert pool.run(4, _send_all_to_one, hint.num_nvl_bytes // 2 - 640)[0] > 0
