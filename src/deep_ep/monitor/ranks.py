"""The processes of this host that serve metrics, and what they say."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from deep_ep.metrics import folder_of_ranks

_TIMEOUT_S = 5.0
_MAX_PARALLEL = 16


@dataclass(frozen=True, slots=True)
class Process:
    """A process that serves metrics."""

    pid: int
    address: str
    port: int


def find_processes() -> list[Process]:
    """Return the processes of this user that serve metrics; forget those that have ended without saying so."""
    found = []
    for path in sorted(folder_of_ranks().glob("*.json")):
        try:
            fields = json.loads(path.read_text())
            process = Process(int(fields["pid"]), str(fields["address"]), int(fields["port"]))
            os.kill(process.pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            path.unlink(missing_ok=True)
        except (ValueError, KeyError, TypeError, PermissionError):
            continue  # not one of ours
        else:
            found.append(process)
    return found


def scrape(process: Process) -> list[Any]:
    """Return the metric families of a process; none if it does not answer, as it may just have ended."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        url = f"http://{process.address}:{process.port}/metrics"
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:
            return list(text_string_to_metric_families(reply.read().decode()))
    except (OSError, ValueError):
        return []


def scrape_all(processes: Iterable[Process]) -> Iterator[tuple[Process, list[Any]]]:
    """Go through processes and their metric families; those that do not answer do not hold up the others."""
    processes = list(processes)
    with ThreadPoolExecutor(max_workers=_MAX_PARALLEL) as pool:
        yield from zip(processes, pool.map(scrape, processes), strict=True)


class HostCollector:
    """Gives prometheus-client the metrics of all processes of this host, each with the label `pid`."""

    def collect(self) -> Iterator[Any]:
        """Go through the families of metrics."""
        from prometheus_client.core import Metric

        families: dict[str, Metric] = {}
        num_processes = 0
        for process, found in scrape_all(find_processes()):
            num_processes += bool(found)
            for family in found:
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    labels = {**sample.labels, "pid": str(process.pid)}
                    merged.samples.append(sample._replace(labels=labels))
        yield from families.values()
        up = Metric("deep_ep_processes", "Processes of this host that serve metrics.", "gauge")
        up.add_sample("deep_ep_processes", {}, num_processes)
        yield up
