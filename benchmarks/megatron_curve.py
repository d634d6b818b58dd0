"""Train a small language model of Megatron-core's MoE layers over deep_ep and over all-to-all, and compare the losses.

    python benchmarks/megatron_curve.py --ranks 2 [--steps 100] [--json FILE] [--plot FILE]

Both runs begin with the same weights, see the same batches, and differ in Megatron's token dispatcher only: `flex`,
which calls deep_ep, and `alltoall`. They may add the same numbers in another order, so rounding alone tells them apart.
A third run repeats all-to-all with its weights moved by one part in 10 ** 7, to show how far rounding can carry.

It needs megatron-core (`pip install -e '.[clients]'`), and runs on GPUs if each rank has one, else on CPU ranks.
"""

import argparse
import json
import os
import platform
import pydoc_data.topics
import subprocess
import sys
import types
import warnings
from importlib.metadata import version

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from deep_ep import Buffer

HIDDEN, EXPERT_HIDDEN, NUM_LAYERS, NUM_EXPERTS, NUM_TOPK = 64, 96, 2, 8, 4
CONTEXT, BATCH = 6, 512  # letters that the next one is told from; predictions of all ranks together
TEXT = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
LETTERS = sorted(set(TEXT))
DISPATCHERS = {
    "deep_ep": {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True},
    "all-to-all": {"moe_token_dispatcher_type": "alltoall"},
}


def initialise_megatron(num_ranks: int, device: torch.device) -> None:
    if device.type == "cpu":
        # The router puts its weight on the current CUDA device, and the all-to-all dispatcher asks for streams.
        event = types.SimpleNamespace(synchronize=lambda: None)
        stream = types.SimpleNamespace(synchronize=lambda: None, record_event=lambda: event)
        torch.cuda.current_device = lambda: device
        torch.cuda.Stream = lambda *_, **__: stream
        torch.cuda.current_stream = lambda *_: stream
        # Where it copies numbers from the GPU it makes them a list; here they stay tensors, which Gloo does not take.
        exchange = dist.all_to_all_single

        def exchange_lists(output, rows, output_split_sizes=None, input_split_sizes=None, group=None):
            splits = [None if s is None else [int(n) for n in s] for s in (output_split_sizes, input_split_sizes)]
            return exchange(output, rows, *splits, group=group)

        dist.all_to_all_single = exchange_lists
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 leaves the name undefined where TransformerEngine is not installed
    parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks)


def count_dispatches() -> list[None]:
    """Return a list that grows by an item with every call of `Buffer.dispatch`."""
    calls: list[None] = []
    dispatch = Buffer.dispatch

    def counted(*args, **kwargs):
        calls.append(None)
        return dispatch(*args, **kwargs)

    Buffer.dispatch = counted
    return calls


class Layer(nn.Module):
    def __init__(self, num_ranks: int, is_on_cpu: bool, dispatcher: dict):
        super().__init__()
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
            moe_router_load_balancing_type="none",
            moe_router_pre_softmax=True,
            moe_router_dtype="fp32",
            add_bias_linear=False,
            use_cpu_initialization=is_on_cpu,
            expert_model_parallel_size=num_ranks,
            **dispatcher,
        )
        spec = get_moe_module_spec(use_te=False, num_experts=NUM_EXPERTS)
        if hasattr(spec, "submodules"):
            self.moe = MoELayer(config, spec.submodules, layer_number=1)
        else:  # newer versions give a function
            self.moe = spec(config, layer_number=1)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x):
        return x + self.moe(self.norm(x)[:, None])[0][:, 0]


def train(dispatcher: dict, num_steps: int, device: torch.device, nudge: float = 0.0) -> list[float]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    embed, head = nn.Embedding(len(LETTERS), HIDDEN), nn.Linear(HIDDEN, len(LETTERS))
    mix = nn.Linear(CONTEXT * HIDDEN, HIDDEN)
    layers = [Layer(num_ranks, device.type == "cpu", dispatcher) for _ in range(NUM_LAYERS)]
    model = nn.ModuleList([embed, mix, *layers, head]).to(device)
    first_expert = rank * NUM_EXPERTS // num_ranks
    with torch.no_grad():
        for index, (name, param) in enumerate(model.named_parameters()):
            # No two experts are the same; everything else is, on all ranks.
            generator = torch.Generator().manual_seed(index + (1000 + 100 * first_expert if "experts" in name else 0))
            value = torch.randn(param.shape, generator=generator) / param.size(-1) ** 0.5
            param.copy_((torch.ones_like(value) if "norm.weight" in name else value) * (1 + nudge))
    dense = [param for name, param in model.named_parameters() if "experts" not in name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text, batches = torch.tensor([LETTERS.index(letter) for letter in TEXT]), torch.Generator().manual_seed(7)
    losses = []
    for _ in range(num_steps):
        start = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=batches).tensor_split(num_ranks)[rank]
        letters = text[start + torch.arange(CONTEXT + 1)].to(device)
        x = mix(embed(letters[:, :-1]).flatten(1))
        for layer in layers:
            x = layer(x)
        loss = F.cross_entropy(head(x), letters[:, -1], reduction="sum") / BATCH
        optimizer.zero_grad()
        loss.backward()
        for tensor in [total := loss.detach(), *(param.grad for param in dense)]:
            dist.all_reduce(tensor)
        optimizer.step()
        losses.append(total.item())
    return losses


def draw(record: dict, path: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    losses = record["losses"]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=[3, 1])
    top.plot(losses["all-to-all"], label="Megatron alltoall", linewidth=4, color="#bbbbbb")
    top.plot(losses["deep_ep"], label="Megatron flex, deep_ep", linewidth=1.2, color="#c0392b")
    top.set_ylabel("loss")
    top.set_title(
        f"megatron-core {record['versions']['megatron-core']}, {record['num_ranks']} {record['device']} ranks"
    )
    top.legend()
    for name, color in (("deep_ep", "#c0392b"), ("all-to-all, nudged", "#2c7fb8")):
        gaps = [max(abs(a - b), 1e-9) for a, b in zip(losses[name], losses["all-to-all"], strict=True)]
        bottom.semilogy(gaps, label=f"|{name} - all-to-all|", color=color, linewidth=1)
    bottom.set_xlabel("step")
    bottom.legend(fontsize="small", loc="center right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(num_steps: int, json_path: str | None, plot_path: str | None) -> None:
    num_ranks, local_rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= num_ranks
    device = torch.device("cuda", local_rank) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    initialise_megatron(num_ranks, device)
    if has_gpus:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(1234)
    calls = count_dispatches()
    losses, num_dispatches = {}, {}
    for name, dispatcher in DISPATCHERS.items():
        calls.clear()
        losses[name] = train(dispatcher, num_steps, device)
        num_dispatches[name] = len(calls)
    # One forward and one backward per layer and step, and none over all-to-all.
    assert num_dispatches == {"deep_ep": 2 * NUM_LAYERS * num_steps, "all-to-all": 0}, num_dispatches
    losses["all-to-all, nudged"] = train(DISPATCHERS["all-to-all"], num_steps, device, nudge=1e-7)
    if dist.get_rank() == 0:
        gaps = [abs(a - b) for a, b in zip(losses["deep_ep"], losses["all-to-all"], strict=True)]
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        record = {
            "what": "loss per step of a small language model of Megatron MoE layers in float32",
            "num_ranks": num_ranks,
            "device": torch.cuda.get_device_name() if has_gpus else "CPU",
            "sizes": {
                "hidden": HIDDEN,
                "num_layers": NUM_LAYERS,
                "num_experts": NUM_EXPERTS,
                "num_topk": NUM_TOPK,
                "tokens_per_step": BATCH,
            },
            "largest_difference": max(gaps),
            "last_losses": {name: values[-1] for name, values in losses.items()},
            "losses": {name: [round(value, 7) for value in values] for name, values in losses.items()},
            "versions": {
                "megatron-core": version("megatron-core"),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "commit": commit.stdout.strip(),
        }
        for name, last in record["last_losses"].items():
            print(f"{name}: loss {losses[name][0]:.5f} at first, {last:.5f} after {num_steps} steps")
        print(f"largest difference between deep_ep and all-to-all: {max(gaps):.2e}")
        if json_path:
            with open(json_path, "w") as file:
                json.dump(record, file, indent=1)
                file.write("\n")
        if plot_path:
            draw(record, plot_path)
        assert max(gaps) < 1e-3, max(gaps)
        assert losses["deep_ep"][-1] < losses["deep_ep"][0] - 0.5
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # Megatron warns of what is not installed
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes to start, unless torchrun does (default 2)")
    parser.add_argument("--steps", type=int, default=100, help="batches to learn from (default 100)")
    parser.add_argument("--json", help="file to write the record to")
    parser.add_argument("--plot", help="file to draw the curves to")
    args = parser.parse_args()
    if "RANK" in os.environ:
        main(args.steps, args.json, args.plot)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        os.execv(sys.executable, [sys.executable, "-m", *torchrun, *sys.argv])
