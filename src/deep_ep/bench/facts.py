"""What there is on this machine. No judgement; that is `deep_ep.check.findings`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deep_ep import tuned


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as torch numbers them.

    Attributes:
        num_links: NVLinks that are up; None if NVML does not tell.
        is_exclusive: Whether only one process at a time may use it.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    num_links: int | None
    is_exclusive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkDevice:
    """A network device that could carry tokens between hosts.

    Attributes:
        kind: "InfiniBand", "RoCE" or "Ethernet".
        is_up: Whether its link is.
        speed: In words, as the system tells it.
    """

    name: str
    kind: str
    is_up: bool
    speed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was found.

    Attributes:
        cuda: The version that torch was built for, None without CUDA.
        driver: Of the GPUs, None if there is none.
        num_gpus_of_driver: GPUs that the driver tells of, which torch may not see.
        peer_access: `[i][j]`: whether GPU i addresses the memory of GPU j.
        memory_limit_bytes: What the container or the machine allows.
        locked_memory_bytes: Limit on locked memory; None if there is none.
        can_share_memory: Whether memory of one process can be mapped by others.
        has_peer_memory_module: Whether network cards can reach GPU memory.
    """

    system: str
    processor: str
    num_cores: int
    python: tuple[int, ...]
    torch: str
    triton: str | None
    cuda: str | None
    cuda_bindings: str | None
    driver: str | None
    num_gpus_of_driver: int
    gpus: list[Gpu] = field(default_factory=list)
    peer_access: list[list[bool]] = field(default_factory=list)
    memory_limit_bytes: int
    memory_free_bytes: int
    locked_memory_bytes: int | None
    num_files: int
    can_share_memory: bool
    network: list[NetworkDevice] = field(default_factory=list)
    has_peer_memory_module: bool

    @property
    def device(self) -> str:
        """What ranks run on here, in a few words."""
        if not self.gpus:
            return self.processor
        names = sorted({gpu.name for gpu in self.gpus})
        return f"{len(self.gpus)} x {', '.join(names)}"


def look() -> Machine:
    """Look at this machine."""
    driver, num_gpus_of_driver, links, exclusive = None, 0, {}, {}
    with _nvml() as nvml:
        if nvml is not None:
            driver = str(nvml.nvmlSystemGetDriverVersion())
            num_gpus_of_driver = nvml.nvmlDeviceGetCount()
            for index in range(num_gpus_of_driver):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = str(nvml.nvmlDeviceGetUUID(handle)).removeprefix("GPU-")
                links[uuid] = _count_links(nvml, handle)
                exclusive[uuid] = nvml.nvmlDeviceGetComputeMode(handle) == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    gpus = []
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(num_gpus):
        properties = torch.cuda.get_device_properties(index)
        uuid = str(properties.uuid)
        gpus.append(
            Gpu(
                name=properties.name,
                capability=(properties.major, properties.minor),
                memory_bytes=properties.total_memory,
                num_links=links.get(uuid),
                is_exclusive=exclusive.get(uuid, False),
            )
        )
    limit, available = _memory()
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=tuned.cpu_name(),
        num_cores=len(os.sched_getaffinity(0)),
        python=tuple(sys.version_info[:3]),
        torch=torch.__version__,
        triton=version("triton"),
        cuda=torch.version.cuda,
        cuda_bindings=version("cuda-bindings"),
        driver=driver,
        num_gpus_of_driver=num_gpus_of_driver,
        gpus=gpus,
        peer_access=[
            [a == b or torch.cuda.can_device_access_peer(a, b) for b in range(num_gpus)] for a in range(num_gpus)
        ],
        memory_limit_bytes=limit,
        memory_free_bytes=available,
        locked_memory_bytes=None if locked == resource.RLIM_INFINITY else locked,
        num_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        can_share_memory=_can_share_memory(),
        network=[*_infiniband(Path("/sys/class/infiniband")), *_ethernet(Path("/sys/class/net"))],
        has_peer_memory_module=any(Path("/sys/module", name).exists() for name in ("nvidia_peermem", "nv_peer_mem")),
    )


def version(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextmanager
def _nvml() -> Iterator[Any]:
    """Give NVML, or None where there is no driver or no package for it."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # NVML tells by an error of its own class that there is no driver
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _count_links(nvml: Any, handle: Any) -> int | None:
    try:
        states = [nvml.nvmlDeviceGetNvLinkState(handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
        return states.count(nvml.NVML_FEATURE_ENABLED)
    except nvml.NVMLError:
        return None


def _memory() -> tuple[int, int]:
    """Return the bytes of memory that there are, or that the container allows, and how many are free."""
    info = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(info[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, usage = int(Path(limit_file).read_text()), int(Path(usage_file).read_text())
        except (OSError, ValueError):  # there is no such group, or its limit is "max"
            continue
        total, free = min(total, limit), min(free, limit - usage)
    return total, free


def _can_share_memory() -> bool:
    """Tell whether a memory file can be opened by its descriptor, as ranks open those of their peers."""
    try:
        fd = os.memfd_create("deep_ep")
    except OSError:
        return False
    try:
        os.close(os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDWR))
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _infiniband(root: Path) -> Iterator[NetworkDevice]:
    for device in sorted(root.glob("*")):
        for port in sorted((device / "ports").glob("*")):
            yield NetworkDevice(
                name=f"{device.name}:{port.name}",
                kind="InfiniBand" if _read(port / "link_layer") == "InfiniBand" else "RoCE",
                is_up="ACTIVE" in _read(port / "state"),
                speed=re.sub(r"\s*\(.*", "", _read(port / "rate")),
            )


def _ethernet(root: Path) -> Iterator[NetworkDevice]:
    for device in sorted(root.glob("*")):
        is_ethernet = _read(device / "type") == "1"
        if not is_ethernet or device.name.startswith(("docker", "veth", "br-", "virbr", "cni", "flannel")):
            continue
        speed = _read(device / "speed")
        has_speed = speed.isdigit()
        yield NetworkDevice(
            name=device.name,
            kind="Ethernet",
            is_up=_read(device / "operstate") in ("up", "unknown"),
            speed=f"{int(speed) / 1000:g} Gb/sec" if has_speed else "unknown speed",
        )


def versions() -> dict[str, str | None]:
    """Return what a record of a measurement must name: versions, and the commit if the source is a checkout."""
    source = Path(__file__).resolve().parents[3]
    commit = None
    if (source / ".git").exists():
        command = ["git", "-C", str(source), "describe", "--always", "--dirty"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda,
        "deep_ep": version("deep-ep"),
        "commit": commit,
    }
