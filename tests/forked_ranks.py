"""Ranks that are forked from a process that has imported everything: some milliseconds each, and free to die.

The interface is that of `rank_pool.FreshRanks`; that one starts whole interpreters, and is for tests of how those end.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rank_pool import (
    _PRELOADED,
    TIMEOUT_S,
    Outcome,
    Rank,
    RankFailure,
    StartedRanks,
    _join_world,
    of_rank,
    write_result,
)

_CONTEXT = get_context("forkserver")


class ForkedRanks(StartedRanks):
    """Processes that each run one function as a rank; a context manager that leaves no process behind.

    Args:
        num_ranks: How many.
        function: What each of them runs.
        *args: Its arguments, after its `Rank`.
        env: Environment variables to set; a `PerRank` of dicts if they differ.
    """

    def __init__(self, num_ranks: int, function: Callable[..., Any], *args: Any, env: Any = None) -> None:
        _CONTEXT.set_forkserver_preload(_PRELOADED)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="forked-ranks-")
        self.processes = []
        for rank in range(num_ranks):
            variables = of_rank(rank, (env,))[0] or {}
            job = (self._folder.name, function, of_rank(rank, args), rank, num_ranks, self.store.port, variables)
            process = _CONTEXT.Process(target=_run, args=job, daemon=False)
            process.start()
            self.processes.append(process)

    def __enter__(self) -> ForkedRanks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        self._folder.cleanup()

    def wait_for(self, name: str) -> None:
        """Wait until all ranks have called `Rank.meet(name)`.

        Raises:
            RankFailure: If a rank ended before.
        """
        self.store.set_timeout(timedelta(seconds=TIMEOUT_S))
        while not self.store.check([f"{name}/all"]):
            if connection.wait([process.sentinel for process in self.processes], timeout=0.01):
                raise RankFailure("\n\n".join(outcome.output for outcome in self.wait(timeout_s=0.0)))

    def wait(self, timeout_s: float = TIMEOUT_S) -> list[Outcome]:
        """Return how each rank ended; end those that have not when time is up."""
        return [*self.wait_of(list(range(len(self.processes))), timeout_s).values()]

    def wait_of(self, ranks: list[int], timeout_s: float = TIMEOUT_S) -> dict[int, Outcome]:
        """Wait as `wait` does, for some of the ranks."""
        deadline = time.monotonic() + timeout_s
        outcomes = {}
        for rank in ranks:
            process = self.processes[rank]
            process.join(max(deadline - time.monotonic(), 0.0))
            exit_code = process.exitcode
            if exit_code is None:
                process.kill()
                process.join()
            result = Path(self._folder.name) / f"{rank}.result"
            output = Path(self._folder.name) / f"{rank}.output"
            outcomes[rank] = Outcome(
                exit_code=exit_code,
                result=pickle.loads(result.read_bytes()) if result.exists() else None,
                output=output.read_text(errors="replace") if output.exists() else "",
            )
        return outcomes


def _run(
    folder: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    num_ranks: int,
    port: int,
    variables: dict[str, str],
) -> None:
    """Be a rank."""
    output = os.open(str(Path(folder) / f"{rank}.output"), os.O_WRONLY | os.O_CREAT, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    faulthandler.enable(sys.stderr)
    os.environ |= {"CUDA_VISIBLE_DEVICES": ""} | variables
    try:
        store = _join_world(rank, num_ranks, port)
        result = function(Rank(rank, num_ranks, store, dist.group.WORLD), *args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    write_result(Path(folder), rank, result)
    os._exit(0)
