"""Injects faults into exchanges of CPU ranks and checks what the survivors report and what is left behind.

python tests/faults/injection.py --faults 1000 --json benchmarks/results/faults.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import ranks
from forked_ranks import ForkedRanks

LIMIT_S = 15.0
REPORTED = ("kill", "stop", "exception", "exit", "too late")
"""The survivors must name the victim."""
UNNOTICED = ("late", "fork", "no destroy", "destroy at different times", "exit apart")
"""Nobody must notice."""
NO_MEMORY = ("out of memory", "shared memory full", "file size limit")
"""All ranks must be told whose memory is missing, and a second try must succeed."""
KINDS = (*REPORTED, *UNNOTICED, *NO_MEMORY, "opposite order")
EXIT_CODES = {"kill": -9, "stop": -9, "exception": 1, "exit": 7}


@dataclass(frozen=True)
class Fault:
    kind: str
    num_ranks: int
    victim: int
    seed: int


def draw(num_faults: int, seed: int) -> list[Fault]:
    """Draw faults, of each kind as many."""
    numbers = random.Random(seed)
    faults = []
    for number in range(num_faults):
        num_ranks = numbers.randint(2, 4)
        kind = KINDS[number % len(KINDS)]
        faults.append(Fault(kind, num_ranks, numbers.randrange(num_ranks), numbers.randrange(1 << 20)))
    return faults


def inject(fault: Fault, slack_s: float) -> tuple[Fault, str, float]:
    """Inject one fault; return what was wrong, if anything, and the longest time until a report."""
    function = ranks.use_in_opposite_order if fault.kind == "opposite order" else ranks.meet_a_fault
    args = (fault.kind, fault.victim, fault.seed, LIMIT_S)
    with ForkedRanks(fault.num_ranks, function, *args) as group:
        pids = [process.pid for process in group.processes]
        survivors = [rank for rank in range(fault.num_ranks) if rank != fault.victim or fault.kind not in REPORTED]
        outcomes = group.wait_of(survivors)
        # What is stopped does not end by itself.
        if fault.kind == "stop":
            group.processes[fault.victim].kill()
        outcomes |= group.wait_of([fault.victim])
    trouble = [*check(fault, outcomes, slack_s), *(f"process {pid} is left" for pid in pids if is_alive(pid))]
    after_s = [o.result["after_s"] for rank, o in outcomes.items() if rank in survivors and o.result]
    return fault, "\n".join(trouble), max(after_s, default=0.0)


def check(fault: Fault, outcomes: dict, slack_s: float) -> list[str]:
    """Return what is not as it must be."""
    trouble = []
    for rank, outcome in outcomes.items():
        is_victim = rank == fault.victim
        code = EXIT_CODES.get(fault.kind, 0) if is_victim else 0
        if outcome.exit_code != code:
            trouble.append(f"rank {rank} ended with {outcome.exit_code}, not {code}:\n{outcome.output}")
            continue
        if code or (is_victim and fault.kind == "too late"):
            continue
        told = outcome.result or {}
        if fault.kind in UNNOTICED and told:
            trouble.append(f"rank {rank} was told {told}")
        if fault.kind in NO_MEMORY and (
            told.get("error") != "CapacityError" or f"rank {fault.victim}" not in told["message"]
        ):
            trouble.append(f"rank {rank} was told {told}, not that rank {fault.victim} has no memory")
        if fault.kind in REPORTED or fault.kind == "opposite order":
            others = [r for r in range(fault.num_ranks) if r != rank]
            named = others if is_victim else [fault.victim]
            if told.get("error") != "PeerTimeoutError" or told["missing"] != named:
                trouble.append(f"rank {rank} was told {told}, not that {named} are missing")
            elif told["after_s"] > LIMIT_S + slack_s:
                trouble.append(f"rank {rank} was told after {told['after_s']:.1f} s")
    return trouble


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def inject_all(faults: list[Fault], num_at_once: int, slack_s: float) -> dict[str, object]:
    """Inject faults, several at the same time, and return the counts."""
    began_s, files = time.monotonic(), set(os.listdir("/dev/shm"))
    with ThreadPoolExecutor(num_at_once) as threads:
        results = list(threads.map(lambda fault: inject(fault, slack_s), faults))
    wrong = [f"{fault}: {trouble}" for fault, trouble, _ in results if trouble]
    left = sorted(name for name in set(os.listdir("/dev/shm")) - files if "deep_ep" in name)
    return {
        "tried": Counter(fault.kind for fault in faults),
        "survived": Counter(fault.kind for fault, trouble, _ in results if not trouble),
        "limit_s": LIMIT_S,
        "longest_until_report_s": round(max((after_s for _, _, after_s in results), default=0.0), 2),
        "left_in_dev_shm": left,
        "wrong": wrong,
        "took_s": round(time.monotonic() - began_s, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    counts = inject_all(draw(arguments.faults, arguments.seed), arguments.at_once, slack_s=1.0)
    text = json.dumps(counts, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    sys.exit(bool(counts["wrong"]))
