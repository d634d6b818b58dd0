"""What the kernels of the GPU engine compile to, without a GPU: wide accesses, memory order, no spilled registers."""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

import torch
import triton.language as tl

from deep_ep.engines import low_latency_plans
from deep_ep.engines.base import RowFormat
from deep_ep.kernels import combine, dispatch, launch, layout, low_latency_dispatch

pytestmark = pytest.mark.filterwarnings("ignore")


def compile_for(kernel, constants, capability, num_warps=16):
    return launch.compile_with_triton(kernel, constants, num_warps, capability)


def dispatch_code(capability, *, has_meta=True, stream=True, align=16, num_ranks=2):
    word, row_words = (tl.int64, 1792) if align == 16 else (tl.int16, 7167)
    topk = 8 if has_meta else 0
    constants = (num_ranks, num_ranks, word, align, row_words, 16, 256, 8192, tl.int64, topk, 0, has_meta, stream)
    return compile_for(dispatch.dispatch_kernel, constants, capability)


def combine_code(capability, *, stream=True, num_ranks=2):
    tokens, columns = (16, 1024) if num_ranks == 2 else (8, 512)
    constants = (num_ranks, num_ranks, tl.bfloat16, tl.int64, 16, 7168, 1792, tokens, columns, 8192, 8, 0, stream)
    return compile_for(combine.combine_kernel, constants, capability)


def num_stack_bytes(compiled, tmp_path):
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    report = subprocess.run([cuobjdump, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", report).group(1))


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("code", [dispatch_code, combine_code])
def test_payload_moves_in_16_byte_accesses(code, capability):
    ptx = code(capability).asm["ptx"]
    assert re.search(r"ld\.global\.cg\.v(2\.b64|4\.b32)", ptx)
    assert re.search(r"st\.global\.cs\.v(2\.b64|4\.b32)", ptx)
    assert not re.search(r"(ld|st)\.global[.\w]*\.b(8|16)\b", ptx)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("code", [dispatch_code, combine_code])
def test_signals_are_released_after_a_barrier_and_acquired(code, capability):
    ptx = code(capability).asm["ptx"]
    assert "ld.acquire.sys.global.b64" in ptx
    # The signals; a wait that runs out has a release of its own, which needs no barrier.
    signals = [match.start() for match in re.finditer(r"@p st\.release\.sys\.global\.b64", ptx)]
    assert signals
    assert all("bar.sync" in ptx[max(at - 3000, 0) : at] for at in signals)
    assert re.search(r"atom\.global\.gpu\.acq_rel\.add", ptx)


@pytest.mark.parametrize("code", [dispatch_code, combine_code])
def test_without_streaming_loads_and_stores_are_plain(code):
    ptx = code(90, stream=False).asm["ptx"]
    assert not re.search(r"(ld|st)\.global\.(cg|cs)", ptx)
    assert re.search(r"ld\.global\.v(2\.b64|4\.b32)", ptx)


def test_odd_rows_move_in_narrow_accesses():
    assert re.search(r"ld\.global\.cg\.b16", dispatch_code(90, align=2).asm["ptx"])


FEW_STACK_BYTES = 16
"""A number or two, kept once per program. What may not be there are rows; a thread holds 32 bytes of them at a time."""


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_dispatch_keeps_rows_in_registers(num_ranks, tmp_path):
    for has_meta in (False, True):
        code = dispatch_code(90, has_meta=has_meta, num_ranks=num_ranks)
        assert num_stack_bytes(code, tmp_path) <= FEW_STACK_BYTES


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_combine_keeps_rows_in_registers(num_ranks, tmp_path):
    assert num_stack_bytes(combine_code(90, num_ranks=num_ranks), tmp_path) <= FEW_STACK_BYTES


def test_counting_kernels_compile():
    for capability in (80, 90, 100):
        compile_for(layout.count_tokens_kernel, (tl.int64, 128, 8), capability, num_warps=4)
        ptx = compile_for(layout.notify_kernel, (8, 8, 16, 256, 256), capability, num_warps=8).asm["ptx"]
        assert "ld.acquire.sys.global.b64" in ptx


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("row_format", [RowFormat.FP8, RowFormat.MXFP8])
def test_low_latency_dispatch_casts_in_registers(capability, row_format, tmp_path):
    """Also where 32 channels share a scale, rows are loaded 16 bytes at a time and none is spilled."""
    types = {torch.int64: tl.int64, torch.int32: tl.int32, torch.int16: tl.int16, torch.uint8: tl.uint8}
    shape = low_latency_plans.Shape(2, 7168, 8, 128, 256, torch.int64, 16)
    is_native = low_latency_plans.has_native_fp8((capability // 10, capability % 10))
    num_programs = low_latency_plans.programs_that_fit(low_latency_plans.LowLatencyTuning(), has_native_fp8=is_native)
    plan = low_latency_plans.plan_dispatch(
        shape, row_format, types.__getitem__, has_native_fp8=is_native, programs_per_sm=num_programs
    )
    constants = (*plan.constants, True, False)
    compiled = compile_for(low_latency_dispatch.dispatch_kernel, constants, capability, num_warps=4)
    assert re.search(r"ld\.global[.\w]*\.v(2\.b64|4\.b32)", compiled.asm["ptx"])
    assert num_stack_bytes(compiled, tmp_path) <= FEW_STACK_BYTES
