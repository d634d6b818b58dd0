"""What programs import, in which order they pass arguments, and what an import costs."""

import inspect
import json
import os
import subprocess
import sys

import pytest

import deep_ep
import deep_ep_cpp
from deep_ep import Buffer, buffer


def test_the_package_exports_what_is_documented():
    documented = {"Buffer", "Config", "EventHandle", "EventOverlap", "__version__", "topk_idx_t", "utils"}
    documented |= {"dispatch", "combine", "low_latency_dispatch", "low_latency_combine", "nn", "ops"}
    assert set(deep_ep.__all__) == documented
    assert all(hasattr(deep_ep, name) for name in documented)
    assert isinstance(deep_ep.__version__, str)


@pytest.mark.parametrize("name", ["HybridEPBuffer", "ElasticBuffer", "EPHandle"])
def test_a_class_that_does_not_exist_is_absent(name):
    # Programs switch to it when they find it.
    assert not hasattr(deep_ep, name)


def test_utils_and_the_native_module_export_the_same_classes():
    assert deep_ep.utils.EventHandle is deep_ep_cpp.EventHandle is deep_ep.EventHandle
    assert deep_ep.utils.EventOverlap is deep_ep.EventOverlap
    assert deep_ep_cpp.Config is deep_ep.Config
    assert buffer.Buffer is deep_ep.Buffer


V1_PARAMETERS = {
    "__init__": "self group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank "
    "allow_nvlink_for_low_latency_mode allow_mnnvl explicitly_destroy enable_shrink comm",
    "destroy": "self",
    "is_sm90_compiled": "",
    "set_num_sms": "new_num_sms",
    "capture": "",
    "get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank hidden num_ranks num_experts",
    "get_comm_stream": "self",
    "get_local_buffer_tensor": "self dtype size offset use_rdma_buffer",
    "get_dispatch_config": "num_ranks",
    "get_combine_config": "num_ranks",
    "get_dispatch_layout": "self topk_idx num_experts previous_event async_finish allocate_on_comm_stream",
    "dispatch": "self x handle num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank num_tokens_per_expert "
    "topk_idx topk_weights expert_alignment num_worst_tokens config previous_event async_finish "
    "allocate_on_comm_stream",
    "combine": "self x handle topk_weights bias config previous_event async_finish allocate_on_comm_stream",
}


@pytest.mark.parametrize("name", V1_PARAMETERS)
def test_positional_arguments_are_in_the_order_of_v1(name):
    parameters = inspect.signature(getattr(Buffer, name)).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == V1_PARAMETERS[name].split()
    # What we add can only be given by name; a program that passes what we do not have gets a TypeError.
    assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("__init__", (0, 0, False, 24, True, False, False, False, None)),
        ("get_local_buffer_tensor", (None, 0, False)),
        ("get_dispatch_layout", (None, False, False)),
        ("dispatch", (None, None, None, None, None, None, None, 1, 0, None, None, False, False)),
        ("combine", (None, None, None, None, False, False)),
    ],
)
def test_defaults_are_those_of_v1(name, defaults):
    parameters = inspect.signature(getattr(Buffer, name)).parameters.values()
    given = [p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty]
    assert tuple(given) == defaults


@pytest.mark.parametrize("keyword", ["use_fabric", "num_nvl_peers", "is_intranode", "anything"])
def test_an_unknown_keyword_is_a_type_error(keyword):
    with pytest.raises(TypeError, match=keyword):
        Buffer(None, **{keyword: True})


IMPORT_AND_TELL = """
import json, os, sys, threading, time
import torch, torch.distributed
modules, environment, descriptors = set(sys.modules), dict(os.environ), os.listdir("/proc/self/fd")
start = time.process_time()  # of this process alone: others may be busy
from deep_ep import *  # loads all that is exported
took_s = time.process_time() - start
import deep_ep_cpp
print(json.dumps({
    "took_s": took_s,
    "new_modules": sorted({name.partition(".")[0] for name in set(sys.modules) - modules}),
    "has_new_environment": dict(os.environ) != environment,
    "num_new_descriptors": len(os.listdir("/proc/self/fd")) - len(descriptors),
    "num_threads": threading.active_count(),
    "has_cuda_context": torch.cuda.is_initialized(),
    "has_oracle": "deep_ep.reference" in sys.modules,
    "has_process_group": torch.distributed.is_initialized(),
}))
"""


@pytest.fixture(scope="module")
def fresh_import():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DEEP_EP_")}
    # A setting that makes no sense is no matter of the import.
    environment["DEEP_EP_TIMEOUT_S"] = "nonsense"
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_AND_TELL],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return json.loads(process.stdout)


def test_import_takes_less_than_a_second_beyond_torch(fresh_import):
    assert fresh_import["took_s"] < 1.0


def test_import_has_no_side_effect(fresh_import):
    assert not fresh_import["has_new_environment"]
    assert fresh_import["num_new_descriptors"] == 0
    assert fresh_import["num_threads"] == 1
    assert not fresh_import["has_cuda_context"]
    assert not fresh_import["has_process_group"]


def test_import_needs_no_triton_and_leaves_the_oracle_out(fresh_import):
    assert "triton" not in fresh_import["new_modules"]
    assert "numpy" not in fresh_import["new_modules"]
    assert not fresh_import["has_oracle"]


def test_import_registers_no_operator_before_one_is_named():
    program = "import torch, deep_ep; assert not hasattr(torch.ops.deep_ep, 'dispatch'); deep_ep.dispatch; "
    program += "assert torch.ops.deep_ep.dispatch.default in deep_ep.ops.COMMUNICATION_OPS; deep_ep.nn.ExpertParallel"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=120)
