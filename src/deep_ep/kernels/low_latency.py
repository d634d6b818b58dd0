"""The protocol of low-latency mode, and what its dispatch and its combine have in common.

Calls are numbered from 1 on the device, dispatches and combines alike. A call is one launch, or two with a hook: one
that sends and one that receives. Call n uses half n mod 2 of the shared memory (`deep_ep.low_latency_layout`).

**Nothing is awaited at the end.** There is one rule: *in call n a rank writes to a peer only after that peer has
finished call n - 2*, and finished means that every program that reads half n mod 2 has ended. Every launch begins by
telling all ranks, in ACKS, which calls the launches before it have finished; as launches of one engine follow each
other, the ones before it have ended. A call of one launch has waited for something from every peer before it ends, so
its successor finds the ACKS that it needs already there:

    rank 0                                          rank 1
    call 5 (half 1): ACKS := 4 finished             call 5: ACKS := 4 finished
      ... sends, waits for rank 1, reads              ... is slow, but has sent
    call 6 (half 0): ACKS := 5 finished               still reads half 1
      waits for ACKS[0][1] >= 4: it has come with
      call 5 of rank 1; sends to half 0             call 6: ACKS := 5 finished, ...
    call 7 (half 1): waits for ACKS[1][1] >= 5:
      rank 1 tells when it begins call 6, and then
      no longer reads half 1

A call in two launches is finished by its second one; between them there may be the launches of one other call. A third
call would wait for the first one to finish, on the same rank: the host refuses it.

**The number of a call** is read by every program when it begins, and advanced by all of them together: the word
counts in units of `CALL`, each program adds 1 and the first one what is missing to a unit, so the unit is full when
the last program has read it, and nobody waits for that. The programs of a second launch read what the first one left
for them. So a CUDA graph may hold any number of calls, odd or even, and graphs may be replayed in any order between
other calls, as long as all ranks do the same.

Example: a launch of 3 programs begins call 5, so the word is 4 units. The programs add 1 unit - 2, 1 and 1, in any
order; before the last of them it is less than 5 units, and after it 5.

**Order.** All programs of a launch fit on the device together. Each announces or sends first, and receives when that
is done, so that nobody whom others wait for waits for them. (The interpreter runs programs one after the other: there,
sending and receiving are two launches, and programs that announce come before those that wait for it.) No result
depends on which is fast: rows have places that are counted from the routing (`tokens_naming`), and sums have an order.
"""

import triton
import triton.language as tl

from deep_ep import low_latency_layout
from deep_ep.kernels.layout import first_expert, owner_of
from deep_ep.kernels.signal import INTERPRET, add_one, deadline_of, hear_all, tell_all, words_at

ACKS = tl.constexpr(low_latency_layout.ACKS)
MAX_RANKS = tl.constexpr(low_latency_layout.MAX_RANKS)
AWAIT_ACK = tl.constexpr(low_latency_layout.AWAIT_ACK)
AWAIT_TOKENS = tl.constexpr(low_latency_layout.AWAIT_TOKENS)
STATE_DONE = tl.constexpr(low_latency_layout.STATE_DONE)
STATE_CALLS = tl.constexpr(low_latency_layout.STATE_CALLS)
CALL = tl.constexpr(low_latency_layout.CALL)


@triton.jit
def begin_call(state, call, timeout, program, SENDS: tl.constexpr):
    """Return the number of this call and the deadline of its waits; `call` is where a first launch left the number."""
    deadline = deadline_of(state, timeout)
    if SENDS:
        launch = tl.load(state + STATE_CALLS) // CALL + 1
        # All threads of this program have read the word before it changes.
        tl.debug_barrier()
        add_one(state + STATE_CALLS, tl.where(program == 0, CALL - tl.num_programs(0) + 1, 1).to(tl.int64))
    else:
        launch = tl.load(call.to(tl.pointer_type(tl.int64)))
    return launch, deadline


@triton.jit
def open_door(
    control, state, call, launch, rank, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr,
    SENDS: tl.constexpr, RECEIVES: tl.constexpr,
):  # fmt: skip
    """Tell all ranks what this rank has finished; one program of a launch does this, the first."""
    half = tl.arange(0, 2).to(tl.int64)[:, None]
    peer = tl.arange(0, RANKS).to(tl.int64)[None, :]
    done = tl.load(state + STATE_DONE + half)
    there = words_at(control, tl.where(peer < NUM_RANKS, peer, rank), ACKS + half * MAX_RANKS + rank)
    tell_all(there, done + 0 * peer, 0 * (half + peer), (peer + 0 * half) < NUM_RANKS)
    tl.debug_barrier()
    if RECEIVES:
        # The next launch tells this, and it begins when all programs of this one have ended.
        tl.store(state + STATE_DONE + (launch & 1), launch)
    else:
        tl.store(call.to(tl.pointer_type(tl.int64)), launch)


@triton.jit
def wait_for_half(control, rank, launch, deadline, record, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr):
    """Wait until every rank has finished the call before last, so that this half of its memory may be written."""
    peer = tl.arange(0, RANKS).to(tl.int64)
    words = words_at(control, rank, ACKS + (launch & 1) * MAX_RANKS + peer)
    hear_all(words, launch - 2, AWAIT_ACK, peer, deadline, record, peer < NUM_RANKS, True)


@triton.jit
def post_num_tokens(control, word, rank, launch, num_tokens, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr):
    """Tell all ranks how many tokens this one has."""
    peer = tl.arange(0, RANKS).to(tl.int64)
    there = words_at(control, tl.where(peer < NUM_RANKS, peer, rank), word + rank)
    tell_all(there, launch, peer * 0 + num_tokens, peer < NUM_RANKS)


@triton.jit
def wait_for_num_tokens(
    control, word, rank, launch, num_max_tokens, deadline, record, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr
):
    """Return how many tokens each rank has, `[RANKS]`; at most M, also after a wait that ran out."""
    peer = tl.arange(0, RANKS).to(tl.int64)
    words = words_at(control, rank, word + peer)
    num_tokens = hear_all(words, launch, AWAIT_TOKENS, peer, deadline, record, peer < NUM_RANKS)
    return tl.minimum(num_tokens, num_max_tokens)


@triton.jit
def experts_of(topk_idx, token, num_topk, num_experts, NUM_RANKS: tl.constexpr, IDX: tl.constexpr, TOPK: tl.constexpr):
    """Return, for the top-k slots of a token, expert, owner and number among the owner's experts; or -1, -1, 0."""
    slot = tl.arange(0, TOPK)
    idx_ptr = topk_idx.to(tl.pointer_type(IDX)) + token * num_topk
    expert = tl.load(idx_ptr + slot, mask=slot < num_topk, other=-1).to(tl.int64)
    is_expert = (expert >= 0) & (expert < num_experts)
    owner = tl.where(is_expert, owner_of(expert, num_experts, NUM_RANKS), -1)
    local = tl.where(is_expert, expert - first_expert(owner, num_experts, NUM_RANKS), 0)
    return tl.where(is_expert, expert, -1), owner, local


@triton.jit
def tokens_naming(
    experts, topk_idx, num_tokens, num_topk,
    IDX: tl.constexpr, TOPK: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Return, for each expert of a vector, how many of the first `num_tokens` tokens name it.

    Example: of tokens [0, 1], [1, 1], [2, 0], the first 2 that name experts [0, 1, 2] are [1, 2, 0].
    """
    total = tl.zeros([EXPERTS], tl.int32)
    slot = tl.arange(0, TOPK)[None, :]
    idx_ptr = topk_idx.to(tl.pointer_type(IDX))
    for first in range(0, num_tokens, TOKENS):
        token = (first + tl.arange(0, TOKENS).to(tl.int64))[:, None]
        mask = (token < num_tokens) & (slot < num_topk)
        named = tl.load(idx_ptr + token * num_topk + slot, mask=mask, other=-1).to(tl.int32)
        is_named = (named[:, :, None] == experts.to(tl.int32)[None, None, :]).to(tl.int32)
        total += tl.sum(tl.max(is_named, axis=1), axis=0)
    return total.to(tl.int64)


@triton.jit
def pick(values, slot, at):
    """Return one item of a vector."""
    return tl.sum(tl.where(slot == at, values, 0), 0)


@triton.jit
def clock():
    """Return a number of GPU clock cycles; the interpreter's clock stands still."""
    if INTERPRET:
        return tl.zeros([1], tl.int64)
    else:  # noqa: RET505 (only one branch is compiled)
        return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
