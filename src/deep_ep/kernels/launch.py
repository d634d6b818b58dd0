"""Launching kernels at little cost to the host.

``kernel[grid](...)`` binds, specialises and looks up at every call, about 22 us. Our kernels take 64-bit integers that
never specialise, so what to run is known from the constants alone: it is looked up here, by them, and run directly.
"""

import triton

_compiled = {}


def launch(kernel, num_programs, arguments, constants, num_warps):
    """Run a kernel on the current stream of the current device.

    Args:
        kernel: A function made by `deep_ep.kernels.signal.kernel`.
        num_programs: The size of its grid.
        arguments: The values of its run-time parameters, integers, in order.
        constants: The values of its `tl.constexpr` parameters, in order, which follow the others.
        num_warps: Warps per program.
    """
    if triton.knobs.runtime.interpret:
        kernel[(num_programs,)](*arguments, *constants)
        return
    driver = triton.runtime.driver.active
    device = driver.get_current_device()
    key = (id(kernel), device, constants, num_warps)
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[(num_programs,)](*arguments, *constants, num_warps=num_warps)
        return
    stream = driver.get_current_stream(device)
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    run(num_programs, 1, 1, stream, function, metadata, None, None, None, *arguments, *constants)


def num_compiled():
    """Return how many variants of kernels have been compiled or loaded in this process."""
    return len(_compiled)
