"""Metrics of the buffers of this process, for Prometheus: `serve(buffer)`, or DEEP_EP_METRICS=1 and no code at all.

Counting costs a call three to four microseconds, and nothing while nobody has asked for metrics; times are those that
`buffer.latency` takes anyway. All else happens when somebody reads, in a thread of the HTTP server.

Every process serves its own buffers on a free port of 127.0.0.1, and writes where into a folder that only its user can
read (`deep_ep-<uid>` in the folder for temporary files). `deep-ep monitor` finds the ranks of a host there, shows
them, and serves them all on one port.
"""

from __future__ import annotations

import atexit
import json
import os
import stat
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from deep_ep import env, extras
from deep_ep.errors import ConfigError
from deep_ep.latency import HISTOGRAM_BOUNDS_US, LatencyMonitor, LatencyStats, apart_from_captures
from deep_ep.topology import Topology

LOCALHOST = "127.0.0.1"
_NUM_PENDING = 1024
_INT32_RANGE = 1 << 32


class MeasuredBuffer(Protocol):
    """What of a `deep_ep.Buffer` is read here."""

    rank: int
    group_size: int
    latency: LatencyMonitor
    topology: Topology
    count_expert_rows: Callable[[int, int], Tensor | None] | None


class BufferMetrics:
    """Counts what the calls of one buffer move.

    Args:
        buffer: The buffer; it is not kept alive.
        index: Which of the buffers of this process it is.
        device: Where its tensors are.
    """

    def __init__(self, buffer: MeasuredBuffer, index: int, device: torch.device) -> None:
        self.rank, self.num_ranks, self.index, self.device = buffer.rank, buffer.group_size, index, device
        self.latency = buffer.latency
        self.local_ranks = buffer.topology.local_ranks
        self.moved_bytes: Counter[str] = Counter()
        self.expert_tokens: Counter[int] = Counter()
        # Of each call what it moved, and how many tokens each expert got, until somebody has time to add them up.
        self._pending: list[tuple[str, int, list[int], int]] = []
        # Of low-latency calls, by (experts, bytes of a row): rows per local expert, and what was last read of them.
        self._rows: dict[tuple[int, int], tuple[Tensor, list[int]]] = {}
        self._lock = threading.Lock()
        buffer.latency.add_observer(self._observe)
        buffer.count_expert_rows = self._count_expert_rows

    def fold(self) -> None:
        """Add up what calls have counted."""
        with self._lock:
            pending = self._pending[:]
            del self._pending[: len(pending)]  # another thread may have appended meanwhile
            counts: dict[int, list[list[int]]] = {}
            for operation, num_bytes, tokens_per_expert, num_experts in pending:
                self.moved_bytes[operation] += num_bytes
                if tokens_per_expert:
                    counts.setdefault(num_experts, []).append(tokens_per_expert)
            for num_experts, of_calls in counts.items():
                first = self._first_expert(num_experts)
                for expert, num_tokens in enumerate(map(sum, zip(*of_calls, strict=True)), first):
                    self.expert_tokens[expert] += num_tokens
            for (num_experts, row_bytes), (rows, seen) in list(self._rows.items()):
                now = self._read(rows)
                for local, (total, before) in enumerate(zip(now, seen, strict=True)):
                    num_rows = (total - before) % _INT32_RANGE  # the count of 32 bits starts over
                    self.expert_tokens[self._first_expert(num_experts) + local] += num_rows
                    self.moved_bytes["low_latency_dispatch"] += num_rows * row_bytes
                seen[:] = now

    def _observe(self, run: Callable[..., Any], operation: str, call: Callable[..., Any], *args: Any) -> Any:
        # Every line here is paid for by every call.
        result = run(operation, call, *args)
        if operation == "dispatch":
            request = args[0]
            counts, num_experts = result.num_recv_tokens_per_expert, request.layout.num_tokens_per_expert.numel()
            # Without counts the rows are the most that could have come.
            num_bytes = 0 if request.num_worst_tokens else result.x.nbytes
            self._pending.append((operation, num_bytes, counts, num_experts))
        elif operation == "combine":
            self._pending.append((operation, args[0].x.nbytes, [], 0))
        elif operation == "cached_dispatch":
            self._pending.append((operation, result[0].nbytes, [], 0))
        if len(self._pending) >= _NUM_PENDING:
            self.fold()
        return result

    def _count_expert_rows(self, num_experts: int, row_bytes: int) -> Tensor | None:
        """Return where the next low-latency dispatch counts the rows of each expert: its kernels do so anyway."""
        key = (num_experts, row_bytes)
        if key not in self._rows:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None  # a graph would set the counts to zero with every replay
            num_local = self._first_expert(num_experts, self.rank + 1) - self._first_expert(num_experts)
            rows = torch.zeros(num_local, dtype=torch.int32, device=self.device)
            self._rows[key] = rows, [0] * num_local
        return self._rows[key][0]

    def _first_expert(self, num_experts: int, rank: int | None = None) -> int:
        rank = self.rank if rank is None else rank
        each, extra = divmod(num_experts, self.num_ranks)
        return rank * each + min(rank, extra)

    def _read(self, rows: Tensor) -> list[int]:
        """Return the counts so far without waiting for the calls under way."""
        values: list[int]
        if rows.device.type == "cpu":
            values = rows.tolist()
        else:
            stream = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
            with apart_from_captures(), torch.cuda.stream(stream):
                values = rows.tolist()
        return values


class _Collector:
    """Gives prometheus-client the metrics of the buffers that are alive, when somebody reads them."""

    def __init__(self) -> None:
        self.buffers: weakref.WeakKeyDictionary[MeasuredBuffer, BufferMetrics] = weakref.WeakKeyDictionary()

    def collect(self) -> Iterator[Any]:
        """Go through the families of metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        def counter(name: str, text: str, *labels: str) -> Any:
            return CounterMetricFamily(f"deep_ep_{name}", text, labels=("rank", "buffer", *labels))

        def gauge(name: str, text: str, *labels: str) -> Any:
            return GaugeMetricFamily(f"deep_ep_{name}", text, labels=("rank", "buffer", *labels))

        info = gauge("buffer_info", "1 for each buffer.", "num_ranks", "device", "pid")
        calls = counter("calls", "Calls that have returned.", "operation")
        times = HistogramMetricFamily(
            "deep_ep_call_seconds",
            "How long calls took; on GPUs one in eight is timed, by events.",
            labels=("rank", "buffer", "operation"),
        )
        first = gauge("call_first_seconds", "How long the first call took.", "operation")
        median = gauge("call_median_seconds", "Median of the last 1024 calls that were timed.", "operation")
        p99 = gauge("call_p99_seconds", "99th percentile of the last 1024 calls that were timed.", "operation")
        moved = counter(
            "moved_bytes",
            "Bytes of rows that came (dispatch) or were sent back (combine), without scales.",
            "operation",
        )
        waits = counter("peer_wait_seconds", "Time spent waiting for each peer, on CPU ranks.", "peer")
        tokens = counter("expert_tokens", "Tokens that came for each expert of this rank.", "expert")
        imbalance = gauge(
            "expert_imbalance_ratio", "Tokens of this rank's busiest expert, over the mean of its experts."
        )
        for metrics in list(self.buffers.values()):
            metrics.fold()
            own = (str(metrics.rank), str(metrics.index))
            info.add_metric((*own, str(metrics.num_ranks), metrics.device.type, str(os.getpid())), 1)
            for operation, stats in metrics.latency.snapshot().items():
                labels = (*own, operation)
                calls.add_metric(labels, stats.num_calls)
                times.add_metric(labels, _buckets(stats), stats.sum_us / 1e6)
                first.add_metric(labels, stats.first_us / 1e6)
                median.add_metric(labels, stats.median_us / 1e6)
                p99.add_metric(labels, stats.p99_us / 1e6)
            for operation, num_bytes in metrics.moved_bytes.items():
                moved.add_metric((*own, operation), num_bytes)
            for peer, waited_us in zip(metrics.local_ranks, metrics.latency.peer_waits_us() or (), strict=False):
                waits.add_metric((*own, str(peer)), waited_us / 1e6)
            for expert, num_tokens in sorted(metrics.expert_tokens.items()):
                tokens.add_metric((*own, str(expert)), num_tokens)
            if total := metrics.expert_tokens.total():
                busiest = max(metrics.expert_tokens.values())
                imbalance.add_metric(own, busiest * len(metrics.expert_tokens) / total)
        yield from (info, calls, times, first, median, p99, moved, waits, tokens, imbalance)


_collector = _Collector()
_num_buffers = 0
_server: tuple[str, int] | None = None
_server_pid = 0


def serve_if_asked(buffer: Any) -> None:
    """Serve the metrics of a buffer if DEEP_EP_METRICS says so."""
    if env.METRICS.get():
        serve(buffer)


def serve(buffer: Any, port: int = 0, address: str = LOCALHOST) -> tuple[str, int]:
    """Serve the metrics of a buffer at `http://address:port/metrics`, until the process ends.

    All buffers of a process are served by one server, which the first call of this function starts.

    Args:
        buffer: A `deep_ep.Buffer`; its metrics are gone when it is.
        port: The port; 0 takes a free one, which `deep-ep monitor` finds.
        address: Who may connect: processes of this host, unless it says otherwise.

    Returns:
        The address and the port of the server.

    Raises:
        MissingExtraError: If prometheus-client is not installed.
        ConfigError: If the port cannot be had, or the server listens elsewhere already.
    """
    global _num_buffers, _server, _server_pid
    extras.require("monitor")
    if _server_pid != os.getpid():
        _server = None  # a fork has no threads of its parent, so no server either
    if buffer not in _collector.buffers:
        _collector.buffers[buffer] = BufferMetrics(buffer, _num_buffers, torch.device(buffer.runtime.device))
        _num_buffers += 1
    if _server is None:
        _server, _server_pid = _start_server(address, port), os.getpid()
        _register(*_server)
    elif port not in (0, _server[1]):
        raise ConfigError(f"port must be 0 or {_server[1]}, where this process serves its metrics already, got {port}")
    return _server


def _start_server(address: str, port: int) -> tuple[str, int]:
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_collector)
    try:
        server, _ = start_http_server(port, address, registry)
    except OSError as error:
        raise ConfigError(f"metrics cannot be served at {address}:{port}: {error.strerror}") from error
    return address, server.server_port


def folder_of_ranks() -> Path:
    """Return where the processes of this user say at which ports they serve metrics; only the user can read it.

    Raises:
        ConfigError: If somebody else has made it, or others can write to it.
    """
    folder = Path(tempfile.gettempdir()) / f"deep_ep-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{folder} must be a folder that belongs to this user alone",
            hint="remove it, or set TMPDIR to a folder of your own",
        )
    return folder


def _register(address: str, port: int) -> None:
    path = folder_of_ranks() / f"{os.getpid()}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"pid": os.getpid(), "address": address, "port": port}))
    partial.rename(path)
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not in a fork
            path.unlink(missing_ok=True)

    atexit.register(remove)


def _buckets(stats: LatencyStats) -> list[tuple[str, float]]:
    """Return the histogram as Prometheus wants it: with each bound all that took no longer."""
    buckets, so_far = [], 0
    for bound, count in zip((*HISTOGRAM_BOUNDS_US, None), stats.histogram, strict=True):
        so_far += count
        buckets.append(("+Inf" if bound is None else f"{bound / 1e6:.9g}", float(so_far)))
    return buckets
