"""What real programs lean on without its being written anywhere; each test is named after the rule.

The rules are of Megatron, NeMo Automodel, vLLM, SGLang, LMDeploy, xtuner, prime-rl, TensorRT-LLM and rtp-llm, wherever
they concern the interface of V1. Those about attributes, positional arguments and results are in
`test_program_habits.py`, those about names and imports in `tests/unit/test_public_names.py`.
"""

import copy
import re
import threading
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
from steps import assert_received, dispatch, expect_dispatch, plain

import deep_ep
from deep_ep import Buffer, Config, EventHandle, EventOverlap
from rank_pool import FreshRanks
from strategies import Exchange

EXCHANGE = Exchange(num_tokens=(9, 14), hidden=96, num_topk=3)
NUM_MAX, NUM_EXPERTS, HIDDEN = 8, 6, 128


def test_the_distribution_is_found_as_deep_ep():
    # Automodel asks importlib.metadata for "deep_ep"; names of distributions count as equal up to - and _.
    declared = re.search(r'^name = "(.+)"$', (Path(__file__).parents[2] / "pyproject.toml").read_text(), re.MULTILINE)
    assert re.sub(r"[-_.]+", "-", declared.group(1)) == re.sub(r"[-_.]+", "-", "deep_ep")
    try:
        assert version("deep_ep") == deep_ep.__version__
    except PackageNotFoundError:  # a source tree that was never installed has only the declared name
        assert deep_ep.__version__ == "0.0.0"


def take_a_gloo_group(rank):
    assert dist.get_backend(rank.group) == "gloo"
    buffer = Buffer(
        group=rank.group, num_nvl_bytes=1 << 20, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=1
    )
    return plain(dispatch(buffer, EXCHANGE, EXCHANGE.inputs(rank.rank)))


def test_the_group_may_be_gloo(pool):
    for rank, (result, expected) in enumerate(
        zip(pool.run(2, take_a_gloo_group), expect_dispatch(EXCHANGE), strict=True)
    ):
        assert_received(rank, result, expected)


def size_a_buffer(rank):
    """As Megatron, prime-rl, xtuner and Automodel do it: the most that the hints of both configs ask for."""
    num_nvl_bytes = num_rdma_bytes = 0
    for config in (Buffer.get_dispatch_config(rank.num_ranks), Buffer.get_combine_config(rank.num_ranks)):
        num_nvl_bytes = max(num_nvl_bytes, config.get_nvl_buffer_size_hint(EXCHANGE.hidden * 2, rank.num_ranks))
        num_rdma_bytes = max(num_rdma_bytes, config.get_rdma_buffer_size_hint(EXCHANGE.hidden * 2, rank.num_ranks))
    assert type(num_nvl_bytes) is type(num_rdma_bytes) is int
    assert num_rdma_bytes == 0
    buffer = Buffer(rank.group, num_nvl_bytes, num_rdma_bytes)
    # Otherwise they make another buffer at every call.
    assert buffer.group == rank.group
    assert buffer.num_nvl_bytes >= num_nvl_bytes
    assert buffer.num_rdma_bytes >= num_rdma_bytes
    larger = Buffer(rank.group, 2 * num_nvl_bytes, num_rdma_bytes)  # no destroy before
    del buffer
    return plain(dispatch(larger, EXCHANGE, EXCHANGE.inputs(rank.rank)))


def test_a_larger_buffer_by_the_hints_replaces_the_first_without_destroy(pool):
    for rank, (result, expected) in enumerate(zip(pool.run(2, size_a_buffer), expect_dispatch(EXCHANGE), strict=True)):
        assert_received(rank, result, expected)


def test_a_config_is_made_of_json():
    fields = "num_sms num_max_nvl_chunked_send_tokens num_max_nvl_chunked_recv_tokens num_max_rdma_chunked_send_tokens"
    values = dict(zip([*fields.split(), "num_max_rdma_chunked_recv_tokens"], [24, 8, 288, 16, 128], strict=True))
    assert Config(**values).get_nvl_buffer_size_hint(7168, 2) > 0


def pass_events(rank):
    """Synchronous calls return no event, asynchronous ones do; both may come before, and so may a bare handle."""
    buffer, inputs = rank.buffer(), EXCHANGE.inputs(rank.rank)
    results = []
    no_event = buffer.get_dispatch_layout(topk_idx=inputs.topk_idx, num_experts=EXCHANGE.num_experts)[-1]
    assert isinstance(no_event, EventOverlap)
    assert no_event.event is None
    for previous in (None, no_event, EventOverlap(None), EventOverlap(EventHandle()), EventHandle(), buffer.capture()):
        for is_async in (False, True):
            for allocate in (False, True):
                flags = {"previous_event": previous, "async_finish": is_async, "allocate_on_comm_stream": allocate}
                result = dispatch(buffer, EXCHANGE, inputs, **flags)
                _, _, event = buffer.combine(result[0].bfloat16(), result[4], **flags)
                for overlap in (result[5], event):
                    assert (overlap.event is not None) == is_async
                    if is_async:
                        overlap.current_stream_wait()
                        overlap.current_stream_wait()
                results.append(plain(result))
    waited_later = EventOverlap(None)
    waited_later.event = EventOverlap(EventHandle()).event
    waited_later.current_stream_wait()
    return results


def test_events_are_none_when_synchronous_and_any_kind_may_come_before(pool):
    for rank, (results, expected) in enumerate(zip(pool.run(2, pass_events), expect_dispatch(EXCHANGE), strict=True)):
        assert len(results) == 24
        for result in results:
            assert_received(rank, result, expected)


def keep_a_handle_for_a_step(rank):
    """Forward, replay under a checkpoint, and backward use one handle; a replay has the rows in the same order."""
    buffer, inputs = rank.buffer(), EXCHANGE.inputs(rank.rank)
    recv_x, _, recv_weights, counts, handle, _ = dispatch(buffer, EXCHANGE, inputs)
    saved = tuple(item.clone() for item in handle)  # what save_for_backward may give back
    buffer.combine(recv_x, handle)
    for one in (handle, saved, list(saved)):
        replayed, *nothing, event = buffer.dispatch(inputs.x, handle=one, async_finish=True)
        assert nothing == [None] * 4
        event.current_stream_wait()
        assert torch.equal(replayed, recv_x)
        grad_x, grad_weights, _ = buffer.combine(x=recv_x, handle=one, topk_weights=recv_weights)
        assert grad_x.shape == inputs.x.shape
        assert grad_weights.shape == inputs.topk_weights.shape
    assert sum(counts) == int(torch.tensor(counts).sum())


def test_a_handle_is_tensors_only_and_serves_a_whole_step(pool):
    pool.run(2, keep_a_handle_for_a_step)


def change_sms(rank):
    """vLLM sets another number of SMs when it enters and leaves every forward pass."""
    buffer, inputs, num_sms = rank.buffer(), EXCHANGE.inputs(rank.rank), Buffer.num_sms
    try:
        results = []
        for number in (num_sms, 8, 24, num_sms):
            buffer.set_num_sms(number)
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(inputs.topk_idx, EXCHANGE.num_experts)
            recv_x, *_, handle, _ = buffer.dispatch(
                inputs.x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=inputs.topk_idx,
                topk_weights=inputs.topk_weights,
            )
            Buffer.set_num_sms(20)
            results.append(buffer.combine(recv_x, handle)[0])
        assert all(torch.equal(result, results[0]) for result in results)
    finally:
        Buffer.set_num_sms(num_sms)


def test_the_number_of_sms_may_change_between_calls(pool):
    pool.run(2, change_sms)


def low_latency_inputs(rank, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + rank.rank)
    x = torch.randn(NUM_MAX - rank.rank, HIDDEN, generator=generator).bfloat16()
    idx = torch.rand(len(x), NUM_EXPERTS, generator=generator).topk(3).indices
    idx[0, 1] = -1
    return x, idx, torch.rand(idx.shape, generator=generator)


def low_latency_buffer(rank):
    num_bytes = Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=NUM_MAX, hidden=HIDDEN, num_ranks=rank.num_ranks, num_experts=NUM_EXPERTS
    )
    assert num_bytes == Buffer.get_low_latency_rdma_size_hint(NUM_MAX, HIDDEN, rank.num_ranks, NUM_EXPERTS)
    return Buffer(
        group=rank.group,
        num_nvl_bytes=0,
        num_rdma_bytes=num_bytes,
        low_latency_mode=True,
        num_qps_per_rank=NUM_EXPERTS / rank.num_ranks,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=True,
        enable_shrink=False,
    )


def check_identity(combined, x, idx, weights):
    total = (weights * (idx >= 0)).sum(1, keepdim=True)
    torch.testing.assert_close(combined.float(), x.float() * total, rtol=2**-7, atol=2**-7)


def ask_for_hooks(rank):
    """The hook is None unless asked for, the event of a call has none unless asynchronous, and `out` is written."""
    buffer = low_latency_buffer(rank)
    x, idx, weights = low_latency_inputs(rank)
    for is_async, has_hook in ((False, False), (True, False), (False, True)):
        flags = {"async_finish": is_async, "return_recv_hook": has_hook}
        recv_x, recv_count, handle, event, hook = buffer.low_latency_dispatch(
            x, idx, NUM_MAX, NUM_EXPERTS, use_fp8=False, round_scale=False, use_ue8m0=False, **flags
        )
        assert (event.event is not None, hook is not None) == (is_async, has_hook)
        _ = hook() if has_hook else None
        assert recv_x.shape == (NUM_EXPERTS // rank.num_ranks, NUM_MAX * rank.num_ranks, HIDDEN)
        assert recv_count.dtype == torch.int32
        out = torch.full_like(x, torch.nan)
        result, event, hook = buffer.low_latency_combine(
            recv_x, idx, weights, handle, zero_copy=False, out=out, **flags
        )
        assert (event.event is not None, hook is not None) == (is_async, has_hook)
        _ = hook() if has_hook else None
        assert result.data_ptr() == out.data_ptr()
        check_identity(out, x, idx, weights)
    buffer.destroy()


def test_hooks_and_events_are_there_only_when_asked_for_and_out_is_written(pool):
    pool.run(2, ask_for_hooks)


def overlap_two_batches(rank):
    """vLLM's two micro-batches live in two threads that take turns; both dispatch before either combines."""
    buffer, results = low_latency_buffer(rank), [None, None]
    turns = [threading.Event() for _ in range(4)]

    def batch(number):
        x, idx, weights = low_latency_inputs(rank, seed=number)
        turns[number].wait(60)
        recv_x, _, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, NUM_MAX, NUM_EXPERTS, use_fp8=False, return_recv_hook=True
        )
        turns[number + 1].set()
        turns[number + 2].wait(60)
        hook()
        combined, _, hook = buffer.low_latency_combine(recv_x, idx, weights, handle, return_recv_hook=True)
        hook()
        results[number] = (combined, x, idx, weights)
        turns[min(number + 3, 3)].set()

    threads = [threading.Thread(target=batch, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    turns[0].set()
    for thread in threads:
        thread.join(60)
    for result in results:
        check_identity(*result)
    buffer.destroy()


def test_two_micro_batches_of_two_threads_are_in_flight(pool):
    pool.run(2, overlap_two_batches)


def clear_the_memory(rank):
    """vLLM zeroes all memory of low-latency mode after a fault; SGLang and LMDeploy clean it after normal calls."""
    buffer = low_latency_buffer(rank)
    for seed in range(3):
        received = dispatch(buffer, EXCHANGE, EXCHANGE.inputs(rank.rank))
        buffer.clean_low_latency_buffer(NUM_MAX, HIDDEN, NUM_EXPERTS)
        x, idx, weights = low_latency_inputs(rank, seed)
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, NUM_MAX, NUM_EXPERTS, use_fp8=False)
        check_identity(buffer.low_latency_combine(recv_x, idx, weights, handle)[0], x, idx, weights)
        result = copy.deepcopy(plain(received))  # results of CPU ranks lie in the memory that is cleared now
        dist.barrier(group=rank.group)
        buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
        dist.barrier(group=rank.group)
    buffer.destroy()
    return result


def test_cleaned_or_zeroed_memory_leaves_a_usable_buffer(pool):
    for rank, (result, expected) in enumerate(
        zip(pool.run(2, clear_the_memory), expect_dispatch(EXCHANGE), strict=True)
    ):
        assert_received(rank, result, expected)


def begin_with_a_buffer(rank):
    """C63: the process group has made no collective yet, and was not told its device."""
    return plain(dispatch(Buffer(rank.group), EXCHANGE, EXCHANGE.inputs(rank.rank)))


def test_c63_a_buffer_before_any_collective():
    with FreshRanks(2, begin_with_a_buffer) as ranks:
        for rank, (result, expected) in enumerate(zip(ranks.results(), expect_dispatch(EXCHANGE), strict=True)):
            assert_received(rank, result, expected)
