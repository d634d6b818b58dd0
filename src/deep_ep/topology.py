"""Topology: which ranks share a host, and by which path each rank reaches each other. Facts only; others decide.

**Hosts are found by trying.** Host names lie (containers share or change them) and so does the boot id (two containers
of one machine have the same). So every rank makes a small file that has no name anywhere, with random bytes in it, and
every rank tries to open those of all others, through ``/proc/<pid>/fd/<fd>``, just as the memory for tokens is opened
later. Two ranks are on one host if each could read the other's bytes *and* both see the same ``/dev/shm``: containers
that share their processes but not their shared memory are meant to be apart.

Example: ranks 0, 1 and 2 run in one container, ranks 3 and 4 in another. Each of the first three reads the bytes of
the other two, and finds no such process or other bytes for 3 and 4. The hosts are (0, 1, 2) and (3, 4): they need not
be of one size, and ranks of a host need not follow each other.

DEEP_EP_NODE_ID, a word, is the host of a rank when it is set: ranks with different words are on different hosts even
if they share memory, which is how one machine plays several. Ranks of one word must share memory.

**Relays.** Between hosts a token travels to one rank of the destination host, which passes it on inside: to the rank
whose place on its host is the source's place on its own, modulo the number of ranks there (`Topology.relay`). With
equal hosts that is V1's "same local index".
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path as FilePath
from typing import Any

import torch

from deep_ep import env
from deep_ep.errors import ConfigError, UnsupportedError

logger = logging.getLogger("deep_ep")

AllGather = Callable[[Sequence[int]], list[list[int]]]
_NAME_WORDS, _NAME_BYTES_PER_WORD = 6, 7
_PEERS_PER_WORD = 62


class Path(StrEnum):
    """How a rank reaches another one's memory."""

    SELF = "self"
    SHARED_MEMORY = "shared memory"
    SAME_GPU = "same GPU"
    NVLINK = "NVLink"
    PCIE = "PCIe peer access"
    PEER_ACCESS = "peer access"
    PINNED_HOST_MEMORY = "pinned host memory"
    NETWORK = "network"


_PEER_ACCESS = (Path.SELF, Path.SAME_GPU, Path.NVLINK, Path.PCIE, Path.PEER_ACCESS)


@dataclass(frozen=True)
class Topology:
    """Who is where, the same on every rank of a group.

    Attributes:
        rank: This rank.
        hosts: The ranks of each host in ascending order; hosts are in the order of their lowest ranks.
        host_names: What to call each host: its DEEP_EP_NODE_ID, or else its host name.
        paths: Item `[i][j]` is how rank i reaches rank j.
    """

    rank: int
    hosts: tuple[tuple[int, ...], ...]
    host_names: tuple[str, ...]
    paths: tuple[tuple[Path, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Return the ranks of the group."""
        return len(self.paths)

    @property
    def num_hosts(self) -> int:
        """Return the number of hosts."""
        return len(self.hosts)

    @cached_property
    def host_of(self) -> tuple[int, ...]:
        """Return the host of each rank."""
        owner = {rank: host for host, ranks in enumerate(self.hosts) for rank in ranks}
        return tuple(owner[rank] for rank in range(self.num_ranks))

    @cached_property
    def local_index(self) -> tuple[int, ...]:
        """Return the place of each rank on its host."""
        place = {rank: index for ranks in self.hosts for index, rank in enumerate(ranks)}
        return tuple(place[rank] for rank in range(self.num_ranks))

    @property
    def host(self) -> int:
        """Return this rank's host."""
        return self.host_of[self.rank]

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Return the ranks of this rank's host."""
        return self.hosts[self.host]

    def relay(self, source: int, host: int) -> int:
        """Return the rank of a host that takes what a source sends there; the source itself on its own host."""
        return self.hosts[host][self.local_index[source] % len(self.hosts[host])]

    def sources(self, relay: int) -> tuple[int, ...]:
        """Return the ranks that a rank is the relay of, itself included, in ascending order."""
        host = self.host_of[relay]
        return tuple(source for source in range(self.num_ranks) if self.relay(source, host) == relay)

    @property
    def has_peer_access(self) -> bool:
        """Return whether every GPU of this host addresses the memory of every other one there."""
        return all(self.paths[i][j] in _PEER_ACCESS for i in self.local_ranks for j in self.local_ranks)

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """Go through the ranks: what it is called, its host, and how this rank reaches it."""
        for rank in range(self.num_ranks):
            yield f"rank {rank}", self.host_names[self.host_of[rank]], str(self.paths[self.rank][rank])

    def table(self) -> str:
        """Return the paths between all ranks as text: a line for each rank, hosts apart."""
        cells = [["", "host", *(f"to {rank}" for rank in range(self.num_ranks))]]
        for rank, paths in enumerate(self.paths):
            cells.append([f"rank {rank}", self.host_names[self.host_of[rank]], *map(str, paths)])
        widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
        )


def count_network_cards(devices: FilePath = FilePath("/sys/class")) -> int:
    """Return how many InfiniBand and RoCE cards this host has, or else Ethernet cards; 0 if nobody can tell.

    Args:
        devices: Where the kernel lists them.
    """
    for kind, mark in (("infiniband", "."), ("net", "device")):
        with contextlib.suppress(OSError):
            found = [card for card in (devices / kind).iterdir() if (card / mark).exists()]
            if found:
                return len(found)
    return 0


def discover(rank: int, all_gather: AllGather, device: torch.device) -> Topology:
    """Find out who is where. All ranks of a group call it together.

    Args:
        rank: This rank.
        all_gather: How the ranks exchange integers.
        device: Where this rank's tensors are.

    Raises:
        ConfigError: If ranks with one DEEP_EP_NODE_ID do not share memory, or only some ranks have one.
        UnsupportedError: If sharing memory divides the ranks into no hosts: a shares with b and b with c, but not a
            with c.
    """
    node_id, use_peer_access = env.NODE_ID.get(), env.USE_P2P.get()
    name = node_id or socket.gethostname()
    shares = _probe_memory(rank, all_gather)
    uuid = _gpu_uuid(device)
    facts = all_gather([int(bool(node_id)), *_hash_words(node_id), *_pack_name(name), *_uuid_words(uuid)])
    ids = [tuple(words[:3]) for words in facts]
    names = [_unpack_name(words[3 : 3 + _NAME_WORDS]) for words in facts]
    hosts = _group(shares, ids, names)
    uuids = [_unpack_uuid(words[3 + _NAME_WORDS :]) for words in facts]
    owner = {member: host for host, ranks in enumerate(hosts) for member in ranks}
    is_same_host = [owner[peer] == owner[rank] for peer in range(len(facts))]
    own_paths = _find_paths(rank, is_same_host, uuids, use_peer_access)
    order = list(Path)
    paths = [tuple(order[word] for word in words) for words in all_gather([order.index(path) for path in own_paths])]
    _warn_of_alike_names(rank, hosts, names)
    return Topology(rank, hosts, _name_hosts(hosts, names), tuple(paths))


def _warn_of_alike_names(rank: int, hosts: tuple[tuple[int, ...], ...], names: list[str]) -> None:
    for host in hosts:
        for other in hosts:
            if rank == host[0] < other[0] and names[rank] == names[other[0]]:
                logger.warning(
                    "ranks %s and %s have one host name, %s, but share no memory: they exchange over the network. "
                    "To share it they need one user, one pid namespace and one /dev/shm.",
                    *(list(host), list(other), names[rank]),
                )


def _probe_memory(rank: int, all_gather: AllGather) -> list[list[bool]]:
    """Return which rank can map the memory of which."""
    secret = secrets.token_bytes(14)
    fd = os.memfd_create("deep_ep_probe", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, secret, 0)
        offers = all_gather([os.getpid(), fd, _shm_device(), *_words_of(secret)])
        own = offers[rank]
        reached = [offer[2] == own[2] and _can_read(offer[0], offer[1], offer[3:]) for offer in offers]
        bits = [
            sum(1 << i for i, yes in enumerate(reached[begin : begin + _PEERS_PER_WORD]) if yes)
            for begin in range(0, len(reached), _PEERS_PER_WORD)
        ]
        everyone = all_gather(bits)  # nobody closes its file before everyone has tried to open it
    finally:
        os.close(fd)
    return [
        [bool(words[peer // _PEERS_PER_WORD] >> peer % _PEERS_PER_WORD & 1) for peer in range(len(offers))]
        for words in everyone
    ]


def _can_read(pid: int, fd: int, secret_words: list[int]) -> bool:
    with contextlib.suppress(OSError):
        own_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return _words_of(os.pread(own_fd, 14, 0)) == secret_words
        finally:
            os.close(own_fd)
    return False


def _shm_device() -> int:
    try:
        return os.stat("/dev/shm").st_dev
    except OSError:
        return 0


def _group(shares: list[list[bool]], ids: list[tuple[int, ...]], names: list[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host."""
    num_ranks = len(ids)
    if len({has_id for has_id, *_ in ids}) > 1:
        without = [rank for rank, (has_id, *_) in enumerate(ids) if not has_id]
        raise ConfigError(
            f"{env.NODE_ID.name} is set on some ranks of the group only, and not on ranks {without}",
            hint="set it on all ranks or on none",
        )
    together = [
        [ids[i] == ids[j] and shares[i][j] and shares[j][i] for j in range(num_ranks)] for i in range(num_ranks)
    ]
    hosts: list[tuple[int, ...]] = []
    for rank in range(num_ranks):
        if any(rank in host for host in hosts):
            continue
        members = tuple(peer for peer in range(num_ranks) if together[rank][peer] or peer == rank)
        for member in members:
            apart = [peer for peer in members if peer != member and not together[member][peer]]
            others = [peer for peer in range(num_ranks) if together[member][peer] and peer not in members]
            if apart or others:
                raise UnsupportedError(
                    f"memory sharing divides the ranks into no hosts: rank {rank} shares memory with ranks "
                    f"{[m for m in members if m != rank]}, but rank {member} with other ones",
                    hint=f"run the ranks of a host as one user with one /dev/shm, or set {env.NODE_ID.name}",
                )
        hosts.append(members)
    for host in hosts:
        alike = [rank for rank in range(num_ranks) if ids[rank] == ids[host[0]]]
        if ids[host[0]][0] and list(host) != alike:
            raise ConfigError(
                f"ranks with one {env.NODE_ID.name} must share memory, but of ranks {alike}, which all have "
                f"{names[host[0]]!r}, only {list(host)} do",
                hint="give ranks on different machines different words, or leave the variable unset",
            )
    return tuple(hosts)


def _name_hosts(hosts: tuple[tuple[int, ...], ...], names: list[str]) -> tuple[str, ...]:
    """Name hosts after their lowest ranks; where two would have one name, with the number of the host behind it."""
    chosen = [names[ranks[0]] for ranks in hosts]
    return tuple(name if chosen.count(name) == 1 else f"{name}#{host}" for host, name in enumerate(chosen))


def _find_paths(rank: int, is_same_host: list[bool], uuids: list[str], use_peer_access: bool) -> list[Path]:
    nvml = _load_nvml() if uuids[rank] and len(set(uuids)) > 1 else None
    paths = []
    for peer, same_host in enumerate(is_same_host):
        if peer == rank:
            paths.append(Path.SELF)
        elif not same_host:
            paths.append(Path.NETWORK)
        elif not uuids[rank] or not uuids[peer]:
            paths.append(Path.SHARED_MEMORY)
        elif not use_peer_access:
            paths.append(Path.PINNED_HOST_MEMORY)
        elif uuids[peer] == uuids[rank]:
            paths.append(Path.SAME_GPU)
        else:
            paths.append(_gpu_path(nvml, uuids[rank], uuids[peer]))
    return paths


def _gpu_path(nvml: Any, own_uuid: str, peer_uuid: str) -> Path:
    """Ask the driver's management library, which sees GPUs that CUDA_VISIBLE_DEVICES hides from this process."""
    if nvml is None:
        return Path.PEER_ACCESS  # whether it is there shows when memory is mapped
    try:
        own, peer = (nvml.nvmlDeviceGetHandleByUUID(uuid.encode()) for uuid in (own_uuid, peer_uuid))

        def has(capability: int) -> bool:
            status: int = nvml.nvmlDeviceGetP2PStatus(own, peer, capability)
            return status == int(nvml.NVML_P2P_STATUS_OK)

        if has(nvml.NVML_P2P_CAPS_INDEX_NVLINK):
            return Path.NVLINK
        can_access = has(nvml.NVML_P2P_CAPS_INDEX_READ) and has(nvml.NVML_P2P_CAPS_INDEX_WRITE)
    except nvml.NVMLError:
        return Path.PEER_ACCESS
    return Path.PCIE if can_access else Path.PINNED_HOST_MEMORY


def _load_nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _gpu_uuid(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _uuid_words(uuid: str) -> list[int]:
    raw = bytes.fromhex(uuid.removeprefix("GPU-").replace("-", "")) if uuid else bytes(16)
    return list(struct.unpack("2q", raw))


def _unpack_uuid(words: list[int]) -> str:
    if not any(words):
        return ""
    digits = struct.pack("2q", *words).hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _words_of(data: bytes) -> list[int]:
    return [int.from_bytes(data[i : i + _NAME_BYTES_PER_WORD], "little") for i in range(0, 14, _NAME_BYTES_PER_WORD)]


def _hash_words(text: str) -> list[int]:
    return _words_of(hashlib.sha256(text.encode()).digest()[:14])


def _pack_name(name: str) -> list[int]:
    data = name.encode()[: _NAME_WORDS * _NAME_BYTES_PER_WORD].ljust(_NAME_WORDS * _NAME_BYTES_PER_WORD, b"\0")
    size = _NAME_BYTES_PER_WORD
    return [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]


def _unpack_name(words: list[int]) -> str:
    data = b"".join(word.to_bytes(_NAME_BYTES_PER_WORD, "little") for word in words)
    return data.rstrip(b"\0").decode(errors="replace")
