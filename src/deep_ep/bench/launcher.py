"""Who started this process: torchrun, mpirun, srun or a person. What a launcher tells its ranks, in one form."""

from __future__ import annotations

import os
import re
import socket
import tempfile
import zlib
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

    torchrun, `mpirun` of Open MPI and of MPICH, and `srun` are known.

    Raises:
        ConfigError: If it is a rank of several hosts and cannot know where to meet the others.
    """
    variables = env.variables_set(
        "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_COMM_", "PMI", "MPI_LOCAL", "OMPI_MCA_", "SLURM_"
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
    if {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"} <= variables.keys():
        return _find_slurm_place(variables)
    return None


def _find_slurm_place(variables: dict[str, str]) -> Place:
    """Return the place that `srun` gave. A batch script itself is no rank: it belongs to no step of that kind."""
    rank, num_ranks = int(variables["SLURM_PROCID"]), int(variables["SLURM_STEP_NUM_TASKS"])
    tasks = _expand_tasks(variables.get("SLURM_STEP_TASKS_PER_NODE", str(num_ranks)))
    num_local_ranks = tasks[min(int(variables.get("SLURM_NODEID", "0")), len(tasks) - 1)]
    address = variables.get("MASTER_ADDR") or _first_host(variables["SLURM_STEP_NODELIST"])
    # Ports below those that systems hand out, one for each step: two steps may share a host.
    step = f"{variables.get('SLURM_JOB_ID', '')}.{variables.get('SLURM_STEP_ID', '')}"
    port = variables.get("MASTER_PORT") or str(20000 + zlib.crc32(step.encode()) % 12000)
    local_rank = int(variables.get("SLURM_LOCALID", rank))
    return Place(rank, num_ranks, local_rank, num_local_ranks, f"tcp://{address}:{port}")


def _expand_tasks(text: str) -> list[int]:
    """Return the tasks of each node.

    Example:
        >>> _expand_tasks("2(x3),1")
        [2, 2, 2, 1]
    """
    tasks: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(count)] * int(times or 1)
    return tasks


def _first_host(nodes: str) -> str:
    """Return the first host of a list in Slurm's short form.

    Example:
        >>> _first_host("gpu[007-009,012],login1"), _first_host("a1,a2"), _first_host("rack[1-2]n[3-4]")
        ('gpu007', 'a1', 'rack1n3')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first.group() if first else nodes)


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
