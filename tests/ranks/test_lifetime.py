"""How buffers begin and end, and what they leave behind."""

import contextlib
import gc
import logging
import os
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from steps import assert_received, assert_same_bits, combine, dispatch, expect_dispatch, plain, rebuild

from deep_ep import Buffer
from deep_ep.errors import DestroyedError
from rank_pool import FreshRanks, PerRank, RankPool
from strategies import Exchange

SMALL = Exchange(num_tokens=(9, 14), hidden=96, num_topk=3)


def round_trip(buffer, rank, exchange=SMALL):
    """Make one exchange on a buffer and return what arrived."""
    inputs = exchange.inputs(rank.rank)
    dispatched = dispatch(buffer, exchange, inputs)
    x, weights = exchange.expert_outputs(rank.rank, len(dispatched[4][3]))
    combine(buffer, exchange, inputs, dispatched[4], x, weights)
    return plain(dispatched)


def assert_all_received(results, exchange=SMALL):
    for rank, expected in enumerate(expect_dispatch(exchange)):
        assert_received(rank, results[rank], expected)


def own_resources():
    """Return how many descriptors are open, how many mappings there are and how many bytes are resident."""
    gc.collect()
    num_descriptors = len(os.listdir("/proc/self/fd"))
    num_mappings = len(Path("/proc/self/maps").read_text().splitlines())
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_descriptors, num_mappings, num_pages * os.sysconf("SC_PAGE_SIZE")


def make_and_drop_buffers(rank, num_cycles, ending):
    """Measure after a few cycles and at the end."""
    at_start = None
    for cycle in range(num_cycles):
        buffer = Buffer(rank.group, num_nvl_bytes=8 << 20, explicitly_destroy=ending == "destroy")
        round_trip(buffer, rank)
        if ending == "destroy":
            buffer.destroy()
        del buffer
        if cycle == 4:
            at_start = own_resources()
    return at_start, own_resources()


@pytest.mark.parametrize("ending", ["destroy", "drop"])
def test_making_and_ending_buffers_leaks_nothing(pool, ending):
    """C71, C69."""
    for before, after in pool.run(2, make_and_drop_buffers, 50, ending):
        assert after[0] <= before[0], "descriptors"
        assert after[1] <= before[1] + 4, "mappings"
        assert after[2] <= before[2] + (4 << 20), "resident bytes"


def call_often(rank, num_calls):
    buffer = rank.buffer()
    inputs = SMALL.inputs(rank.rank)
    before = None
    for call in range(num_calls):
        _, _, _, _, handle, _ = dispatch(buffer, SMALL, inputs)
        x, weights = SMALL.expert_outputs(rank.rank, len(handle[3]))
        combine(buffer, SMALL, inputs, handle, x, weights)
        if call == 50:
            before = own_resources()
    return before, own_resources()


def test_memory_is_flat_over_a_thousand_calls(pool):
    for before, after in pool.run(2, call_often, 1000):
        assert after[0] <= before[0], "descriptors"
        assert after[1] <= before[1] + 4, "mappings"
        assert after[2] <= before[2] + (2 << 20), "resident bytes"


def hold_many_results(rank, num_results):
    """Keep many results at once, as the layers of a model do, then let go of them and go on."""
    buffer = Buffer(rank.group)
    round_trip(buffer, rank)
    before = own_resources()
    exchange = Exchange(num_tokens=(100, 100), hidden=2048)
    held = [dispatch(buffer, exchange, exchange.inputs(rank.rank)) for _ in range(num_results)]
    assert_same_bits(held[0][0], held[-1][0])
    while_held = own_resources()
    del held
    # More than any of the results, so that the buffer grows once more and gives back what nobody uses.
    round_trip(buffer, rank, Exchange(num_tokens=(400, 400), hidden=2048))
    after = own_resources()
    buffer.destroy()
    return before, while_held, after


def test_memory_of_results_is_given_back_when_they_are_gone(pool):
    for before, while_held, after in pool.run(2, hold_many_results, 100):
        assert while_held[1] >= before[1] + 100, "each result should have its own memory here"
        assert after[1] <= before[1] + 16, "mappings"
        assert after[2] - before[2] <= (while_held[2] - before[2]) / 2, "resident bytes"


def destroy_twice_and_use(rank):
    buffer = Buffer(rank.group, explicitly_destroy=True)
    received = round_trip(buffer, rank)
    received_copy = received[0].clone()
    handle = rebuild(received[5])
    buffer.destroy()
    buffer.destroy()
    assert buffer.runtime is None
    inputs = SMALL.inputs(rank.rank)
    calls = [
        lambda: dispatch(buffer, SMALL, inputs),
        lambda: buffer.dispatch(inputs.x, handle=handle),
        lambda: buffer.combine(received[0], handle),
        lambda: buffer.get_dispatch_layout(inputs.topk_idx, 8),
        lambda: buffer.get_local_buffer_tensor(torch.uint8),
        buffer.get_comm_stream,
    ]
    for call in calls:
        with pytest.raises(DestroyedError, match="destroyed"):
            call()
    # What was received before stays what it was.
    assert torch.equal(received[0], received_copy)
    return buffer.num_nvl_bytes


def test_destroy_twice_is_fine_and_use_after_it_is_an_error(pool):
    """C67."""
    assert pool.run(2, destroy_twice_and_use) == [0, 0]


def drop_with_live_results(rank):
    buffer = Buffer(rank.group)
    received = round_trip(buffer, rank)
    watch = weakref.ref(buffer)
    del buffer
    assert watch() is None
    other = Buffer(rank.group)
    round_trip(other, rank, Exchange(num_tokens=(9, 14), hidden=96, num_topk=3, seed=99))
    return received


def test_results_outlive_their_buffer(pool):
    assert_all_received(pool.run(2, drop_with_live_results))


def replace_without_destroy(rank):
    """A second, larger buffer takes the place of the first, on one rank before the other."""
    holder = {"buffer": Buffer(rank.group, num_nvl_bytes=1 << 16)}
    round_trip(holder["buffer"], rank)
    holder["buffer"] = Buffer(rank.group, num_nvl_bytes=1 << 22)
    return round_trip(holder["buffer"], rank)


def test_a_larger_buffer_replaces_one_that_was_not_destroyed(pool):
    assert_all_received(pool.run(2, replace_without_destroy))


class Records(logging.Handler):
    """Collects what the library logs."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append((record.levelname, record.getMessage()))


@contextlib.contextmanager
def logged():
    records, logger = Records(), logging.getLogger("deep_ep")
    level = logger.level
    logger.addHandler(records)
    logger.setLevel(logging.INFO)
    try:
        yield records.messages
    finally:
        logger.removeHandler(records)
        logger.setLevel(level)


def forget_destroy(rank):
    with logged() as messages:
        buffer = Buffer(rank.group, explicitly_destroy=True)
        del buffer
        gc.collect()
    return messages


def test_a_forgotten_destroy_is_logged(pool):
    for rank, messages in enumerate(pool.run(2, forget_destroy)):
        assert [level for level, _ in messages] == ["WARNING"]
        assert f"rank {rank}" in messages[0][1]
        assert "destroy" in messages[0][1]


def grow(rank, num_nvl_bytes):
    exchange = Exchange(num_tokens=(200, 100), hidden=7168, num_topk=4)
    with logged() as messages:
        buffer = Buffer(rank.group, num_nvl_bytes=num_nvl_bytes)
        received = [round_trip(buffer, rank, exchange) for _ in range(3)]
        local_bytes = buffer.get_local_buffer_tensor(torch.uint8).numel()
    assert buffer.num_nvl_bytes == num_nvl_bytes
    for again in received[1:]:
        assert_same_bits(again[0], received[0][0])
    return received[0], messages, local_bytes


@pytest.mark.parametrize("num_nvl_bytes", [PerRank([1 << 20, 1 << 20]), PerRank([0, 0]), PerRank([0, 3000])])
def test_a_buffer_that_is_too_small_grows_on_all_ranks_and_says_so(pool, num_nvl_bytes):
    """C77."""
    results = pool.run(2, grow, num_nvl_bytes)
    assert_all_received(
        [received for received, _, _ in results], Exchange(num_tokens=(200, 100), hidden=7168, num_topk=4)
    )
    for _, messages, _ in results:
        assert messages
        assert all("bytes" in message for _, message in messages)


def use_two_buffers(rank):
    """Two buffers of one group, used in turn."""
    first, second = Buffer(rank.group, num_nvl_bytes=1 << 20), Buffer(rank.group)
    exchanges = [Exchange(num_tokens=(9, 14), hidden=hidden, seed=hidden) for hidden in (7168, 33, 7168, 5)]
    handles = [
        dispatch(buffer, exchange, exchange.inputs(rank.rank))[4]
        for buffer, exchange in zip([first, second, first, second], exchanges, strict=True)
    ]
    results = []
    for buffer, exchange, handle in zip([second, first, second, first], exchanges, handles, strict=True):
        # A handle is numbers only, so it also fits another buffer of the same ranks.
        recv_x, *_ = buffer.dispatch(exchange.inputs(rank.rank).x, handle=handle)
        results.append(recv_x)
    return results


def test_two_buffers_of_one_group_at_once(pool):
    """C49, as far as normal mode goes."""
    results = pool.run(2, use_two_buffers)
    for which, hidden in enumerate((7168, 33, 7168, 5)):
        exchange = Exchange(num_tokens=(9, 14), hidden=hidden, seed=hidden)
        for rank, expected in enumerate(expect_dispatch(exchange)):
            assert_same_bits(results[rank][which], expected.x)


@pytest.fixture(scope="module")
def three_ranks():
    pool = RankPool(num_ranks=3)
    yield pool
    pool.close()


def use_overlapping_groups(rank):
    """Make buffers of overlapping groups and use them in turns; each rank knows only the groups it is in."""
    members = [(0, 1), (1, 2), (0, 1, 2), (0, 2), (2,)]
    groups = [dist.new_group(list(ranks)) for ranks in members]
    mine = [(ranks, Buffer(group)) for ranks, group in zip(members, groups, strict=True) if rank.rank in ranks]
    results = []
    for _ in range(20):
        for ranks, buffer in mine:
            exchange = exchange_of(ranks)
            here = ranks.index(rank.rank)
            assert (buffer.rank, buffer.group_size) == (here, len(ranks))
            results.append((ranks, here, plain(dispatch(buffer, exchange, exchange.inputs(here)))))
    return results


def exchange_of(ranks):
    return Exchange(num_tokens=tuple(5 + 3 * rank for rank in ranks), hidden=40, num_experts=9, seed=sum(ranks))


def test_overlapping_groups_in_one_process_do_not_touch_each_other(three_ranks):
    """C62, strict sub-groups."""
    for results in three_ranks.run(3, use_overlapping_groups):
        for ranks, here, received in results:
            assert_received(here, received, expect_dispatch(exchange_of(ranks))[here])


class Communicator:
    """An mpi4py communicator, as far as a Buffer needs one."""

    def __init__(self, group):
        self.group = group

    def Get_rank(self):  # noqa: N802
        return dist.get_rank(self.group)

    def Get_size(self):  # noqa: N802
        return dist.get_world_size(self.group)

    def Allgather(self, mine, everyone):  # noqa: N802
        parts = [torch.empty(len(mine), dtype=torch.int64) for _ in range(self.Get_size())]
        dist.all_gather(parts, torch.tensor(list(mine)), group=self.group)
        for index, value in enumerate(torch.cat(parts).tolist()):
            everyone[index] = value

    def allgather(self, value):
        values = [None] * self.Get_size()
        dist.all_gather_object(values, value, group=self.group)
        return values


def use_communicator(rank):
    communicator = Communicator(rank.group)
    return round_trip(Buffer(None, comm=communicator), rank)


def test_an_mpi_communicator_is_as_good_as_a_group(pool):
    assert_all_received(pool.run(2, use_communicator))


def train_a_step(rank, ending):
    """Be a program: make a buffer before any collective has run, use it, end."""
    buffer = Buffer(rank.group, num_nvl_bytes=1 << 20, explicitly_destroy=ending == "destroy")
    received = round_trip(buffer, rank)
    if ending == "destroy":
        buffer.destroy()
        dist.destroy_process_group()
    if ending == "at different times":
        globals()["kept"] = buffer
        time.sleep(0.7 * rank.rank)
    if ending == "kept":
        globals()["kept"] = (buffer, received)
    return received


@pytest.mark.parametrize("ending", ["destroy", "at different times", "kept"])
def test_a_program_ends_with_exit_code_0(ending):
    """C60, C63, C68, C69: each rank sees a device of its own, and no collective has run before."""
    env = PerRank([{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}])
    with FreshRanks(2, train_a_step, ending, env=env) as ranks:
        outcomes = ranks.wait()
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
    assert all("Traceback" not in outcome.output for outcome in outcomes)
    assert_all_received([outcome.result for outcome in outcomes])


def exchange_for_ever(rank):
    buffer = Buffer(rank.group, num_nvl_bytes=4 << 20)
    round_trip(buffer, rank)
    rank.meet("running")
    while True:
        round_trip(buffer, rank)


def test_killed_ranks_leave_nothing_behind():
    before = set(os.listdir("/dev/shm"))
    with FreshRanks(2, exchange_for_ever) as ranks:
        ranks.wait_for("running")
        while_running = set(os.listdir("/dev/shm"))
        ranks.kill(0, 1)
    assert set(os.listdir("/dev/shm")) <= before
    assert while_running <= before, "memory should have no name as soon as all ranks have mapped it"
