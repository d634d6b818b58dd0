"""Makes Triton's interpreter round as GPUs do.

It truncates float32 to bfloat16, and with Triton 3.6 and new numpy it cannot take a loaded value as a loop's bound.
"""

import inspect

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_DTYPES = {tl.bfloat16: torch.bfloat16, tl.float32: torch.float32, tl.float16: torch.float16}
_INTEGERS = {2: (np.int16, torch.int16), 4: (np.int32, torch.int32)}


def install():
    """Patch the interpreter of this process."""
    builder = interpreter.InterpreterBuilder
    cast_impl, create_fp_to_fp = builder.cast_impl, builder.create_fp_to_fp

    def patched_cast(self, src, dst_type):
        cast = _round(src, dst_type)
        return cast_impl(self, src, dst_type) if cast is None else cast

    def patched_fp_to_fp(self, src, dst_type, rounding_mode):
        cast = _round(src, dst_type)
        return create_fp_to_fp(self, src, dst_type, rounding_mode) if cast is None else cast

    builder.cast_impl, builder.create_fp_to_fp = patched_cast, patched_fp_to_fp
    _patch_index()


def _round(src, dst_type):
    src_type, dst = src.dtype.scalar, dst_type.scalar
    if src_type not in _DTYPES or dst not in _DTYPES:
        return None
    data = np.ascontiguousarray(src.data)
    as_numpy, _ = _INTEGERS[data.dtype.itemsize]
    values = torch.from_numpy(data.view(as_numpy).reshape(-1).copy()).view(_DTYPES[src_type]).to(_DTYPES[dst])
    integers = values.view(_INTEGERS[values.element_size()][1]).numpy()
    rounded = integers.view(interpreter._get_np_dtype(dst_type)).reshape(np.shape(src.data))
    return interpreter.TensorHandle(rounded, dst)


def _patch_index():
    if "int(self.handle.data)" not in inspect.getsource(interpreter._patch_lang_tensor):
        return
    patch_lang_tensor = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.reshape(self.handle.data, -1)[0]))

    interpreter._patch_lang_tensor = patched
