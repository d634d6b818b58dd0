"""Host memory of every rank, mapped by every rank of the host.

The memory is a memfd: a file that has no name anywhere. Peers open it through ``/proc/<pid>/fd/<fd>``, which Linux
allows to processes of the same user only, and it is gone when the last process that maps it is gone. So nothing can
be left behind in /dev/shm, whatever kills the ranks, and the small /dev/shm of a container is no limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import torch
from torch import Tensor

from deep_ep.errors import CapacityError, UnsupportedError
from deep_ep.memory.rendezvous import AllGather
from deep_ep.phases import phase


class HostMemory:
    """Memory that each rank brings and all ranks map; sizes may differ, and may be 0.

    All ranks construct one together. Either all of them succeed or all of them raise.

    Args:
        num_bytes: Bytes that this rank brings.
        rank: This rank.
        all_gather: How the ranks tell each other where their memory is.
        keep_open: A rank whose memory stays open, to lock it as a file.

    Attributes:
        fd: The descriptor of that memory, -1 without one.

    Raises:
        CapacityError: If a rank could not get its memory.
        UnsupportedError: If a rank could not map the memory of another.
    """

    def __init__(self, num_bytes: int, rank: int, all_gather: AllGather, keep_open: int | None = None) -> None:
        self.rank, self.fd = rank, -1
        with phase("allocate"):
            own, fd, error = _allocate(num_bytes)
        try:
            stat = os.fstat(fd) if fd >= 0 else None
            identity = (stat.st_dev, stat.st_ino) if stat else (0, 0)
            offers = all_gather([error, num_bytes, os.getpid(), fd, *identity])
            _raise_if_short(offers)
            self._maps: list[mmap.mmap | None] = []
            unreachable = 0
            for peer, (_, peer_bytes, pid, peer_fd, *peer_identity) in enumerate(offers):
                if peer == rank or peer_bytes == 0:
                    self._maps.append(own if peer == rank else None)
                    continue
                try:
                    with phase("map_peers"):
                        self._maps.append(_map_peer(pid, peer_fd, peer_bytes, tuple(peer_identity)))
                except OSError:
                    self._maps.append(None)
                    unreachable = peer + 1
            if keep_open is not None and not unreachable:
                self.fd = _open_of(*offers[keep_open][2:4])
            # Nobody closes its descriptor before everyone has had the chance to open it.
            _raise_if_unreachable(all_gather([unreachable]), [offer[2] for offer in offers])
        finally:
            if fd >= 0:
                os.close(fd)
        self.num_ranks = len(offers)
        self.num_bytes = [offer[1] for offer in offers]

    def bytes_of(self, rank: int) -> memoryview:
        """Return the memory that a rank brought, as a writable view of bytes."""
        mapping = self._maps[rank]
        return memoryview(b"") if mapping is None else memoryview(mapping)

    def tensor_of(self, rank: int) -> Tensor:
        """Return the memory that a rank brought, as a uint8 tensor; it stays mapped while the tensor lives."""
        mapping = self._maps[rank]
        if mapping is None:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def peer_address(self, rank: int) -> int:
        """Return where in this process a rank's memory begins, 0 if it brought none."""
        mapping = self._maps[rank]
        return 0 if mapping is None else ctypes.addressof(ctypes.c_char.from_buffer(mapping))

    def address_table(self) -> Tensor:
        """Return the addresses of all ranks' memory as an int64 tensor `[num_ranks]`."""
        return torch.tensor([self.peer_address(rank) for rank in range(self.num_ranks)], dtype=torch.int64)

    def close(self) -> None:
        """Let go of the memory; what tensors still use stays mapped until they die."""
        for mapping in self._maps:
            if mapping is not None:
                with contextlib.suppress(BufferError):  # a tensor or view still uses it
                    mapping.close()
        self._maps = [None] * len(self._maps)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _allocate(num_bytes: int) -> tuple[mmap.mmap | None, int, int]:
    """Make memory and touch every page of it; return the mapping, its descriptor and an errno."""
    if num_bytes == 0:
        return None, -1, 0
    fd = os.memfd_create("deep_ep", os.MFD_CLOEXEC)
    try:
        # Without this, memory that runs out would show later, as SIGBUS in whoever touches the page.
        os.posix_fallocate(fd, 0, num_bytes)
        return _map(fd, num_bytes), fd, 0
    except OSError as error:
        os.close(fd)
        return None, -1, error.errno or -1


def _map(fd: int, num_bytes: int) -> mmap.mmap:
    # MAP_POPULATE: the first call shall not pay for page faults.
    return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _open_of(pid: int, fd: int) -> int:
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def _map_peer(pid: int, fd: int, num_bytes: int, identity: tuple[int, ...]) -> mmap.mmap:
    own_fd = _open_of(pid, fd)
    try:
        stat = os.fstat(own_fd)
        if (stat.st_dev, stat.st_ino) != identity:
            raise OSError("another process has this pid here")
        return _map(own_fd, num_bytes)
    finally:
        os.close(own_fd)


def _raise_if_short(offers: list[list[int]]) -> None:
    failed = [
        f"rank {rank} ({num_bytes:,} bytes: {os.strerror(error) if error > 0 else 'unknown error'})"
        for rank, (error, num_bytes, *_) in enumerate(offers)
        if error
    ]
    if failed:
        raise CapacityError(
            f"shared host memory could not be had by {', '.join(failed)}",
            hint="ask for a smaller buffer, use fewer ranks on this host, or raise the memory limit of the container",
        )


def _raise_if_unreachable(replies: list[list[int]], pids: list[int]) -> None:
    pairs = [(rank, peer - 1) for rank, (peer,) in enumerate(replies) if peer > 0]
    if pairs:
        told = ", ".join(f"rank {rank} cannot map the memory of rank {peer} (pid {pids[peer]})" for rank, peer in pairs)
        raise UnsupportedError(
            f"ranks of one host must share memory, but {told}",
            hint="run all ranks of the group on one host, as one user, in one pid namespace",
        )
