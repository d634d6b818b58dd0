"""Device memory of every rank, addressable by every rank of the host, through CUDA IPC.

Each rank allocates with ``cudaMalloc``, outside of torch's allocator, so its settings do not matter. The 64 bytes of an
IPC handle travel as integers, so any process group will do; no collective runs on a GPU. Ranks may each see only their
own GPU, and several ranks may share one.

CUDA IPC comes from ``cuda.bindings``, which every CUDA build of torch for Linux depends on.
"""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import torch
from torch import Tensor

from deep_ep.errors import CapacityError, UnsupportedError
from deep_ep.memory.rendezvous import AllGather
from deep_ep.phases import phase

_HANDLE_WORDS = 8
_CUDA_ERROR_MEMORY_ALLOCATION = 2


class CudaMemory:
    """Memory on its GPU that each rank brings and all ranks of the host can address.

    All ranks construct one together. Either all of them succeed or all of them raise.

    Args:
        num_bytes: Bytes that each rank brings, the same everywhere. They are zero at first.
        rank: This rank.
        all_gather: How the ranks tell each other where their memory is.
        device: This rank's GPU.

    Attributes:
        table: `[num_ranks]` int64 on the device: where in this process each rank's memory begins.

    Raises:
        CapacityError: If a rank could not get its memory.
        UnsupportedError: If a rank could not map the memory of another.
    """

    def __init__(self, num_bytes: int, rank: int, all_gather: AllGather, device: torch.device) -> None:
        self.num_bytes, self.rank, self.device = num_bytes, rank, device
        self._runtime: Any = _load_runtime()
        self._mapped: dict[int, int] = {}
        with torch.cuda.device(device):
            with phase("allocate"):
                self._own, error = self._allocate(num_bytes)
            offers = all_gather([error, *(self._export() if error == 0 else [0] * _HANDLE_WORDS)])
            try:
                _raise_if_short(offers, num_bytes)
                with phase("map_peers"):
                    errors = [self._map(peer, offer[1:]) for peer, offer in enumerate(offers)]
                _raise_if_unreachable(all_gather(errors))
            except BaseException:
                self.close()
                raise
            addresses = [self._mapped.get(peer, self._own) for peer in range(len(offers))]
            self.table = torch.tensor(addresses, dtype=torch.int64, device=device)

    def local_bytes(self) -> Tensor:
        """Return this rank's memory as a uint8 tensor, good until `close`."""
        return torch.as_tensor(_CudaArray(self._own, self.num_bytes), device=self.device)

    def close(self) -> None:
        """Let go of the memory. Waits for this GPU's work, not for peers; calling it again does nothing."""
        if self._own == 0:
            return
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            for address in self._mapped.values():
                self._runtime.cudaIpcCloseMemHandle(address)
            self._runtime.cudaFree(self._own)
        self._mapped, self._own = {}, 0

    def __del__(self) -> None:
        # At interpreter shutdown modules may be gone; the driver then frees everything anyway.
        with contextlib.suppress(Exception):
            self.close()

    def _allocate(self, num_bytes: int) -> tuple[int, int]:
        """Return the address of zeroed memory and a CUDA error code."""
        error, address = self._runtime.cudaMalloc(num_bytes)
        if int(error) == _CUDA_ERROR_MEMORY_ALLOCATION:
            # What torch keeps for later is free to give away.
            torch.cuda.empty_cache()
            error, address = self._runtime.cudaMalloc(num_bytes)
        if int(error) != 0:
            return 0, int(error)
        (error,) = self._runtime.cudaMemset(address, 0, num_bytes)
        torch.cuda.synchronize()
        return int(address), int(error)

    def _export(self) -> tuple[int, ...]:
        error, handle = self._runtime.cudaIpcGetMemHandle(self._own)
        if int(error) != 0:
            raise UnsupportedError(
                f"CUDA cannot share device memory between processes here: {error}",
                hint="CUDA IPC needs Linux; ranks in containers need a common pid namespace",
            )
        return struct.unpack(f"{_HANDLE_WORDS}q", bytes(handle.reserved))

    def _map(self, peer: int, handle_words: list[int]) -> int:
        """Map a peer's memory; return a CUDA error code."""
        if peer == self.rank:
            return 0
        handle = self._runtime.cudaIpcMemHandle_t()
        handle.reserved = struct.pack(f"{_HANDLE_WORDS}q", *handle_words)
        error, address = self._runtime.cudaIpcOpenMemHandle(handle, self._runtime.cudaIpcMemLazyEnablePeerAccess)
        if int(error) == 0:
            self._mapped[peer] = int(address)
        return int(error)


class _CudaArray:
    """Device memory in the form that torch takes over without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _load_runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise UnsupportedError(
            f"peer memory needs the Python package cuda-bindings, which is not installed ({error})",
            hint="run `pip install cuda-bindings` in the version of your CUDA, or install torch's CUDA build with pip",
        ) from None
    return runtime


def _raise_if_short(offers: list[list[int]], num_bytes: int) -> None:
    failed = [f"rank {rank} (CUDA error {error})" for rank, (error, *_) in enumerate(offers) if error]
    if failed:
        raise CapacityError(
            f"{num_bytes:,} bytes of device memory could not be had by {', '.join(failed)}",
            hint="ask for a smaller buffer, or make it before the model takes the memory",
        )


def _raise_if_unreachable(errors: list[list[int]]) -> None:
    pairs = [(rank, peer, error) for rank, row in enumerate(errors) for peer, error in enumerate(row) if error]
    if pairs:
        told = ", ".join(f"rank {rank} cannot reach rank {peer} (CUDA error {error})" for rank, peer, error in pairs)
        raise UnsupportedError(
            f"the GPUs of a group must be able to address each other's memory, but {told}",
            hint="set DEEP_EP_USE_P2P=0 on all ranks to go through pinned host memory",
        )
