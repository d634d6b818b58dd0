"""Makes the calls of a layer with interpreted kernels, on one rank; compares what is launched with what is prepared.

Prints "as prepared" if every kernel that calls of a shape launch is one that `variants` names.
"""

import sys
from array import array

import interpreter_fixes
import torch

from deep_ep.config import Config
from deep_ep.engines.base import CachedDispatchRequest, CombineRequest, DispatchRequest, RowFormat
from deep_ep.engines.gpu import GpuEngine
from deep_ep.engines.gpu_low_latency import GpuLowLatencyEngine
from deep_ep.memory.rendezvous import Rendezvous
from deep_ep.shapes import ExchangeShape
from low_latency_cases import Case, run_round


class Alone:
    """An MPI communicator of one."""

    def Get_rank(self):  # noqa: N802
        return 0

    def Get_size(self):  # noqa: N802
        return 1

    def Allgather(self, mine: array, everyone: array):  # noqa: N802
        everyone[:] = mine


def record_launches(engine):
    """Return a set that the kernels which an engine launches go to."""
    kernels, launched = engine._running(), set()
    launch = kernels.launch

    def recorded(kernel, num_programs, arguments, constants, num_warps):
        launched.add((kernel, constants, num_warps))
        launch(kernel, num_programs, arguments, constants, num_warps)

    kernels.launch = recorded
    return launched


def normal_calls(shape):
    engine = GpuEngine(Rendezvous(None, Alone()), 0, 60.0, torch.device("cpu"))
    launched = record_launches(engine)
    x = torch.randn(3, shape.hidden, dtype=torch.bfloat16)
    rows, scales = x, None
    if shape.use_fp8:
        rows, scales = x.to(torch.float8_e4m3fn), torch.rand(3, shape.num_scales)
    topk_idx = torch.randint(shape.num_experts, (3, shape.num_topk))
    weights, config = torch.rand(3, shape.num_topk), Config(num_sms=shape.num_sms)
    for num_worst_tokens in (0, 5):
        result = engine.dispatch(
            DispatchRequest(
                x=rows,
                scales=scales,
                topk_idx=topk_idx,
                topk_weights=weights,
                layout=engine.compute_layout(topk_idx, shape.num_experts),
                expert_alignment=1,
                num_worst_tokens=num_worst_tokens,
                config=config,
            )
        )
    handle = result.handle
    engine.dispatch_cached(CachedDispatchRequest(x=rows, scales=scales, handle=handle, config=config))
    engine.dispatch_cached(CachedDispatchRequest(x=x, scales=None, handle=handle, config=config))
    y = torch.randn(handle.recv_src_idx.numel(), shape.hidden, dtype=torch.bfloat16)
    for topk_weights in (None, result.topk_weights):
        engine.combine(CombineRequest(x=y, topk_weights=topk_weights, biases=(), handle=handle, config=config))
    return launched, engine.variants(shape)


def low_latency_calls(shape):
    engine = GpuLowLatencyEngine(Rendezvous(None, Alone()), 60.0, torch.device("cpu"))
    launched = record_launches(engine)
    row_format = RowFormat.FP8 if shape.use_fp8 else RowFormat.BF16
    for split in (False, True):
        case = Case(
            shape.num_max_tokens_per_rank,
            shape.hidden,
            shape.num_topk,
            shape.num_experts,
            row_format=row_format,
            split=split,
            num_tokens=2,
        )
        run_round(engine, case, 0, 1, 1, "cpu")
    return launched, engine.variants(shape)


def main():
    interpreter_fixes.install()
    sizes = {"hidden": 256, "num_topk": 3, "num_experts": 6, "num_max_tokens_per_rank": 4, "num_sms": 4}
    for use_fp8 in (False, True):
        for calls in (normal_calls, low_latency_calls):
            shape = ExchangeShape(**sizes, use_fp8=use_fp8, is_low_latency=calls is low_latency_calls)
            launched, prepared = calls(shape)
            assert len(prepared) == len(set(prepared))
            expected = {tuple(variant) for variant in prepared}
            if shape.is_low_latency:
                # The interpreter makes two launches of a call; the one of a GPU is prepared too, alike in the rest.
                as_one = {variant for variant in expected if variant[1][-2:] == (True, True)}
                expected -= as_one
                for halves in ((True, False), (False, True)):
                    assert {(k, (*c[:-2], *halves), n) for k, c, n in as_one} <= expected
            assert launched == expected, (calls, use_fp8, launched, prepared)
    print("as prepared")


if __name__ == "__main__":
    sys.exit(main())
