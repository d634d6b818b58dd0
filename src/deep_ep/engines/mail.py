"""Mail: the messages of one call between hosts, and the memory they lie in.

Every call between hosts begins with a **letter** from each rank to its relay on every other host: what it is about to
do, how many tokens it has for that host, in how many chunks they come, and what the host needs to know of them. The
relays tell the ranks of their host, so every rank of the group knows what every other one is about to do before any row
is sent, and all of them refuse a call that they disagree about.

Gloo ends the process of a receiver to whom more bytes come than it has offered. Messages whose size is not settled by a
letter therefore carry the most bytes that they may have in their tags, as a number modulo a prime: those of ranks that
disagree about it do not meet, and the letter that travels beside them tells why.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TypeVar

import torch
from torch import Tensor

from deep_ep.errors import ConfigError, PeerTimeoutError
from deep_ep.layout import align
from deep_ep.memory.arena import Arena
from deep_ep.memory.control import Control
from deep_ep.memory.wire import NUM_TAGS, LostPeerError, Transfer, Wire

MAX_LETTER_BYTES = 1 << 20


class Kind(IntEnum):
    """The kinds of messages of one call; messages of one kind between two ranks stay in order."""

    LETTER = 0
    ROWS = 1
    WEIGHTS = 2
    STATUS = 3


R = TypeVar("R")
_NUM_SIZE_CLASSES = 1 << 15
_FIRST_SIZED_TAG = NUM_TAGS // 2
_NUM_CALLS = _FIRST_SIZED_TAG // len(Kind)
_NUM_SIZED_CALLS = (NUM_TAGS - _FIRST_SIZED_TAG) // (len(Kind) * _NUM_SIZE_CLASSES)


class Staging:
    """Memory for messages. What is taken is free again when the last tensor on it is gone.

    Args:
        num_bytes: Bytes to begin with; they are touched at once.
    """

    def __init__(self, num_bytes: int) -> None:
        self._arena = Arena()
        self._num_segments = 0
        if num_bytes:
            self._add_segment(num_bytes)

    @property
    def num_bytes(self) -> int:
        """Return the bytes there are."""
        return self._arena.num_bytes

    def take(self, num_bytes: int) -> Tensor:
        """Return uninitialised bytes, as a uint8 tensor."""
        place = self._arena.largest_free()
        if place.num_bytes < align(num_bytes):
            self._arena.remove_unused_segments()
            # A quarter more than is needed, so that routing which varies from call to call does not grow it each time.
            self._add_segment(align(num_bytes * 5 // 4))
            place = self._arena.largest_free()
        return self._arena.take(place.segment, place.offset, num_bytes)

    def _add_segment(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._arena.add_segment(self._num_segments, memoryview(mmap.mmap(-1, num_bytes, flags=flags)))
        self._num_segments += 1


class Mail:
    """The messages of one call.

    Args:
        wire: Carries them.
        staging: Memory for those that come.
        number: The number of the call, the same on all ranks.
        call: The call, in words.
        control: The ranks of this host: they are told which rank was lost and how, before a call fails because of it.
    """

    def __init__(self, wire: Wire, staging: Staging, number: int, call: str, control: Control) -> None:
        self._wire, self.staging, self.call = wire, staging, call
        self._number = number
        self._control = control
        self._going: list[Transfer] = []
        self._deadline = wire.deadline()

    def begin_phase(self) -> None:
        """Let what is awaited from now on have the whole time limit."""
        self._deadline = self._wire.deadline()

    def send(self, kind: Kind, peer: int, data: Tensor, what: str, limit: int = 0) -> None:
        """Start to send a contiguous tensor.

        Args:
            kind: What kind of message it is.
            peer: To whom.
            data: Its bytes.
            what: What it is, in words.
            limit: The most bytes that it might have had, if the receiver cannot know how many it has.
        """
        if data.numel():
            tag = self._tag(kind, limit)
            self._going.append(self._guarded(lambda: self._wire.send(peer, tag, data, what)))

    def recv(self, kind: Kind, peer: int, data: Tensor, what: str, limit: int = 0) -> Transfer | None:
        """Start to receive into a contiguous tensor; None if it is empty. Arguments are those of `send`."""
        if not data.numel():
            return None
        tag = self._tag(kind, limit)
        return self._guarded(lambda: self._wire.recv(peer, tag, data, what))

    def _tag(self, kind: Kind, limit: int) -> int:
        if limit == 0:
            return self._number % _NUM_CALLS * len(Kind) + kind
        number = self._number % _NUM_SIZED_CALLS * len(Kind) + kind
        return _FIRST_SIZED_TAG + number * _NUM_SIZE_CLASSES + limit % (_NUM_SIZE_CLASSES - 19)  # a prime

    def wait(self, transfer: Transfer | None) -> None:
        """Wait for what comes."""
        if transfer is not None:
            self._guarded(lambda: self._wire.wait(transfer, self.call, self._deadline))

    def wait_for_sends(self) -> None:
        """Wait until all that was sent has left."""
        for transfer in self._going:
            self.wait(transfer)
        self._going.clear()

    def send_letter(self, peer: int, words: Sequence[int]) -> None:
        """Start to send integers.

        Raises:
            ConfigError: If there are too many.
        """
        if len(words) * 8 > MAX_LETTER_BYTES:
            raise ConfigError(
                f"a call between hosts tells at most {MAX_LETTER_BYTES // 8} counts per host, got {len(words)}",
                hint="use fewer channels (config.num_sms) or fewer experts",
            )
        self.send(Kind.LETTER, peer, torch.frombuffer(array("q", words), dtype=torch.int64), "a header")

    def recv_letter(self, peer: int) -> Callable[[], Tensor]:
        """Start to receive integers; return how to wait for them."""
        data = self.staging.take(MAX_LETTER_BYTES)
        transfer = self.recv(Kind.LETTER, peer, data, "a header")

        def wait() -> Tensor:
            self.wait(transfer)
            return data.view(torch.int64)

        return wait

    def _guarded(self, operation: Callable[[], R]) -> R:
        try:
            return operation()
        except PeerTimeoutError as error:
            # A rank that does not send may itself wait for one that is lost, which a rank of this host may know of.
            self._control.raise_if_lost(range(len(self._control.names)), self.call)
            self._control.announce_loss(error.missing_ranks[0], str(error))
            raise
        except LostPeerError as error:
            self._control.announce_loss(error.lost_rank, str(error))
            raise
