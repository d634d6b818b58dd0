"""Who started this process: torchrun, mpirun, or a person. What a launcher tells its ranks, in one form."""

from __future__ import annotations

import os
import socket
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from deep_ep import env
from deep_ep.errors import ConfigError

_DEFAULT_PORT = "29500"


class Place(NamedTuple):
    """Where a process stands among the ranks.

    Attributes:
        rank: Its number.
        num_ranks: How many there are.
        local_rank: Its number on its host.
        num_local_ranks: How many are on its host.
        init_method: Where the ranks meet, as `torch.distributed.init_process_group` takes it.
    """

    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int
    init_method: str


def find_place() -> Place | None:
    """Return the place that a launcher gave to this process; None if nobody launched it as a rank.

    torchrun, and `mpirun` of Open MPI and of MPICH, are known.

    Raises:
        ConfigError: If it is a rank of several hosts and cannot know where to meet the others.
    """
    variables = env.variables_set(
        "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_COMM_", "PMI", "MPI_LOCAL", "OMPI_MCA_"
    )
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= variables.keys():
        rank, num_ranks = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        local_rank = int(variables.get("LOCAL_RANK", rank))
        return Place(rank, num_ranks, local_rank, int(variables.get("LOCAL_WORLD_SIZE", num_ranks)), "env://")
    for prefix, local_rank_name, num_local_name in (
        ("OMPI_COMM_WORLD_", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        if f"{prefix}RANK" in variables and f"{prefix}SIZE" in variables:
            rank, num_ranks = int(variables[f"{prefix}RANK"]), int(variables[f"{prefix}SIZE"])
            local_rank = int(variables.get(local_rank_name, rank))
            num_local_ranks = int(variables.get(num_local_name, num_ranks))
            init_method = _meeting_point(variables, num_ranks, is_one_host=num_local_ranks == num_ranks)
            return Place(rank, num_ranks, local_rank, num_local_ranks, init_method)
    return None


def _meeting_point(variables: dict[str, str], num_ranks: int, *, is_one_host: bool) -> str:
    """Find where ranks of mpirun meet, which MPI knows and torch must be told."""
    if "MASTER_ADDR" in variables:
        return f"tcp://{variables['MASTER_ADDR']}:{variables.get('MASTER_PORT', _DEFAULT_PORT)}"
    address = _ask_rank_0(num_ranks) if find_spec("mpi4py") is not None else None
    if address is not None:
        return address
    job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid") or variables.get("PMI_ID")
    if is_one_host and job:
        # The name is that of one run of mpirun on this host.
        name = "".join(letter if letter.isalnum() else "-" for letter in job)
        return f"file://{Path(tempfile.gettempdir()) / f'deep-ep-{name}-{os.getppid()}'}"
    raise ConfigError(
        "ranks of mpirun need a place to meet, but MASTER_ADDR is not set and mpi4py is not installed for this MPI",
        hint="run `mpirun -x MASTER_ADDR=host-of-rank-0 ...`, or `pip install mpi4py` on all hosts",
    )


def _ask_rank_0(num_ranks: int) -> str | None:
    """Let rank 0 choose a port; return None if mpi4py belongs to another MPI than the one that runs us."""
    from mpi4py import MPI

    comm: Any = MPI.COMM_WORLD
    if comm.Get_size() != num_ranks:
        return None
    address = None
    if comm.Get_rank() == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            address = f"tcp://{socket.gethostname()}:{free.getsockname()[1]}"
    return str(comm.bcast(address))
