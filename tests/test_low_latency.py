#!/usr/bin/env python3
"""Verifies low-latency mode, with and without hooks, bfloat16 and fp8; then says how long its calls take.

    python tests/test_low_latency.py --num-experts 32 --batch-size 1024
    python tests/test_low_latency.py --num-experts 32 64 256 --batch-size 128
    python tests/test_low_latency.py --num-experts 32 --batch-size 128 --auto-tune

Every row that an expert receives is compared byte by byte with the specification, every sum element by element. One
line is printed for each claim; the exit code is 1 if one fails, 2 if the arguments make no sense. On GPUs, calls are
timed in CUDA graphs; on CPU ranks, one by one.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist

import verification
from deep_ep import tuned
from deep_ep.bench import oracle
from deep_ep.bench.case import Case
from deep_ep.bench.measure import measure
from deep_ep.tune.command import make_entry
from deep_ep.tune.search import SPACES, kind_of, search


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    verification.add_common_arguments(parser)
    parser.add_argument("--batch-size", type=int, default=128, help="tokens of each rank (default: 128)")
    parser.add_argument("--num-topk", type=int, default=8, help="experts of a token (default: 8)")
    parser.add_argument("--num-experts", type=int, nargs="+", default=[32], help="on all ranks (default: 32)")
    parser.add_argument(
        "--auto-tune", action="store_true", help="first search for the best launch parameters, and keep them"
    )
    return parser


def tune(talk: verification.Talk, case: Case, args: argparse.Namespace) -> None:
    rank = talk.rank
    kind = kind_of(case, rank.device.type)
    # No candidate is begun after a quarter of the limit, so that the rest has time.
    outcome = search(rank, kind(), SPACES[kind], [case], args.num_iterations, args.timeout_s / 4)
    if rank.rank == 0:
        device = tuned.cpu_device() if rank.device.type == "cpu" else torch.cuda.get_device_name(rank.device)
        path = tuned.save(device, make_entry(outcome, [case], rank.num_ranks))
        found = "the defaults are best" if outcome.tuning == kind() else f"{outcome.tuning}"
        times = f"{outcome.default_us[0]:.1f} us by default, {outcome.tuned_us[0]:.1f} us tuned"
        talk.say(f"Auto-tune: {found} ({times}, {len(outcome.trials)} candidates), kept in {path}")
    dist.barrier()


def verify(talk: verification.Talk, args: argparse.Namespace) -> None:
    rank = talk.rank
    for num_experts in args.num_experts:
        shape = {"num_tokens": args.batch_size, "hidden": args.hidden, "num_topk": args.num_topk}
        case = Case(mode="low-latency", num_experts=num_experts, **shape)
        fp8_case = Case(mode="low-latency", num_experts=num_experts, dtype="fp8", **shape)
        buffer = oracle.make_buffer(rank, case)
        for one in (case, fp8_case):
            talk.claims(buffer, one)
        if talk.num_failed:
            break  # what is wrong has no speed
        if args.auto_tune:
            buffer.destroy()
            tune(talk, fp8_case, args)
            buffer = oracle.make_buffer(rank, case)
        record = measure(rank, buffer, fp8_case, args.num_iterations)
        rival = ""
        if "torch_dispatch_us" in record:
            pair_us = record["torch_dispatch_us"] + record["torch_combine_us"]
            rival = f", torch.distributed {pair_us:.1f} us"
        talk.say(f"Latency for {num_experts} experts: {record['pair_us']:.1f} us ({fp8_case.shape}{rival})")
        talk.say(f"Dispatch latency: {record['dispatch_us']:.1f} us ({record['dispatch_gb_per_s']:.2f} GB/s)")
        talk.say(f"Combine latency: {record['combine_us']:.1f} us ({record['combine_gb_per_s']:.2f} GB/s)")
        talk.overlap(buffer, fp8_case, args.num_iterations)
        buffer.destroy()


def main(argv: list[str] | None = None) -> int:
    return verification.main(make_parser(), verify, argv)


if __name__ == "__main__":
    sys.exit(main())


def test_every_claim_of_the_program_is_printed_and_holds(tmp_path):
    arguments = "--device cpu --num-experts 32 --batch-size 16 --hidden 256 --num-iterations 4 --auto-tune"
    result = verification.run_program("test_low_latency.py", *arguments.split(), DEEP_EP_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("Dispatch", "Combine", "Dispatch with hook", "Combine with hook"):
        assert f"Test {name} with 32 experts: PASSED\n" in result.stdout
        assert f"Test {name} with 32 experts, fp8 rows: PASSED\n" in result.stdout
    for words in ("Latency for 32 experts: ", "Dispatch latency: ", "Combine latency: ", "Communication overlap: "):
        assert f"\n{words}" in result.stdout
    assert "\nAuto-tune: " in result.stdout
    assert len(list(tmp_path.glob("tuned/*.json"))) == 1
    assert result.stdout.endswith("All claims hold.\n")


def test_wrong_arguments_are_exit_code_2(capsys):
    assert main(["--device", "cpu", "--batch-size", "-1"]) == 2
    assert "num_tokens must be at least 0, got -1" in capsys.readouterr().err
