"""Low-latency combine: every rank adds the rows that it has of a token, weighted, and sends the source one sum.

`deep_ep.kernels.low_latency` has the protocol, `deep_ep.low_latency_layout` the words and slots. The programs of a
launch are, by their order,

    the first        tells what this rank has finished (the door)
    announcers       TOKENS, to all ranks; then a token each, then another: ROUTES, to all ranks, which say by
                     themselves where the token's rows are (`x` of an expert rank has them where the dispatch put them)
                     and what they weigh
    senders          a token of any source each, or some pieces of one if tokens are few, then another: wait for its
                     ROUTES, add its rows in float32, store the sum in the source's slot for this rank, and SUMS there

and all but the first then receive: a part of an own token each, then another: wait for the SUMS of the ranks that own
its experts, add them in the order of ranks, round once. The last programs, which send least, take the first parts.

A rank that has one row of a token sends that row as it is, in bf16, and the source multiplies it with the weight. The
sum of more rows travels in 32, 24 or 16 bits (`deep_ep.kernels.quantize`). Both sides see from the routing which.

Example: token 4 of rank 0 has experts [0, 1, 5] with weights [.5, .3, .2] on 2 ranks with 3 experts each. Rank 0 sends
itself .5 * y0 + .3 * y1, rank 1 sends y5, and rank 0 gives (.5 * y0 + .3 * y1) + .2 * y5.
"""

import triton
import triton.language as tl

from deep_ep import low_latency_layout
from deep_ep.kernels.low_latency import (
    begin_call,
    clock,
    experts_of,
    open_door,
    pick,
    post_num_tokens,
    tokens_naming,
    wait_for_half,
    wait_for_num_tokens,
)
from deep_ep.kernels.quantize import from_bf16_bits, from_planes, round_to_bits
from deep_ep.kernels.rows import inside
from deep_ep.kernels.signal import hear_all, kernel, pointer, post_all, tell_all, wait_all, wait_one, words_at

AWAIT_TOKENS = tl.constexpr(low_latency_layout.AWAIT_TOKENS)
AWAIT_ROUTES = tl.constexpr(low_latency_layout.AWAIT_ROUTES)
AWAIT_SUMS = tl.constexpr(low_latency_layout.AWAIT_SUMS)
NOWHERE = tl.constexpr(0xFFFFFFFF)
RANKS_AT_ONCE = tl.constexpr(8)
SLOTS_AT_ONCE = tl.constexpr(8)


@kernel
def combine_kernel(
    x: tl.int64,
    topk_idx: tl.int64,
    topk_weights: tl.int64,
    layout_range: tl.int64,
    out: tl.int64,
    wait_stats: tl.int64,
    call: tl.int64,
    control: tl.int64,
    state: tl.int64,
    record: tl.int64,
    first_word: tl.int64,
    half_words: tl.int64,
    data_offset: tl.int64,
    half_bytes: tl.int64,
    routes: tl.int64,
    sums: tl.int64,
    num_tokens: tl.int64,
    num_max_tokens: tl.int64,
    num_topk: tl.int64,
    num_experts: tl.int64,
    num_own: tl.int64,
    rank: tl.int64,
    first_sender: tl.int64,
    num_senders: tl.int64,
    timeout: tl.int64,
    NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    HIDDEN: tl.constexpr,
    IDX: tl.constexpr,
    TOPK: tl.constexpr,
    TOKENS: tl.constexpr,
    ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    LOW: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    LOW_OFFSET: tl.constexpr,
    PROGRAMS_PER_SM: tl.constexpr,
    SENDS: tl.constexpr,
    RECEIVES: tl.constexpr,
):
    """Send sums, receive sums, or both; see the module docstring."""
    control = control.to(tl.pointer_type(tl.int64))
    state = state.to(tl.pointer_type(tl.int64))
    rank, record, num_tokens = rank.to(tl.int64), record.to(tl.int64), num_tokens.to(tl.int64)
    program = tl.program_id(0).to(tl.int64)
    launch, deadline = begin_call(state, call, timeout, program, SENDS)
    word = first_word + (launch & 1) * half_words
    data = data_offset + (launch & 1) * half_bytes

    if program == 0:
        open_door(control, state, call, launch, rank, NUM_RANKS, RANKS, SENDS, RECEIVES)

    if SENDS:
        if (program > 0) & (program < first_sender):
            if program == 1:
                wait_for_half(control, rank, launch, deadline, record, NUM_RANKS, RANKS)
                post_num_tokens(control, word, rank, launch, num_tokens, NUM_RANKS, RANKS)
            for token in range(program - 1, num_tokens, first_sender - 1):
                _announce(
                    topk_idx, topk_weights, control, word + routes, token, rank, launch, num_max_tokens, num_topk,
                    num_experts, deadline, record, NUM_RANKS, RANKS, IDX, TOPK, TOKENS,
                )  # fmt: skip
        if (program >= first_sender) & (program < first_sender + num_senders):
            # Whatever came from a peer in this call says that it has finished the call before last.
            num_of_rank = wait_for_num_tokens(
                control, word, rank, launch, num_max_tokens, deadline, record, NUM_RANKS, RANKS
            )
            peer = tl.arange(0, RANKS)
            num_pairs = (tl.max(num_of_rank, 0) * NUM_RANKS).to(tl.int32)
            num_pieces: tl.constexpr = (HIDDEN + PIECE - 1) // PIECE
            num_shares = tl.maximum(tl.minimum(num_senders.to(tl.int32) // tl.maximum(num_pairs, 1), num_pieces), 1)
            for item in range((program - first_sender).to(tl.int32), num_pairs * num_shares, num_senders.to(tl.int32)):
                pair, share = item // num_shares, item % num_shares
                src, token = ((rank + 1 + pair) % NUM_RANKS).to(tl.int64), (pair // NUM_RANKS).to(tl.int64)
                if token < pick(num_of_rank, peer, src):
                    _send_sum(
                        x, layout_range, control, word + routes, word + sums, data, src, token, share, num_shares,
                        rank, launch, num_max_tokens, num_topk, num_own, deadline, record,
                        NUM_RANKS, HIDDEN, TOPK, TOPK if TOPK < SLOTS_AT_ONCE else SLOTS_AT_ONCE, ALIGN, PIECE, PIECES, LOW_BITS, LOW, SLOT_BYTES, LOW_OFFSET,
                    )  # fmt: skip

    if RECEIVES:
        if (program == 0) & (wait_stats != 0):
            _time_arrivals(wait_stats, control, word, rank, launch, deadline, record, NUM_RANKS)
        num_receivers = tl.num_programs(0) - 1
        num_parts: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
        if program > 0:
            first_item = num_receivers - program.to(tl.int32)
            for item in range(first_item, num_tokens.to(tl.int32) * num_parts, num_receivers):
                _receive_sum(
                    out, topk_idx, topk_weights, control, word + sums, data, rank * 0 + item // num_parts,
                    item % num_parts, rank, launch, num_max_tokens, num_topk, num_experts, deadline, record,
                    NUM_RANKS, RANKS, HIDDEN, IDX, TOPK, OUT_ALIGN, PIECE, COLUMNS, LOW_BITS, LOW, SLOT_BYTES, LOW_OFFSET,
                )  # fmt: skip


@triton.jit
def _announce(
    topk_idx, topk_weights, control, routes, token, rank, launch, num_max_tokens, num_topk, num_experts, deadline,
    record, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr, IDX: tl.constexpr, TOPK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Tell every rank which of its rows are those of a token, and what they weigh."""
    expert, owner, local = experts_of(topk_idx, token, num_topk, num_experts, NUM_RANKS, IDX, TOPK)
    slot = tl.arange(0, TOPK)
    weight = _weights_of(topk_weights, token, num_topk, TOPK).to(tl.int32, bitcast=True).to(tl.int64) & NOWHERE
    before = tokens_naming(expert, topk_idx, token, num_topk, IDX, TOPK, TOPK, TOKENS)
    peer = tl.arange(0, RANKS).to(tl.int64)[:, None]
    expert_slot = tl.where(owner[None, :] == peer, (local * num_max_tokens + before)[None, :], NOWHERE)
    values = tl.join(expert_slot, weight[None, :] + 0 * peer)
    there = routes + ((rank * num_max_tokens + token) * num_topk + slot) * 2
    words = there[None, :, None] + tl.arange(0, 2)[None, None, :]
    is_word = (peer < NUM_RANKS)[:, :, None] & (slot < num_topk)[None, :, None]
    owner_of_word = tl.where(peer < NUM_RANKS, peer, rank)[:, :, None]
    there = words_at(control, owner_of_word, words)
    wait_for_half(control, rank, launch, deadline, record, NUM_RANKS, RANKS)
    tell_all(there, launch, values, is_word & (values >= 0))


@triton.jit
def _weights_of(topk_weights, token, num_topk, TOPK: tl.constexpr):
    slot = tl.arange(0, TOPK)
    weights_ptr = topk_weights.to(tl.pointer_type(tl.float32)) + token * num_topk
    return tl.load(weights_ptr + slot, mask=slot < num_topk, other=0.0)


@triton.jit
def _send_sum(
    x, layout_range, control, routes, sums, data, src, token, share, num_shares, rank, launch, num_max_tokens,
    num_topk, num_own, deadline, record,
    NUM_RANKS: tl.constexpr, HIDDEN: tl.constexpr, TOPK: tl.constexpr, SLOTS: tl.constexpr, ALIGN: tl.constexpr,
    PIECE: tl.constexpr, PIECES: tl.constexpr, LOW_BITS: tl.constexpr, LOW: tl.constexpr, SLOT_BYTES: tl.constexpr,
    LOW_OFFSET: tl.constexpr,
):  # fmt: skip
    """Add the rows that this rank has of a source's token, every `num_shares`-th piece, and send the sums there.

    One signal a piece lets receivers begin anywhere in a row; all of them are raised at the end, for each costs a wait
    until the peer has what was stored before.
    """
    there = tl.load(control + src) + data + (rank * num_max_tokens + token) * SLOT_BYTES
    here = tl.load(control + rank)
    slot = tl.arange(0, TOPK)
    first = pointer(here + 8 * (routes + (src * num_max_tokens + token) * num_topk * 2), tl.int64)
    mask = slot < num_topk
    weight = hear_all(first + 2 * slot + 1, launch, AWAIT_ROUTES, src + 0 * slot, deadline, record, mask)
    route = hear_all(first + 2 * slot, launch, AWAIT_ROUTES, src + 0 * slot, deadline, record, mask)
    # The second condition holds but after a wait that ran out.
    is_row = (slot < num_topk) & (route < num_own * num_max_tokens)
    num_slots = tl.sum(is_row.to(tl.int32), 0)
    if num_slots > 0:
        most = num_max_tokens.to(tl.int32)
        local = tl.where(is_row, route.to(tl.int32) // most, 0).to(tl.int64)
        range_ptr = layout_range.to(tl.pointer_type(tl.int64)) + local * NUM_RANKS + src
        begin = tl.load(range_ptr, mask=is_row, other=0) >> 32
        num_rows = num_max_tokens * NUM_RANKS
        row = local * num_rows + tl.minimum(begin + (route.to(tl.int32) % most).to(tl.int64), num_rows - 1)
        factor = tl.where(num_slots == 1, 1.0, weight.to(tl.int32).to(tl.float32, bitcast=True))
        factor = tl.where(is_row, factor, 0.0)
        begin_of_row = tl.where(is_row, row * HIDDEN, -1)
        begins, factors = _slots_from(begin_of_row, factor, slot, 0, SLOTS)
        channel = share * PIECE + tl.arange(0, PIECE)
        # Two pieces at a time, so that enough loads are under way.
        for _ in range(share * PIECE, HIDDEN, 2 * num_shares * PIECE):
            following = channel + num_shares * PIECE
            one, two = _add_rows(
                tl.zeros([PIECE], tl.float32), tl.zeros([PIECE], tl.float32), x, begins, factors, channel, following,
                HIDDEN, ALIGN, SLOTS,
            )  # fmt: skip
            for first_slot in range(SLOTS, TOPK, SLOTS):
                others, weights = _slots_from(begin_of_row, factor, slot, first_slot, SLOTS)
                one, two = _add_rows(one, two, x, others, weights, channel, following, HIDDEN, ALIGN, SLOTS)
            _store_sums(there, one, channel, num_slots, HIDDEN, LOW_BITS, LOW, LOW_OFFSET)
            _store_sums(there, two, following, num_slots, HIDDEN, LOW_BITS, LOW, LOW_OFFSET)
            channel = following + num_shares * PIECE
        num_pieces: tl.constexpr = (HIDDEN + PIECE - 1) // PIECE
        piece = tl.arange(0, PIECES)
        flags = words_at(control, src, sums + (rank * num_max_tokens + token) * num_pieces + piece)
        post_all(flags, launch, num_slots + 0 * piece, (piece < num_pieces) & (piece % num_shares == share))


@triton.jit
def _slots_from(begin_of_row, factor, slot, first, SLOTS: tl.constexpr):
    """Return, one by one, where the rows of `SLOTS` top-k slots begin, -1 for none, and what they weigh."""
    begins, factors = (), ()
    for k in tl.static_range(SLOTS):
        begins = begins + (pick(begin_of_row, slot, first + k),)
        factors = factors + (tl.sum(tl.where(slot == first + k, factor, 0.0), 0),)
    return begins, factors


@triton.jit
def _add_rows(
    one, two, x, begins, factors, channel, following, HIDDEN: tl.constexpr, ALIGN: tl.constexpr, SLOTS: tl.constexpr
):
    """Add the weighted rows of `SLOTS` top-k slots, in their order, to the sums of two pieces."""
    # All loads before the first addition.
    values = ()
    for k in tl.static_range(SLOTS):
        row_ptr = tl.multiple_of((x + 2 * begins[k]).to(tl.pointer_type(tl.int16)), ALIGN)
        is_row = begins[k] + 0 * channel >= 0
        of_one = tl.load(row_ptr + channel, mask=is_row & (channel < HIDDEN), other=0)
        of_two = tl.load(row_ptr + following, mask=is_row & (following < HIDDEN), other=0)
        values = values + ((of_one, of_two),)
    for k in tl.static_range(SLOTS):
        one += from_bf16_bits(values[k][0]) * factors[k]
        two += from_bf16_bits(values[k][1]) * factors[k]
    return one, two


@triton.jit
def _store_sums(
    there, total, channel, num_slots,
    HIDDEN: tl.constexpr, LOW_BITS: tl.constexpr, LOW: tl.constexpr, LOW_OFFSET: tl.constexpr,
):  # fmt: skip
    """Store the sums of a piece in a slot, in the bits that they travel in."""
    rounded = round_to_bits(total, LOW_BITS)
    high_ptr = tl.multiple_of(there.to(tl.pointer_type(tl.int16)), 16)
    tl.store(high_ptr + channel, (rounded >> LOW_BITS).to(tl.int16), mask=channel < HIDDEN)
    if LOW_BITS > 0:
        low_ptr = tl.multiple_of(there.to(tl.pointer_type(LOW)), 16) + LOW_OFFSET
        tl.store(low_ptr + channel, rounded.to(LOW), mask=(channel < HIDDEN) & (num_slots + 0 * channel > 1))


@triton.jit
def _time_arrivals(wait_stats, control, word, rank, launch, deadline, record, NUM_RANKS: tl.constexpr):
    """Add, for each rank, the time until it is seen to have begun."""
    stats_ptr = wait_stats.to(tl.pointer_type(tl.int64)) + tl.arange(0, 1)
    began = clock()
    for src in range(NUM_RANKS):
        wait_one(words_at(control, rank, word + src), launch, AWAIT_TOKENS, rank * 0 + src, deadline, record)
        tl.store(stats_ptr + src, tl.load(stats_ptr + src) + clock() - began)


@triton.jit
def _receive_sum(
    out, topk_idx, topk_weights, control, sums, data, token, part, rank, launch, num_max_tokens, num_topk, num_experts,
    deadline, record,
    NUM_RANKS: tl.constexpr, RANKS: tl.constexpr, HIDDEN: tl.constexpr, IDX: tl.constexpr, TOPK: tl.constexpr,
    ALIGN: tl.constexpr, PIECE: tl.constexpr, COLUMNS: tl.constexpr, LOW_BITS: tl.constexpr,
    LOW: tl.constexpr, SLOT_BYTES: tl.constexpr, LOW_OFFSET: tl.constexpr,
):  # fmt: skip
    """Wait for the sums of some channels of a token and add them."""
    expert, owner, local = experts_of(topk_idx, token, num_topk, num_experts, NUM_RANKS, IDX, TOPK)
    weight = _weights_of(topk_weights, token, num_topk, TOPK)
    slots = tl.load(control + rank) + data + token * SLOT_BYTES
    peer = tl.arange(0, RANKS).to(tl.int64)
    is_src = tl.max((owner[None, :] == peer[:, None]).to(tl.int32), axis=1) > 0
    num_pieces: tl.constexpr = (HIDDEN + PIECE - 1) // PIECE
    flags = sums + (peer * num_max_tokens + token) * num_pieces + part * COLUMNS // PIECE
    wait_all(words_at(control, rank, flags), launch, AWAIT_SUMS, peer, deadline, record, is_src)
    channel = part * COLUMNS + tl.arange(0, COLUMNS)
    is_channel = inside(channel >= 0, channel, HIDDEN, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, NUM_RANKS, RANKS_AT_ONCE):
        # All loads before the first addition.
        values = ()
        for step in tl.static_range(RANKS_AT_ONCE if NUM_RANKS > RANKS_AT_ONCE else NUM_RANKS):
            is_of = owner == first + step
            num_slots = tl.sum(is_of.to(tl.int32), 0)
            factor = tl.where(num_slots == 1, tl.sum(tl.where(is_of, weight, 0.0), 0), 1.0)
            slot = slots + (first + step) * num_max_tokens * SLOT_BYTES
            high_ptr = tl.multiple_of(slot.to(tl.pointer_type(tl.int16)), 16)
            high = tl.load(
                high_ptr + channel, mask=is_channel & (num_slots + 0 * channel > 0), other=0, cache_modifier=".cg"
            )
            low = high
            if LOW_BITS > 0:
                low_ptr = tl.multiple_of(slot.to(tl.pointer_type(LOW)), 16) + LOW_OFFSET
                low = tl.load(
                    low_ptr + channel, mask=is_channel & (num_slots + 0 * channel > 1), other=0, cache_modifier=".cg"
                )
            values = values + ((high, low, factor),)
        for step in tl.static_range(RANKS_AT_ONCE if NUM_RANKS > RANKS_AT_ONCE else NUM_RANKS):
            total += from_planes(values[step][0], values[step][1], LOW_BITS) * values[step][2]
    out_ptr = tl.multiple_of(out.to(tl.pointer_type(tl.int16)), ALIGN) + token * HIDDEN
    tl.store(out_ptr + channel, round_to_bits(total, 0).to(tl.int16), mask=is_channel)
