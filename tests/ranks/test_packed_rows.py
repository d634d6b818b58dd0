"""Rows of packed and scaled number formats in normal mode: rows and scales are opaque bytes of any dtype.

Each case is what a client sends: NVFP4 (two numbers a byte, an e4m3 scale for every 16), MXFP8 and MXFP4 (an e8m0 scale
for every 32), also with scales packed in int32, and TensorRT-LLM's NVFP4 scales viewed as float32.
"""

import pytest
import torch
from steps import dispatch

from deep_ep import Buffer, reference
from strategies import Exchange

EXCHANGE = Exchange(num_tokens=(9, 0, 14), num_topk=3)
HIDDEN = 320  # numbers of a row

# rows as (bytes, dtype), scales as (bytes, dtype)
FORMATS = {
    "nvfp4": ((HIDDEN // 2, torch.float4_e2m1fn_x2), (HIDDEN // 16, torch.float8_e4m3fn)),
    "nvfp4 as bytes": ((HIDDEN // 2, torch.uint8), (HIDDEN // 16, torch.uint8)),
    "nvfp4 with scales viewed as float32": ((HIDDEN // 2, torch.uint8), (HIDDEN // 16, torch.float32)),
    "mxfp8": ((HIDDEN, torch.float8_e4m3fn), (HIDDEN // 32, torch.float8_e8m0fnu)),
    "mxfp8 with an odd number of scales": ((33, torch.float8_e5m2), (3, torch.float8_e8m0fnu)),
    "mxfp8 with packed scales": ((HIDDEN, torch.float8_e4m3fn), (12, torch.int32)),
    "mxfp4": ((HIDDEN // 2, torch.float4_e2m1fn_x2), (HIDDEN // 32, torch.float8_e8m0fnu)),
    "fp8 viewed as bf16": ((HIDDEN, torch.bfloat16), None),
}


def random_bytes(rank, num_bytes, dtype, seed):
    generator = torch.Generator().manual_seed(seed + rank)
    content = torch.randint(256, (EXCHANGE.num_tokens[rank], num_bytes), dtype=torch.uint8, generator=generator)
    return content.view(dtype)


def rows_of(name, rank):
    rows, scales = FORMATS[name]
    return random_bytes(rank, *rows, 100), None if scales is None else random_bytes(rank, *scales, 200)


def in_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


def send(rank, name):
    """Dispatch and dispatch again by the handle; column-major scales arrive row-major."""
    buffer = Buffer(rank.group, device="cpu")
    x, scales = rows_of(name, rank.rank)
    inputs = EXCHANGE.inputs(rank.rank)._replace(x=x, scales=scales)
    if scales is not None and scales.element_size() > 1:
        inputs = inputs._replace(scales=scales.t().contiguous().t())
    rows, _, _, _, handle, _ = dispatch(buffer, EXCHANGE, inputs)
    again = buffer.dispatch(inputs.rows, handle=handle)[0]
    results = []
    for received in (rows, again):
        recv_x, recv_scales = received if isinstance(received, tuple) else (received, None)
        assert recv_x.dtype == x.dtype
        assert (recv_scales is None) == (scales is None)
        assert recv_scales is None or (recv_scales.dtype == scales.dtype and recv_scales.is_contiguous())
        results.append((in_bytes(recv_x), None if recv_scales is None else in_bytes(recv_scales)))
    return results


@pytest.mark.parametrize("name", FORMATS)
def test_packed_rows_and_any_scales_arrive_byte_by_byte(pool, name):
    num_ranks = EXCHANGE.num_ranks
    tensors = [rows_of(name, rank) for rank in range(num_ranks)]
    layouts = [
        reference.get_dispatch_layout(EXCHANGE.inputs(rank).topk_idx, EXCHANGE.num_experts, num_ranks)
        for rank in range(num_ranks)
    ]
    has_scales = FORMATS[name][1] is not None
    expected = reference.dispatch(
        [in_bytes(x) for x, _ in tensors],
        layouts,
        scales_RTS=[in_bytes(scales) for _, scales in tensors] if has_scales else None,
        num_sms=EXCHANGE.num_sms,
    )
    for rank, results in enumerate(pool.run(num_ranks, send, name)):
        for x, scales in results:
            assert torch.equal(x, expected[rank].x)
            assert scales is None or torch.equal(scales, expected[rank].scales)
