"""What the three verification programs share: ranks, claims, one line for each, and the exit code.

A program gives `main` a function that runs on every rank and says lines; rank 0's are printed. Launched by torchrun or
mpirun, a process is one of the ranks; otherwise the program starts ranks of its own on this host.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import deep_ep
from deep_ep import Buffer
from deep_ep.bench import facts, oracle
from deep_ep.bench.case import Case
from deep_ep.bench.launcher import find_place
from deep_ep.bench.overlap import measure_overlap
from deep_ep.bench.ranks import Rank, RankFailedError, choose_device, joined, run_ranks
from deep_ep.errors import ConfigError, DeepEPError


class Talk:
    """Says lines in the name of all ranks, and counts what failed."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.num_failed = rank, 0

    def say(self, line: str) -> None:
        """Print a line, once."""
        if self.rank.rank == 0:
            self.rank.report(line)

    def claims(self, buffer: Buffer, case: Case) -> None:
        """Verify a case and say a line for each claim, with the reason under one that failed."""
        experts = f"{'' if case.routing == 'uniform' else f'{case.routing} routing to '}{case.num_experts}"
        what = f"with {experts} experts" + ("" if case.dtype == "bf16" else f", {case.dtype} rows")
        for claim in oracle.verify(self.rank, buffer, case):
            self.say(f"Test {claim.name} {what}: {'FAILED' if claim.error else 'PASSED'}")
            if claim.error:
                self.num_failed += 1
                self.say(f"  {claim.error}")

    def overlap(self, buffer: Buffer, case: Case, num_iterations: int) -> None:
        """Say how much of an exchange hides behind a matrix product."""
        if case.mode == "normal" and self.rank.device.type == "cpu":
            self.say("Communication overlap: 0 % (on CPU ranks a normal call is done when it returns)")
            return
        times = measure_overlap(self.rank, buffer, case, num_iterations)
        parts = "exchange {exchange_us:.0f} us, compute {compute_us:.0f} us, both {both_us:.0f} us".format(**times)
        self.say(f"Communication overlap: {100 * times['overlap']:.0f} % ({parts})")

    def welcome(self) -> None:
        """Say what runs where."""
        device = facts.look().device
        kind = "GPU" if self.rank.device.type == "cuda" else "CPU"
        num_ranks = self.rank.num_ranks
        self.say(
            f"deep_ep {deep_ep.__version__}: {num_ranks} {kind} rank{'' if num_ranks == 1 else 's'} ({device}), "
            f"torch {torch.__version__}"
        )


def make_normal_mode_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a program that verifies normal mode."""
    parser = argparse.ArgumentParser(description=description)
    add_common_arguments(parser)
    parser.add_argument("--num-tokens", type=int, help="of each rank (default: 256 on CPU ranks, 4096 on GPUs)")
    parser.add_argument("--num-topk", type=int, default=4, help="experts of a token (default: 4)")
    parser.add_argument("--num-experts", type=int, nargs="+", default=[8], help="on all ranks (default: 8)")
    return parser


def normal_mode_shapes(rank: Rank, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the shape of each number of experts that was asked for, as arguments of `Case`."""
    num_tokens = args.num_tokens or (4096 if rank.device.type == "cuda" else 256)
    return [
        {"num_tokens": num_tokens, "hidden": args.hidden, "num_topk": args.num_topk, "num_experts": num_experts}
        for num_experts in args.num_experts
    ]


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what all three programs take."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--num-processes", type=int, help="ranks to start, if no launcher did (default: 2, or one for each GPU)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="what ranks run on (default: GPUs if there are any)")
    parser.add_argument("--hidden", type=int, help="size of a token's row (default: 1024 on CPU ranks, 7168 on GPUs)")
    parser.add_argument("--num-iterations", type=int, default=20, help="how often a call is timed (default: 20)")
    parser.add_argument(
        "--timeout-s", type=float, default=540, help="limit for ranks that the program starts (default: 540)"
    )


def main(
    parser: argparse.ArgumentParser,
    function: Callable[[Talk, argparse.Namespace], None],
    argv: list[str] | None,
    variables: Callable[[int], dict[str, str]] | None = None,
) -> int:
    """Run a program; return its exit code: 0, 1 if a claim failed, 2 if it was called in a wrong way."""
    args = parser.parse_args(argv)
    try:
        args.device = choose_device(args.device)
        if args.hidden is None:
            args.hidden = 7168 if args.device == "cuda" else 1024
        place = find_place()
        if place is not None:
            if args.num_processes not in (None, place.num_ranks):
                raise ConfigError(
                    f"--num-processes is {args.num_processes}, but the launcher started {place.num_ranks} ranks"
                )
            with joined(place, args.device) as rank:
                rank.report = functools.partial(print, flush=True)
                num_failed = _run(rank, function, args)
                dist.barrier()
        else:
            num_ranks = args.num_processes
            if num_ranks is None:
                num_ranks = max(torch.cuda.device_count(), 1) if args.device == "cuda" else 2
            (num_failed, *_) = run_ranks(
                num_ranks,
                _run,
                function,
                args,
                device=args.device,
                timeout_s=args.timeout_s,
                variables=variables,
                on_report=functools.partial(print, flush=True),
            )
    except DeepEPError as error:
        sys.stdout.flush()
        print(f"FAILED: {error}", file=sys.stderr)
        if isinstance(error, RankFailedError) and error.trace:
            print(error.trace, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    if place is None or place.rank == 0:
        print(f"{num_failed} claims FAILED" if num_failed else "All claims hold.", flush=True)
    return 1 if num_failed else 0


def _run(rank: Rank, function: Callable[[Talk, argparse.Namespace], None], args: argparse.Namespace) -> int:
    talk = Talk(rank)
    talk.welcome()
    function(talk, args)
    return talk.num_failed


def run_program(name: str, *arguments: str, prefix: tuple[str, ...] = (), **environment: str) -> Any:
    """Run a program as a user does; return the completed process."""
    import subprocess
    from pathlib import Path

    program = Path(__file__).parent / name
    return subprocess.run(
        [*prefix, sys.executable, str(program), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
