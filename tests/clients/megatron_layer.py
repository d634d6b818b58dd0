"""One rank of a Megatron-core MoE layer, run once over each of two token dispatchers.

Megatron-core is imported inside the functions only: it warns when it is imported, and our tests take a warning for an
error. So it lives in the processes of the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rank_pool import Rank

NUM_EXPERTS, NUM_TOPK, HIDDEN, EXPERT_HIDDEN = 8, 3, 72, 96
NUM_TOKENS, NUM_STEPS = 45, 2

DISPATCHERS: dict[str, dict[str, Any]] = {
    "all-gather": {"moe_token_dispatcher_type": "allgather"},
    "deep_ep": {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True},
}


def run_layers(rank: Rank, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Run forward and backward of each case over both dispatchers; return the tensors of each, by name."""
    import deep_ep

    calls = _record_calls(deep_ep.Buffer)
    _initialise_megatron(rank)
    results = {}
    for case, settings in cases.items():
        for name, dispatcher in DISPATCHERS.items():
            calls.clear()
            tensors = _run_layer(rank, **settings, **dispatcher)
            results[f"{case} over {name}"] = {"tensors": tensors, "calls": list(calls)}
    return results


def _record_calls(buffer_class: Any) -> list[tuple[str, int]]:
    """Make the class keep a list of what is called, and with how many -1 among the expert ids."""
    calls: list[tuple[str, int]] = []

    def record(name: str) -> None:
        method = getattr(buffer_class, name)

        def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
            topk_idx = kwargs.get("topk_idx")
            kind = f"cached {name}" if name == "dispatch" and topk_idx is None else name
            calls.append((kind, 0 if topk_idx is None else int((topk_idx == -1).sum())))
            return method(self, *args, **kwargs)

        setattr(buffer_class, name, recorded)

    for name in ("get_dispatch_layout", "dispatch", "combine"):
        record(name)
    return calls


def _initialise_megatron(rank: Rank) -> None:
    # The router puts its weight on the current CUDA device. It is all that needs CUDA here.
    torch.cuda.current_device = lambda: torch.device("cpu")

    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 leaves the name undefined where TransformerEngine is not installed
    parallel_state.initialize_model_parallel(expert_model_parallel_size=rank.num_ranks)


def _run_layer(rank: Rank, dtype: torch.dtype, capacity: float | None, **dispatcher: Any) -> dict[str, Tensor]:
    layer = _make_layer(rank, dtype, capacity, **dispatcher)
    tensors: dict[str, Tensor] = {}
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(1000 + 10 * step + rank.rank)
        x = torch.randn(NUM_TOKENS, 1, HIDDEN, generator=generator).to(dtype).requires_grad_()
        weights_of_loss = torch.randn(NUM_TOKENS, 1, HIDDEN, generator=generator)
        layer.zero_grad()
        output, _ = layer(x)
        (output.float() * weights_of_loss).sum().backward()
        tensors[f"step {step}: output"] = output.detach()
        tensors[f"step {step}: gradient of input"] = x.grad
        for name, param in layer.named_parameters():
            tensors[f"step {step}: gradient of {name}"] = param.grad.clone()
    return tensors


def _make_layer(rank: Rank, dtype: torch.dtype, capacity: float | None, **dispatcher: Any) -> nn.Module:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=NUM_TOPK,
        moe_ffn_hidden_size=EXPERT_HIDDEN,
        moe_expert_capacity_factor=capacity,
        moe_router_load_balancing_type="none",
        moe_router_pre_softmax=True,
        moe_router_dtype="fp32",
        add_bias_linear=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        expert_model_parallel_size=rank.num_ranks,
        **dispatcher,
    )
    spec = get_moe_module_spec(use_te=False, num_experts=NUM_EXPERTS)
    layer = MoELayer(config, spec.submodules, layer_number=1).to(dtype)
    first_expert = rank.rank * NUM_EXPERTS // rank.num_ranks
    with torch.no_grad():
        for index, (name, param) in enumerate(layer.named_parameters()):
            # The router is the same on all ranks, and no two experts are.
            seed = index + (100 * first_expert if "experts" in name else 0)
            generator = torch.Generator().manual_seed(seed)
            param.copy_(torch.randn(param.shape, generator=generator) / param.size(-1) ** 0.5)
    return layer
