#!/usr/bin/env python3
"""Verifies normal mode between the ranks of one host, then says how fast it is.

    python tests/test_intranode.py
    python tests/test_intranode.py --num-processes 4 --num-experts 8 64
    torchrun --nproc-per-node 8 tests/test_intranode.py

Every row that a rank receives is compared byte by byte with the specification, every sum element by element. One line
is printed for each claim; the exit code is 1 if one fails, 2 if the arguments make no sense.
"""

from __future__ import annotations

import argparse
import sys

import verification
from deep_ep.bench import oracle
from deep_ep.bench.case import Case
from deep_ep.bench.measure import measure


def verify(talk: verification.Talk, args: argparse.Namespace) -> None:
    rank = talk.rank
    for shape in verification.normal_mode_shapes(rank, args):
        buffer = oracle.make_buffer(rank, Case(**shape))
        for dtype, routing in (("bf16", "uniform"), ("bf16", "zipf"), ("bf16", "one-hot"), ("fp8", "uniform")):
            talk.claims(buffer, Case(**shape, dtype=dtype, routing=routing))
        if talk.num_failed:
            break  # what is wrong has no speed
        case = Case(**shape)
        record = measure(rank, buffer, case, args.num_iterations)
        for call in ("dispatch", "combine"):
            us, rate = record[f"{call}_us"], record[f"{call}_gb_per_s"]
            ratio = f", torch.distributed {record[f'torch_{call}_us']:.1f} us" if f"torch_{call}_us" in record else ""
            talk.say(f"{call.capitalize()} latency: {us:.1f} us for {case.shape} ({rate:.2f} GB/s{ratio})")
        talk.overlap(buffer, case, args.num_iterations)
        buffer.destroy()


def main(argv: list[str] | None = None) -> int:
    return verification.main(verification.make_normal_mode_parser(__doc__), verify, argv)


if __name__ == "__main__":
    sys.exit(main())


def test_every_claim_of_the_program_is_printed_and_holds():
    result = verification.run_program(
        "test_intranode.py", "--device", "cpu", "--num-tokens", "48", "--num-iterations", "4"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("Layout", "Dispatch", "Cached dispatch", "Combine"):
        assert f"Test {name} with 8 experts: PASSED\n" in result.stdout
        assert f"Test {name} with 8 experts, fp8 rows: PASSED\n" in result.stdout
    assert "Dispatch latency: " in result.stdout
    assert "Combine latency: " in result.stdout
    assert "Communication overlap: " in result.stdout
    assert result.stdout.startswith("deep_ep ")
    assert "2 CPU ranks" in result.stdout
    assert result.stdout.endswith("All claims hold.\n")
    assert "FAILED" not in result.stdout


def test_wrong_shapes_are_exit_code_2(capsys):
    assert main(["--device", "cpu", "--num-topk", "9", "--num-experts", "8"]) == 2
    assert "num_topk must be at most num_experts" in capsys.readouterr().err
    assert verification.run_program("test_intranode.py", "--num-token-s", "x").returncode == 2
