"""Train a small mixture-of-experts transformer whose experts are spread over ranks.

    python examples/train_moe.py --ranks 2 --steps 100
    torchrun --nproc-per-node 2 examples/train_moe.py

It learns, letter by letter, the English text that ships with Python. Every rank has all dense layers, a share of each
batch and a share of the experts. `deep_ep.nn.ExpertParallel` takes tokens to their experts (dispatch) and brings back
what those make of them (combine). After 100 steps, 1, 2 and 4 ranks have the same loss within 0.001.
"""

import argparse
import os
import pydoc_data.topics
import sys
import time
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from deep_ep import Buffer
from deep_ep.nn import ExpertParallel, TopKRouter, local_experts

HIDDEN, NUM_LAYERS, NUM_HEADS = 128, 2, 4
NUM_EXPERTS, NUM_TOPK, EXPERT_HIDDEN = 8, 2, 256
BATCH, LENGTH = 32, 64  # sequences on all ranks together, letters in each
TEXT = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
LETTERS = sorted(set(TEXT))


class Expert(nn.Module):
    """Two matrices and a GELU."""

    def __init__(self, up: Tensor, down: Tensor):
        super().__init__()
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x @ self.up) @ self.down


class Experts(ExpertParallel):
    """A router, and this rank's share of the experts."""

    def __init__(self, buffer: Buffer):
        router = TopKRouter(HIDDEN, NUM_EXPERTS, NUM_TOPK)
        # Every rank draws all experts and keeps its own: they are the same for any number of ranks.
        up = torch.randn(NUM_EXPERTS, HIDDEN, EXPERT_HIDDEN) / HIDDEN**0.5
        down = torch.randn(NUM_EXPERTS, EXPERT_HIDDEN, HIDDEN) / EXPERT_HIDDEN**0.5
        experts = [Expert(up[i], down[i]) for i in local_experts(NUM_EXPERTS, buffer)]
        super().__init__(router, experts, buffer, NUM_EXPERTS)


class Layer(nn.Module):
    """Causal attention, with a penalty on distance (ALiBi) that tells it where it is; then experts."""

    def __init__(self, buffer: Buffer):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.experts = Experts(buffer)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, NUM_HEADS, -1)).transpose(1, 3).unbind(2)
        distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        bias = torch.where(distance < 0, -torch.inf, -distance * 0.5 ** torch.arange(1.0, NUM_HEADS + 1)[:, None, None])
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))
        return x + self.experts(self.norm2(x))


def train(num_steps: int) -> None:
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    buffer = Buffer(dist.group.WORLD, device="cpu")
    first, last = nn.Embedding(len(LETTERS), HIDDEN), nn.Linear(HIDDEN, len(LETTERS))
    model = nn.Sequential(first, *(Layer(buffer) for _ in range(NUM_LAYERS)), nn.LayerNorm(HIDDEN), last)
    dense = [param for name, param in model.named_parameters() if not name.endswith((".up", ".down"))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    start_s = time.perf_counter()
    steps = range(1, num_steps + 1)
    with suppress(ImportError):  # a bar, if rich is installed
        from rich.progress import track

        steps = track(steps, description="learning", disable=rank != 0)
    for step in steps:
        start = torch.randint(len(text) - LENGTH, (BATCH, 1)).tensor_split(num_ranks)[rank]
        letters = text[start + torch.arange(LENGTH + 1)]
        logits = model(letters[:, :-1]).mT
        # A rank computes its part of the mean over the whole batch, so the gradients of the ranks need only be added.
        # Those of the experts are complete already, as an expert sees the tokens of all ranks.
        loss = F.cross_entropy(logits, letters[:, 1:], reduction="sum") / (BATCH * LENGTH)
        optimizer.zero_grad()
        loss.backward()
        for tensor in [loss.detach(), *(param.grad for param in dense)]:
            dist.all_reduce(tensor)  # in place: `loss`, too, is now that of the whole batch
        optimizer.step()
        if rank == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step}: loss {loss.item():.5f}", flush=True)
    if rank == 0:
        tokens_per_s = num_steps * BATCH * LENGTH / (time.perf_counter() - start_s)
        print(f"loss {loss.item():.5f} after {num_steps} steps on {num_ranks} ranks, {tokens_per_s:,.0f} tokens/s")
    buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes to start, unless torchrun does (default 2)")
    parser.add_argument("--steps", type=int, default=100, help="batches to learn from (default 100)")
    args = parser.parse_args()
    if "RANK" in os.environ:
        train(args.steps)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        os.execv(sys.executable, [sys.executable, "-m", *torchrun, *sys.argv])
