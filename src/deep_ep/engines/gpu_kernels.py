"""The kernel modules, imported when they are needed first: they need Triton, and importing that takes a while."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from deep_ep.errors import UnsupportedError
from deep_ep.phases import phase

_lock = threading.Lock()
_kernels: Kernels | None = None


class Kernels:
    """What the GPU engines use of the kernel modules.

    Attributes:
        layout, dispatch, combine, low_latency_dispatch, low_latency_combine: The modules.
        launch, prepare, find, name_of: The functions of `deep_ep.kernels.launch`.
    """

    def __init__(self) -> None:
        try:
            import triton.language as tl
        except ImportError:
            raise UnsupportedError(
                "exchanges between GPUs need Triton, which is not installed", hint="run `pip install triton`"
            ) from None
        from deep_ep.kernels import combine, dispatch, launch, layout, low_latency_combine, low_latency_dispatch

        self.layout: ModuleType = layout
        self.dispatch: ModuleType = dispatch
        self.combine: ModuleType = combine
        self.low_latency_dispatch: ModuleType = low_latency_dispatch
        self.low_latency_combine: ModuleType = low_latency_combine
        self.launch: Callable[..., None] = launch.launch
        self.prepare: Callable[..., Any] = launch.prepare
        self.find: Callable[..., Any] = launch.find
        self.name_of: Callable[[Any], str] = launch.name_of
        self._types: dict[torch.dtype, Any] = {
            torch.int64: tl.int64,
            torch.int32: tl.int32,
            torch.int16: tl.int16,
            torch.uint8: tl.int8,
            torch.bfloat16: tl.bfloat16,
            torch.float16: tl.float16,
            torch.float32: tl.float32,
        }

    def type_of(self, dtype: torch.dtype) -> Any:
        """Return Triton's name of a dtype."""
        return self._types[dtype]


def load_kernels() -> Kernels:
    """Import the kernel modules, once in a process.

    Raises:
        UnsupportedError: If Triton is not installed.
    """
    global _kernels
    if _kernels is None:
        with _lock, phase("load"):
            _kernels = _kernels or Kernels()
    return _kernels
