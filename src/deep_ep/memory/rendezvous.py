"""The few integers that ranks exchange through the program's process group while a buffer is made.

Only integers travel, never pickled objects, and never on the path of tokens.
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import socket
import struct
from array import array
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from deep_ep import env
from deep_ep.errors import ConfigError, PeerTimeoutError

_SIOCGIFADDR = 0x8915

AllGather = Callable[[Sequence[int]], list[list[int]]]
"""Gives every rank the integers of every rank, in rank order; all ranks pass equally many."""


class Rendezvous:
    """A group of ranks that can exchange integers.

    Attributes:
        rank, num_ranks: This rank and the number of ranks.
        ranks: What to call each of them in messages.
        all_gather: How they exchange integers.
        timeout_s: How long such an exchange may take; None leaves that to the group. (NCCL's own limit holds anyway.)

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
        self.ranks: Sequence[int]
        self._group = group
        self.timeout_s: float | None = None
        if group is not None:
            self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
            if self.rank < 0:
                raise ConfigError("this process is not a member of the group it was given")
            self.all_gather = _torch_all_gather(group, self)
        else:
            self.rank, self.num_ranks = comm.Get_rank(), comm.Get_size()
            self.all_gather = _mpi_all_gather(comm)
        self.ranks = range(self.num_ranks)

    def make_store(self, name: str) -> Store:
        """Return a store of this group's ranks that is used for nothing else. All ranks call it together.

        Args:
            name: What it is for.
        """
        nonce = secrets.randbits(62)
        address, port = 0, 0
        own_store: Store | None = None if self._group is None else self._group.get_group_store()
        if own_store is None and self.rank == 0:
            own_store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
            address, port = int.from_bytes(socket.inet_aton(_own_address())), own_store.port
        nonce, address, port = self.all_gather([nonce, address, port])[0]
        if own_store is None:
            own_store = TCPStore(socket.inet_ntoa(address.to_bytes(4)), port, is_master=False)
        return PrefixStore(f"deep_ep/{name}/{nonce}", own_store)


def _own_address() -> str:
    """Return an address of this host that other hosts may reach."""
    name = env.GLOO_SOCKET_IFNAME.get()
    address = interface_address(name) if name else None
    if address is None:
        with contextlib.suppress(OSError):
            address = socket.gethostbyname(socket.gethostname())
    return address or "127.0.0.1"


def interface_address(name: str) -> str | None:
    """Return the IPv4 address of a network interface, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])


def _torch_all_gather(group: dist.ProcessGroup, rendezvous: Rendezvous) -> AllGather:
    # A backend config reads like "cpu:gloo,cuda:nccl".
    devices = [part.split(":")[0] for part in dist.get_backend_config(group).split(",")]
    device = "cpu" if "cpu" in devices else "cuda"

    def all_gather(words: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(list(words), dtype=torch.int64, device=device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        if device == "cpu" and rendezvous.timeout_s is not None:
            _wait_for(dist.all_gather(everyone, mine, group=group, async_op=True), rendezvous)
        else:
            dist.all_gather(everyone, mine, group=group)
        return [words.tolist() for words in everyone]

    return all_gather


def _wait_for(work: Any, rendezvous: Rendezvous) -> None:
    assert rendezvous.timeout_s is not None, "the caller has looked"
    try:
        work.wait(timedelta(seconds=rendezvous.timeout_s))
    except RuntimeError as error:
        reason = str(error).split(" Exception raised from")[0].strip()
        raise PeerTimeoutError(
            f"rank {rendezvous.rank}: not all of the {rendezvous.num_ranks} ranks came to make a buffer within "
            f"{rendezvous.timeout_s} s, or one of them has ended ({reason})",
            [],
            hint="all ranks of the group must construct the buffer; the process group can hardly be used any more",
        ) from error


def _mpi_all_gather(comm: Any) -> AllGather:
    def all_gather(words: Sequence[int]) -> list[list[int]]:
        mine = array("q", words)
        everyone = array("q", bytes(8 * len(mine) * comm.Get_size()))
        comm.Allgather(mine, everyone)
        return [list(everyone[i : i + len(mine)]) for i in range(0, len(everyone), len(mine))]

    return all_gather
