"""What `deep-ep tune` found for a device, kept in files and taken at the next start.

A file `tuned/<device>.json` has an entry for each kind of tuning (the name of its class) and number of ranks of a host.
Files lie in DEEP_EP_CACHE_DIR, where `deep-ep tune` writes them, and in the package, for devices that its authors have
measured; the former come first. Without an entry the defaults of the class hold.

Example of an entry:

    {"kind": "CpuTuning", "num_ranks": 2, "parameters": {"spin_us": 50.0},
     "gain": 1.08, "cases": ["256 x 2048, top-4 of 8"], "deep_ep": "0.1.0"}
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from deep_ep import env

logger = logging.getLogger("deep_ep")

T = TypeVar("T")
AllGather = Callable[[Sequence[int]], list[list[int]]]
SHIPPED = Path(__file__).parent / "tuned_devices"
_trial: dict[str, Any] = {}


def cpu_name() -> str:
    """Return what the processor is called."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def cpu_device() -> str:
    """Return the name under which tunings of CPU ranks are kept: those of another number of cores are others."""
    return f"{cpu_name()} {len(os.sched_getaffinity(0))} cores"


def folders() -> list[Path]:
    """Return where files may lie, the first to be looked at first."""
    return [Path(env.CACHE_DIR.get()).expanduser() / "tuned", SHIPPED]


def file_name(device: str) -> str:
    """Return the name of a device's file.

    Example:
        >>> file_name("NVIDIA H200")
        'nvidia-h200.json'
    """
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def find(kind: str, device: str, num_ranks: int) -> tuple[dict[str, Any], Path] | None:
    """Return the entry of a kind of tuning, and the file that has it; None if there is none.

    A file that cannot be read counts as none, and is told in the log.
    """
    for entry, path in find_all(device):
        if entry.get("kind") == kind and entry.get("num_ranks") == num_ranks:
            return entry, path
    return None


def find_all(device: str) -> list[tuple[dict[str, Any], Path]]:
    """Return all entries of a device, those that come first first, and the files that have them."""
    paths = [folder / file_name(device) for folder in folders()]
    return [(entry, path) for path in paths for entry in _entries(path)]


def load(kind: type[T], device: str, num_ranks: int) -> T:
    """Return the tuning in force: what was found for this device and number of ranks, else the defaults.

    Args:
        kind: A dataclass of launch parameters, all with defaults.
        device: What `torch.cuda.get_device_name` says, or `cpu_device`.
        num_ranks: Ranks of the host.
    """
    if kind.__name__ in _trial:
        trial: T = _trial[kind.__name__]
        return trial
    found = find(kind.__name__, device, num_ranks)
    if found is None:
        return kind()
    entry, path = found
    try:
        known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
        parameters = {name: tuple(v) if isinstance(v, list) else v for name, v in entry["parameters"].items()}
        if unknown := parameters.keys() - known:
            raise TypeError(f"unknown parameters {sorted(unknown)}")
        return kind(**parameters)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        _warn(path, f"{kind.__name__}: {error}")
        return kind()


def agree(tuning: T, default: T, all_gather: AllGather) -> T:
    """Return the tuning if all ranks have the same, else the default; all ranks together."""
    checksum = zlib.crc32(repr(tuning).encode())
    everyone = [words[0] for words in all_gather([checksum])]
    if len(set(everyone)) == 1:
        return tuning
    logger.warning("ranks have different tunings in their DEEP_EP_CACHE_DIR, so %r holds for all", default)
    return default


def save(device: str, entry: dict[str, Any]) -> Path:
    """Write an entry to the first folder, in place of one of the same kind and number of ranks; return the file."""
    path = folders()[0] / file_name(device)
    entries = [
        other
        for other in _entries(path)
        if (other.get("kind"), other.get("num_ranks")) != (entry["kind"], entry["num_ranks"])
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when it is whole, so that a rank that starts meanwhile reads the old file or the new one.
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps({"device": device, "entries": [*entries, entry]}, indent=1) + "\n")
    new.replace(path)
    _read.cache_clear()
    return path


def remove(device: str) -> Path | None:
    """Remove what was found for a device; return the file that was removed, None if there was none."""
    path = folders()[0] / file_name(device)
    if not path.exists():
        return None
    path.unlink()
    return path


@contextmanager
def trying(tuning: Any) -> Iterator[None]:
    """Let this tuning hold, whatever files say, for what is made inside."""
    name = type(tuning).__name__
    _trial[name] = tuning
    try:
        yield
    finally:
        del _trial[name]


def parameters_of(tuning: Any) -> dict[str, Any]:
    """Return a tuning as it is kept in a file."""
    return asdict(tuning)


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        modified_ns = path.stat().st_mtime_ns
    except OSError:
        return []
    return _read(path, modified_ns)


@lru_cache(maxsize=8)
def _read(path: Path, _: int) -> list[dict[str, Any]]:
    try:
        entries = json.loads(path.read_text())["entries"]
        if not all(isinstance(entry, dict) for entry in entries):
            raise TypeError("its entries are not objects")
    except (OSError, ValueError, KeyError, TypeError) as error:
        _warn(path, str(error))
        return []
    return list(entries)


@lru_cache(maxsize=64)
def _warn(path: Path, reason: str) -> None:
    logger.warning("%s is left out, the default tuning holds: %s", path, reason)
