"""Ranks to run a function on: processes of this host that are joined by a process group, with a limit in time.

One server imports torch, and ranks are forked from it, so that several ranks cost little more than one. A rank sends
what it has to say through a pipe; if one fails, all are ended and the first error is told.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deep_ep import env
from deep_ep.bench.launcher import Place
from deep_ep.config import ClusterProfile
from deep_ep.errors import ConfigError, DeepEPError, PeerTimeoutError, UnsupportedError

_PRELOADED = ["torch", "torch.distributed", "deep_ep.buffer", "deep_ep.bench.oracle"]
_GRACE_S = 2.0
"""How long ranks may go on after the first failure: theirs may tell more."""


class RankFailedError(DeepEPError):
    """A function failed on a rank.

    Attributes:
        rank: Which.
        trace: The traceback there, empty if the library raised the error on purpose.
    """

    def __init__(self, rank: int, message: str, trace: str = "") -> None:
        super().__init__(f"rank {rank}: {message}")
        self.rank, self.trace = rank, trace


class RankConfigError(RankFailedError, ConfigError):
    """What a rank was given breaks a rule."""


class Rank:
    """Where a function runs.

    Args:
        rank: Its number.
        num_ranks: How many there are.
        device: Where its tensors are.
        report: Takes what it has to say while it runs.

    Attributes:
        group: All ranks; Gloo, and NCCL for CUDA tensors if each rank has a GPU to itself.
        has_nccl: Whether `group` can exchange CUDA tensors.
    """

    def __init__(self, rank: int, num_ranks: int, device: torch.device, report: Callable[[Any], None]) -> None:
        self.rank, self.num_ranks, self.device, self.report = rank, num_ranks, device, report
        assert dist.group.WORLD is not None
        self.group = dist.group.WORLD
        self.has_nccl = "nccl" in dist.get_backend_config(self.group)

    def slowest(self, values: dict[str, float]) -> dict[str, float]:
        """Return the largest of each value over all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def total(self, values: dict[str, float]) -> dict[str, float]:
        """Return the sum of each value over all ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def _reduce(self, values: dict[str, float], how: Any) -> dict[str, float]:
        tensor = torch.tensor(list(values.values()), dtype=torch.float64)
        dist.all_reduce(tensor, how)
        return dict(zip(values, tensor.tolist(), strict=True))


def choose_device(name: str | None) -> str:
    """Return "cuda" or "cpu": what was named, or else CUDA where there is a GPU.

    Raises:
        UnsupportedError: If CUDA was named and there is no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise UnsupportedError(
            "no GPU that torch can use was found",
            hint="--device cpu runs on CPU ranks; `deep-ep check` says what torch sees",
        )
    return name or ("cuda" if has_gpu else "cpu")


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    device: str = "cpu",
    variables: Callable[[int], dict[str, str]] | None = None,
    timeout_s: float = 600.0,
    on_report: Callable[[Any], None] | None = None,
) -> list[Any]:
    """Run `function(rank, *args)` on new ranks of this host; return what it returned on each.

    Args:
        num_ranks: How many.
        function: A function of a module, as its name is sent.
        *args: Its arguments after its `Rank`.
        device: "cpu" or "cuda"; with fewer GPUs than ranks, ranks share them.
        variables: Gives the environment variables to set on a rank, by its number.
        timeout_s: After so many seconds the ranks are ended.
        on_report: Is given what a rank reports while it runs.

    Raises:
        ConfigError: If `num_ranks` is not positive.
        RankFailedError: If it failed on a rank.
        PeerTimeoutError: If time was up.
    """
    if num_ranks < 1:
        raise ConfigError(f"the number of ranks must be at least 1, got {num_ranks}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    # The server has the variables of the time when it started.
    given = env.variables_set("")
    with tempfile.TemporaryDirectory(prefix="deep-ep-") as folder:
        processes, channels = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_serve,
                args=(
                    rank,
                    num_ranks,
                    device,
                    folder,
                    theirs,
                    given | (variables(rank) if variables else {}),
                    function,
                    args,
                ),
                daemon=True,
            )
            process.start()
            theirs.close()
            processes.append(process)
            channels.append(ours)
        try:
            return _collect(processes, channels, timeout_s, on_report or (lambda _: None))
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


@contextmanager
def joined(place: Place, device: str) -> Iterator[Rank]:
    """Make this process a rank.

    Args:
        place: Its place among the ranks.
        device: "cpu" or "cuda".
    """
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.num_local_ranks) if device == "cpu" else 1)
    backend, chosen = "gloo", torch.device("cpu")
    if device == "cuda":
        chosen = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(chosen)
        if torch.cuda.device_count() >= place.num_local_ranks:
            backend = "cpu:gloo,cuda:nccl"
    timeout_s = env.TIMEOUT_S.get() or ClusterProfile.of(None, place.num_ranks).timeout_s
    limit = timedelta(seconds=timeout_s + 20)
    dist.init_process_group(
        backend, init_method=place.init_method, rank=place.rank, world_size=place.num_ranks, timeout=limit
    )
    try:
        yield Rank(place.rank, place.num_ranks, chosen, lambda _: None)
    finally:
        dist.destroy_process_group()


def _serve(
    rank: int,
    num_ranks: int,
    device: str,
    folder: str,
    channel: Connection,
    variables: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Run the function as a rank, and send what it returns or raises."""
    env.replace_all(variables)
    try:
        place = Place(rank, num_ranks, rank, num_ranks, f"file://{Path(folder) / 'store'}")
        with joined(place, device) as where:
            where.report = lambda value: channel.send(("report", value))
            result = function(where, *args)
            dist.barrier()
        channel.send(("result", result))
    except PeerTimeoutError as error:
        channel.send(("late", (str(error), "")))
    except ConfigError as error:
        channel.send(("usage", (str(error), "")))
    except DeepEPError as error:
        channel.send(("error", (str(error), "")))
    except Exception as error:
        channel.send(("error", (f"{type(error).__name__}: {error}", traceback.format_exc())))


def _collect(
    processes: list[ForkServerProcess],
    channels: list[Connection],
    timeout_s: float,
    on_report: Callable[[Any], None],
) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    failures: list[tuple[str, int, tuple[str, str]]] = []
    open_channels = {channel: rank for rank, channel in enumerate(channels)}
    while open_channels:
        ready = wait(list(open_channels), timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            break
        for channel in ready:
            assert isinstance(channel, Connection)
            rank = open_channels[channel]
            try:
                kind, value = channel.recv()
            except EOFError:
                processes[rank].join()
                kind, value = "error", (f"the process ended with exit code {processes[rank].exitcode}", "")
            if kind == "report":
                on_report(value)
                continue
            del open_channels[channel]
            if kind == "result":
                results[rank] = value
            else:
                failures.append((kind, rank, value))
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    if failures:
        # A rank that waited in vain fails because of another.
        kind, rank, (message, trace) = min(failures, key=lambda failure: failure[0] == "late")
        raise (RankConfigError if kind == "usage" else RankFailedError)(rank, message, trace)
    if open_channels:
        missing = sorted(open_channels.values())
        raise PeerTimeoutError(f"ranks {missing} did not come to an end within {timeout_s:.0f} s", missing)
    return [results[rank] for rank in range(len(processes))]
