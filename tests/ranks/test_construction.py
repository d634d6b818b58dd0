"""What happens when ranks do not make the same buffer, or not all of them come; and limits that change."""

import time

import pytest

from deep_ep import Buffer, checks
from deep_ep.errors import ConfigError, MismatchError, PeerTimeoutError
from forked_ranks import ForkedRanks


def make_different(rank, what):
    arguments = {}
    if rank.rank == 1 and what == "version":
        checks.library_version = lambda: "9.9.9"
    elif rank.rank == 1:
        arguments[what] = True
    with pytest.raises(MismatchError) as told:
        Buffer(rank.group, **arguments)
    return str(told.value)


@pytest.mark.parametrize("what", ["version", "low_latency_mode", "enable_shrink"])
def test_buffers_that_differ_are_refused_and_the_difference_is_named(what):
    with ForkedRanks(2, make_different, what) as ranks:
        first, second = ranks.results()
    assert f"the ranks disagree about {'the version of deep_ep' if what == 'version' else what}" in first
    if what == "version":
        assert "and 9.9.9 on rank 1" in first
        assert "it is 9.9.9 on rank 1" in second


def come_alone(rank):
    began_s = time.monotonic()
    message = ""
    if rank.rank == 0:
        with pytest.raises(PeerTimeoutError) as told:
            Buffer(rank.group, timeout_s=1.0)
        message = str(told.value)
    rank.meet("over")
    return message, time.monotonic() - began_s


def test_a_rank_that_comes_alone_is_told_within_the_limit():
    with ForkedRanks(2, come_alone) as ranks:
        (message, after_s), _ = ranks.results()
    assert "not all of the 2 ranks came to make a buffer within 1.0 s" in message
    assert after_s < 30


def wait_less_and_less(rank):
    """C73: a limit that is set for a while, and what a slow rank gets."""
    buffer = Buffer(rank.group, timeout_s=100.0)
    with pytest.raises(ConfigError):
        buffer.set_timeout(0)
    buffer.set_timeout(1.0)
    missing = None
    if rank.rank == 0:
        with pytest.raises(PeerTimeoutError) as told:
            buffer.runtime.exchanger.control.all_gather([1], "dispatch", "a header")
        missing = told.value.missing_ranks
    rank.meet("over")
    buffer.destroy()
    return missing


def test_the_limit_can_be_set_at_run_time():
    with ForkedRanks(2, wait_less_and_less) as ranks:
        assert ranks.results() == [[1], None]
