"""What programs do with a Buffer and what it gives them, beyond passing it tensors."""

import inspect
import weakref

import pytest
import torch
from steps import assert_received, assert_same_bits, dispatch, expect_dispatch, plain, rebuild

from deep_ep import Buffer, Config, EventHandle, EventOverlap
from deep_ep.errors import ConfigError
from strategies import Exchange

EXCHANGE = Exchange(num_tokens=(9, 14), hidden=96, num_topk=3)


def look_at_buffer(rank):
    buffer = Buffer(rank.group, 1 << 20, 0, num_qps_per_rank=2.5)
    assert isinstance(buffer, Buffer)
    assert inspect.isclass(Buffer)
    assert buffer.group is rank.group
    assert (buffer.rank, buffer.group_size) == (rank.rank, rank.num_ranks)
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (1 << 20, 0)
    assert (buffer.low_latency_mode, buffer.explicitly_destroy, buffer.enable_shrink) == (False, False, False)
    assert buffer.num_sms == Buffer.num_sms
    assert buffer.runtime is not None
    assert weakref.WeakValueDictionary({"buffer": buffer})["buffer"] is buffer
    assert {buffer: 1}[buffer] == 1
    assert buffer.is_sm90_compiled() in (True, False)
    assert buffer.get_comm_stream() == buffer.get_comm_stream()
    assert isinstance(buffer.capture(), EventOverlap)
    num_sms = Buffer.num_sms
    buffer.set_num_sms(num_sms + 2)
    assert Buffer.num_sms == num_sms + 2
    buffer.set_num_sms(num_sms)


def test_a_buffer_has_the_attributes_that_programs_read(pool):
    pool.run(2, look_at_buffer)


def look_at_memory(rank):
    buffer = Buffer(rank.group, num_nvl_bytes=4096)
    memory = buffer.get_local_buffer_tensor(torch.uint8)
    assert (memory.dim(), memory.numel()) == (1, 4096)
    memory.copy_(torch.arange(4096).to(torch.uint8))
    # The offset is in bytes; all views are on the same memory.
    assert_same_bits(buffer.get_local_buffer_tensor(torch.uint8, torch.Size([2, 3]), 10), memory[10:16].view(2, 3))
    assert_same_bits(buffer.get_local_buffer_tensor(torch.int32, torch.Size([2]), 8), memory[8:16].view(torch.int32))
    assert buffer.get_local_buffer_tensor(torch.bfloat16).numel() == 2048
    assert buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).numel() == 0
    for arguments in [
        {"dtype": torch.int32, "offset": 2},
        {"dtype": torch.uint8, "offset": 4097},
        {"dtype": torch.uint8, "offset": -1},
        {"dtype": torch.uint8, "size": torch.Size([4097])},
        {"dtype": torch.uint8, "size": torch.Size([2]), "use_rdma_buffer": True},
    ]:
        with pytest.raises(ConfigError, match="must be"):
            buffer.get_local_buffer_tensor(**arguments)


def test_local_memory_can_be_viewed(pool):
    pool.run(2, look_at_memory)


def pass_positionals(rank):
    """Dispatch with eight positional arguments, and again with the handle and every other argument None."""
    buffer, inputs = rank.buffer(), EXCHANGE.inputs(rank.rank)
    per_rank, per_rdma_rank, per_expert, in_rank, layout_event = buffer.get_dispatch_layout(
        inputs.topk_idx, EXCHANGE.num_experts, None, False, False
    )
    results = buffer.dispatch(
        inputs.x,
        None,
        per_rank,
        per_rdma_rank,
        in_rank,
        per_expert,
        inputs.topk_idx,
        inputs.topk_weights,
        previous_event=layout_event,
        config=Config(num_sms=EXCHANGE.num_sms),
    )
    again = buffer.dispatch(
        x=inputs.x,
        handle=list(rebuild(results[4])),
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        previous_event=EventHandle(),
    )
    assert torch.equal(again[0], results[0])
    assert isinstance(results[4], tuple)
    assert all(isinstance(item, torch.Tensor) for item in results[4])
    assert all(type(count) is int for count in results[3])
    return plain(results)


def test_the_ways_in_which_programs_pass_arguments(pool):
    results = pool.run(2, pass_positionals)
    for rank, expected in enumerate(expect_dispatch(EXCHANGE)):
        assert_received(rank, results[rank], expected)


def handle_results(rank):
    """Do to results what programs do: require gradients, write in place, free early; then go on."""
    buffer, inputs = rank.buffer(), EXCHANGE.inputs(rank.rank)
    exchange = Exchange(**{**vars(EXCHANGE), "kind": "fp8 row-major scales"})
    (recv_x, recv_scales), topk_idx, weights, _, handle, _ = dispatch(buffer, exchange, exchange.inputs(rank.rank))
    kept = rebuild(handle)
    weights.requires_grad_()
    topk_idx.fill_(-1)
    for tensor in (recv_x, recv_scales):
        tensor.set_(torch.empty(0, dtype=tensor.dtype))
    for _ in range(20):
        result = dispatch(buffer, EXCHANGE, inputs)
        result[0].requires_grad_()
        del result
    assert all(torch.equal(item, before) for item, before in zip(handle, kept, strict=True))
    return plain(dispatch(buffer, EXCHANGE, inputs))


def test_results_are_the_programs_own(pool):
    results = pool.run(2, handle_results)
    for rank, expected in enumerate(expect_dispatch(EXCHANGE)):
        assert_received(rank, results[rank], expected)


def use_autograd_inputs(rank):
    """Pass tensors that require gradients: results are leaves without."""
    buffer, inputs = rank.buffer(), EXCHANGE.inputs(rank.rank)
    leaf = inputs.x.clone().requires_grad_()
    results = dispatch(buffer, EXCHANGE, inputs._replace(x=leaf * 1.0))
    combined_x, _, _ = buffer.combine(results[0].clone().requires_grad_() * 1.0, results[4])
    assert not combined_x.requires_grad
    assert combined_x.is_leaf
    return plain(results)


def test_inputs_may_require_gradients(pool):
    results = pool.run(2, use_autograd_inputs)
    for rank, expected in enumerate(expect_dispatch(EXCHANGE)):
        assert_received(rank, results[rank], expected)


def run_in_inference_mode(rank):
    with torch.inference_mode():
        return plain(dispatch(rank.buffer(), EXCHANGE, EXCHANGE.inputs(rank.rank)))


def mix_inference_mode(rank):
    run_in_inference_mode(rank)
    results = dispatch(rank.buffer(), EXCHANGE, EXCHANGE.inputs(rank.rank))
    buffer_grad = (results[0].float() * torch.ones(96, requires_grad=True)).sum()
    buffer_grad.backward()
    return run_in_inference_mode(rank)


def test_inference_mode_and_training_take_turns(pool):
    results = pool.run(2, mix_inference_mode)
    for rank, expected in enumerate(expect_dispatch(EXCHANGE)):
        assert_received(rank, results[rank], expected)


def change_inputs_after_the_call(rank):
    """Overwrite everything that was passed, as soon as the call has returned."""
    buffer, inputs = rank.buffer(), EXCHANGE.inputs(rank.rank)
    results = plain(dispatch(buffer, EXCHANGE, inputs))
    for tensor in (inputs.x, inputs.topk_idx, inputs.topk_weights):
        tensor.fill_(7)
    return results


def test_inputs_may_change_after_the_call(pool):
    results = pool.run(2, change_inputs_after_the_call)
    for rank, expected in enumerate(expect_dispatch(EXCHANGE)):
        assert_received(rank, results[rank], expected)


def default_dtype_and_device(rank):
    """DeepEP's own tests set these."""
    inputs = EXCHANGE.inputs(rank.rank)
    torch.set_default_dtype(torch.bfloat16)
    try:
        x, _, weights, _, handle, _ = dispatch(rank.buffer(), EXCHANGE, inputs)
        combined_x, combined_weights, _ = rank.buffer().combine(x.float(), handle, topk_weights=weights)
    finally:
        torch.set_default_dtype(torch.float32)
    return x, weights.dtype, combined_x.dtype, combined_weights.dtype


def test_the_default_dtype_does_not_matter(pool):
    for (x, *dtypes), expected in zip(pool.run(2, default_dtype_and_device), expect_dispatch(EXCHANGE), strict=True):
        assert_same_bits(x, expected.x)
        assert dtypes == [torch.float32] * 3
