"""Where compiled kernels are kept: files that many ranks and jobs may share.

A kernel is one file, named after everything that it depends on: the source of all kernels, the version of Triton, the
architecture, the values of its constants. So a file is never out of date, and never changes once it is there: it is
written under another name and then renamed, so nobody sees half of it, and its checksum tells if a disk did damage.
While a process compiles it holds a lock on the kernel's name; others that want the same kernel wait for that, and find
the file. So a host compiles a kernel once, however many ranks it has.

Two folders are looked at: DEEP_EP_CACHE_DIR, and `prebuilt` inside the package, which a build may have filled
(`python setup.py build --preinitialize-optimized`).

The same folder remembers the shapes of calls that programs have made (`seen`), so that a later start can prepare for
them without being told.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deep_ep import env
from deep_ep.phases import phase

logger = logging.getLogger("deep_ep")

PREBUILT = Path(__file__).parent / "prebuilt"
_SOURCES = ("kernels/*.py", "gpu_layout.py", "low_latency_layout.py")
_FORMAT = "deep_ep kernel 1"
_LOCK_TIMEOUT_S = 120.0
_NUM_MAX_SEEN = 64


@dataclass(frozen=True, slots=True)
class KernelCode:
    """A compiled kernel.

    Attributes:
        name: Its name in the code.
        num_params: How many 8-byte parameters it takes.
        num_warps: Warps per program.
        shared_bytes: Shared memory per program.
        cubin: The code.
    """

    name: str
    num_params: int
    num_warps: int
    shared_bytes: int
    cubin: bytes

    def pack(self) -> bytes:
        """Return the bytes of the file."""
        fields = {field: value for field, value in asdict(self).items() if field != "cubin"}
        header = {"format": _FORMAT, "sha256": hashlib.sha256(self.cubin).hexdigest(), **fields}
        return json.dumps(header).encode() + b"\n" + self.cubin

    @staticmethod
    def unpack(data: bytes) -> KernelCode | None:
        """Return the kernel of a file, None if the file is damaged."""
        first, _, cubin = data.partition(b"\n")
        try:
            header = json.loads(first)
            if header.pop("format") != _FORMAT or header.pop("sha256") != hashlib.sha256(cubin).hexdigest():
                return None
            return KernelCode(cubin=cubin, **header)
        except (ValueError, KeyError, TypeError):
            return None


def key_of(kernel: str, constants: tuple[object, ...], num_warps: int, capability: int) -> str:
    """Return the name under which a kernel is kept.

    Args:
        kernel: Its module and name.
        constants: The values of its constants.
        num_warps: Warps per program.
        capability: What it is compiled for: 90 is compute capability 9.0.
    """
    what = (_FORMAT, _versions(), kernel, tuple(map(str, constants)), num_warps, capability)
    digest = hashlib.sha256(repr(what).encode()).hexdigest()[:32]
    return f"{kernel.rpartition('.')[2]}-sm{capability}-{digest}"


def find_or_compile(key: str, compile_kernel: Callable[[], KernelCode]) -> KernelCode:
    """Return a kernel: from the cache, or else compiled, by one process of all that share the cache.

    Args:
        key: From `key_of`.
        compile_kernel: Compiles it.
    """
    with phase("load"):
        found = _find(key)
    if found is not None:
        return found
    with phase("compile"):
        folder = _folder("kernels")
        if folder is None:
            return compile_kernel()
        from filelock import FileLock, Timeout

        try:
            with FileLock(folder / f"{key}.lock", timeout=_LOCK_TIMEOUT_S):
                found = _find(key)  # whoever held the lock before has made it
                if found is None:
                    found = compile_kernel()
                    write_whole(folder / key, found.pack())
                return found
        except (OSError, Timeout) as error:
            # Without a lock or room for a file the kernel is still right; others may compile it too.
            logger.warning("cannot use the kernel cache %s: %s", folder, error)
            return compile_kernel()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that nobody ever sees a part of it."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def remember(shape: dict[str, object]) -> None:
    """Keep the shape of a call for later starts; the last 64 that are new are kept."""
    folder = _folder("seen")
    if folder is None:
        return
    text = json.dumps(shape, sort_keys=True)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    try:
        if path.exists():
            path.touch()
            return
        write_whole(path, text.encode())
        for old in sorted(folder.glob("*.json"), key=lambda each: each.stat().st_mtime)[:-_NUM_MAX_SEEN]:
            old.unlink(missing_ok=True)
    except OSError as error:
        logger.info("cannot remember a shape in %s: %s", folder, error)


def seen() -> list[dict[str, object]]:
    """Return the shapes that are remembered, the last one first."""
    folder = _folder("seen")
    if folder is None:
        return []
    found = []
    for path in folder.glob("*.json"):
        try:
            found.append((path.stat().st_mtime, json.loads(path.read_text())))
        except (OSError, ValueError):
            continue  # another process has just removed it
    return [shape for _, shape in sorted(found, key=lambda item: -item[0])]


def _find(key: str) -> KernelCode | None:
    for folder in (_folder("kernels"), PREBUILT):
        if folder is None:
            continue
        try:
            data = (folder / key).read_bytes()
        except OSError:
            continue
        found = KernelCode.unpack(data)
        if found is not None:
            return found
        logger.warning("%s is damaged, and is made anew", folder / key)
    return None


def _folder(name: str) -> Path | None:
    """Return a folder of the cache, None if there can be none."""
    return _make_folder(env.CACHE_DIR.get(), name)


@lru_cache
def _make_folder(root: str, name: str) -> Path | None:
    folder = Path(root).expanduser() / name
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for path in (folder.parent, folder):
            _refuse_if_others_can_write(path)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written")
    except OSError as error:
        logger.warning("no kernel cache: %s; set DEEP_EP_CACHE_DIR to a folder that can be written", error)
        return None
    return folder


def _refuse_if_others_can_write(folder: Path) -> None:
    """Raise if somebody else could put code there for this process to run."""
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(
            f"{folder} belongs to user {status.st_uid} and has mode {status.st_mode & 0o777:o}, so that others can put "
            f"code there; it must belong to user {os.geteuid()} and be writable by nobody else (chmod go-w)"
        )


@lru_cache(1)
def _versions() -> tuple[str, ...]:
    """Return what decides, beside constants, what a kernel compiles to."""
    package = Path(__file__).parent
    sources = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(package.glob(pattern)):
            sources.update(path.read_bytes())
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    settings = env.variables_set("TRITON_PTXAS", "DISABLE_PTXAS_OPT")
    return (sources.hexdigest(), triton, *(f"{name}={text}" for name, text in settings.items()))
