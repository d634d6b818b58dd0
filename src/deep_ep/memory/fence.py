"""A fence between memory accesses of one process that other processes see."""

from __future__ import annotations

import threading

_lock = threading.Lock()
_lock.acquire()
_guard = threading.Lock()


def fence() -> None:
    """Keep memory accesses before this line before those after it, for other processes too.

    Releasing a lock publishes every store before it, and nothing after an acquire of the same lock moves before that
    acquire: locks are made of release and acquire operations on every processor. (An acquire followed by a release
    would not do: accesses from both sides may move in between the two and pass each other there.)
    """
    with _guard:  # one thread at a time
        _lock.release()
        _lock.acquire()
