"""Two network namespaces as hosts: both modes as specified, and the loss of a rank and of the cable."""

import os

import pytest
from two_hosts import TwoHosts, check, suffer, why_not

LACKING = why_not()
pytestmark = [
    pytest.mark.skipif(LACKING is not None, reason=f"needs network namespaces: {LACKING}"),
    pytest.mark.timeout(280),
]


@pytest.fixture(scope="module")
def hosts():
    with TwoHosts() as hosts:
        yield hosts


def test_both_modes_are_as_specified(hosts):
    check(hosts, (2, 2))


@pytest.mark.skipif(
    os.environ.get("HYPOTHESIS_PROFILE") != "nightly", reason="nightly; tests/ranks/test_hosts.py has uneven hosts"
)
def test_both_modes_are_as_specified_on_uneven_hosts(hosts):
    check(hosts, (3, 2))
    check(hosts, (4, 4))


def test_a_killed_rank_is_named_by_every_survivor_in_time(hosts):
    suffer(hosts, (2, 2), "kill", slack_s=40.0)


def test_a_cut_cable_is_told_by_every_rank_in_time(hosts):
    suffer(hosts, (2, 1), "link", slack_s=40.0)
