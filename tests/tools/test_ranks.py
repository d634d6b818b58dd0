"""Ranks that tools start: what they return, what they report, and how failures come back."""

import os
import time

import pytest

from deep_ep.bench.ranks import RankFailedError, choose_device, run_ranks
from deep_ep.errors import ConfigError, PeerTimeoutError, UnsupportedError


def say_who(rank, word):
    rank.report(f"{word} {rank.rank}")
    most, total = rank.slowest({"rank": rank.rank}), rank.total({"rank": rank.rank})
    return rank.rank, rank.num_ranks, most["rank"], total["rank"], os.environ["A_WORD"]


def variables(rank):
    return {"A_WORD": f"of {rank}"}


def test_results_come_in_order_and_reports_on_the_way():
    reports = []
    results = run_ranks(3, say_who, "hello", variables=variables, on_report=reports.append)
    assert results == [(rank, 3, 2, 3, f"of {rank}") for rank in range(3)]
    assert sorted(reports) == ["hello 0", "hello 1", "hello 2"]


def read_variable(_):
    return os.environ.get("A_WORD")


def test_ranks_have_the_variables_of_now(monkeypatch):
    monkeypatch.setenv("A_WORD", "now")
    assert run_ranks(1, read_variable) == ["now"]
    monkeypatch.delenv("A_WORD")
    assert run_ranks(1, read_variable) == [None]


def fail(rank, how):
    if rank.rank == 1:
        if how == "error":
            raise ConfigError("no good")
        if how == "bug":
            raise KeyError("a bug")
        if how == "exit":
            os._exit(7)
    time.sleep(60)  # what the others do while one fails


@pytest.mark.parametrize(
    ("how", "message"),
    [("error", "rank 1: no good"), ("bug", "rank 1: KeyError: 'a bug'"), ("exit", "rank 1: .* exit code 7")],
)
def test_the_first_failure_ends_all(how, message):
    with pytest.raises(RankFailedError, match=message) as caught:
        run_ranks(2, fail, how, timeout_s=50)
    assert ("Traceback" in caught.value.trace) == (how == "bug")


def test_a_limit_in_time_ends_all():
    with pytest.raises(PeerTimeoutError, match=r"ranks \[0, 1\] did not come to an end"):
        run_ranks(2, fail, "never", timeout_s=1)


def test_wrong_numbers_and_missing_gpus_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        run_ranks(0, fail)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_device(None) == "cpu"
    with pytest.raises(UnsupportedError, match="no GPU that torch can use"):
        choose_device("cuda")
