"""Faults of all kinds; `injection.py` is the program for many more."""

import os

import injection
import pytest

NUM_FAULTS = int(os.environ.get("DEEP_EP_TEST_FAULTS", str(len(injection.KINDS))))


@pytest.mark.timeout(60 + 20 * NUM_FAULTS)
def test_survivors_report_and_nothing_is_left_behind():
    counts = injection.inject_all(injection.draw(NUM_FAULTS, seed=8), num_at_once=7, slack_s=20.0)
    assert not counts["wrong"], "\n\n".join(counts["wrong"])
    assert counts["left_in_dev_shm"] == []
    assert counts["survived"].total() == NUM_FAULTS
