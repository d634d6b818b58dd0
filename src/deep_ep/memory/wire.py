"""The wire: messages between ranks of different hosts, over an existing engine of `torch.distributed`.

Every message of a buffer has a tag that is used once, so what belongs to one call is never taken for another's. A
receiver may offer more bytes than come. Sending and receiving only *start* a transfer, which goes on in the engine's
own thread; `Wire.wait` waits for its end, until a deadline.

*When a wait fails.* Gloo closes all of a process's connections when one wait runs out, so the wire is of no use after
that, and neither is the buffer. Whoever waits for a peer of its own host that has lost a rank learns which one
(`deep_ep.memory.control`): that is why the network is given a little less time than the host (`NETWORK_SHARE`).
"""

from __future__ import annotations

import socket
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from deep_ep import env
from deep_ep.errors import DestroyedError, PeerError, PeerTimeoutError, UnsupportedError
from deep_ep.memory.rendezvous import AllGather, Rendezvous, interface_address

NETWORK_SHARE = 0.9
"""The part of the time limit that a wait for another host may take."""

_FIRST_SETUP_TAG = 1 << 29
_NUM_SETUP_TAGS = 1 << 16
NUM_TAGS = _FIRST_SETUP_TAG
"""Calls use the tags below this."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message under way.

    Attributes:
        work: The engine's own object for it.
        peer: The other rank.
        what: What the message is, in words.
        data: Its bytes; they must neither move nor change while it is under way.
    """

    work: Any
    peer: int
    what: str
    data: Tensor


class LostPeerError(PeerError):
    """The connection to a rank of another host is gone.

    Attributes:
        lost_rank: The rank.
    """

    def __init__(self, message: str, lost_rank: int, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.lost_rank = lost_rank


class Wire:
    """Messages between the ranks of a group, over Gloo. All ranks construct one together.

    Args:
        rendezvous: The ranks.
        host_names: What to call the host of each rank.
        timeout_s: The time limit of a call.

    Raises:
        UnsupportedError: If the ranks cannot connect.
    """

    def __init__(self, rendezvous: Rendezvous, host_names: Sequence[str], timeout_s: float) -> None:
        self.rank = rendezvous.rank
        self.host_names, self.timeout_s = host_names, timeout_s
        self._failure: str | None = None
        self._store: Store | None = rendezvous.make_store("wire")
        try:
            self._group: Any = dist.ProcessGroupGloo(
                self._store, self.rank, rendezvous.num_ranks, timedelta(seconds=max(timeout_s, 1.0))
            )
        except RuntimeError as error:
            raise UnsupportedError(
                f"rank {self.rank} on host {host_names[self.rank]} cannot connect to the ranks of other hosts over "
                f"{describe_interface()}: {_first_sentence(error)}",
                hint=f"set {env.GLOO_SOCKET_IFNAME.name} on every host to the interface that reaches the others",
            ) from None

    def deadline(self) -> float:
        """Return when a wait that begins now runs out."""
        return time.monotonic() + NETWORK_SHARE * self.timeout_s

    def send(self, peer: int, tag: int, data: Tensor, what: str) -> Transfer:
        """Start to send the bytes of a contiguous tensor on the CPU."""
        return self._start("send", peer, tag, data, what)

    def recv(self, peer: int, tag: int, data: Tensor, what: str) -> Transfer:
        """Start to receive at most as many bytes as a contiguous tensor has."""
        return self._start("recv", peer, tag, data, what)

    def wait(self, transfer: Transfer, call: str, deadline: float) -> None:
        """Wait for the end of a transfer.

        Raises:
            PeerTimeoutError: If it does not end in time.
            LostPeerError: If the connection breaks.
        """
        remaining_s = max(deadline - time.monotonic(), 1e-3)
        try:
            transfer.work.wait(timedelta(seconds=remaining_s))
        except RuntimeError as error:
            self._raise(transfer, call, error)

    def all_gather(self, words: Sequence[int], ranks: Sequence[int], tag: int) -> list[list[int]]:
        """Give integers to some ranks, which all do the same, and get theirs, in the order of `ranks`."""
        own = torch.frombuffer(array("q", words), dtype=torch.int64)
        everyone = [own if peer == self.rank else torch.empty_like(own) for peer in ranks]
        peers = [peer for peer in ranks if peer != self.rank]
        coming = [
            self.recv(peer, tag, data, "an integer")
            for peer, data in zip(ranks, everyone, strict=True)
            if peer != self.rank
        ]
        going = [self.send(peer, tag, own, "an integer") for peer in peers]
        deadline = self.deadline()
        for transfer in (*coming, *going):
            self.wait(transfer, "set-up", deadline)
        return [data.tolist() for data in everyone]

    def give_up(self, reason: str) -> None:
        """Carry nothing more."""
        self._failure = self._failure or reason

    def close(self) -> None:
        """Let go of the connections."""
        self._failure = self._failure or "it has been closed"
        self._group = self._store = None

    def _start(self, operation: str, peer: int, tag: int, data: Tensor, what: str) -> Transfer:
        if self._failure is not None:
            raise DestroyedError(
                f"this buffer has lost its network: {self._failure}", hint="destroy it on all ranks and make a new one"
            )
        transfer = Transfer(None, peer, what, data)
        try:
            work = getattr(self._group, operation)([data.view(-1).view(torch.uint8)], peer, tag)
        except RuntimeError as error:
            self._raise(transfer, "call", error)
        return Transfer(work, peer, what, data)

    def _raise(self, transfer: Transfer, call: str, error: RuntimeError) -> None:
        peer, where = transfer.peer, f"over {describe_interface()}"
        if "imed out" in str(error):
            message = (
                f"rank {self.rank}: no {transfer.what} in {call} between this rank and rank {peer} on host "
                f"{self.host_names[peer]} within {NETWORK_SHARE * self.timeout_s:g} s, {where}"
            )
            self._failure = message
            raise PeerTimeoutError(
                message,
                [peer],
                hint=f"look for an error or a slow step on that rank, and whether the link is up; the interface is "
                f"chosen by {env.GLOO_SOCKET_IFNAME.name}, the limit by {env.TIMEOUT_S.name}",
            ) from error
        message = (
            f"rank {self.rank}: the connection to rank {peer} on host {self.host_names[peer]} is gone, {where}, "
            f"while it was to carry {transfer.what} in {call} ({_first_sentence(error)})"
        )
        self._failure = message
        raise LostPeerError(
            message,
            peer,
            hint=f"that rank has ended, failed or is out of reach: look at its output, and at the interface that "
            f"{env.GLOO_SOCKET_IFNAME.name} names",
        ) from error


class HostRendezvous(Rendezvous):
    """The ranks of one host among those of a wire, as a group of their own.

    Args:
        wire: Carries their integers.
        ranks: The ranks of this host, in ascending order.
    """

    def __init__(self, wire: Wire, ranks: Sequence[int]) -> None:
        self.rank, self.num_ranks = ranks.index(wire.rank), len(ranks)
        self.ranks = tuple(ranks)
        self.all_gather: AllGather = self._gather
        self._wire, self._num_rounds = wire, 0

    def _gather(self, words: Sequence[int]) -> list[list[int]]:
        self._num_rounds += 1
        return self._wire.all_gather(words, self.ranks, _FIRST_SETUP_TAG + self._num_rounds % _NUM_SETUP_TAGS)

    def make_store(self, name: str) -> Store:
        """Not for the ranks of one host."""
        raise NotImplementedError(name)


def describe_interface() -> str:
    """Return the network interface that Gloo uses, and which variable says so, in words."""
    chosen = env.GLOO_SOCKET_IFNAME.get()
    if chosen:
        return f"interface {chosen} ({env.GLOO_SOCKET_IFNAME.name})"
    return f"interface {_interface_of_host_name()} (of the host name; {env.GLOO_SOCKET_IFNAME.name} is not set)"


def _interface_of_host_name() -> str:
    """Return the interface that has the address of this host's name, as Gloo chooses one."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return "lo"
    for _, name in socket.if_nameindex():
        if interface_address(name) == address:
            return name
    return address


def _first_sentence(error: BaseException) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    text = text[text.find("] ") + 2 :] if text.startswith("[") and "] " in text else text
    return text.split(". ")[0]
