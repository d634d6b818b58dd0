"""A buffer on a GPU that takes and gives CPU tensors, so that the rank tests run on a GPU as they are.

DEEP_EP_TEST_ON_GPU=1 HYPOTHESIS_PROFILE=gpu bash tests/gpu/with_mps.sh pytest tests/ranks/test_against_reference.py
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from deep_ep import Buffer


class GpuBuffer:
    """What `Buffer` is, but for tensors that are brought to the GPU and back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._buffer = Buffer(*args, device="cuda", **kwargs)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._buffer, name)
        if not callable(attribute) or name == "get_local_buffer_tensor":
            return attribute

        @functools.wraps(attribute)
        def call(*args: Any, **kwargs: Any) -> Any:
            to_gpu = functools.partial(_move, device="cuda")
            result = attribute(*map(to_gpu, args), **{key: to_gpu(value) for key, value in kwargs.items()})
            torch.cuda.synchronize()
            return _move(result, device="cpu")

        return call


def _move(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_move(item, device) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_move(item, device) for item in value)
    return value
