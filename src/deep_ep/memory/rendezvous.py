"""The few integers that ranks exchange through the program's process group while a buffer is made.

Only integers travel, never pickled objects, and never on the path of tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deep_ep.errors import ConfigError

AllGather = Callable[[Sequence[int]], list[list[int]]]
"""Gives every rank the integers of every rank, in rank order; all ranks pass equally many."""


class Rendezvous:
    """A group of ranks that can exchange integers.

    Args:
        group: Any process group: Gloo or NCCL, a sub-group or the world.
        comm: An mpi4py communicator, for programs without torch.distributed; used if `group` is None.

    Raises:
        ConfigError: If there is neither.
    """

    def __init__(self, group: dist.ProcessGroup | None, comm: Any = None) -> None:
        if group is None and comm is None:
            raise ConfigError("group and comm are both None; pass a torch.distributed process group")
        self.rank: int
        self.num_ranks: int
        self.all_gather: AllGather
        if group is not None:
            self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
            if self.rank < 0:
                raise ConfigError("this process is not a member of the group it was given")
            self.all_gather = _torch_all_gather(group)
        else:
            self.rank, self.num_ranks = comm.Get_rank(), comm.Get_size()
            self.all_gather = _mpi_all_gather(comm)


def _torch_all_gather(group: dist.ProcessGroup) -> AllGather:
    # A backend config reads like "cpu:gloo,cuda:nccl".
    devices = [part.split(":")[0] for part in dist.get_backend_config(group).split(",")]
    device = "cpu" if "cpu" in devices else "cuda"

    def all_gather(words: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(list(words), dtype=torch.int64, device=device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, mine, group=group)
        return [words.tolist() for words in everyone]

    return all_gather


def _mpi_all_gather(comm: Any) -> AllGather:
    def all_gather(words: Sequence[int]) -> list[list[int]]:
        mine = array("q", words)
        everyone = array("q", bytes(8 * len(mine) * comm.Get_size()))
        comm.Allgather(mine, everyone)
        return [list(everyone[i : i + len(mine)]) for i in range(0, len(everyone), len(mine))]

    return all_gather
