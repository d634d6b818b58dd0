"""Config, its tables and its size hints have the values of DeepEP V1; profiles have those of the documentation."""

import json
from types import MappingProxyType

import pytest

from deep_ep import Buffer, Config
from deep_ep.config import PROFILES, ClusterProfile, combine_config, dispatch_config, topk_idx_t
from deep_ep.errors import ConfigError
from deep_ep.gpu_layout import StagingLayout
from deep_ep.layout import CombineLayout, DispatchLayout

HIDDEN_BYTES = 7168 * 2
DISPATCH_ROWS = MappingProxyType(
    {
        2: (24, 256, 6, 128),
        4: (6, 256, 6, 128),
        8: (6, 256, 6, 128),
        16: (36, 288, 20, 128),
        24: (32, 288, 8, 128),
        32: (32, 288, 8, 128),
        48: (32, 288, 8, 128),
        64: (32, 288, 8, 128),
        96: (20, 480, 12, 128),
        128: (20, 560, 12, 128),
        144: (32, 720, 12, 128),
        160: (28, 720, 12, 128),
    }
)
COMBINE_ROWS = MappingProxyType(
    {
        2: (10, 256, 6, 128),
        4: (9, 256, 6, 128),
        8: (4, 256, 6, 128),
        16: (4, 288, 12, 128),
        24: (1, 288, 8, 128),
        32: (1, 288, 8, 128),
        48: (1, 288, 8, 128),
        64: (1, 288, 8, 128),
        96: (1, 480, 8, 128),
        128: (1, 560, 8, 128),
        144: (2, 720, 8, 128),
        160: (2, 720, 8, 128),
    }
)


@pytest.fixture
def restore_num_sms():
    before = Buffer.num_sms
    yield
    Buffer.num_sms = before


@pytest.mark.parametrize(
    ("num_sms", "num_recv_tokens", "num_ranks", "expected"),
    [(24, 256, 8, 402_851_712), (20, 256, 8, 335_709_824), (24, 288, 16, 453_208_704)],
)
def test_nvl_hint(num_sms, num_recv_tokens, num_ranks, expected):
    assert Config(num_sms, 6, num_recv_tokens).get_nvl_buffer_size_hint(HIDDEN_BYTES, num_ranks) == expected


@pytest.mark.parametrize(("num_ranks", "expected"), [(2, 0), (8, 0), (16, 100_814_208), (32, 201_628_416)])
def test_rdma_hint(num_ranks, expected):
    config = Config(24, 6, 256, 16, 128)
    assert config.get_rdma_buffer_size_hint(HIDDEN_BYTES, num_ranks) == expected


def test_hints_take_keywords_and_any_number_of_ranks():
    config = Config()
    for num_ranks in range(1, 65):
        nvl_bytes = config.get_nvl_buffer_size_hint(hidden_bytes=HIDDEN_BYTES, num_ranks=num_ranks)
        rdma_bytes = config.get_rdma_buffer_size_hint(hidden_bytes=HIDDEN_BYTES, num_ranks=num_ranks)
        assert type(nvl_bytes) is type(rdma_bytes) is int
        assert nvl_bytes % 128 == rdma_bytes % 128 == 0
        assert (rdma_bytes > 0) == (num_ranks > 8)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "expected"), [(128, 288, 2_146_961_792), (128, 256, 1_908_410_496)]
)
def test_low_latency_hint(num_tokens, num_experts, expected):
    assert Buffer.get_low_latency_rdma_size_hint(num_tokens, 7168, 8, num_experts) == expected
    assert expected == Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=num_tokens, hidden=7168, num_ranks=16, num_experts=num_experts
    )


@pytest.mark.parametrize("num_ranks", DISPATCH_ROWS)
def test_recommended_configs_are_those_of_v1(num_ranks):
    assert dispatch_config(num_ranks, 20) == Config(20, *DISPATCH_ROWS[num_ranks])
    assert combine_config(num_ranks, 20) == Config(20, *COMBINE_ROWS[num_ranks])
    assert Buffer.get_dispatch_config(num_ranks) == Config(Buffer.num_sms, *DISPATCH_ROWS[num_ranks])
    assert Buffer.get_combine_config(num_ranks) == Config(Buffer.num_sms, *COMBINE_ROWS[num_ranks])


def test_every_number_of_ranks_has_a_config():
    for num_ranks in range(1, 200):
        assert isinstance(Buffer.get_dispatch_config(num_ranks), Config)
        assert isinstance(Buffer.get_combine_config(num_ranks), Config)
    with pytest.raises(ConfigError, match="num_ranks must be at least 1, got 0"):
        Buffer.get_dispatch_config(0)


@pytest.mark.usefixtures("restore_num_sms")
def test_set_num_sms_holds_for_later_configs():
    assert Buffer.num_sms == 20
    Buffer.set_num_sms(24)
    assert Buffer.num_sms == 24
    assert Buffer.get_dispatch_config(8).num_sms == Buffer.get_combine_config(8).num_sms == 24


@pytest.mark.usefixtures("restore_num_sms")
@pytest.mark.parametrize("num_sms", [7, -2])
def test_set_num_sms_refuses(num_sms):
    with pytest.raises(ConfigError, match=f"num_sms .*even.* got {num_sms}"):
        Buffer.set_num_sms(num_sms)
    assert Buffer.num_sms == 20


def test_config_from_json():
    text = json.dumps(
        {
            "num_sms": 96,
            "num_max_nvl_chunked_send_tokens": 16,
            "num_max_nvl_chunked_recv_tokens": 512,
            "num_max_rdma_chunked_send_tokens": 16,
            "num_max_rdma_chunked_recv_tokens": 512,
        }
    )
    assert Config(**json.loads(text)) == Config(96, 16, 512, 16, 512)


def test_defaults_and_rounding():
    assert Config() == Config(20, 6, 256, 6, 256)
    # A multiple of the tokens sent at once.
    assert Config().num_max_rdma_chunked_recv_tokens == 258
    assert [Config(num_sms=n).num_channels for n in (0, 1, 2, 3, 20)] == [1, 1, 1, 1, 10]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_sms": -1}, "num_sms must be at least 0, got -1"),
        ({"num_max_nvl_chunked_send_tokens": 0}, "num_max_nvl_chunked_send_tokens .* got 0 and 256"),
        ({"num_max_nvl_chunked_recv_tokens": 6}, "num_max_nvl_chunked_recv_tokens .* got 6 and 6"),
        ({"num_max_rdma_chunked_send_tokens": 0}, "num_max_rdma_chunked_send_tokens .* got 0 and 256"),
        ({"num_max_rdma_chunked_recv_tokens": 10}, "at most half .* got 6 and 10"),
    ],
)
def test_config_refuses(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Config(**arguments)


@pytest.mark.parametrize(("hidden_bytes", "num_ranks"), [(-1, 8), (7168, 0)])
def test_hints_refuse(hidden_bytes, num_ranks):
    for hint in (Config().get_nvl_buffer_size_hint, Config().get_rdma_buffer_size_hint):
        with pytest.raises(ConfigError, match="at least"):
            hint(hidden_bytes, num_ranks)


def test_expert_ids_are_64_bits_wide():
    assert topk_idx_t.itemsize == 8


def test_profiles_are_chosen_by_the_group_or_by_name():
    names = {1: "small", 8: "small", 9: "medium", 64: "medium", 65: "large", 4096: "large"}
    assert {num_ranks: ClusterProfile.of(None, num_ranks).name for num_ranks in names} == names
    large = ClusterProfile.of("large", 2)
    assert large is PROFILES["large"]
    assert ClusterProfile.of(large, 2) is large
    with pytest.raises(ConfigError, match=r"profile must be one of small, medium, large .* got 'huge'"):
        ClusterProfile.of("huge", 2)


def test_profiles_have_the_documented_values():
    def column(name):
        return [getattr(PROFILES[size], name) for size in ("small", "medium", "large")]

    assert column("num_max_nvl_peers") == [8, 12, 16]
    assert column("num_qps_per_rank") == [2, 3, 4]
    assert column("num_rdma_bytes") == [256 << 20, 512 << 20, 1 << 30]
    for name in ("num_chunks", "timeout_s"):
        assert column(name) == sorted(set(column(name)))


def test_few_network_cards_are_warned_of():
    small = PROFILES["small"]
    assert small.warning_of(16, 8) is None
    assert small.warning_of(5, 0) is None  # nobody could count them
    assert small.warning_of(17, 8).startswith("17 network peers share 8 network cards")


@pytest.mark.parametrize(("num_tokens", "hidden_bytes", "num_ranks"), [(0, 8, 1), (7, 30, 2), (129, 14336, 8)])
@pytest.mark.parametrize(("num_topk", "num_scales"), [(0, 0), (7, 3), (8, 56)])
def test_buffer_size_hint_is_twice_an_exchange(num_tokens, hidden_bytes, num_ranks, num_topk, num_scales):
    hint = Buffer.get_buffer_size_hint(num_tokens, hidden_bytes, num_ranks, num_topk, num_scales)
    num_rows = num_tokens * num_ranks
    assert hint == (2 * (num_rows * (hidden_bytes + 4 * num_scales + 12 * num_topk + 4) + 640), 0)
    # What the engines need for one exchange, by their own layouts.
    needs_bytes = [
        StagingLayout(hidden_bytes, num_topk, 8, num_scales).num_bytes(num_rows),
        DispatchLayout(
            num_rows=num_rows,
            row_bytes=hidden_bytes,
            scale_row_bytes=4 * num_scales,
            num_topk=num_topk,
            topk_idx_bytes=8,
            has_src_idx=True,
        ).num_bytes,
        CombineLayout(num_rows=num_rows, row_bytes=hidden_bytes, num_topk=num_topk, num_bias_rows=0).num_bytes,
    ]
    assert max(needs_bytes) <= hint.num_nvl_bytes // 2


def test_buffer_size_hint_counts_hosts_by_the_profile():
    row_bytes = 100 + 4
    for num_ranks, profile, num_other_hosts in (
        (8, None, 0),
        (12, None, 0),
        (13, None, 1),
        (13, "small", 1),
        (128, None, 7),
    ):
        hint = Buffer.get_buffer_size_hint(10, 100, num_ranks, profile=profile)
        assert hint.num_rdma_bytes == 2 * num_other_hosts * (10 * row_bytes + 640)
    with pytest.raises(ConfigError, match="num_topk must be at least 0, got -1"):
        Buffer.get_buffer_size_hint(10, 100, 8, num_topk=-1)
