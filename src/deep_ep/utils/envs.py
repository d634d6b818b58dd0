"""Where a test program runs: its ranks, its seeds and its links, with the names and results of DeepEP's module.

These functions are for tests. The library itself reads environment variables in `deep_ep.env` only; the ones that are
read here are those with which launchers tell torch where the ranks meet.
"""

from __future__ import annotations

import functools
import os
import random
import re
import shutil
import socket
import subprocess
from pathlib import Path

import torch
import torch.distributed as dist

from deep_ep.errors import UnsupportedError

_state = {"local_rank": 0, "local_seed": 0, "global_seed": 0}


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, dist.ProcessGroup]:
    """Join the ranks of a test: each calls this once, in a process of its own.

    Ranks meet at MASTER_ADDR (127.0.0.1) and MASTER_PORT (8361). WORLD_SIZE (1) is here the number of hosts, and RANK
    (0) the index of this one. Where there is a GPU, the backend is NCCL and the default device is the GPU of that local
    rank; elsewhere it is Gloo, on the CPU. The default dtype becomes bfloat16.

    Args:
        local_rank: Index of this process on its host.
        num_local_ranks: Processes of a host.
        seed: Seeds of ranks are this plus their rank.

    Returns:
        The rank, the number of ranks, and their group.
    """
    has_gpu = torch.cuda.is_available()
    num_hosts, host = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "8361")
    dist.init_process_group(
        "nccl" if has_gpu else "gloo",
        init_method=f"tcp://{address}:{port}",
        world_size=num_hosts * num_local_ranks,
        rank=host * num_local_ranks + local_rank,
        device_id=torch.device("cuda", local_rank) if has_gpu else None,
    )
    torch.set_default_dtype(torch.bfloat16)
    if has_gpu:
        torch.set_default_device("cuda")
        torch.cuda.set_device(local_rank)
    _state["local_rank"] = local_rank
    init_seed(seed)
    group = dist.new_group(list(range(num_hosts * num_local_ranks)))
    return dist.get_rank(), dist.get_world_size(), group


def init_seed(seed: int) -> None:
    """Seed torch and `random` with `seed` plus this rank."""
    _state["global_seed"], _state["local_seed"] = seed, seed + dist.get_rank()
    torch.manual_seed(_state["local_seed"])
    random.seed(_state["local_seed"])


def get_local_seed() -> int:
    """Return what this rank was seeded with."""
    return _state["local_seed"]


def get_global_seed() -> int:
    """Return what `init_seed` was given."""
    return _state["global_seed"]


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Print on every rank, or on the first of each host, and wait for all ranks."""
    if not once_in_node or _state["local_rank"] == 0:
        print(s, flush=True)  # noqa: T201 (it is what this is for)
    dist.barrier()


def get_physical_domain_size(group: dist.ProcessGroup) -> tuple[int, int]:
    """Return how many hosts the ranks of a group are on, and how many ranks each of them has.

    Raises:
        UnsupportedError: If hosts have different numbers of ranks.
    """
    names: list[str] = [""] * dist.get_world_size(group)
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    dist.all_gather_object(names, socket.gethostname() + (boot_id.read_text() if boot_id.exists() else ""), group)
    num_ranks_of_host = [names.count(name) for name in dict.fromkeys(names)]
    if len(set(num_ranks_of_host)) > 1:
        raise UnsupportedError(f"hosts must have equally many ranks of a group, got {num_ranks_of_host}")
    return len(num_ranks_of_host), num_ranks_of_host[0]


def get_logical_domain_size(group: dist.ProcessGroup, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Return the physical sizes; without hybrid mode all ranks count as those of one host."""
    return get_physical_domain_size(group) if allow_hybrid_mode else (1, dist.get_world_size(group))


def check_nvlink_connections(group: dist.ProcessGroup) -> None:
    """Check that PCIe cards which are joined in pairs only are not more than a pair.

    Raises:
        UnsupportedError: If the GPU is a PCIe card and the group has more than two ranks.
    """
    if not torch.cuda.is_available() or "PCIE" not in torch.cuda.get_device_name():
        return
    if dist.get_world_size(group) > 2:
        raise UnsupportedError(
            f"{torch.cuda.get_device_name()} has NVLink in pairs at most, got {dist.get_world_size(group)} ranks"
        )


def check_torch_deterministic() -> None:
    """Check that torch does not fill every new tensor, which would overlap with communication.

    Raises:
        UnsupportedError: If deterministic algorithms and the filling of uninitialised memory are both on.
    """
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if torch.are_deterministic_algorithms_enabled() and fills:
        raise UnsupportedError(
            "torch fills uninitialised memory while deterministic algorithms are on",
            hint="torch.utils.deterministic.fill_uninitialized_memory = False",
        )


@functools.lru_cache
def get_nvlink_gbs(factor: float = 0.9) -> float:
    """Return the bandwidth of all NVLinks of the first GPU together in GB/s, times a factor; 0 if there are none."""
    of_gpus = re.split(r"^GPU \d+:", _output_of("nvidia-smi", "nvlink", "-s"), flags=re.MULTILINE)
    links = re.findall(r"Link \d+:\s*([\d.]+) GB/s", of_gpus[1] if len(of_gpus) > 1 else "")
    return sum(map(float, links)) * factor


@functools.lru_cache
def check_fast_rdma_atomic_support(nic_name: str = "mlx5_0") -> bool:
    """Tell whether a network adapter is of the type MT4131, whose atomics are fast."""
    return _of_adapter(nic_name, r"CA type:\s*(\S+)") == "MT4131"


@functools.lru_cache
def get_rdma_gbs(nic_name: str = "mlx5_0") -> float:
    """Return the bandwidth of a network adapter in GB/s; 0 if there is none."""
    return float(_of_adapter(nic_name, r"Rate:\s*(\d+)") or 0) / 8


def _of_adapter(nic_name: str, pattern: str) -> str | None:
    _, _, rest = _output_of("ibstat").partition(f"CA '{nic_name}'")
    match = re.search(pattern, rest.partition("\nCA '")[0])
    return match.group(1) if match else None


def _output_of(program: str, *args: str) -> str:
    """Return what a program prints; nothing if it is not there or fails."""
    path = shutil.which(program)
    if path is None:
        return ""
    process = subprocess.run([path, *args], capture_output=True, text=True, timeout=30, check=False)
    return process.stdout if process.returncode == 0 else ""
