"""What low-latency calls promise when programs do not go the usual way; interpreted kernels, real processes."""

import pytest

pytest.importorskip("triton")

import low_latency_steps as steps

from rank_pool import FreshRanks

INTERPRETED = {"TRITON_INTERPRET": "1"}


def test_a_third_call_in_flight_is_refused_and_the_two_others_are_right():
    with FreshRanks(2, steps.refuse_a_third, env=INTERPRETED) as ranks:
        messages = ranks.results(timeout_s=200.0)
    assert all("2 low-latency calls are in flight" in message for message in messages)


def test_a_peer_that_does_not_call_is_named():
    with FreshRanks(2, steps.wait_in_vain, env=INTERPRETED) as ranks:
        message, _ = ranks.results(timeout_s=200.0)
    assert "waited 0.5 s for rank 1" in message


@pytest.mark.parametrize("wire_bits", [16, 24, 32])
def test_sums_are_as_exact_as_their_bits_allow(wire_bits):
    with FreshRanks(2, steps.sum_in_bits, wire_bits, env=INTERPRETED) as ranks:
        ranks.results(timeout_s=200.0)
