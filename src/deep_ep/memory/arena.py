"""Arena: which parts of this rank's segments are free, and when a part becomes free again.

What a dispatch returns lives where the senders wrote it: in a segment that all ranks have mapped. Nothing is copied
out. So a part of a segment is in use as long as any tensor on it lives, and the end of that tensor's storage is what
frees it, whether it was dropped, disposed of with ``set_`` or freed by autograd in another thread.
"""

from __future__ import annotations

import weakref
from collections import deque
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from deep_ep.layout import align


class Extent(NamedTuple):
    """A stretch of one segment."""

    segment: int
    offset: int
    num_bytes: int


NO_EXTENT = Extent(0, 0, 0)


class Arena:
    """Hands out parts of segments. Only the owner of the memory uses it."""

    def __init__(self) -> None:
        self._segments: dict[int, memoryview] = {}
        self._free: list[Extent] = []  # sorted, neighbours merged
        self._in_use: dict[Extent, weakref.ref[memoryview]] = {}
        self._freed: deque[Extent] = deque()  # appended to by whichever thread ends a tensor

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all segments."""
        return sum(len(memory) for memory in self._segments.values())

    def add_segment(self, segment: int, memory: memoryview) -> None:
        """Take a new segment into use."""
        self._segments[segment] = memory
        self._add_free(Extent(segment, 0, len(memory)))

    def remove_unused_segments(self) -> list[int]:
        """Forget every segment that no tensor uses; return their numbers."""
        self._collect()
        unused = [extent for extent in self._free if extent.num_bytes == len(self._segments[extent.segment])]
        for extent in unused:
            self._free.remove(extent)
            self._segments.pop(extent.segment)
        return [extent.segment for extent in unused]

    def largest_free(self) -> Extent:
        """Return the largest free stretch, of 0 bytes if there is none."""
        self._collect()
        return max(self._free, key=lambda extent: extent.num_bytes, default=NO_EXTENT)

    def take(self, segment: int, offset: int, num_bytes: int) -> Tensor:
        """Put a part of a free stretch, from its beginning, into use.

        Args:
            segment: The segment.
            offset: Where the free stretch begins.
            num_bytes: The bytes wanted; they are rounded up to the alignment of sections.

        Returns:
            The part as a uint8 tensor. The part is free again when the last tensor on its storage is gone.
        """
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        index = next(i for i, extent in enumerate(self._free) if extent[:2] == (segment, offset))
        used = align(num_bytes)
        rest = self._free[index].num_bytes - used
        assert rest >= 0, "the caller compared what it needs with what is free"
        if rest:
            self._free[index] = Extent(segment, offset + used, rest)
        else:
            del self._free[index]
        part = self._segments[segment][offset : offset + num_bytes]
        extent = Extent(segment, offset, used)
        self._in_use[extent] = weakref.ref(part, partial(_append, self._freed, extent))
        return torch.frombuffer(part, dtype=torch.uint8)

    def _collect(self) -> None:
        """Make free what tensors have let go of since the last time."""
        while self._freed:
            extent = self._freed.popleft()
            del self._in_use[extent]
            self._add_free(extent)

    def _add_free(self, extent: Extent) -> None:
        self._free.append(extent)
        self._free.sort()
        merged: list[Extent] = []
        for segment, offset, num_bytes in self._free:
            if merged and merged[-1][0] == segment and merged[-1].offset + merged[-1].num_bytes == offset:
                merged[-1] = Extent(segment, merged[-1].offset, merged[-1].num_bytes + num_bytes)
            else:
                merged.append(Extent(segment, offset, num_bytes))
        self._free = merged


def _append(freed: deque[Extent], extent: Extent, _: object) -> None:
    freed.append(extent)
