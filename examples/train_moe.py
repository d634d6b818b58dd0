"""Train a small mixture-of-experts transformer whose experts are spread over ranks.

    python examples/train_moe.py --ranks 2 --steps 100
    torchrun --nproc-per-node 2 examples/train_moe.py

It learns, letter by letter, the English text that ships with Python. Every rank has all dense layers, a share of each
batch and a share of the experts. `deep_ep.Buffer` takes tokens to their experts (dispatch) and brings back what those
make of them (combine). After 100 steps, 1, 2 and 4 ranks have the same loss within 0.001 (measured: within 0.00001).
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

HIDDEN, NUM_LAYERS, NUM_HEADS = 128, 2, 4
NUM_EXPERTS, NUM_TOPK, EXPERT_HIDDEN = 8, 2, 256
BATCH, LENGTH = 32, 64  # sequences on all ranks together, letters in each
TEXT = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
LETTERS = sorted(set(TEXT))


class Dispatch(torch.autograd.Function):
    """Send tokens to the ranks of their experts. Gradients come back as the experts' outputs do: by a combine."""

    @staticmethod
    def forward(ctx, buffer: Buffer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor):
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
        layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
        recv_x, recv_topk_idx, recv_topk_weights, _, handle, _ = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=topk_weights, **layout
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(recv_topk_idx)
        return recv_x, recv_topk_idx, recv_topk_weights, handle

    @staticmethod
    def backward(ctx, grad_x: Tensor, _idx, grad_topk_weights: Tensor, _handle):
        grad_x, grad_topk_weights, _ = ctx.buffer.combine(grad_x, ctx.handle, topk_weights=grad_topk_weights)
        return None, grad_x, None, grad_topk_weights


class Combine(torch.autograd.Function):
    """Bring the rows of each token back and add them. Gradients go where the tokens went: by a cached dispatch."""

    @staticmethod
    def forward(ctx, buffer: Buffer, x: Tensor, handle: tuple[Tensor, ...]):
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(x, handle)[0]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, ctx.buffer.dispatch(grad, handle=ctx.handle)[0], None


class Experts(nn.Module):
    """A router, and this rank's share of the experts."""

    def __init__(self, buffer: Buffer):
        super().__init__()
        self.buffer, self.router = buffer, nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        # Every rank draws all experts and keeps its own: they are the same for any number of ranks.
        mine = torch.arange(NUM_EXPERTS).tensor_split(buffer.group_size)[buffer.rank]
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, EXPERT_HIDDEN)[mine] / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, EXPERT_HIDDEN, HIDDEN)[mine] / EXPERT_HIDDEN**0.5)

    def forward(self, x: Tensor) -> Tensor:
        topk_weights, topk_idx = self.router(x).softmax(-1).topk(NUM_TOPK)
        recv_x, recv_topk_idx, recv_topk_weights, handle = Dispatch.apply(self.buffer, x, topk_idx, topk_weights)
        out = torch.zeros_like(recv_x)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            row, k = torch.where(recv_topk_idx == expert)
            out = out.index_add(0, row, F.gelu(recv_x[row] @ up) @ down * recv_topk_weights[row, k, None])
        return Combine.apply(self.buffer, out, handle)


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
        return x + self.experts(self.norm2(x).flatten(0, 1)).view_as(x)


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
