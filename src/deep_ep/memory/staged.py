"""Pinned host memory of every rank, addressable by every rank's GPU, for GPUs that cannot address each other.

The memory is the host memory of CPU ranks (`deep_ep.memory.cpu`), mapped by all ranks of the host; each rank makes all
of it known to its GPU. Kernels use it as they use peers' device memory, only over PCIe. Without a device it is what
the Triton interpreter runs on.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from deep_ep.errors import UnsupportedError
from deep_ep.memory.cpu import HostMemory
from deep_ep.memory.rendezvous import AllGather
from deep_ep.phases import phase

_REGISTER_MAPPED_AND_PORTABLE = 3


class StagedMemory:
    """Host memory that each rank brings and the GPUs of all ranks of the host can address.

    All ranks construct one together. Either all of them succeed or all of them raise.

    Args:
        num_bytes: Bytes that each rank brings, the same everywhere. They are zero at first.
        rank: This rank.
        all_gather: How the ranks tell each other where their memory is.
        device: This rank's GPU, or the CPU.

    Attributes:
        table: `[num_ranks]` int64 on the device: where in this process each rank's memory begins.

    Raises:
        CapacityError: If a rank could not get its memory.
        UnsupportedError: If a rank could not map the memory of another.
    """

    def __init__(self, num_bytes: int, rank: int, all_gather: AllGather, device: torch.device) -> None:
        self.num_bytes, self.rank, self.device = num_bytes, rank, device
        self._host: HostMemory | None = HostMemory(num_bytes, rank, all_gather)
        self._registered: list[int] = []
        table = self._host.address_table()
        if device.type == "cuda":
            with phase("map_peers"):
                own_errors = [self._register(address) for address in table.tolist()]
            errors = all_gather(own_errors)
            if any(any(row) for row in errors):
                self.close()
                raise UnsupportedError(
                    f"CUDA cannot address shared host memory here (CUDA errors by rank: {errors})",
                    hint="raise the limit of locked memory (ulimit -l)",
                )
        self.table = table.to(device)

    def local_bytes(self) -> Tensor:
        """Return this rank's memory as a uint8 tensor on the CPU."""
        return torch.empty(0, dtype=torch.uint8) if self._host is None else self._host.tensor_of(self.rank)

    def close(self) -> None:
        """Let go of the memory. Waits for this GPU's work, not for peers; calling it again does nothing."""
        if self._host is None:
            return
        if self._registered:
            torch.cuda.synchronize(self.device)
            runtime = _runtime()
            for address in self._registered:
                runtime.cudaHostUnregister(address)
        self._host.close()
        self._host, self._registered = None, []

    def __del__(self) -> None:
        # At interpreter shutdown modules may be gone; the system then frees everything anyway.
        with contextlib.suppress(Exception):
            self.close()

    def _register(self, address: int) -> int:
        """Make a mapping known to the GPU; return a CUDA error code. Its address there is the same."""
        with torch.cuda.device(self.device):
            error = int(_runtime().cudaHostRegister(address, self.num_bytes, _REGISTER_MAPPED_AND_PORTABLE))
        if error == 0:
            self._registered.append(address)
        return error


def _runtime() -> Any:
    load: Any = torch.cuda.cudart
    return load()
