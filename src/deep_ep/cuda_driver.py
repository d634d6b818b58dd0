"""The few functions of the CUDA driver that load and launch kernels, called directly.

Triton's own launcher is C code that is compiled on the user's machine, for each kind of kernel. Ours take nothing but
8-byte integers, so one array of them will do, and neither a compiler nor the CUDA toolkit is needed.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from deep_ep.errors import UnsupportedError
from deep_ep.kernel_cache import KernelCode

_INVALID_CONTEXT = 201
_ATTRIBUTE_NUM_REGS = 4
_ATTRIBUTE_MAX_DYNAMIC_SHARED_BYTES = 8
_SHARED_BYTES_WITHOUT_ASKING = 48 << 10
_THREADS_PER_WARP = 32


@lru_cache(1)
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnsupportedError(f"the CUDA driver is not installed: {error}") from None
    driver.cuGetErrorName.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
    driver.cuModuleLoadData.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p)
    driver.cuModuleGetFunction.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_char_p)
    driver.cuFuncSetAttribute.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    driver.cuFuncGetAttribute.argtypes = (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_void_p)
    driver.cuCtxGetCurrent.argtypes = (ctypes.POINTER(ctypes.c_void_p),)
    driver.cuDevicePrimaryCtxRetain.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int)
    driver.cuCtxSetCurrent.argtypes = (ctypes.c_void_p,)
    driver.cuLaunchKernel.argtypes = (
        ctypes.c_void_p,
        *(ctypes.c_uint,) * 7,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
    )
    return driver


class LoadedKernel:
    """A kernel on the current device.

    Args:
        code: The kernel.

    Raises:
        UnsupportedError: If the driver cannot load it.
    """

    def __init__(self, code: KernelCode) -> None:
        driver = _driver()
        _ensure_context()
        module, function, num_regs = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        _check(driver.cuModuleLoadData(ctypes.byref(module), code.cubin), f"load {code.name}")
        name = code.name.encode()
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name), f"find {code.name}")
        # To be asked for an attribute makes the driver load the function now and not when it is launched first, which
        # could wait for kernels that wait for this one.
        _check(driver.cuFuncGetAttribute(ctypes.byref(num_regs), _ATTRIBUTE_NUM_REGS, function), f"load {code.name}")
        if code.shared_bytes > _SHARED_BYTES_WITHOUT_ASKING:
            _check(
                driver.cuFuncSetAttribute(function, _ATTRIBUTE_MAX_DYNAMIC_SHARED_BYTES, code.shared_bytes),
                f"give {code.name} {code.shared_bytes} bytes of shared memory",
            )
        self._name, self._function = code.name, function
        self._num_threads, self._shared_bytes = code.num_warps * _THREADS_PER_WARP, code.shared_bytes
        self._launch_kernel = driver.cuLaunchKernel
        # What the kernel takes beyond our arguments is scratch memory that it does not use: null.
        self._values = (ctypes.c_int64 * code.num_params)()
        begin = ctypes.addressof(self._values)
        self._params = (ctypes.c_void_p * code.num_params)(*(begin + 8 * i for i in range(code.num_params)))
        self._lock = threading.Lock()

    def launch(self, num_programs: int, stream: int, arguments: Sequence[int]) -> None:
        """Put a launch on a stream.

        Args:
            num_programs: The size of the grid.
            stream: The stream's handle.
            arguments: The kernel's arguments.

        Raises:
            UnsupportedError: If the driver refuses.
        """
        with self._lock:  # the driver has copied the values when the call returns
            self._values[: len(arguments)] = arguments  # type: ignore[call-overload]
            error = self._put(num_programs, stream)
            if error == _INVALID_CONTEXT:
                _ensure_context()
                error = self._put(num_programs, stream)
        if error:
            _check(error, f"launch {self._name}")

    def _put(self, num_programs: int, stream: int) -> int:
        error: int = self._launch_kernel(
            self._function,
            num_programs,
            1,
            1,
            self._num_threads,
            1,
            1,
            self._shared_bytes,
            stream,
            self._params,
            None,
        )
        return error


def _ensure_context() -> None:
    """Give this thread the context that torch uses, if it has none because it has not used CUDA yet."""
    driver, context, device = _driver(), ctypes.c_void_p(), torch.cuda.current_device()
    _check(driver.cuCtxGetCurrent(ctypes.byref(context)), "tell the current context")
    if not context.value:
        _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "make a context")
        _check(driver.cuCtxSetCurrent(context), "set the current context")


def _check(error: int, what: str) -> None:
    if error == 0:
        return
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(error, ctypes.byref(name))
    told = name.value.decode() if name.value else str(error)
    raise UnsupportedError(f"the CUDA driver could not {what}: {told}")
