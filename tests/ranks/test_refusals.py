"""Bad calls are refused before anything is sent, and disagreements are found out; then the ranks can go on."""

import re
import time

import pytest
import torch
from steps import assert_received, dispatch, expect_dispatch, plain

from deep_ep import Buffer, Config
from deep_ep.errors import (
    CapacityError,
    DeepEPError,
    DestroyedError,
    MismatchError,
    PeerError,
    PeerTimeoutError,
)
from rank_pool import FreshRanks, PerRank
from strategies import Exchange

GOOD = Exchange(num_tokens=(9, 14), hidden=96, num_topk=3, num_experts=8)


def arguments(buffer, inputs):
    """Return the arguments of a good dispatch."""
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(inputs.topk_idx, GOOD.num_experts)
    return {
        "x": inputs.x,
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": inputs.topk_idx,
        "topk_weights": inputs.topk_weights,
    }


def changed(**changes):
    """Return a change of arguments: of each name, a function of the good value."""
    return lambda good: good | {name: change(good.get(name)) for name, change in changes.items()}


def none(_):
    return None


def with_item(value):
    def change(tensor):
        tensor = tensor.clone()
        tensor[2, 1] = value
        return tensor

    return change


# What is changed of a good dispatch, and what the error must speak of: the argument, the value, the rule.
BAD_DISPATCHES = {
    "C37 x of three dimensions": (changed(x=lambda x: x.view(3, -1, 96)), ["x", "[3, 3, 96]", "view"]),
    "x of one dimension": (changed(x=lambda x: x.flatten()), ["x", "[864]", "num_tokens, hidden"]),
    "x of a dtype that is not carried": (changed(x=lambda x: x.to(torch.complex64)), ["x", "complex64"]),
    "x that is a list": (changed(x=lambda x: x.tolist()), ["x"]),
    "x that is None": (changed(x=none), ["x", "NoneType"]),
    "x and two scales": (changed(x=lambda x: (x, x, x)), ["x", "3"]),
    "scales of one dimension": (changed(x=lambda x: (x, torch.ones(9))), ["scales", "[9]"]),
    "scales of other tokens": (changed(x=lambda x: (x, torch.ones(8, 1))), ["scales", "[8, 1]", "9"]),
    "an expert that does not exist": (changed(topk_idx=with_item(8)), ["topk_idx", "8", "7"]),
    "an expert below -1": (changed(topk_idx=with_item(-2)), ["topk_idx", "-2"]),
    "expert ids in floats": (changed(topk_idx=lambda t: t.float()), ["topk_idx", "float32", "int64"]),
    "expert ids of other tokens": (changed(topk_idx=lambda t: t[:-1]), ["topk_idx", "[8, 3]", "9"]),
    "weights of another shape": (changed(topk_weights=lambda t: t[:, :-1]), ["topk_weights", "[9, 2]", "[9, 3]"]),
    "weights in bfloat16": (changed(topk_weights=lambda t: t.bfloat16()), ["topk_weights", "bfloat16", "float32"]),
    "expert ids without weights": (changed(topk_weights=none), ["topk_weights", "None"]),
    "weights without expert ids": (changed(topk_idx=none), ["topk_idx", "None"]),
    "no layout": (
        changed(num_tokens_per_rank=none, is_token_in_rank=none, num_tokens_per_expert=none),
        ["num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert", "get_dispatch_layout"],
    ),
    "counts of ranks that are not those of the mask": (
        changed(num_tokens_per_rank=lambda t: t + 1),
        ["num_tokens_per_rank", "is_token_in_rank"],
    ),
    "counts of another number of ranks": (
        changed(num_tokens_per_rank=lambda t: torch.cat([t, t])),
        ["num_tokens_per_rank", "[4]", "[2]"],
    ),
    "counts in int64": (changed(num_tokens_per_rank=lambda t: t.long()), ["num_tokens_per_rank", "int64", "int32"]),
    "a mask of integers": (changed(is_token_in_rank=lambda t: t.int()), ["is_token_in_rank", "int32", "bool"]),
    "a mask of other tokens": (changed(is_token_in_rank=lambda t: t[:-1]), ["is_token_in_rank", "[8, 2]", "[9, 2]"]),
    "no experts": (changed(num_tokens_per_expert=lambda t: t[:0]), ["num_tokens_per_expert"]),
    "alignment 0": (changed(expert_alignment=lambda _: 0), ["expert_alignment", "0", "1"]),
    "negative num_worst_tokens": (changed(num_worst_tokens=lambda _: -5), ["num_worst_tokens", "-5"]),
    "num_worst_tokens without expert ids": (
        changed(num_worst_tokens=lambda _: 50, topk_idx=none, topk_weights=none),
        ["num_worst_tokens", "50", "topk_idx"],
    ),
    "a config that is a number": (changed(config=lambda _: 20), ["config", "int"]),
    "a handle that is a tensor": (
        changed(handle=lambda _: torch.zeros(6), topk_idx=none, topk_weights=none),
        ["handle"],
    ),
    "a handle of five items": (
        changed(handle=lambda _: (torch.zeros(2, 2),) * 5, topk_idx=none, topk_weights=none),
        ["handle", "5", "6"],
    ),
    "a handle and expert ids": (changed(handle=lambda _: (torch.zeros(2, 2),) * 6), ["topk_idx", "handle"]),
    "an unknown keyword": (changed(use_fabric_please=lambda _: True), ["use_fabric_please"]),
}


def refuse_then_retry(rank, name):
    """On rank 0 make a bad call, while rank 1 waits in a good one; then make the good call there too."""
    buffer = rank.buffer()
    good = arguments(buffer, GOOD.inputs(rank.rank))
    message = None
    if rank.rank == 0:
        with pytest.raises((DeepEPError, TypeError)) as error:
            buffer.dispatch(**BAD_DISPATCHES[name][0](good))
        message = str(error.value)
    return message, plain(buffer.dispatch(**good))


@pytest.mark.parametrize("name", BAD_DISPATCHES)
def test_a_bad_dispatch_is_refused_and_the_next_one_succeeds(pool, name):
    (message, first), (_, second) = pool.run(2, refuse_then_retry, name)
    assert_speaks_of(message, BAD_DISPATCHES[name][1])
    for rank, (received, expected) in enumerate(
        zip([first, second], expect_dispatch(Exchange(**vars(GOOD))), strict=True)
    ):
        assert_received(rank, received, expected)


def assert_speaks_of(message, parts):
    """Check that every part, a word of its own, is in a message."""
    for part in parts:
        assert re.search(rf"(?<!\w){re.escape(part)}(?!\w)", message), f"{part!r} is not in {message!r}"


# Of a good combine: x, topk_weights, bias, handle.
BAD_COMBINES = {
    "too few rows": (changed(x=lambda x: x[:-1]), ["x"]),
    "rows of one dimension": (changed(x=lambda x: x.flatten()), ["x"]),
    "rows that have no sum": (changed(x=lambda x: x.to(torch.uint8)), ["x", "uint8", "bfloat16"]),
    "rows in float64": (changed(x=lambda x: x.double()), ["x", "float64"]),
    "weights of other rows": (changed(topk_weights=lambda _: torch.ones(3, 3)), ["topk_weights", "[3, 3]"]),
    "a bias of the received rows": (
        changed(bias=lambda _: torch.ones(3, 96).bfloat16()),
        ["bias", "[3, 96]", "[9, 96]"],
    ),
    "a bias of another dtype": (changed(bias=lambda _: torch.ones(9, 96)), ["bias", "float32", "bfloat16"]),
    "three biases": (changed(bias=lambda _: (torch.ones(9, 96).bfloat16(),) * 3), ["bias", "3"]),
    "a bias that is a number": (changed(bias=lambda _: 1.0), ["bias"]),
    "no handle": (changed(handle=none), ["handle"]),
    "a handle of another group": (
        changed(handle=lambda h: (torch.zeros(3, 3, dtype=torch.int32), *h[1:])),
        ["handle[0]", "[3, 3]", "[2, 2]"],
    ),
    "a handle with a list in it": (changed(handle=lambda h: (*h[:3], h[3].tolist(), *h[4:])), ["handle[3]", "list"]),
}


def refuse_combine_then_retry(rank, name):
    buffer = rank.buffer()
    x, _, weights, _, handle, _ = buffer.dispatch(**arguments(buffer, GOOD.inputs(rank.rank)))
    good = {"x": x, "topk_weights": weights, "bias": None, "handle": handle}
    message = None
    if rank.rank == 0:
        with pytest.raises((DeepEPError, TypeError)) as error:
            buffer.combine(**BAD_COMBINES[name][0](good))
        message = str(error.value)
    return message, buffer.combine(**good)[1]


@pytest.mark.parametrize("name", BAD_COMBINES)
def test_a_bad_combine_is_refused_and_the_next_one_succeeds(pool, name):
    results = pool.run(2, refuse_combine_then_retry, name)
    assert_speaks_of(results[0][0], BAD_COMBINES[name][1])
    for rank, (_, weights) in enumerate(results):
        assert torch.equal(weights, GOOD.inputs(rank).topk_weights)


BAD_BUFFERS = {
    "negative bytes": ({"num_nvl_bytes": -1}, ["num_nvl_bytes", "-1"]),
    "neither group nor comm": ({"group": None}, ["group", "comm"]),
    "no time": ({"timeout_s": 0.0}, ["timeout_s", "0.0"]),
}


def refuse_buffer(rank, name):
    with pytest.raises((DeepEPError, TypeError)) as error:
        Buffer(**({"group": rank.group} | BAD_BUFFERS[name][0]))
    return str(error.value)


@pytest.mark.parametrize("name", BAD_BUFFERS)
def test_a_bad_buffer_is_refused(pool, name):
    for message in pool.run(2, refuse_buffer, name):
        assert_speaks_of(message, BAD_BUFFERS[name][1])


def refuse_layout(rank):
    topk_idx = torch.zeros(4, 2, dtype=torch.int64)
    messages = {}
    for name, args in {
        "no experts": (topk_idx, 0),
        "expert out of range": (topk_idx + 7, 7),
        "floats": (topk_idx.float(), 8),
        "one dimension": (topk_idx.flatten(), 8),
        "no tensor": ([[0, 1]], 8),
    }.items():
        with pytest.raises((DeepEPError, TypeError)) as error:
            rank.buffer().get_dispatch_layout(*args)
        messages[name] = str(error.value)
    return messages


def test_a_bad_layout_is_refused(pool):
    [messages] = pool.run(1, refuse_layout)
    assert_speaks_of(messages["no experts"], ["num_experts", "0"])
    assert_speaks_of(messages["expert out of range"], ["topk_idx", "7"])
    assert_speaks_of(messages["floats"], ["topk_idx", "float32"])
    assert_speaks_of(messages["one dimension"], ["topk_idx", "[8]"])
    assert_speaks_of(messages["no tensor"], ["topk_idx", "list"])


def disagree(rank, name):
    """Make calls that differ between the ranks; then make the same good call on both."""
    buffer = rank.buffer()
    inputs = GOOD.inputs(rank.rank)
    good = arguments(buffer, inputs)
    x, _, weights, _, handle, _ = buffer.dispatch(**good)
    other = dispatch(
        buffer, Exchange(**{**vars(GOOD), "seed": 5}), Exchange(**{**vars(GOOD), "seed": 5}).inputs(rank.rank)
    )
    first = rank.rank == 0
    calls = {
        "another call": lambda: buffer.dispatch(**good) if first else buffer.combine(x, handle),
        "another hidden": lambda: buffer.dispatch(**good | {"x": inputs.x[:, : 96 - rank.rank]}),
        "another dtype": lambda: buffer.dispatch(**good | {"x": inputs.x.half() if first else inputs.x}),
        "scales on one rank": lambda: buffer.dispatch(
            **good | {"x": (inputs.x, torch.ones(len(inputs.x), 1)) if first else inputs.x}
        ),
        "another config": lambda: buffer.dispatch(**good, config=Config(num_sms=20 + 2 * rank.rank)),
        "another top-k": lambda: buffer.dispatch(
            **good | {n: good[n][:, : 3 - rank.rank] for n in ("topk_idx", "topk_weights")}
        ),
        "expert ids on one rank": lambda: buffer.dispatch(
            **good | (dict.fromkeys(("topk_idx", "topk_weights")) if first else {})
        ),
        "another number of experts": lambda: buffer.dispatch(
            **good | {"num_tokens_per_expert": torch.cat([good["num_tokens_per_expert"]] * (1 + rank.rank))}
        ),
        "weights on one rank": lambda: buffer.combine(x, handle, topk_weights=weights if first else None),
        "another handle in combine": lambda: buffer.combine(*((x, handle) if first else (other[0], other[4]))),
        "another handle in dispatch": lambda: buffer.dispatch(inputs.x, handle=handle if first else other[4]),
    }
    with pytest.raises((MismatchError, PeerError)) as error:
        calls[name]()
    return type(error.value).__name__, str(error.value), plain(buffer.dispatch(**good))


DISAGREEMENTS = [
    "another call",
    "another hidden",
    "another dtype",
    "scales on one rank",
    "another config",
    "another top-k",
    "expert ids on one rank",
    "another number of experts",
    "weights on one rank",
    "another handle in combine",
    "another handle in dispatch",
]


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree_are_told_and_can_go_on(pool, name):
    results = pool.run(2, disagree, name)
    assert "MismatchError" in [kind for kind, _, _ in results]
    assert all("rank" in message for _, message, _ in results)
    for rank, expected in enumerate(expect_dispatch(GOOD)):
        assert_received(rank, results[rank][2], expected)


def receive_too_much(rank, num_worst_tokens):
    buffer = rank.buffer()
    good = arguments(buffer, GOOD.inputs(rank.rank))
    with pytest.raises(CapacityError) as error:
        buffer.dispatch(**good, num_worst_tokens=num_worst_tokens)
    return str(error.value), plain(buffer.dispatch(**good))


def test_more_tokens_than_num_worst_tokens_is_an_error_on_all_ranks(pool):
    results = pool.run(2, receive_too_much, PerRank([3, 23]))
    for message, _ in results:
        assert_speaks_of(message, ["num_worst_tokens", "3", "rank 0"])
    for rank, expected in enumerate(expect_dispatch(GOOD)):
        assert_received(rank, results[rank][1], expected)


def miss_a_peer(rank, timeout_s):
    """Ranks 0 and 1 of three make a call that rank 2 does not make."""
    buffer = Buffer(rank.group, timeout_s=timeout_s)
    exchange = Exchange(num_tokens=(5, 6, 7))
    dispatched = dispatch(buffer, exchange, exchange.inputs(rank.rank))
    if rank.rank == 2:
        rank.meet("miss_a_peer")
        return None
    start = time.monotonic()
    with pytest.raises(PeerTimeoutError) as error:
        buffer.combine(dispatched[0], dispatched[4])
    waited_s = time.monotonic() - start
    with pytest.raises(DestroyedError):
        buffer.combine(dispatched[0], dispatched[4])
    rank.meet("miss_a_peer")
    return str(error.value), error.value.missing_ranks, waited_s


def test_a_peer_that_does_not_come_is_named_in_time(pool):
    *waiting, _ = pool.run(3, miss_a_peer, 1.0)
    for message, missing_ranks, waited_s in waiting:
        assert missing_ranks == [2]
        assert_speaks_of(message, ["combine", "[2]", "1.0 s"])
        assert 1.0 <= waited_s < 5.0


def be_late(rank, delay_s):
    buffer = Buffer(rank.group, timeout_s=10.0)
    if rank.rank == 1:
        time.sleep(delay_s)
    return plain(dispatch(buffer, GOOD, GOOD.inputs(rank.rank)))


def test_a_peer_that_is_late_within_the_limit_is_waited_for(pool):
    """C73, with short times."""
    results = pool.run(2, be_late, 0.5)
    for rank, expected in enumerate(expect_dispatch(GOOD)):
        assert_received(rank, results[rank], expected)


def exchange_until_a_peer_is_gone(rank):
    exchange = Exchange(num_tokens=(5, 6, 7, 8))
    buffer = Buffer(rank.group, timeout_s=2.0)
    dispatch(buffer, exchange, exchange.inputs(rank.rank))
    rank.meet("running")
    try:
        while True:
            dispatch(buffer, exchange, exchange.inputs(rank.rank))
    except PeerTimeoutError as error:
        buffer.destroy()
        return error.missing_ranks


def test_survivors_of_a_killed_rank_are_told_which():
    """C72: they get an error in time and can end in order."""
    with FreshRanks(4, exchange_until_a_peer_is_gone) as ranks:
        ranks.wait_for("running")
        ranks.kill(2)
        outcomes = ranks.wait()
    for rank in (0, 1, 3):
        assert 2 in outcomes[rank].result, outcomes[rank].output


def corrupt(rank, name):
    """Use a handle that no dispatch made; an error or not, nothing else may break."""
    buffer = Buffer(rank.group, timeout_s=5.0)
    good = arguments(buffer, GOOD.inputs(rank.rank))
    x, _, _, _, handle, _ = buffer.dispatch(**good)
    handle = [item.clone() for item in handle]
    changes = {
        "negative counts": (0, lambda t: t.neg_()),
        "huge counts": (0, lambda t: t.fill_(2**31 - 1)),
        "falling counts": (0, lambda t: t.copy_(t.flip(0))),
        "mask of all tokens": (4, lambda t: t.fill_(True)),
        "mask of no token": (4, lambda t: t.fill_(False)),
        "fewer rows": (3, lambda t: t.resize_(len(t) - 4)),
    }
    index, change = changes[name]
    change(handle[index])
    outcomes = []
    for call in (
        lambda: buffer.combine(x[:1].expand(len(handle[3]), -1), tuple(handle)),
        lambda: buffer.dispatch(good["x"], handle=tuple(handle)),
    ):
        with pytest.raises(DeepEPError) as error:
            call()
        outcomes.append(str(error.value))
    return outcomes, plain(buffer.dispatch(**good))


@pytest.mark.parametrize(
    "name",
    ["negative counts", "huge counts", "falling counts", "mask of all tokens", "mask of no token", "fewer rows"],
)
def test_a_handle_that_contradicts_itself_is_an_error(pool, name):
    results = pool.run(2, corrupt, name)
    for rank, expected in enumerate(expect_dispatch(GOOD)):
        assert all(results[rank][0])
        assert_received(rank, results[rank][1], expected)
