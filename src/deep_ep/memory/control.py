"""Control: how the ranks of a host meet, through a few words of shared memory.

Every rank owns one control block (`deep_ep.layout.ControlLayout`) that only it writes. Three of its words are signals,
which only grow and are never cleared, so a late rank cannot miss one:

- `STEP`, the number of steps that the rank has entered,
- `WRITTEN`, the number of the last call whose rows the rank has written, and
- `FAILED`, the number of the last call whose rows it could not write.

A fourth, `LOST`, names a rank of another host that the rank has lost (plus one; 0 is none): a rank that has lost one
takes part in nothing more, and who waits for it gives up at once and names the lost one.

To take part in **step** n, in which the ranks exchange integers, a rank

1. writes its integers into its area n mod 2,
2. sets its `STEP` to n,
3. waits until the `STEP` of every peer is n or more, and
4. reads the areas n mod 2 of all peers.

Example with two ranks, both entering step 5: rank 0 writes (7, 1) into its area 1, sets its `STEP` from 4 to 5 and
waits; rank 1 writes (3, 0), sets its `STEP` to 5, finds 5 at rank 0 and reads (7, 1); rank 0 finds 5 and reads (3, 0).

*Why two areas are enough.* A rank writes its area again in step n + 2. It gets there only after it has seen the step
n + 1 of every peer, and a peer enters that after it has done its reading of step n.

**Rows** are announced one way: a rank sets `WRITTEN` when all its rows of a call are where they belong, and a rank that
wants its rows waits until that signal of every peer has come. Nobody answers, so ranks may wait for the rows of several
calls in any order.

*What a signal orders.* Whatever a rank wrote to any shared memory before it set a signal, a peer that has seen the
signal can read. The fences below make that hold on processors that reorder stores (arm) as well as on x86.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable, Sequence

from deep_ep import tuned
from deep_ep.errors import DestroyedError, PeerTimeoutError
from deep_ep.layout import ControlLayout
from deep_ep.memory.cpu import HostMemory
from deep_ep.memory.rendezvous import AllGather
from deep_ep.tuning import CpuTuning

WaitObserver = Callable[[str, str, int, list[int]], None]

_YIELD_S = 2e-3
_SLEEP_S = 50e-6
_MAX_SLEEP_S = 1e-3


class Control:
    """The meeting place of the ranks of one host. All ranks construct one together, and one thread at a time uses it.

    Args:
        rank: This rank.
        num_ranks: Ranks of the group.
        all_gather: How the ranks exchange integers until this object exists.
        timeout_s: How long a wait for a peer may last.
        names: What to call each rank in messages, if that is not its number: the ranks of a group on several hosts.

    Attributes:
        last_wait_ns: How long the last wait was for each rank.
        waited_ns: How long all waits were for each rank together.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        all_gather: AllGather,
        timeout_s: float,
        names: Sequence[int] | None = None,
    ) -> None:
        self.rank = rank
        self.names = range(num_ranks) if names is None else names
        self.timeout_s = timeout_s
        self._memory = HostMemory(ControlLayout.NUM_BYTES, rank, all_gather)
        self._blocks = [self._memory.bytes_of(peer).cast("q") for peer in range(num_ranks)]
        self.last_wait_ns = [0] * num_ranks
        self.waited_ns = [0] * num_ranks
        self._step = 0
        self._failure: str | None = None
        # With fewer cores than ranks, a rank that spins keeps the one it waits for from running.
        spin_us = tuned.load(CpuTuning, tuned.cpu_device(), num_ranks).spin_us
        self._spin_s = spin_us * 1e-6 if num_ranks <= len(os.sched_getaffinity(0)) else 0.0

    def all_gather(self, words: Sequence[int], call: str = "call", awaited: str = "its part") -> list[list[int]]:
        """Give integers, get everyone's. Takes one step, or several if there are more integers than an area holds.

        Args:
            words: This rank's integers; all ranks give equally many.
            call: The operation this belongs to, for the error message.
            awaited: What a peer owes in this step, for the error message.

        Returns:
            The integers of every rank, in rank order.

        Raises:
            PeerTimeoutError: If a peer does not enter the step in time. The ranks may then disagree about how far
                they are, so every later call raises `DestroyedError`.
            DestroyedError: If an earlier step timed out.
        """
        num_words = ControlLayout.NUM_AREA_WORDS
        everyone = self._step_through(words[:num_words], call, awaited)
        for begin in range(num_words, len(words), num_words):
            more = self._step_through(words[begin : begin + num_words], call, awaited)
            everyone = [have + got for have, got in zip(everyone, more, strict=True)]
        return everyone

    def _step_through(self, words: Sequence[int], call: str, awaited: str) -> list[list[int]]:
        if self._failure is not None:
            raise DestroyedError(
                f"this buffer is out of step with its peers since: {self._failure}",
                hint="destroy it on all ranks and make a new one",
            )
        step = self._step = self._step + 1
        begin = ControlLayout.area(step)
        end = begin + len(words)
        own = self._blocks[self.rank]
        own[begin:end] = memoryview(array("q", words))
        _fence()  # what was written above is seen by whoever sees the signal
        own[ControlLayout.STEP] = step
        self._wait_for_peers(ControlLayout.STEP, step, call, awaited)
        _fence()  # what is read below is what was written before the signals
        return [block[begin:end].tolist() for block in self._blocks]

    def observe_waits(self, observer: WaitObserver | None) -> None:
        """Tell an observer of every wait for peers from now on; None ends that. Without one, waits cost nothing more.

        Args:
            observer: Is given the call, what is awaited, when the wait began (`time.monotonic_ns`), and how many ns
                it was for each rank.
        """
        wait = type(self)._wait_for_peers

        def observed(signal: int, value: int, call: str, awaited: str) -> None:
            start_ns = time.monotonic_ns()
            wait(self, signal, value, call, awaited)
            assert observer is not None
            observer(call, awaited, start_ns, self.last_wait_ns)

        if observer is not None:
            self._wait_for_peers = observed  # type: ignore[method-assign]
        elif "_wait_for_peers" in vars(self):
            del self._wait_for_peers  # the method again

    def announce_rows(self, number: int, *, has_failed: bool) -> None:
        """Tell the peers that this rank's rows of a call are written, or never will be.

        Args:
            number: The number of the call; calls announce theirs in order.
            has_failed: Whether they never will be.
        """
        own = self._blocks[self.rank]
        if has_failed:
            own[ControlLayout.FAILED] = number
        _fence()
        own[ControlLayout.WRITTEN] = number

    def wait_for_rows(self, number: int, call: str) -> list[int]:
        """Wait until the peers' rows of a call are written; return the ranks that failed to write theirs.

        Raises:
            PeerTimeoutError: If a peer does not write its rows in time.
        """
        self._wait_for_peers(ControlLayout.WRITTEN, number, call, "rows")
        _fence()
        # A later failure counts too: it may hide one of this call.
        return [rank for rank, block in enumerate(self._blocks) if block[ControlLayout.FAILED] >= number]

    def announce_loss(self, lost: int, reason: str) -> None:
        """Tell the peers that this rank has lost a rank of another host and will take part in nothing more.

        Args:
            lost: What that rank is called.
            reason: How it was lost; later steps of this rank fail with it.
        """
        self._failure = reason
        if self._blocks:
            self._blocks[self.rank][ControlLayout.LOST] = lost + 1

    def close(self) -> None:
        """Let go of the control blocks."""
        for block in self._blocks:
            block.release()
        self._blocks = []
        self._memory.close()

    def _wait_for_peers(self, signal: int, value: int, call: str, awaited: str) -> None:
        """Spin, then yield the core, then sleep, until a signal of every peer has come to a value."""
        missing = [peer for peer, block in enumerate(self._blocks) if block[signal] < value]
        self.last_wait_ns = [0] * len(self._blocks)
        if not missing:
            return
        start_ns = time.monotonic_ns()
        sleep_s = _SLEEP_S
        while True:
            waited_ns = time.monotonic_ns() - start_ns
            still_missing = []
            for peer in missing:
                self.last_wait_ns[peer] = waited_ns
                if self._blocks[peer][signal] < value:
                    still_missing.append(peer)
            missing = still_missing
            if not missing:
                for peer, waited_ns in enumerate(self.last_wait_ns):
                    self.waited_ns[peer] += waited_ns
                return
            waited_s = waited_ns * 1e-9
            if waited_s < self._spin_s:
                continue
            self.raise_if_lost(missing, call)
            if waited_s < _YIELD_S:
                os.sched_yield()
            elif waited_s < self.timeout_s:
                time.sleep(sleep_s)
                sleep_s = min(2 * sleep_s, _MAX_SLEEP_S)
            else:
                self._raise_timeout(missing, signal, value, call, awaited)

    def raise_if_lost(self, missing: Sequence[int], call: str) -> None:
        """Raise if a rank that is awaited has itself lost a rank: then it will not come.

        Raises:
            PeerTimeoutError: With the lost rank as the missing one.
        """
        for peer in missing:
            lost = self._blocks[peer][ControlLayout.LOST] - 1
            if lost >= 0:
                name = self.names[peer]
                message = (
                    f"rank {self.names[self.rank]}: rank {name}, which is awaited in {call}, has lost rank {lost}, "
                    f"on another host, and given up"
                )
                self._failure = message
                raise PeerTimeoutError(message, [lost], hint=f"the error on rank {name} tells how it was lost")

    def _raise_timeout(self, missing: list[int], signal: int, value: int, call: str, awaited: str) -> None:
        name = "step" if signal == ControlLayout.STEP else "call"
        seen = ", ".join(f"rank {self.names[peer]} is at {self._blocks[peer][signal]}" for peer in missing)
        message = (
            f"rank {self.names[self.rank]}: no sign of {awaited} in {call} from ranks "
            f"{[self.names[peer] for peer in missing]} after {self.timeout_s} s "
            f"({name} {value} is awaited; {seen})"
        )
        self._failure = message
        raise PeerTimeoutError(
            message,
            [self.names[peer] for peer in missing],
            hint="look for an error or a slow step on those ranks; DEEP_EP_TIMEOUT_S sets the limit",
        )


_fence_lock = threading.Lock()
_fence_lock.acquire()
_fence_guard = threading.Lock()


def _fence() -> None:
    """Keep memory accesses before this line before those after it, for other processes too.

    Releasing a lock publishes every store before it, and nothing after an acquire of the same lock moves before that
    acquire: locks are made of release and acquire operations on every processor. (An acquire followed by a release
    would not do: accesses from both sides may move in between the two and pass each other there.)
    """
    with _fence_guard:  # one thread at a time
        _fence_lock.release()
        _fence_lock.acquire()
