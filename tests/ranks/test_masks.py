"""Masked ranks: the others go on without them, with right results, and take them in again."""

import masks
import pytest

from deep_ep import Buffer
from deep_ep.errors import ConfigError
from forked_ranks import ForkedRanks


@pytest.mark.parametrize("has_hooks", [False, True])
@pytest.mark.parametrize("row_format", ["bf16", "fp8_ue8m0"])
def test_a_masked_rank_is_left_out_and_comes_back(pool, row_format, has_hooks):
    pool.run(3, masks.mask_and_take_in, row_format, has_hooks)


@pytest.mark.parametrize(
    ("moment", "gone"),
    [("before dispatch", 1), ("in dispatch", 0), ("before combine", 2), ("in combine", 0), ("in dispatch", 1)],
)
def test_the_others_go_on_when_a_rank_is_killed(moment, gone):
    """C72."""
    with ForkedRanks(3, masks.lose_a_rank, gone, moment, "bf16" if gone else "fp8") as ranks:
        outcomes = ranks.wait()
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == (-9 if rank == gone else 0), outcome.output
        assert outcome.result == (None if rank == gone else [int(r == gone) for r in range(3)])


@pytest.mark.parametrize("late", [0, 2])
def test_a_late_rank_is_told_that_it_is_masked_and_is_taken_in_again(late):
    with ForkedRanks(3, masks.be_late, late) as ranks:
        told = ranks.results()
    assert all(("have masked this one" in message) == (rank == late) for rank, message in enumerate(told))


@pytest.mark.parametrize("gone", [0, 1])
def test_normal_mode_goes_on_once_the_program_has_masked_a_missing_rank(gone):
    with ForkedRanks(3, masks.normal_without, gone) as ranks:
        outcomes = ranks.wait()
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == (-9 if rank == gone else 0), outcome.output
        assert outcome.result == (None if rank == gone else [gone, gone])


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
