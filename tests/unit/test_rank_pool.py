"""The tests' own ranks: results, failures, hangs and ends."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from rank_pool import FreshRanks, PerRank, RankFailure, RankPool


@pytest.fixture
def small_pool():
    pool = RankPool(num_ranks=3)
    yield pool
    pool.close()


def add_over_ranks(rank, common, mine):
    total = torch.tensor(common + mine)
    dist.all_reduce(total, group=rank.group)
    return rank.rank, total.item()


def fail_on_rank_one(rank):
    if rank.rank == 1:
        raise ValueError("rank 1 gives up")
    dist.barrier(group=rank.group)


def end_rank_one(rank):
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier(group=rank.group)


def never_return_on_rank_zero(rank):
    while rank.rank == 0:
        time.sleep(0.1)


def warn(_rank):
    import warnings

    warnings.warn("a warning", stacklevel=1)


def test_every_rank_gets_its_arguments_and_gives_its_result(small_pool):
    assert small_pool.run(2, add_over_ranks, 10, PerRank([1, 2])) == [(0, 23), (1, 23)]
    assert small_pool.run(3, add_over_ranks, 0, PerRank([1, 2, 3])) == [(0, 6), (1, 6), (2, 6)]
    assert small_pool.num_starts == 1


def test_one_failure_ends_all_ranks_and_shows_what_each_did(small_pool):
    with pytest.raises(RankFailure) as failure:
        small_pool.run(2, fail_on_rank_one)
    assert "rank 1 gives up" in str(failure.value)
    assert "rank 0 gave no answer" in str(failure.value)
    assert "in fail_on_rank_one" in str(failure.value).split("rank 1 failed")[0]
    assert small_pool.pids() == []
    assert small_pool.run(2, add_over_ranks, 0, PerRank([1, 2])) == [(0, 3), (1, 3)]


def test_a_killed_rank_is_a_failure(small_pool):
    with pytest.raises(RankFailure, match="exit code -9"):
        small_pool.run(2, end_rank_one)


def test_a_rank_that_hangs_is_shown_and_ended(small_pool):
    with pytest.raises(RankFailure, match="never_return_on_rank_zero"):
        small_pool.run(2, never_return_on_rank_zero, timeout_s=1.0)


def test_a_warning_on_a_rank_is_a_failure(small_pool):
    with pytest.raises(RankFailure, match="a warning"):
        small_pool.run(1, warn)


def exit_with_code(rank, codes):
    rank.meet("here")
    if codes[rank.rank]:
        os._exit(codes[rank.rank])
    return os.environ["COLOUR"]


def test_fresh_ranks_tell_exit_codes_results_and_environment():
    with FreshRanks(2, exit_with_code, [0, 3], env=PerRank([{"COLOUR": "red"}, {"COLOUR": "blue"}])) as ranks:
        first, second = ranks.wait()
    assert (first.exit_code, first.result) == (0, "red")
    assert (second.exit_code, second.result) == (3, None)
