"""The compatibility list: what is needed, what is recommended, and what the facts of a machine say to that."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from deep_ep import env
from deep_ep.bench.facts import Gpu, Machine
from deep_ep.errors import ConfigError


class Status(StrEnum):
    """How a finding is to be taken."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the list.

    Attributes:
        name: What was looked at.
        found: What was found.
        minimum: What is needed, empty if nothing is.
        recommended: What is better.
        status: What that means.
        advice: One sentence of what to do; empty if there is nothing to do.
    """

    name: str
    found: str
    minimum: str = ""
    recommended: str = ""
    status: Status = Status.OK
    advice: str = ""


_MIN_PYTHON, _MIN_TORCH, _MIN_TRITON = (3, 11), (2, 11), (3, 6)
_MIN_CAPABILITY, _BEST_CAPABILITY = (8, 0), (9, 0)
_MIN_CUDA, _BEST_CUDA = (12, 4), (12, 8)
_MIN_DRIVER, _BEST_DRIVER = 525, 570
_MIN_MEMORY_BYTES, _BEST_MEMORY_BYTES = 1 << 30, 8 << 30
_MIN_FILES, _BEST_FILES = 256, 4096
_MANY_LOCKED_BYTES = 1 << 36


def judge(machine: Machine) -> list[Finding]:
    """Return the compatibility list of a machine."""
    return [
        *_software(machine),
        *_gpus(machine),
        *_host(machine),
        *_network(machine),
        _cache(Path(env.CACHE_DIR.get()).expanduser()),
        _nvshmem(env.NVSHMEM_DIR.get()),
        *_environment(),
    ]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _dots(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _software(machine: Machine) -> Iterator[Finding]:
    yield Finding(
        name="Python",
        found=_dots(machine.python),
        minimum=_dots(_MIN_PYTHON),
        recommended="3.12",
        status=Status.OK if machine.python >= _MIN_PYTHON else Status.PROBLEM,
        advice="" if machine.python >= _MIN_PYTHON else "Make an environment with Python 3.11 or newer.",
    )
    is_new = _numbers(machine.torch) >= _MIN_TORCH
    yield Finding(
        name="torch",
        found=machine.torch,
        minimum=_dots(_MIN_TORCH),
        recommended="the newest",
        status=Status.OK if is_new else Status.PROBLEM,
        advice="" if is_new else "Run `pip install --upgrade torch`.",
    )
    has_triton = machine.triton is not None and _numbers(machine.triton) >= _MIN_TRITON
    yield Finding(
        name="Triton",
        found=machine.triton or "not installed",
        minimum=_dots(_MIN_TRITON),
        recommended="that of torch",
        status=Status.OK if has_triton else Status.PROBLEM if machine.gpus else Status.WARNING,
        advice="" if has_triton else "Run `pip install 'triton>=3.6'`; GPUs need it, CPU ranks do not.",
    )


def _gpus(machine: Machine) -> Iterator[Finding]:
    if not machine.gpus:
        yield _no_gpu(machine)
        return
    yield _cuda(machine)
    yield _driver(machine)
    has_bindings = machine.cuda_bindings is not None
    yield Finding(
        name="cuda-bindings",
        found=machine.cuda_bindings or "not installed",
        minimum="of the CUDA of torch",
        status=Status.OK if has_bindings else Status.PROBLEM,
        advice="" if has_bindings else "Run `pip install cuda-bindings`; ranks share GPU memory through it.",
    )
    for index, gpu in enumerate(machine.gpus):
        yield _gpu(index, gpu)
    if len(machine.gpus) > 1:
        yield _links(machine.gpus)
        yield _peer_access(machine.peer_access)
    exclusive = [str(index) for index, gpu in enumerate(machine.gpus) if gpu.is_exclusive]
    if exclusive:
        yield Finding(
            name="compute mode",
            found=f"exclusive on GPU {', '.join(exclusive)}",
            recommended="default",
            status=Status.WARNING,
            advice="Only one rank per GPU can start; `nvidia-smi -c DEFAULT` lets ranks share a GPU.",
        )


def _no_gpu(machine: Machine) -> Finding:
    if machine.num_gpus_of_driver == 0:
        return Finding(name="GPU", found="none: ranks are CPU processes", recommended="compute capability 9.0")
    if machine.cuda is None:
        advice = "This torch is built without CUDA; install the CUDA build: `pip install --force-reinstall torch`."
    else:
        advice = (
            f"torch for CUDA {machine.cuda} does not start with driver {machine.driver}; update the driver, look at "
            "CUDA_VISIBLE_DEVICES, or install a torch for an older CUDA."
        )
    return Finding(
        name="GPU",
        found=f"the driver has {machine.num_gpus_of_driver}, torch sees none",
        minimum="visible to torch",
        status=Status.PROBLEM,
        advice=advice,
    )


def _cuda(machine: Machine) -> Finding:
    found = machine.cuda or "unknown"
    numbers = _numbers(found)
    is_enough, is_best = numbers >= _MIN_CUDA, numbers >= _BEST_CUDA
    return Finding(
        name="CUDA of torch",
        found=found,
        minimum=_dots(_MIN_CUDA),
        recommended=_dots(_BEST_CUDA),
        status=Status.OK if is_best else Status.WARNING if is_enough else Status.PROBLEM,
        advice="" if is_best else "Install a torch that is built for a newer CUDA; no CUDA toolkit is needed.",
    )


def _driver(machine: Machine) -> Finding:
    limits = {"minimum": str(_MIN_DRIVER), "recommended": str(_BEST_DRIVER)}
    if machine.driver is None:
        return Finding(
            name="driver",
            found="unknown",
            **limits,
            status=Status.WARNING,
            advice="Run `pip install 'deep-ep[cli]'` for nvidia-ml-py, which tells the driver and the links.",
        )
    major = _numbers(machine.driver)[0]
    is_best = major >= _BEST_DRIVER
    return Finding(
        name="driver",
        found=machine.driver,
        **limits,
        status=Status.OK if is_best else Status.WARNING if major >= _MIN_DRIVER else Status.PROBLEM,
        advice="" if is_best else f"Update the driver to {_BEST_DRIVER} or newer.",
    )


def _gpu(index: int, gpu: Gpu) -> Finding:
    status, advice = Status.OK, ""
    if gpu.capability < _MIN_CAPABILITY:
        status, advice = (
            Status.PROBLEM,
            "Its kernels are not built for GPUs before Ampere; use CPU ranks or another GPU.",
        )
    elif gpu.capability < _BEST_CAPABILITY:
        status, advice = Status.WARNING, "It works, but fp8 is cast without the help of the hardware before 8.9."
        if gpu.capability >= (8, 9):
            status, advice = Status.OK, ""
    return Finding(
        name=f"GPU {index}",
        found=f"{gpu.name}, compute capability {_dots(gpu.capability)}, {gpu.memory_bytes >> 30} GiB",
        minimum=_dots(_MIN_CAPABILITY),
        recommended=_dots(_BEST_CAPABILITY),
        status=status,
        advice=advice,
    )


def _links(gpus: list[Gpu]) -> Finding:
    counts = [gpu.num_links for gpu in gpus]
    found = ", ".join("?" if count is None else str(count) for count in counts) + " links"
    if all(counts):
        return Finding(name="NVLink", found=found, recommended="the same on all")
    return Finding(
        name="NVLink",
        found=found,
        recommended="all of a GPU's links",
        status=Status.WARNING,
        advice="Without NVLink, rows cross PCIe, about ten times slower; see `nvidia-smi topo -m`.",
    )


def _peer_access(matrix: list[list[bool]]) -> Finding:
    """The matrix as one word per GPU: `+` for each GPU whose memory it addresses, `-` for the others."""
    words = " ".join("".join("+" if can else "-" for can in line) for line in matrix)
    if all(all(line) for line in matrix):
        return Finding(name="peer access", found=words, recommended="between all GPUs")
    return Finding(
        name="peer access",
        found=words,
        recommended="between all GPUs",
        status=Status.WARNING,
        advice="Set DEEP_EP_USE_P2P=0 on all ranks: rows then go through pinned host memory.",
    )


def _host(machine: Machine) -> Iterator[Finding]:
    yield Finding(name="cores", found=f"{machine.num_cores} of {machine.processor}", recommended="one per rank")
    free, total = machine.memory_free_bytes, machine.memory_limit_bytes
    is_best = free >= _BEST_MEMORY_BYTES
    yield Finding(
        name="host memory",
        found=f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f}",
        minimum="1 GiB free",
        recommended="8 GiB free",
        status=Status.OK if is_best else Status.WARNING if free >= _MIN_MEMORY_BYTES else Status.PROBLEM,
        advice=""
        if is_best
        else "Free some, raise the memory limit of the container, or use fewer or smaller buffers.",
    )
    yield Finding(
        name="shared memory",
        found="memory files; /dev/shm is not used" if machine.can_share_memory else "cannot be opened by peers",
        minimum="memfd and /proc",
        status=Status.OK if machine.can_share_memory else Status.PROBLEM,
        advice="" if machine.can_share_memory else "Run all ranks as one user in one container with /proc mounted.",
    )
    is_best = machine.num_files >= _BEST_FILES
    yield Finding(
        name="open files",
        found=str(machine.num_files),
        minimum=str(_MIN_FILES),
        recommended=str(_BEST_FILES),
        status=Status.OK if is_best else Status.WARNING if machine.num_files >= _MIN_FILES else Status.PROBLEM,
        advice="" if is_best else f"Run `ulimit -n {_BEST_FILES}` before the program.",
    )


def _cache(folder: Path) -> Finding:
    """Kernels and tunings are kept there; without it every start compiles anew."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    is_writable = os.access(nearest, os.W_OK)
    return Finding(
        name="cache",
        found=f"{folder}, {'can' if is_writable else 'cannot'} be written",
        recommended="a folder that ranks share",
        status=Status.OK if is_writable else Status.WARNING,
        advice="" if is_writable else "Set DEEP_EP_CACHE_DIR to a folder that can be written: kernels are kept there.",
    )


def _network(machine: Machine) -> Iterator[Finding]:
    devices = [device for device in machine.network if device.is_up]
    fast = [device for device in devices if device.kind != "Ethernet"]
    found = ", ".join(f"{device.name} {device.kind} {device.speed}" for device in fast or devices) or "none"
    down = [device.name for device in machine.network if not device.is_up and device.kind != "Ethernet"]
    if down:
        yield Finding(
            name="network ports",
            found=f"{', '.join(down)} down",
            recommended="all up",
            status=Status.WARNING,
            advice="See `ibstat`: a port that is down is a cable, a switch or a subnet manager.",
        )
    yield Finding(name="network", found=found, recommended="InfiniBand or RoCE, for several hosts")
    if not fast:
        return
    has_module = machine.has_peer_memory_module or not machine.gpus
    yield Finding(
        name="GPUDirect RDMA",
        found="nvidia_peermem is loaded" if machine.has_peer_memory_module else "nvidia_peermem is not loaded",
        recommended="nvidia_peermem or DMA-BUF",
        status=Status.OK if has_module else Status.WARNING,
        advice="" if has_module else "Run `modprobe nvidia_peermem`, or check that NCCL_DEBUG=INFO tells of GDRDMA.",
    )
    locked = machine.locked_memory_bytes
    is_many = locked is None or locked >= _MANY_LOCKED_BYTES
    yield Finding(
        name="locked memory",
        found="unlimited" if locked is None else f"{locked:,} bytes",
        recommended="unlimited",
        status=Status.OK if is_many else Status.WARNING,
        advice=""
        if is_many
        else "Run `ulimit -l unlimited`, in containers `--ulimit memlock=-1`: network cards need it.",
    )


def _nvshmem(folder: str) -> Finding:
    """NVSHMEM is not used; a folder that is named should still be what its name says."""
    if not folder:
        return Finding(name="NVSHMEM", found="not set", recommended="nothing: this version needs none")
    lacks = missing_of_nvshmem(Path(folder))
    version = nvshmem_version(Path(folder))
    return Finding(
        name="NVSHMEM",
        found=f"{folder}{f', version {version}' if version else ''}" + (f" lacks {', '.join(lacks)}" if lacks else ""),
        recommended="nothing: this version needs none",
        status=Status.WARNING if lacks else Status.OK,
        advice="It is not used; unset NVSHMEM_DIR or name the folder of an installation." if lacks else "",
    )


def missing_of_nvshmem(folder: Path) -> list[str]:
    """Return what a folder lacks to be an installation of NVSHMEM: its header, its libraries."""
    parts = {
        "include/nvshmem.h": ("include/nvshmem.h",),
        "lib/libnvshmem_host.so": ("lib/libnvshmem_host.so*", "lib64/libnvshmem_host.so*"),
        "lib/libnvshmem_device.a": ("lib/libnvshmem_device.*", "lib64/libnvshmem_device.*"),
    }
    return [name for name, patterns in parts.items() if not any(any(folder.glob(p)) for p in patterns)]


def nvshmem_version(folder: Path) -> str | None:
    """Return the version that the headers of NVSHMEM tell."""
    for header in sorted(folder.glob("include/**/*version*.h")):
        text = header.read_text(errors="replace")
        numbers = [re.search(rf"NVSHMEM_VENDOR_{part}_VERSION\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
        if numbers[0]:
            return ".".join(match.group(1) for match in numbers if match)
    return None


def _environment() -> Iterator[Finding]:
    """Variables that slow things down or that nobody reads."""
    for variable in env.ALL_VARIABLES:
        try:
            variable.get()
        except ConfigError as error:
            advice = f"Set it to {variable.rule}, or unset it."
            yield Finding(name=variable.name, found=str(error), status=Status.PROBLEM, advice=advice)
    known = {variable.name for variable in env.ALL_VARIABLES}
    for name, text in env.variables_set("DEEP_EP_").items():
        if name not in known and not name.startswith("DEEP_EP_TEST"):
            advice = "No variable has this name; the list below has those that are read."
            yield Finding(name=name, found=text, status=Status.WARNING, advice=advice)
    for name, bad, advice in (
        ("CUDA_LAUNCH_BLOCKING", "1", "Unset it: with it nothing overlaps, every launch waits for its end."),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "Raise it to 8 or more if communication does not overlap with compute."),
        ("NCCL_P2P_DISABLE", "1", "Unset it to let NCCL, which torch.distributed uses, take NVLink."),
        ("TRITON_INTERPRET", "1", "Unset it: kernels would be interpreted, a thousand times slower."),
    ):
        if env.variables_set(name).get(name) == bad:
            yield Finding(name=name, found=bad, recommended="not set", status=Status.WARNING, advice=advice)
