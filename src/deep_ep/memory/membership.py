"""Membership: which ranks take part in which steps of `deep_ep.memory.control`, the same answer on every rank.

Ranks that may be masked must agree on who is. A rank that counts on rows which another one does not expect would place
its own rows wrongly. So masking is not a local matter of who has lost patience: it is a line in a log that all ranks
read, in memory that outlives each of them. A line says *rank r takes part no more from step s on*, or again from s on.

**How a late rank is masked.** Rank A has waited for D to enter step 8, in vain. Under a lock that the system releases
if its holder dies, A

1. marks D as suspected,
2. looks at the step of D once more: if D is at 8 now, it takes the mark back; if D is at 7,
3. writes the line "D is out from step 8 on".

A rank B that finds D at step 8 looks for marks and new lines before it believes that. If there is none, then A, who
marks first and looks then, will find D at 8 too, and will not mask it. If there is one, B takes the lock and reads what
has been decided. Either way A and B agree. D looks for lines about itself in the same manner.

**How it comes back.** The others write "D is in again from step n + 1 on" between their steps n and n + 1, and D, which
waits for that line, goes on with step n + 1.

What a masked rank may still write is in memory that nobody reads any more: `deep_ep.engines.exchange` maps new
segments when the membership changes. `tests/models/masks.pml` is a model of this page.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from deep_ep.errors import CapacityError, PeerTimeoutError
from deep_ep.memory.cpu import HostMemory
from deep_ep.memory.fence import fence
from deep_ep.memory.rendezvous import AllGather

NOBODY: frozenset[int] = frozenset()
_NUM_CHANGES, _NUM_LINES, _FIRST_WORD = 0, 1, 2
_MAX_LINES = 4096
_POLL_S = 100e-6


class Line(NamedTuple):
    """One line of the log: from `step` on, `rank` is out, or in again."""

    rank: int
    step: int
    is_out: bool


class Membership:
    """The log of who is masked. All ranks construct one together.

    Args:
        rank: This rank.
        num_ranks: Ranks of the group.
        blocks: The control block of each rank, to look at signals.
        step_signal: Which word of a block is the number of steps that its rank has entered.
        all_gather: How the ranks exchange integers until this object exists.
    """

    def __init__(
        self, rank: int, num_ranks: int, blocks: list[memoryview], step_signal: int, all_gather: AllGather
    ) -> None:
        self.rank = rank
        self._blocks, self._step_signal = blocks, step_signal
        self._first_line = _FIRST_WORD + num_ranks
        num_bytes = 8 * (self._first_line + _MAX_LINES)
        self._memory = HostMemory(num_bytes if rank == 0 else 0, rank, all_gather, keep_open=0)
        self._words = self._memory.bytes_of(0).cast("q")
        self._num_changes_read = 0
        self.lines: list[Line] = []

    def out_at(self, step: int) -> frozenset[int]:
        """Return the ranks that are masked at a step."""
        if not self.lines:
            return NOBODY
        out: set[int] = set()
        for line in self.lines:
            if line.step <= step:
                (out.add if line.is_out else out.discard)(line.rank)
        return frozenset(out)

    def num_lines_at(self, step: int) -> int:
        """Return how often the membership has changed up to a step."""
        return sum(line.step <= step for line in self.lines)

    def was_masked_after(self, rank: int, step: int) -> bool:
        """Tell whether a rank that took part in a step was masked later."""
        return any(line.is_out and line.rank == rank and line.step > step for line in self.lines)

    def has_changed(self) -> bool:
        """Tell whether there is something in the log that this rank has not read. Costs a look at one word."""
        return self._words[_NUM_CHANGES] != self._num_changes_read

    def refresh(self, timeout_s: float) -> None:
        """Read what is new, and settle what others have left open."""
        with self._lock(timeout_s):
            self._settle()

    def suspect(self, ranks: list[int], signal: int, value: int, timeout_s: float) -> None:
        """Mask ranks whose signal has not come to a value, unless it just has; then read the log.

        A rank that finds itself masked meanwhile masks nobody.
        """
        is_step = signal == self._step_signal
        with self._lock(timeout_s):
            self._settle()
            if self.rank in self.out_at(self._blocks[self.rank][self._step_signal] + 1):
                return
            for rank in ranks:
                self._words[_FIRST_WORD + rank] = value << 1 | is_step
            self._words[_NUM_CHANGES] += 1
            self._settle(signal if not is_step else None)

    def write(self, rank: int, step: int, *, is_out: bool, timeout_s: float) -> None:
        """Mask a rank from a step on, or take it in again; does nothing if that is so already."""
        with self._lock(timeout_s):
            self._settle()
            if (rank in self.out_at(step)) != is_out:
                self._append(Line(rank, step, is_out))
                self._settle()

    def wait_until_in(self, timeout_s: float) -> int:
        """Wait until the others have taken this rank in again; return the step from on which it is in, 0 if always.

        Raises:
            PeerTimeoutError: If they do not in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self.refresh(timeout_s)
            own = [line for line in self.lines if line.rank == self.rank]
            if not own or not own[-1].is_out:
                return own[-1].step if own else 0
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"rank {self.rank}: no other rank has unmasked this one within {timeout_s} s",
                    [],
                    hint="all ranks must unmask it between the same two calls",
                )
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Let go of the log."""
        self._words.release()
        self._memory.close()

    @contextmanager
    def _lock(self, timeout_s: float) -> Iterator[None]:
        # A POSIX lock belongs to a process and ends with it, whoever has inherited its descriptors.
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.lockf(self._memory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > deadline:
                    raise PeerTimeoutError(
                        f"rank {self.rank}: another rank has held the log of masked ranks for {timeout_s} s",
                        [],
                        hint="a rank was stopped in the middle of masking another one; end it",
                    ) from None
                time.sleep(_POLL_S)
        try:
            fence()
            yield
            fence()
        finally:
            fcntl.lockf(self._memory.fd, fcntl.LOCK_UN)

    def _settle(self, signal: int | None = None) -> None:
        """Decide about every suspected rank, then read all lines; the lock is held.

        Args:
            signal: Which signal other than the step suspicions are about, if this rank has just raised some.
        """
        fence()  # the marks are seen before the signals are looked at
        for rank, block in enumerate(self._blocks):
            mark = self._words[_FIRST_WORD + rank]
            if mark:
                awaited = self._step_signal if mark & 1 else signal
                # Without the signal, the rank that raised the suspicion has died over it: another one will.
                if awaited is not None and block[awaited] < mark >> 1:
                    self._append(Line(rank, block[self._step_signal] + 1, True))
                self._words[_FIRST_WORD + rank] = 0
        for i in range(len(self.lines), self._words[_NUM_LINES]):
            word = self._words[self._first_line + i]
            self.lines.append(Line(word >> 1 & 0xFFFF, word >> 17, bool(word & 1)))
        self._num_changes_read = self._words[_NUM_CHANGES]

    def _append(self, line: Line) -> None:
        count = self._words[_NUM_LINES]
        if count == _MAX_LINES:
            raise CapacityError(
                f"ranks of this buffer have been masked and unmasked {_MAX_LINES} times, more than it keeps count of",
                hint="make a new Buffer",
            )
        self._words[self._first_line + count] = line.step << 17 | line.rank << 1 | line.is_out
        self._words[_NUM_LINES] = count + 1
        self._words[_NUM_CHANGES] += 1
