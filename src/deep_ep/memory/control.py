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

import logging
import os
import time
from array import array
from collections.abc import Callable, Sequence

from deep_ep import tuned
from deep_ep.errors import DestroyedError, MaskedError, PeerTimeoutError
from deep_ep.layout import ControlLayout
from deep_ep.memory.cpu import HostMemory
from deep_ep.memory.fence import fence
from deep_ep.memory.membership import NOBODY, Membership
from deep_ep.memory.rendezvous import AllGather
from deep_ep.tuning import CpuTuning

logger = logging.getLogger("deep_ep")

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
        can_mask: Whether ranks that are late are masked (`deep_ep.memory.membership`); if not, that is an error.

    Attributes:
        step: The number of steps that this rank has entered.
        membership: Who is masked, None if nobody can be.
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
        *,
        can_mask: bool = False,
    ) -> None:
        self.rank = rank
        self.names = range(num_ranks) if names is None else names
        self.timeout_s = timeout_s
        self._memory = HostMemory(ControlLayout.NUM_BYTES, rank, all_gather)
        self._blocks = [self._memory.bytes_of(peer).cast("q") for peer in range(num_ranks)]
        self.membership: Membership | None = None
        if can_mask:
            self.membership = Membership(rank, num_ranks, self._blocks, ControlLayout.STEP, all_gather)
        self.last_wait_ns = [0] * num_ranks
        self.waited_ns = [0] * num_ranks
        self.step = 0
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
            The integers of every rank, in rank order; zeros of a rank that is masked.

        Raises:
            PeerTimeoutError: If a peer does not enter the step in time. The ranks may then disagree about how far
                they are, so every later call raises `DestroyedError`.
            DestroyedError: If an earlier step timed out.
            MaskedError: If this rank has been masked by the others.
        """
        num_words = ControlLayout.NUM_AREA_WORDS
        everyone = self._step_through(words[:num_words], call, awaited)
        for begin in range(num_words, len(words), num_words):
            more = self._step_through(words[begin : begin + num_words], call, awaited)
            everyone = [have + got for have, got in zip(everyone, more, strict=True)]
        return everyone

    def _step_through(self, words: Sequence[int], call: str, awaited: str) -> list[list[int]]:
        self.check_in_step()
        step = self.step = self.step + 1
        begin = ControlLayout.area(step)
        end = begin + len(words)
        own = self._blocks[self.rank]
        own[begin:end] = memoryview(array("q", words))
        fence()  # what was written above is seen by whoever sees the signal
        own[ControlLayout.STEP] = step
        self._wait_for_peers(ControlLayout.STEP, step, call, awaited)
        fence()  # what is read below is what was written before the signals
        out = self.masked_at(step)
        zeros = [0] * len(words)
        everyone = [zeros if rank in out else block[begin:end].tolist() for rank, block in enumerate(self._blocks)]
        self._raise_if_masked()
        return everyone

    def masked_at(self, step: int) -> frozenset[int]:
        """Return the ranks that are masked at a step; all ranks give the same answer for a step they have taken."""
        return NOBODY if self.membership is None else self.membership.out_at(step)

    def mask(self, rank: int, *, is_out: bool) -> None:
        """Mask a rank from the next step on, or take it in again; all ranks do so between the same two steps.

        A rank that was masked itself, and now is not, goes on where the others are.

        Raises:
            PeerTimeoutError: If this rank is to be taken in, and the others do not do so in time.
        """
        assert self.membership is not None, "the caller has looked"
        if rank != self.rank:
            self.membership.write(rank, self.step + 1, is_out=is_out, timeout_s=self.timeout_s)
        elif not is_out:
            step = self.membership.wait_until_in(self.timeout_s) - 1
            if step > self.step:
                self.step = step
                # What this rank has missed it never wrote.
                self.announce_rows(step, has_failed=True)

    def _raise_if_masked(self) -> None:
        """Raise if this rank is masked. What it has read since is then of no worth: nobody waits for it any more."""
        if self.membership is None:
            return
        fence()
        if self.membership.has_changed():
            self.membership.refresh(self.timeout_s)
        if self.rank in self.membership.out_at(self.step + 1):
            raise MaskedError(
                f"rank {self.rank}: the other ranks have masked this one, for it was late by more than the time limit",
                hint="call low_latency_update_mask_buffer(rank, False) on all ranks, this one too, to take it in again",
            )

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
        fence()
        own[ControlLayout.WRITTEN] = number

    def wait_for_rows(self, number: int, call: str) -> tuple[list[int], frozenset[int]]:
        """Wait until the peers' rows of a call are written.

        Returns:
            The ranks that failed to write theirs, and those that have been masked since the call began and did not
            write theirs before.

        Raises:
            PeerTimeoutError: If a peer does not write its rows in time, and cannot be masked.
        """
        self._wait_for_peers(ControlLayout.WRITTEN, number, call, "rows")
        fence()
        out = self.masked_at(number)
        # A later failure counts too: it may hide one of this call.
        absent = {
            rank
            for rank, block in enumerate(self._blocks)
            if rank not in out and (block[ControlLayout.FAILED] >= number or block[ControlLayout.WRITTEN] < number)
        }
        members = self.membership
        lost = frozenset(r for r in absent if members is not None and members.was_masked_after(r, number))
        return sorted(absent - lost), lost

    def check_in_step(self) -> None:
        """Raise if an earlier step failed.

        Raises:
            DestroyedError: If one did.
        """
        if self._failure is not None:
            raise DestroyedError(
                f"this buffer is out of step with its peers since: {self._failure}",
                hint="destroy it on all ranks and make a new one",
            )

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
        if self.membership is not None:
            self.membership.close()
        for block in self._blocks:
            block.release()
        self._blocks = []
        self._memory.close()

    def _wait_for_peers(self, signal: int, value: int, call: str, awaited: str) -> None:
        """Wait until a signal of every peer that takes part has come to a value; who is late is masked, if possible."""
        self.last_wait_ns = [0] * len(self._blocks)
        while True:
            missing = self._wait(signal, value, self._missing(signal, value), call)
            members = self.membership
            if missing and members is None:
                self._raise_timeout(missing, signal, value, call, awaited)
            if members is None:
                return
            if missing:
                self._raise_if_masked()
                logger.warning("%s; masking them", self._describe_wait(missing, signal, value, call, awaited))
                members.suspect(missing, signal, value, self.timeout_s)
                continue
            # Whoever has come may have been masked just before.
            fence()
            if not members.has_changed():
                return
            members.refresh(self.timeout_s)

    def _missing(self, signal: int, value: int) -> list[int]:
        """Return the ranks that take part and whose signal has not come to a value."""
        missing = [peer for peer, block in enumerate(self._blocks) if block[signal] < value]
        members = self.membership
        if not missing or members is None or not members.lines:
            return missing
        out = members.out_at(value)
        is_step = signal == ControlLayout.STEP
        return [r for r in missing if r not in out and (is_step or not members.was_masked_after(r, value))]

    def _still_awaited(self, signal: int, value: int, missing: list[int]) -> list[int]:
        """Leave out the ranks that have been masked meanwhile."""
        if self.membership is None or not self.membership.has_changed():
            return missing
        self.membership.refresh(self.timeout_s)
        if signal == ControlLayout.STEP:
            self._raise_if_masked()  # rows of a call that it has taken part in still come to a rank that is masked now
        awaited = self._missing(signal, value)
        return [peer for peer in missing if peer in awaited]

    def _wait(self, signal: int, value: int, missing: list[int], call: str) -> list[int]:
        """Spin, then yield the core, then sleep; return who is missing when time is up or the membership changes."""
        if not missing:
            return []
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
                return []
            waited_s = waited_ns * 1e-9
            if waited_s < self._spin_s:
                continue
            self.raise_if_lost(missing, call)
            if waited_s < _YIELD_S:
                os.sched_yield()
            elif waited_s < self.timeout_s:
                time.sleep(sleep_s)
                sleep_s = min(2 * sleep_s, _MAX_SLEEP_S)
                missing = self._still_awaited(signal, value, missing)
            else:
                return missing

    def raise_if_lost(self, missing: Sequence[int], call: str) -> None:
        """Raise if a rank that is awaited has itself lost a rank: then it will not come. This rank does not count.

        Raises:
            PeerTimeoutError: With the lost rank as the missing one.
        """
        for peer in missing:
            if peer == self.rank:
                continue
            lost = self._blocks[peer][ControlLayout.LOST] - 1
            if lost >= 0:
                name = self.names[peer]
                message = (
                    f"rank {self.names[self.rank]}: rank {name}, which takes part in this {call}, has lost rank {lost} "
                    f"on another host and given up"
                )
                self._failure = message
                raise PeerTimeoutError(message, [lost], hint=f"the error on rank {name} tells how it was lost")

    def _raise_timeout(self, missing: list[int], signal: int, value: int, call: str, awaited: str) -> None:
        message = self._describe_wait(missing, signal, value, call, awaited)
        self._failure = message
        raise PeerTimeoutError(
            message,
            [self.names[peer] for peer in missing],
            hint="look for an error or a slow step on those ranks; DEEP_EP_TIMEOUT_S sets the limit",
        )

    def _describe_wait(self, missing: list[int], signal: int, value: int, call: str, awaited: str) -> str:
        name = "step" if signal == ControlLayout.STEP else "call"
        seen = ", ".join(f"rank {self.names[peer]} is at {self._blocks[peer][signal]}" for peer in missing)
        return (
            f"rank {self.names[self.rank]}: no sign of {awaited} in {call} from ranks "
            f"{[self.names[peer] for peer in missing]} after {self.timeout_s} s "
            f"({name} {value} is awaited; {seen})"
        )
