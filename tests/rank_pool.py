"""Runs functions on several ranks: real processes that are joined by a Gloo group.

`RankPool` keeps ranks alive between tests, so that an example costs a message and not a process. `FreshRanks`
starts new interpreters, for tests about how processes begin and end. Both have time limits; when one rank
fails, all are ended and the tracebacks of all are shown.

A function that runs on ranks is a module-level function whose first argument is its `Rank`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NUM_POOL_RANKS = 8
TIMEOUT_S = 60.0
PEER_TIMEOUT_S = 20.0
"""How long the library waits for a peer in these ranks: less than our own limit, as its error says more."""

_PRELOADED = [
    "torch",
    "torch.distributed",
    "numpy",
    "pytest",
    "hypothesis",
    "deep_ep",
    "deep_ep.buffer",
    "deep_ep.reference",
]


class _Pickler(pickle.Pickler):
    """Writes tensors as their own bytes; torch would write the whole memory that a view looks on."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        flat = torch.empty(obj.numel(), dtype=obj.dtype)
        flat.view(obj.shape).copy_(obj.detach())
        content = flat.view(torch.uint8).numpy().tobytes()
        return _make_tensor, (content, obj.dtype, tuple(obj.shape))


def _make_tensor(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


def _dumps(value: Any) -> bytes:
    """Pickle a value; of tensors remain dtype, shape and content."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


class PerRank(list):
    """An argument that differs: item r is for rank r."""


class Rank:
    """Where a function runs: one of the first `num_ranks` ranks.

    Attributes:
        rank: Its index.
        num_ranks: How many take part.
        store: Shared by all ranks and by the test, to meet at.
        group: The group of those that take part.
    """

    def __init__(self, rank: int, num_ranks: int, store: dist.Store, group: dist.ProcessGroup) -> None:
        self.rank, self.num_ranks, self.store, self.group = rank, num_ranks, store, group
        self._buffer: Any = None

    def buffer(self) -> Any:
        """Return the Buffer of those that take part, made at its first use and then kept."""
        if self._buffer is None:
            if os.environ.get("DEEP_EP_TEST_ON_GPU"):
                from gpu_buffer import GpuBuffer as Buffer
            else:
                from deep_ep import Buffer

            self._buffer = Buffer(self.group, num_nvl_bytes=1 << 20)
        return self._buffer

    def meet(self, name: str) -> None:
        """Wait until all ranks that take part have come here; `name` is good for one meeting."""
        self.store.add(name, 1)
        key = f"{name}/all"
        if self.store.add(name, 0) == self.num_ranks:
            self.store.set(key, "")
        self.store.wait([key], timedelta(seconds=TIMEOUT_S))


class RankFailure(Exception):  # noqa: N818 (a failure is what it tells of)
    """One rank or several failed; the message holds all tracebacks."""


def _join_world(rank: int, num_ranks: int, port: int) -> dist.Store:
    """Make this process a rank of a Gloo world that has its store at the given port."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    # Sub-groups take the limit of the world.
    limit = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=num_ranks, timeout=limit
    )
    return store


def _serve(rank: int, num_ranks: int, port: int, channel: connection.Connection, stack_path: str) -> None:
    """Run the functions that come through the channel, until it closes."""
    # Upon SIGUSR1: write what every thread is doing, then end by the signal.
    stack_file = Path(stack_path).open("w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True, chain=True)
    if not os.environ.get("DEEP_EP_TEST_ON_GPU"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["DEEP_EP_TIMEOUT_S"] = str(PEER_TIMEOUT_S)
    store = _join_world(rank, num_ranks, port)
    ranks: dict[int, Rank] = {}
    with contextlib.suppress(EOFError):
        while True:
            num_taking_part, function, args = pickle.loads(channel.recv_bytes())
            if function is None:
                # All ranks of the world make a group together, also those that will not be in it.
                group = dist.new_group(list(range(num_taking_part)))
                ranks[num_taking_part] = Rank(rank, num_taking_part, store, group)
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                try:
                    answer = _dumps((True, function(ranks[num_taking_part], *args)))
                except BaseException:
                    answer = _dumps((False, traceback.format_exc()))
            channel.send_bytes(answer)
    os._exit(0)


@dataclass
class _Worker:
    process: Any
    channel: connection.Connection
    stack_path: Path


class RankPool:
    """Ranks that live until the end of the test session, or until one of them fails; then new ones start.

    Args:
        num_ranks: How many there are at most.
    """

    def __init__(self, num_ranks: int = NUM_POOL_RANKS) -> None:
        self.num_ranks = num_ranks
        self._workers: list[_Worker] = []
        self._group_sizes: set[int] = set()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="rank-pool-")
        self._store: dist.Store | None = None
        self.num_starts = 0

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Run `function(rank, *args)` on the first ranks; return what it returned on each.

        Raises:
            RankFailure: If it raised, ended or did not return in time on any rank. All ranks have then ended.
        """
        if not self._workers:
            self._start()
        if num_ranks not in self._group_sizes:
            self._group_sizes.add(num_ranks)
            for worker in self._workers:
                worker.channel.send_bytes(_dumps((num_ranks, None, ())))
        workers = self._workers[:num_ranks]
        for rank, worker in enumerate(workers):
            mine = tuple(arg[rank] if isinstance(arg, PerRank) else arg for arg in args)
            worker.channel.send_bytes(_dumps((num_ranks, function, mine)))
        answers = self._collect(workers, timeout_s)
        if all(answer is not None and answer[0] for answer in answers):
            return [answer[1] for answer in answers if answer is not None]
        raise RankFailure(self._end_and_report(function.__name__, answers, timeout_s))

    def pids(self) -> list[int]:
        """Return the process ids of the ranks."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End all ranks."""
        for worker in self._workers:
            worker.channel.close()
        for worker in self._workers:
            worker.process.join(timeout=5.0)
        self._end(signal.SIGKILL)
        self._folder.cleanup()

    def _start(self) -> None:
        self.num_starts += 1
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.num_ranks):
            ours, theirs = self._context.Pipe()
            stack_path = Path(self._folder.name) / f"{self.num_starts}-{rank}"
            process = self._context.Process(
                target=_serve,
                args=(rank, self.num_ranks, self._store.port, theirs, str(stack_path)),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, stack_path))

    def _collect(self, workers: list[_Worker], timeout_s: float) -> list[tuple[bool, Any] | None]:
        """Return (has succeeded, result or traceback) of each rank, None where there is no answer.

        After a first failure the others get a second to tell theirs.
        """
        deadline = time.monotonic() + timeout_s
        answers: list[tuple[bool, Any] | None] = [None] * len(workers)
        waiting = {worker.channel: rank for rank, worker in enumerate(workers)}
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                break
            for channel in ready:
                rank = waiting.pop(channel)
                try:
                    answers[rank] = pickle.loads(channel.recv_bytes())
                except (EOFError, ConnectionError):
                    workers[rank].process.join(timeout=5.0)
                    answers[rank] = (
                        False,
                        f"the process ended with exit code {workers[rank].process.exitcode}",
                    )
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + 1.0)
        return answers

    def _end_and_report(self, name: str, answers: list[tuple[bool, Any] | None], timeout_s: float) -> str:
        workers = self._workers
        self._end(signal.SIGUSR1)
        parts = [f"{name} failed on {len(answers)} ranks"]
        for rank, answer in enumerate(answers):
            if answer is None:
                stack = workers[rank].stack_path.read_text()
                parts.append(f"rank {rank} gave no answer within {timeout_s} s or soon after another failed:\n{stack}")
            elif not answer[0]:
                parts.append(f"rank {rank} failed:\n{answer[1]}")
            else:
                parts.append(f"rank {rank} succeeded")
        return "\n\n".join(parts)

    def _end(self, first_signal: int) -> None:
        for number in (first_signal, signal.SIGKILL):
            for worker in self._workers:
                if worker.process.is_alive():
                    os.kill(worker.process.pid, number)
            for worker in self._workers:
                worker.process.join(timeout=5.0)
        for worker in self._workers:
            worker.channel.close()
            worker.process.close()
        self._workers = []
        self._group_sizes = set()
        self._store = None


@dataclass(frozen=True)
class Outcome:
    """How a fresh rank ended.

    Attributes:
        exit_code: Of the process; negative is a signal; None if it was ended because time was up.
        result: What the function returned, None if it did not.
        output: All that the process printed, tracebacks too.
    """

    exit_code: int | None
    result: Any
    output: str


class StartedRanks(ABC):
    """Processes that each run one function as a rank."""

    @abstractmethod
    def wait(self, timeout_s: float = TIMEOUT_S) -> list[Outcome]:
        """Return how each rank ended; end those that have not when time is up."""

    def results(self, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Return what each rank returned.

        Raises:
            RankFailure: If one did not end with exit code 0.
        """
        outcomes = self.wait(timeout_s)
        if any(outcome.exit_code != 0 for outcome in outcomes):
            raise RankFailure(
                "\n\n".join(f"rank {r}: exit code {o.exit_code}\n{o.output}" for r, o in enumerate(outcomes))
            )
        return [outcome.result for outcome in outcomes]


def of_rank(rank: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments that a rank gets."""
    return tuple(arg[rank] if isinstance(arg, PerRank) else arg for arg in args)


def write_result(folder: Path, rank: int, result: Any) -> None:
    """Leave what a rank returned where its starter looks, whole or not at all."""
    partial = folder / f"{rank}.partial"
    partial.write_bytes(_dumps(result))
    partial.rename(partial.with_suffix(".result"))


class FreshRanks(StartedRanks):
    """New interpreters that each run one function as a rank; a context manager that leaves no process behind.

    Args:
        num_ranks: How many.
        function: What each of them runs.
        *args: Its arguments, after its `Rank`.
        env: Environment variables to set; a `PerRank` of dicts if they differ.
    """

    def __init__(self, num_ranks: int, function: Callable[..., Any], *args: Any, env: Any = None) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="fresh-ranks-")
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(num_ranks):
            mine = of_rank(rank, args)
            job = (sys.path, function.__module__, function.__name__, mine, rank, num_ranks, self.store.port)
            self._path(rank, "job").write_bytes(_dumps(job))
            variables = of_rank(rank, (env,))[0] or {}
            with self._path(rank, "output").open("wb") as output:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", _FRESH_PROGRAM, str(self._path(rank, "job"))],
                        env={"CUDA_VISIBLE_DEVICES": "", "DEEP_EP_TIMEOUT_S": str(PEER_TIMEOUT_S)}
                        | dict(os.environ)
                        | variables,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )

    def __enter__(self) -> FreshRanks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._folder.cleanup()

    def wait_for(self, name: str) -> None:
        """Wait until all ranks have called `Rank.meet(name)`.

        Raises:
            RankFailure: If a rank ended before.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while not self.store.check([f"{name}/all"]):
            if time.monotonic() > deadline or any(p.poll() is not None for p in self._processes):
                raise RankFailure("\n\n".join(outcome.output for outcome in self.wait(timeout_s=0.0)))
            time.sleep(0.01)

    def pids(self) -> list[int]:
        """Return the process ids."""
        return [process.pid for process in self._processes]

    def kill(self, *ranks: int) -> None:
        """Kill ranks as `kill -9` does, and wait for their ends."""
        for rank in ranks:
            self._processes[rank].kill()
        for rank in ranks:
            self._processes[rank].wait()

    def wait(self, timeout_s: float = TIMEOUT_S) -> list[Outcome]:
        """Return how each rank ended; end those that have not when time is up."""
        deadline = time.monotonic() + timeout_s
        outcomes = []
        for rank, process in enumerate(self._processes):
            try:
                exit_code = process.wait(timeout=max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                exit_code = None
            result_path = self._path(rank, "result")
            outcomes.append(
                Outcome(
                    exit_code=exit_code,
                    result=pickle.loads(result_path.read_bytes()) if result_path.exists() else None,
                    output=self._path(rank, "output").read_text(errors="replace"),
                )
            )
        return outcomes

    def _path(self, rank: int, what: str) -> Path:
        return Path(self._folder.name) / f"{rank}.{what}"


def run_fresh(job_path: str) -> None:
    """Be one of `FreshRanks`; the interpreter then ends as that of any program does."""
    path, module_name, function_name, args, rank, num_ranks, port = pickle.loads(Path(job_path).read_bytes())
    sys.path[:] = path
    faulthandler.enable()
    function = getattr(importlib.import_module(module_name), function_name)
    store = _join_world(rank, num_ranks, port)
    result = function(Rank(rank, num_ranks, store, dist.group.WORLD), *args)
    write_result(Path(job_path).parent, rank, result)


_FRESH_PROGRAM = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); " + (
    "import rank_pool; rank_pool.run_fresh(sys.argv[1])"
)


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
