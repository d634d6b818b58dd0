"""What a profile decides of a buffer, and that a buffer of the hinted size never needs more."""

import logging

import torch

from deep_ep import Buffer
from deep_ep.topology import count_network_cards
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


class _Messages(logging.Handler):
    def __init__(self, words="bytes of shared memory"):
        super().__init__()
        self.words, self.messages = words, []

    def emit(self, record):
        if self.words in record.getMessage():
            self.messages.append(record.getMessage())


def _send_all_to_one(rank, num_nvl_bytes):
    num_tokens, hidden, num_topk, num_experts = 33, 96, 3, 8
    buffer = Buffer(rank.group, num_nvl_bytes=num_nvl_bytes, device="cpu")
    growth = _Messages()
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


def _connect_hosts(rank, num_cards):
    """Make buffers of ranks that each are a host; return what they keep for messages, and what is warned of."""
    import deep_ep.buffer

    count, deep_ep.buffer.count_network_cards = deep_ep.buffer.count_network_cards, lambda: num_cards
    messages = _Messages("network cards")
    logging.getLogger("deep_ep").addHandler(messages)
    kept = []
    for variable, arguments in (
        ("", {}),
        ("", {"profile": "medium"}),
        ("3000000", {}),
        ("3000000", {"num_rdma_bytes": 1 << 20}),
    ):
        with environment(DEEP_EP_NODE_ID=f"host-{rank.rank}", DEEP_EP_RDMA_BUFFER_SIZE=variable):
            buffer = Buffer(rank.group, device="cpu", **arguments)
        kept.append(buffer.runtime.staging.num_bytes)
        num_chunks = buffer.runtime.tuning.num_chunks
        assert num_chunks == buffer.profile.num_chunks
        buffer.destroy()
    deep_ep.buffer.count_network_cards = count
    logging.getLogger("deep_ep").removeHandler(messages)
    return [size >> 20 for size in kept], len(messages.messages)


def test_between_hosts_a_profile_decides_buffers_chunks_and_a_warning(pool):
    assert pool.run(3, _connect_hosts, 1) == [([256, 512, 2, 1], 0)] * 3
    # Three network peers are more than two for one card.
    assert pool.run(4, _connect_hosts, 1) == [([256, 512, 2, 1], 4)] * 4


def test_network_cards_are_counted(tmp_path):
    assert count_network_cards(tmp_path) == 0
    for path in ("net/lo", "net/eth0/device", "net/eth1/device"):
        (tmp_path / path).mkdir(parents=True)
    assert count_network_cards(tmp_path) == 2
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert count_network_cards(tmp_path) == 1
