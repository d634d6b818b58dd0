"""The example trains, and trains the same on any number of ranks."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from rank_pool import Rank

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_moe.py"
pytestmark = pytest.mark.timeout(600)

TOLERANCE = 1e-4  # of the loss after ten steps; the docstring of the example promises 1e-3 after a hundred


def run_program(*args: str, **variables: str) -> str:
    """Run Python; return what it printed."""
    process = subprocess.Popen(
        [sys.executable, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "DEEP_EP_TIMEOUT_S": "60", **variables},
    )
    try:
        output, _ = process.communicate(timeout=240.0)
    except subprocess.TimeoutExpired:
        process.terminate()  # upon this it ends its ranks
        output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def losses_in(output: str) -> list[float]:
    """Return the losses that were shown, the final one last."""
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]


@pytest.fixture(scope="module")
def losses():
    """Losses of ten steps, by the number of ranks."""
    return {n: losses_in(run_program(str(EXAMPLE), "--ranks", str(n), "--steps", "10")) for n in (1, 2, 4)}


def test_losses_of_1_2_and_4_ranks_agree(losses):
    assert losses[2] == pytest.approx(losses[1], abs=TOLERANCE)
    assert losses[4] == pytest.approx(losses[1], abs=TOLERANCE)


def test_loss_falls_below_that_of_guessing_by_frequency(losses):
    first, *_, last = losses[2]
    assert first > 4.5  # as bad as guessing among all letters
    assert last < 3.0  # letters drawn by how often they occur give 3.2


def test_runs_under_torchrun_and_without_rich(tmp_path):
    (tmp_path / "rich.py").write_text("raise ImportError('not installed')")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = run_program(*torchrun, str(EXAMPLE), "--steps", "1", OMP_NUM_THREADS="1", PYTHONPATH=str(tmp_path))
    assert re.search(r"^loss \d\.\d+ after 1 steps on 2 ranks, [\d,]+ tokens/s$", output, re.MULTILINE), output


def load_example():
    spec = importlib.util.spec_from_file_location("train_moe", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare_with_all_experts_at_home(rank: Rank, num_tokens: int) -> None:
    """Compare output and gradients of the example's expert layer with those of all experts on this rank."""
    example = load_example()
    torch.manual_seed(2)
    layer = example.Experts(rank.buffer())
    torch.manual_seed(2)
    router = torch.nn.Linear(example.HIDDEN, example.NUM_EXPERTS, bias=False)
    up = torch.randn(example.NUM_EXPERTS, example.HIDDEN, example.EXPERT_HIDDEN) / example.HIDDEN**0.5
    down = torch.randn(example.NUM_EXPERTS, example.EXPERT_HIDDEN, example.HIDDEN) / example.EXPERT_HIDDEN**0.5
    up.requires_grad_()
    down.requires_grad_()

    torch.manual_seed(3 + rank.rank)
    x = torch.randn(num_tokens, example.HIDDEN, requires_grad=True)
    x_at_home = x.detach().clone().requires_grad_()
    weights_of_loss = torch.randn(num_tokens, example.HIDDEN)

    output = layer(x)
    (output * weights_of_loss).sum().backward()

    topk_weights, topk_idx = router(x_at_home).softmax(-1).topk(example.NUM_TOPK)
    gates = torch.zeros(num_tokens, example.NUM_EXPERTS).scatter(1, topk_idx, topk_weights)
    each = torch.einsum("teh,ehd->ted", F.gelu(torch.einsum("td,edh->teh", x_at_home, up)), down)
    output_at_home = torch.einsum("te,ted->td", gates, each)
    (output_at_home * weights_of_loss).sum().backward()
    for grad in (up.grad, down.grad):
        dist.all_reduce(grad, group=rank.group)

    mine = torch.arange(example.NUM_EXPERTS).tensor_split(rank.num_ranks)[rank.rank]
    assert layer.router.weight.grad.abs().max() > 0
    torch.testing.assert_close(output, output_at_home)
    torch.testing.assert_close(x.grad, x_at_home.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.router.weight.grad, router.weight.grad, rtol=1e-4, atol=1e-4)
    assert len(layer.experts) == len(mine)
    for expert, number in zip(layer.experts, mine, strict=True):
        torch.testing.assert_close(expert.up.grad, up.grad[number], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(expert.down.grad, down.grad[number], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_its_layer_gives_what_it_gives_with_all_experts_on_one_rank(pool, num_ranks):
    pool.run(num_ranks, compare_with_all_experts_at_home, 50)
