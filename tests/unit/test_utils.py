"""The modules that DeepEP's own tests import from `deep_ep.utils`: names, and results on small numbers."""

import importlib
import inspect
import os
import socket
import subprocess
import sys

import pytest
import torch

from deep_ep import low_latency_reference, reference
from deep_ep.errors import ConfigError, UnsupportedError
from deep_ep.utils import envs, gate, math, refs, testing

SIGNATURES = {
    "envs.init_dist": "local_rank num_local_ranks seed",
    "envs.init_seed": "seed",
    "envs.get_local_seed": "",
    "envs.get_global_seed": "",
    "envs.dist_print": "s once_in_node",
    "envs.get_physical_domain_size": "group",
    "envs.get_logical_domain_size": "group allow_hybrid_mode",
    "envs.check_nvlink_connections": "group",
    "envs.check_torch_deterministic": "",
    "envs.get_nvlink_gbs": "factor",
    "envs.check_fast_rdma_atomic_support": "nic_name",
    "envs.get_rdma_gbs": "nic_name",
    "math.calc_diff": "x y",
    "math.safe_div": "a b",
    "math.ceil_div": "x y",
    "math.align": "x y",
    "math.per_token_cast_to_fp8": "x",
    "math.per_token_cast_back": "x_fp8 x_scales",
    "math.inplace_unique": "x num_slots",
    "math.create_grouped_scores": "scores group_idx num_groups",
    "math.hash_tensor": "t",
    "math.hash_tensors": "tensors",
    "math.count_bytes": "tensors",
    "testing.bench": "fn num_warmups num_tests post_fn flush_l2",
    "testing.bench_kineto": "fn kernel_names num_tests suppress_kineto_output trace_path flush_l2 "
    "barrier_comm_profiling num_kernels_per_period barrier",
    "refs.dispatch": "x topk_idx topk_weights num_max_tokens_per_rank num_experts",
    "refs.combine": "y topk_idx num_scaleout_ranks num_scaleup_ranks num_experts bias reduce_in_rank reduce_in_scaleup",
    "refs.generate_pre_combine_data": "src_token_global_idx num_max_tokens_per_rank num_topk hidden",
    "refs.ordered_accumulate": "y",
    "gate.get_unbalanced_scores": "num_tokens num_experts num_ranks num_topk ratio precise",
    "event.EventOverlap": "event extra_tensors",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_functions_take_what_deepep_tests_pass(name):
    module, _, function = name.partition(".")
    parameters = inspect.signature(getattr(importlib.import_module(f"deep_ep.utils.{module}"), function)).parameters
    assert list(parameters) == SIGNATURES[name].split()


@pytest.mark.parametrize("hidden", [1, 128, 200, 640])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_fp8_rows_come_back_within_half_a_step(num_tokens, hidden):
    x = torch.randn(num_tokens, hidden).bfloat16() * torch.logspace(-3, 3, hidden).bfloat16()
    data, scales = math.per_token_cast_to_fp8(x)
    assert (data.dtype, data.shape) == (torch.float8_e4m3fn, x.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, (num_tokens, -(-hidden // 128)))
    back = math.per_token_cast_back(data, scales)
    assert (back.dtype, back.shape) == (torch.bfloat16, x.shape)
    # 4 significant bits: half a step is 1/16 of a normal value, and 2 ** -10 scales below those.
    limit = x.float().abs() / 16 + scales.repeat_interleave(128, 1)[:, :hidden] * 2**-10 + x.float().abs() * 2**-8
    assert ((back.float() - x.float()).abs() <= limit).all()
    zeros, zero_scales = math.per_token_cast_to_fp8(torch.zeros(num_tokens, hidden))
    assert (zero_scales > 0).all()
    assert not zeros.float().any()


@pytest.mark.parametrize("hidden", [128, 200, 640])
def test_packed_exponents_are_read_back(hidden):
    x = torch.randn(6, hidden).bfloat16()
    cast = low_latency_reference.cast_to_fp8(x, round_scale=True, use_ue8m0=True)
    expected = low_latency_reference.dequantize(cast).bfloat16()
    assert torch.equal(math.per_token_cast_back(cast.x, cast.scales), expected)


def test_calc_diff_tells_equal_from_unlike():
    x = torch.randn(40, 30)
    assert math.calc_diff(x, x) == pytest.approx(0, abs=1e-15)
    assert math.calc_diff(torch.zeros(3), torch.zeros(3)) == 0
    # By hand: (1 + 0) and (1 + 1), so 1 - 2 * 2 / (1 + 4).
    assert math.calc_diff(torch.tensor([0.0]), torch.tensor([1.0])) == pytest.approx(0.2)


def test_small_arithmetic():
    assert [math.ceil_div(7, 3), math.ceil_div(6, 3), math.align(7, 3), math.align(0, 128)] == [3, 2, 9, 0]
    assert [math.safe_div(1, 2), math.safe_div(0, 0)] == [0.5, 0.0]
    with pytest.raises(ZeroDivisionError):
        math.safe_div(1, 0)


def test_unique_values_descend_and_end_in_minus_one():
    x = torch.tensor([[2, 5, 2, -1], [-1, -1, -1, -1], [0, 1, 2, 3]])
    math.inplace_unique(x, 8)
    assert x.tolist() == [[5, 2, -1, -1], [-1, -1, -1, -1], [3, 2, 1, 0]]


def test_grouped_scores_keep_the_chosen_groups():
    scores = math.create_grouped_scores(torch.arange(1.0, 7.0).view(1, 6), torch.tensor([[2, 0]]), 3)
    assert scores.tolist() == [[1, 2, 0, 0, 5, 6]]


def test_hashes_and_bytes_see_every_tensor():
    x, y = torch.randn(4, 6), torch.randn(3, 5).bfloat16()
    assert math.hash_tensor(torch.tensor([1, 2, 4], dtype=torch.int32)) == 7
    assert math.hash_tensors(x, None, (y, [x])) == math.hash_tensor(y)
    assert math.hash_tensor(x.t()) == math.hash_tensor(x)
    assert math.hash_tensor(torch.tensor([True, True, False])) == 2
    assert math.count_bytes(x, None, (y, [x])) == 96 + 30 + 96


@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize(("num_ranks", "num_topk", "ratio"), [(4, 2, 1.5), (4, 6, 1.3), (8, 2, 8.0), (2, 3, 1.0)])
def test_scores_load_the_first_rank_as_asked(num_ranks, num_topk, ratio, precise):
    torch.manual_seed(3)
    num_tokens, num_experts = 4000, 16
    scores = gate.get_unbalanced_scores(num_tokens, num_experts, num_ranks, num_topk, ratio, precise)
    assert scores.shape == (num_tokens, num_experts)
    assert (scores > 0).all()
    at_home = int((scores.topk(num_topk).indices < num_experts // num_ranks).sum())
    wanted = ratio * num_tokens * num_topk / num_ranks
    assert at_home == pytest.approx(wanted, rel=0, abs=0.5 if precise else 0.05 * wanted)


def test_a_ratio_that_no_routing_has_is_refused():
    with pytest.raises(ConfigError, match="ratio must be from 1 to 4"):
        gate.get_unbalanced_scores(8, 16, 4, 2, 4.5)
    with pytest.raises(ConfigError, match="ratio must be from 1"):
        gate.get_unbalanced_scores(8, 16, 4, 2, 0.5)


def test_bench_leaves_out_the_first_time():
    calls = []
    mean_s, least_s, most_s = testing.bench(lambda: calls.append(1), 2, 5, post_fn=lambda: calls.append(2))
    assert 0 <= least_s <= mean_s <= most_s
    assert calls.count(1) == 7
    assert calls.count(2) == 5


def test_bench_kineto_finds_operators_by_part_of_their_name():
    x = torch.randn(64, 64)

    def work():
        torch.mm(x, x)
        torch.mm(x, x)

    one, none = testing.bench_kineto(work, ("aten::mm", "no such kernel"), num_tests=3)
    assert one > 0
    assert none == 0
    assert len(testing.bench_kineto(work, "aten::mm", num_tests=3, num_kernels_per_period=2)) == 2
    with pytest.raises(ConfigError, match="part of one kernel's name"):
        testing.bench_kineto(lambda: (x + x, x.sum()), "aten::", num_tests=1)


def test_a_machine_without_links_has_no_bandwidth(monkeypatch):
    monkeypatch.setenv("PATH", "")
    for function in (envs.get_nvlink_gbs, envs.get_rdma_gbs, envs.check_fast_rdma_atomic_support):
        function.cache_clear()
        assert function() == 0
        function.cache_clear()


def test_links_are_read_from_what_the_tools_print(monkeypatch):
    printed = {
        "nvidia-smi": "GPU 0: NVIDIA X (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\nGPU 1: NVIDIA X\n"
        "\t Link 0: 26.562 GB/s\n",
        "ibstat": "CA 'mlx5_0'\n\tCA type: MT4129\n\tPort 1:\n\t\tRate: 400\nCA 'mlx5_1'\n\tCA type: MT4131\n"
        "\tPort 1:\n\t\tRate: 200\n",
    }
    monkeypatch.setattr(envs, "_output_of", lambda program, *_: printed[program])
    functions = (envs.get_nvlink_gbs, envs.get_rdma_gbs, envs.check_fast_rdma_atomic_support)
    for function in functions:
        function.cache_clear()
    assert envs.get_nvlink_gbs() == pytest.approx(2 * 26.562 * 0.9)
    assert [envs.get_rdma_gbs("mlx5_0"), envs.get_rdma_gbs("mlx5_1"), envs.get_rdma_gbs("mlx5_2")] == [50, 25, 0]
    assert not envs.check_fast_rdma_atomic_support("mlx5_0")
    assert envs.check_fast_rdma_atomic_support("mlx5_1")
    for function in functions:
        function.cache_clear()


def test_filling_of_new_tensors_is_refused(monkeypatch):
    envs.check_torch_deterministic()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(UnsupportedError, match="fills uninitialised memory"):
        envs.check_torch_deterministic()


JOIN = """
import sys, torch
from deep_ep.utils import envs
rank, num_ranks, group = envs.init_dist(int(sys.argv[1]), 2, seed=40)
envs.dist_print(f"all {rank} of {num_ranks}")
envs.dist_print(f"once {rank}", once_in_node=True)
assert (envs.get_local_seed(), envs.get_global_seed()) == (40 + rank, 40)
assert envs.get_physical_domain_size(group) == (1, 2) == envs.get_logical_domain_size(group)
assert envs.get_logical_domain_size(group, allow_hybrid_mode=False) == (1, 2)
envs.check_nvlink_connections(group)
torch.distributed.destroy_process_group()
"""


def test_ranks_join_as_in_deepep_tests():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen([sys.executable, "-c", JOIN, str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert outputs == [["all 0 of 2", "once 0"], ["all 1 of 2"]]


NUM_RANKS, NUM_MAX, NUM_EXPERTS, NUM_TOPK, HIDDEN = 8, 5, 16, 3, 40


def tokens_of(rank):
    generator = torch.Generator().manual_seed(rank)
    num_tokens = rank % (NUM_MAX + 1)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    idx = torch.stack(
        [torch.randperm(NUM_EXPERTS, generator=generator)[:NUM_TOPK] for _ in range(num_tokens)]
        or [torch.empty(NUM_TOPK)]
    )
    idx = idx[:num_tokens].long()
    idx[torch.rand(idx.shape, generator=generator) < 0.2] = -1
    return x, idx, torch.rand(num_tokens, NUM_TOPK, generator=generator)


def run_refs(rank):
    """Dispatch; make what the experts make of the rows; and combine what comes of it."""
    x, idx, weights = tokens_of(rank.rank)
    pair = (x.view(torch.uint8), torch.arange(len(x))[:, None].float() + 100 * rank.rank)
    received = refs.dispatch(pair, idx, weights, NUM_MAX, NUM_EXPERTS)
    y = refs.generate_pre_combine_data(NUM_MAX * rank.rank + torch.arange(len(x)), NUM_MAX, NUM_TOPK, HIDDEN)
    made = refs.generate_pre_combine_data(received[3], NUM_MAX, NUM_TOPK, HIDDEN)
    made[received[1] == -1] = 0
    return received, refs.combine(y, idx, 1, NUM_RANKS, NUM_EXPERTS), refs.ordered_accumulate(made), len(x)


def test_the_references_over_collectives_agree_with_the_specification(pool):
    results = pool.run(NUM_RANKS, run_refs)
    tokens = [tokens_of(rank) for rank in range(NUM_RANKS)]
    layouts = [reference.get_dispatch_layout(idx, NUM_EXPERTS, NUM_RANKS) for _, idx, _ in tokens]
    expected = reference.dispatch(
        [x for x, _, _ in tokens],
        layouts,
        topk_idx_RTK=[idx for _, idx, _ in tokens],
        topk_weights_RTK=[weights for _, _, weights in tokens],
        num_sms=2,
    )
    for rank, ((rows, scales), idx, weights, src_idx, counts) in enumerate(result[0] for result in results):
        assert torch.equal(rows, expected[rank].x.view(torch.uint8))
        assert torch.equal(scales[:, 0], (src_idx // NUM_MAX * 100 + src_idx % NUM_MAX).float())
        assert torch.equal(idx, expected[rank].topk_idx)
        assert torch.equal(weights, expected[rank].topk_weights)
        assert counts == expected[rank].handle.rank_prefix_matrix[:, rank].diff(prepend=torch.tensor([0])).tolist()
    combined = reference.combine([made.float() for _, _, made, _ in results], [e.handle for e in expected])
    # Ranks add in ascending order there and by the place of their last slot here: the last bit may differ.
    for (_, sums, _, _), want in zip(results, combined, strict=True):
        torch.testing.assert_close(sums.float(), want.x, rtol=2**-7, atol=2**-8)


def test_stages_of_a_sum_round_where_they_should():
    # bfloat16 has 1 + 2 ** -7 and 1 + 2 ** -6, and takes the even one (the second) of what lies in the middle.
    y = torch.tensor([1, 2**-8, 2**-8, 2**-8]).bfloat16().view(1, 4, 1)
    idx = torch.tensor([[0, 2, 4, 6]])  # ranks 0, 1, 2, 3; hosts 0, 0, 1, 1
    at_once = refs.combine(y, idx, 2, 2, 8, None, False, False)
    by_host = refs.combine(y, idx, 2, 2, 8, None, True, True)
    assert at_once.item() == 1 + 2**-6  # of 1 + 3 * 2 ** -8
    assert by_host.item() == 1 + 2**-7  # 1 and 2 ** -7
    biased = refs.combine(y, idx.masked_fill(idx > 0, -1), 2, 2, 8, (torch.ones(1, 1), torch.ones(1, 1)), True, False)
    assert biased.item() == 3
