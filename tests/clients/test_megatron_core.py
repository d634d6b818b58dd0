"""Megatron-core from PyPI trains its MoE layer through deep_ep, and gets what it gets without.

The layer runs with its flex dispatcher, which calls `deep_ep`, and with its all-gather dispatcher, which does not. They
add the same numbers in another order, so results are compared relative to the largest of each tensor. Seen were 1e-7 in
float32 and 6e-3 in bfloat16.
"""

from importlib.metadata import PackageNotFoundError, version

import megatron_layer
import pytest
import torch

from rank_pool import FreshRanks

pytestmark = pytest.mark.timeout(600)

CASES = {
    "float32": {"dtype": torch.float32, "capacity": None},
    "float32 with capacity": {"dtype": torch.float32, "capacity": 0.75},
    "bfloat16": {"dtype": torch.bfloat16, "capacity": None},
    "bfloat16 with capacity": {"dtype": torch.bfloat16, "capacity": 0.75},
}
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module", params=[2, 4], ids=["R2", "R4"])
def results(request):
    """What `megatron_layer.run_layers` returned on each rank."""
    try:
        version("megatron-core")
    except PackageNotFoundError:
        pytest.fail("megatron-core is not installed: run `pip install -e '.[clients]'`")
    # Without Dynamo: its compiled functions would need a C++ compiler, and minutes.
    env = {"TORCHDYNAMO_DISABLE": "1"}
    with FreshRanks(request.param, megatron_layer.run_layers, CASES, env=env) as ranks:
        return ranks.results(timeout_s=240.0)


@pytest.mark.parametrize("case", CASES)
def test_the_layer_gives_what_it_gives_over_all_gather(results, case):
    tolerance = TOLERANCES[CASES[case]["dtype"]]
    for rank, result in enumerate(results):
        expected = result[f"{case} over all-gather"]["tensors"]
        actual = result[f"{case} over deep_ep"]["tensors"]
        assert set(actual) == set(expected)
        for name, tensor in expected.items():
            largest = tensor.float().abs().max()
            assert largest > 0, name
            error = (actual[name].float() - tensor.float()).abs().max() / largest
            assert error <= tolerance, f"rank {rank}, {name}: relative error {error:.2e}"


@pytest.mark.parametrize("case", CASES)
def test_all_its_tokens_travel_through_deep_ep(results, case):
    step = ["get_dispatch_layout", "dispatch", "combine", "cached dispatch", "combine"]
    for result in results:
        assert [name for name, _ in result[f"{case} over deep_ep"]["calls"]] == step * megatron_layer.NUM_STEPS
        assert result[f"{case} over all-gather"]["calls"] == []


@pytest.mark.parametrize("case", CASES)
def test_a_capacity_drops_tokens_and_no_capacity_drops_none(results, case):
    has_capacity = CASES[case]["capacity"] is not None
    for result in results:
        num_dropped = [count for name, count in result[f"{case} over deep_ep"]["calls"] if name == "dispatch"]
        assert all((count > 0) == has_capacity for count in num_dropped), num_dropped
