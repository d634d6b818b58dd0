"""Masked ranks: the others go on without them, with right results, and take them in again."""

import contextlib

import masks
import pytest

from deep_ep import Buffer
from deep_ep.errors import ConfigError
from forked_ranks import ForkedRanks


@pytest.mark.parametrize("has_hooks", [False, True])
@pytest.mark.parametrize("row_format", ["bf16", "fp8_ue8m0"])
def test_a_masked_rank_is_left_out_and_comes_back(pool, row_format, has_hooks):
    pool.run(3, masks.mask_and_take_in, row_format, has_hooks)


MOMENTS = [("before dispatch", 1), ("in dispatch", 0), ("before combine", 2), ("in combine", 0), ("in dispatch", 1)]


def run_all(kinds, function):
    """Run groups of ranks at the same time, for most of it is waiting; return how the ranks of each have ended."""
    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(ForkedRanks(3, function, *args)) for args in kinds]
        return [group.wait() for group in groups]


def assert_only_one_is_gone(outcomes, gone, result):
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == (-9 if rank == gone else 0), outcome.output
        assert outcome.result == (None if rank == gone else result)


def test_the_others_go_on_when_a_rank_is_killed():
    """C72."""
    kinds = [(gone, moment, "bf16" if gone else "fp8") for moment, gone in MOMENTS]
    for (gone, _, _), outcomes in zip(kinds, run_all(kinds, masks.lose_a_rank), strict=True):
        assert_only_one_is_gone(outcomes, gone, [int(rank == gone) for rank in range(3)])


def test_a_late_rank_is_told_that_it_is_masked_and_is_taken_in_again():
    kinds = [(0,), (2,)]
    for (late,), outcomes in zip(kinds, run_all(kinds, masks.be_late), strict=True):
        for rank, outcome in enumerate(outcomes):
            assert outcome.exit_code == 0, outcome.output
            assert ("have masked this one" in outcome.result) == (rank == late)


def test_normal_mode_goes_on_once_the_program_has_masked_a_missing_rank():
    kinds = [(0,), (1,)]
    for (gone,), outcomes in zip(kinds, run_all(kinds, masks.normal_without), strict=True):
        assert_only_one_is_gone(outcomes, gone, [gone, gone])


def refuse_masks(rank):
    plain = Buffer(rank.group, low_latency_mode=True)
    told = []
    for call in (
        lambda: plain.mask(0),
        lambda: plain.low_latency_update_mask_buffer(0),
        plain.low_latency_clean_mask_buffer,
    ):
        with pytest.raises(ConfigError) as refused:
            call()
        told.append(str(refused.value))
    plain.destroy()
    buffer = Buffer(rank.group, low_latency_mode=True, enable_shrink=True)
    for call in (
        lambda: buffer.mask(rank.rank),
        lambda: buffer.low_latency_update_mask_buffer(rank.rank, True),
        lambda: buffer.mask(2),
        lambda: buffer.low_latency_query_mask_buffer(None),
    ):
        with pytest.raises(ConfigError) as refused:
            call()
        told.append(str(refused.value))
    buffer.destroy()
    return told


def test_masks_that_make_no_sense_are_refused(pool):
    for told in pool.run(2, refuse_masks):
        assert all("enable_shrink=True" in message for message in told[:3])
        assert "a rank must not mask itself" in told[3]
        assert "a rank must not mask itself" in told[4]
        assert "rank must be from 0 to 1, got 2" in told[5]
        assert "mask_status must be a tensor" in told[6]
