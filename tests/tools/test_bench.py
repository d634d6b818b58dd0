"""`deep-ep bench`: verified first, every field of a record, the picture, wrong usage."""

import json

import pytest
import torch
from click.testing import CliRunner

from deep_ep.bench import oracle
from deep_ep.bench.case import CASES, DEFAULT_CASES, Case, with_routing
from deep_ep.bench.command import choose_cases
from deep_ep.bench.ranks import RankFailedError, run_ranks
from deep_ep.bench.rival import TorchExchange
from deep_ep.cli import cli
from deep_ep.errors import ConfigError

NO_FLAGS = dict.fromkeys(("tokens", "hidden", "topk", "experts", "mode", "dtype"))


def bench(*arguments):
    return CliRunner().invoke(cli, ["bench", "--device", "cpu", *arguments])


def test_a_line_of_json_for_each_case_and_a_picture(tmp_path):
    picture = tmp_path / "curve.png"
    shape = ["--hidden", "64", "--topk", "2", "--iterations", "4"]
    result = bench("--tokens", "8,32", *shape, "--json", "--plot", str(picture))
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["num_tokens"] for record in records] == [8, 32]
    for record in records:
        assert record["num_claims"] == 4
        # A row is 128 bytes, and goes to at most two ranks.
        assert 0 < record["sent_bytes"] <= 2 * 128 * record["num_tokens"]
        for name in ("dispatch", "combine"):
            assert record[f"{name}_us"] > 0
            assert record[f"{name}_ratio"] == pytest.approx(record[f"torch_{name}_us"] / record[f"{name}_us"], rel=0.01)
            assert record[f"{name}_gb_per_s"] > 0
        assert record["torch"] == torch.__version__
        assert record["routing"] == "uniform"
        assert "slowest rank" in record["clock"]
        assert {"machine", "driver", "python", "triton", "deep_ep", "commit", "num_ranks", "device"} <= record.keys()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_table_with_overlap_and_low_latency():
    shape = ["--tokens", "8", "--hidden", "64", "--topk", "2", "--iterations", "4"]
    result = bench("--mode", "low-latency", "--dtype", "fp8", *shape, "--routing", "zipf", "--overlap")
    assert result.exit_code == 0, result.output
    for word in ("dispatch", "combine", "pair", "zipf", "8 x 64, top-2 of 8, fp8", "torch us", "Overlap of custom: "):
        assert word in result.stdout
    assert "custom, 8 tokens: 4 claims verified, then timed." in result.stderr


def test_named_cases_are_listed():
    result = bench("--list")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in CASES)


def test_names_and_flags_choose_cases():
    assert [case.name for case in choose_cases((), "cpu", NO_FLAGS)] == list(DEFAULT_CASES["cpu"])
    assert choose_cases(("train",), "cuda", NO_FLAGS) == [CASES["train"]]
    chosen = choose_cases((), "cpu", NO_FLAGS | {"tokens": [1, 2], "experts": [16, 32]})
    assert [(case.num_tokens, case.num_experts) for case in chosen] == [(1, 16), (1, 32), (2, 16), (2, 32)]
    (chosen,) = choose_cases(("train",), "cpu", NO_FLAGS | {"hidden": [64], "dtype": "fp8"})
    assert (chosen.num_tokens, chosen.hidden, chosen.dtype) == (4096, 64, "fp8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "there is no case 'nonsense'\nhint: one of tiny, "),
        (["--topk", "9"], "num_topk must be at most num_experts, got num_topk=9, num_experts=8"),
        (["--tokens", "-1"], "num_tokens must be at least 0, got -1"),
        (["--tokens", "many"], "'many' is not a list of numbers like 64,256"),
        (["--routing", "/nonexistent"], "routing must be one of uniform, zipf, one-hot or a file"),
        (["--sms", "8"], "--sms is for GPUs"),
        (["--ranks", "0"], "0 is not in the range"),
    ],
)
def test_wrong_usage_is_a_sentence_and_exit_code_2(arguments, message):
    result = bench(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_a_missing_gpu_is_a_sentence(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(cli, ["bench", "--device", "cuda"])
    assert result.exit_code == 1
    assert "no GPU that torch can use was found\nhint: --device cpu" in result.stderr


def test_without_matplotlib_there_is_one_sentence_and_the_remedy(monkeypatch):
    monkeypatch.setattr("deep_ep.extras.find_spec", lambda _: None)
    result = bench("--plot", "picture.png")
    assert result.exit_code == 2
    assert result.stderr.endswith("matplotlib, which is not installed\nhint: pip install 'deep-ep[plot]'\n")


@pytest.mark.parametrize("routing", ["uniform", "zipf", "one-hot"])
def test_routing_is_what_its_name_says(routing):
    case = Case(num_tokens=2000, num_topk=2, num_experts=8, hidden=1, routing=routing)
    topk_idx = case.inputs(0, 2).topk_idx
    counts = torch.bincount(topk_idx[topk_idx >= 0], minlength=8).sort(descending=True).values
    if routing == "one-hot":
        assert counts.tolist() == [2000, 0, 0, 0, 0, 0, 0, 0]
        return
    assert bool((topk_idx[:, 0] != topk_idx[:, 1]).all())
    assert (counts[0] > 2 * counts[4]) == (routing == "zipf")
    # Ranks agree about the popular expert, and have other tokens.
    other = case.inputs(1, 2).topk_idx
    assert not torch.equal(other, topk_idx)
    if routing == "zipf":
        assert torch.bincount(other.view(-1)).argmax() == torch.bincount(topk_idx.view(-1)).argmax()


def test_routing_comes_from_a_file(tmp_path):
    path = str(tmp_path / "routing.pt")
    topk_idx = torch.tensor([[[0, 11], [1, -1], [2, 3]], [[4, 5], [6, 7], [8, 9]]])
    torch.save(topk_idx, path)
    case = with_routing(Case(num_experts=8), path)
    assert (case.num_tokens, case.num_topk, case.num_experts) == (3, 2, 12)
    assert torch.equal(case.inputs(1, 2).topk_idx, topk_idx[1])
    with pytest.raises(ConfigError, match="has the routing of 2 ranks, but there are 3"):
        case.inputs(0, 3)
    torch.save(torch.rand(3, 2), path)
    with pytest.raises(ConfigError, match="must hold expert ids"):
        with_routing(Case(), path)


def break_a_byte(rank):
    """Let the specification differ from what arrives by one element; the claims must notice."""
    case = Case(num_tokens=8, hidden=16)
    buffer = oracle.make_buffer(rank, case)
    original = oracle.reference.dispatch

    def dispatch(*args, **kwargs):
        received = original(*args, **kwargs)
        received[1].x[2, 3] ^= 1
        return received

    oracle.reference.dispatch = dispatch
    try:
        return list(oracle.verify(rank, buffer, case))
    finally:
        oracle.reference.dispatch = original


def test_one_wrong_bit_is_noticed_on_all_ranks():
    for claims in run_ranks(2, break_a_byte):
        assert [(claim.name, claim.error is None) for claim in claims] == [("Layout", True), ("Dispatch", False)]
        assert "rank 1: 1 of " in claims[1].error


def compare_rival(rank):
    case = Case(num_tokens=20, hidden=8, num_topk=3, num_experts=7, routing="one-hot", seed=rank.num_ranks)
    inputs = case.inputs(rank.rank, rank.num_ranks)
    inputs.topk_idx[::2, 1:] = torch.tensor([[5, 2]])
    TorchExchange(7).verify(*inputs)
    wrong = inputs.x * 2
    exchange = TorchExchange(7)
    exchange.combine = lambda *_: wrong
    exchange.verify(*inputs)


def test_the_rival_is_checked_too():
    with pytest.raises(RankFailedError, match=r"torch\.distributed brought back other sums"):
        run_ranks(3, compare_rival)
