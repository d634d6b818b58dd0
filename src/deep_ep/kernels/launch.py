"""Compiling, loading and launching kernels, at little cost to the host.

``kernel[grid](...)`` of Triton binds, specialises and looks up at every call, about 22 us. Our kernels take 64-bit
integers that never specialise, so what to run is known from the constants alone: it is looked up here, by them, and run
directly. A variant that this process has not used comes from the cache on disk (`deep_ep.kernel_cache`), or is
compiled. `prepare` does all that without a launch.
"""

import re
import threading

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deep_ep import kernel_cache
from deep_ep.cuda_driver import LoadedKernel
from deep_ep.errors import UnsupportedError
from deep_ep.phases import phase

_REGISTERS_PER_SM = 65536
_loaded = {}
_loading = {}
_lock = threading.Lock()
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def launch(kernel, num_programs, arguments, constants, num_warps):
    """Run a kernel on the current stream of the current device.

    Args:
        kernel: A function made by `deep_ep.kernels.signal.kernel`.
        num_programs: The size of its grid.
        arguments: The values of its run-time parameters, integers, in order.
        constants: The values of its `tl.constexpr` parameters, in order, which follow the others.
        num_warps: Warps per program.

    Raises:
        UnsupportedError: If the variant is not loaded and the stream is being captured.
    """
    if triton.knobs.runtime.interpret:
        kernel[(num_programs,)](*arguments, *constants)
        return
    device = _current_device()
    loaded = _loaded.get((id(kernel), device, constants, num_warps))
    if loaded is None:
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"{name_of(kernel)} is used for the first time while a CUDA graph is captured, and must be compiled or "
                "loaded before",
                hint="make the same call once before the capture, or warm the buffer: Buffer(preinitialize=True), "
                "buffer.warmup_async(shapes=...).wait()",
            )
        loaded = prepare(kernel, constants, num_warps)
    loaded.launch(num_programs, _current_stream(device), arguments)


def prepare(kernel, constants, num_warps):
    """Compile a variant of a kernel, or read it from disk, and load it on the current device; return it.

    Several threads may prepare at once: a second one that wants the same variant waits for the first.
    """
    if triton.knobs.runtime.interpret:
        return None
    device = _current_device()
    key = (id(kernel), device, constants, num_warps)
    with _lock:
        loading = _loading.setdefault(key, threading.Lock())
    with loading:
        if key not in _loaded:
            capability = 10 * torch.cuda.get_device_capability(device)[0] + torch.cuda.get_device_capability(device)[1]
            code = find(kernel, constants, num_warps, capability)
            with phase("load"):
                _loaded[key] = LoadedKernel(code)
    return _loaded[key]


def find(kernel, constants, num_warps, capability):
    """Return the code of a variant for a compute capability, from disk or compiled; needs no GPU.

    Args:
        kernel: As in `launch`, like the next two.
        constants: See above.
        num_warps: See above.
        capability: 90 for compute capability 9.0.
    """
    key = kernel_cache.key_of(name_of(kernel), constants, num_warps, capability)
    return kernel_cache.find_or_compile(key, lambda: compile_for(kernel, constants, num_warps, capability))


def compile_for(kernel, constants, num_warps, capability):
    """Compile a variant for a compute capability; needs no GPU."""
    compiled = compile_with_triton(kernel, constants, num_warps, capability)
    metadata = compiled.metadata
    # Beside our arguments the code has parameters for scratch memory, which must be of no size.
    assert metadata.global_scratch_size == 0
    assert metadata.num_ctas == 1
    assert not metadata.launch_cooperative_grid
    return kernel_cache.KernelCode(
        name=metadata.name,
        num_params=len(re.findall(r"^\s*\.param \.u64 ", compiled.asm["ptx"], re.MULTILINE)),
        num_warps=metadata.num_warps,
        shared_bytes=metadata.shared,
        cubin=compiled.asm["cubin"],
    )


def compile_with_triton(kernel, constants, num_warps, capability):
    """Return what Triton makes of a variant, with every stage of the compilation.

    Kernels of which so many programs must fit on a multiprocessor at once say so with a constant, PROGRAMS_PER_SM.
    """
    names = [parameter.name for parameter in kernel.params]
    constant_names = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
    values = dict(zip(constant_names, constants, strict=True))
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in values else "i64" for name in names},
        constexprs={(names.index(name),): value for name, value in values.items()},
    )
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    if "PROGRAMS_PER_SM" in values:
        num_threads = 32 * num_warps * values["PROGRAMS_PER_SM"]
        options["maxnreg"] = min(_REGISTERS_PER_SM // num_threads // 8 * 8, 255)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def name_of(kernel):
    """Return the module and name of a kernel."""
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


def num_compiled():
    """Return how many variants of kernels have been compiled or loaded in this process."""
    return len(_loaded)
