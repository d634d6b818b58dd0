"""Low-latency dispatch: a row goes once to every rank that owns one of its experts and is spread there.

`deep_ep.kernels.low_latency` has the protocol, `deep_ep.low_latency_layout` the words and slots. The programs of a
launch are, by their order,

    the first        tells what this rank has finished (the door); then waits for all counts, and writes `layout_range`,
                     `recv_count` and the statistics (the books)
    announcers       count a block of experts each; COUNTS and TOKENS, to the owners and to all
    senders          a token each, then another: quantise its row once, store it in the token's slot on every rank that
                     owns one of its experts, with its expert slots; ROWS on every rank, 1 or 0
    the others

and all but the first then receive: a row each, then another: wait for its word, and copy it to its places. Those that
had nothing to send take the first rows.

The places follow from numbers that were sent, so their order is fixed: among the rows of an expert, those of source s
begin after the counts of the sources before it, and the sender has counted how many of its earlier tokens name the
expert.

Example: 2 ranks, expert 5 is number 1 of rank 1's. Of rank 0's tokens 0, 3 and 7 name it, of rank 1's 2 and 4. COUNTS
on rank 1 are [0][1] = 3 and [1][1] = 2. Token 4 of rank 1 carries the expert slot 1 * M + 1, and lands in row 3 + 1.
"""

import triton
import triton.language as tl

from deep_ep import low_latency_layout
from deep_ep.kernels.layout import first_expert, owner_of
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
from deep_ep.kernels.quantize import from_bf16_bits, scales_of, to_fp8_bits
from deep_ep.kernels.rows import inside, load_words
from deep_ep.kernels.signal import hear_all, kernel, pointer, post_all, tell_all, wait_one, words_at

AWAIT_COUNTS = tl.constexpr(low_latency_layout.AWAIT_COUNTS)
AWAIT_ROWS = tl.constexpr(low_latency_layout.AWAIT_ROWS)
EXPERTS_BLOCK = tl.constexpr(8)
COUNT_BLOCK = tl.constexpr(256)


@kernel
def dispatch_kernel(
    x: tl.int64,
    topk_idx: tl.int64,
    recv_x: tl.int64,
    recv_scales: tl.int64,
    src_info: tl.int64,
    layout_range: tl.int64,
    recv_count: tl.int64,
    recv_stats: tl.int64,
    wait_stats: tl.int64,
    call: tl.int64,
    control: tl.int64,
    state: tl.int64,
    record: tl.int64,
    first_word: tl.int64,
    half_words: tl.int64,
    data_offset: tl.int64,
    half_bytes: tl.int64,
    counts: tl.int64,
    rows: tl.int64,
    num_tokens: tl.int64,
    num_max_tokens: tl.int64,
    num_topk: tl.int64,
    num_experts: tl.int64,
    rank: tl.int64,
    first_sender: tl.int64,
    num_senders: tl.int64,
    timeout: tl.int64,
    NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    HIDDEN: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    IDX: tl.constexpr,
    TOPK: tl.constexpr,
    TOKENS: tl.constexpr,
    COUNT_TOKENS: tl.constexpr,
    ALIGN: tl.constexpr,
    WORD: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    ROUNDED: tl.constexpr,
    PACKED: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    SCALES: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
    ROUTES_OFFSET: tl.constexpr,
    PROGRAMS_PER_SM: tl.constexpr,
    SENDS: tl.constexpr,
    RECEIVES: tl.constexpr,
):
    """Send rows, receive rows, or both; see the module docstring."""
    control = control.to(tl.pointer_type(tl.int64))
    state = state.to(tl.pointer_type(tl.int64))
    # The interpreter makes 32-bit integers of small values, such as the addresses of empty tensors.
    rank, record, num_tokens = rank.to(tl.int64), record.to(tl.int64), num_tokens.to(tl.int64)
    x, topk_idx = x.to(tl.int64), topk_idx.to(tl.int64)
    program = tl.program_id(0).to(tl.int64)
    launch, deadline = begin_call(state, call, timeout, program, SENDS)
    num_local = (num_experts + NUM_RANKS - 1) // NUM_RANKS
    word = first_word + (launch & 1) * half_words
    data = data_offset + (launch & 1) * half_bytes

    if program == 0:
        open_door(control, state, call, launch, rank, NUM_RANKS, RANKS, SENDS, RECEIVES)

    if SENDS:
        if (program > 0) & (program < first_sender):
            _announce(
                topk_idx, control, word, word + counts, program - 1, first_sender - 1, rank, launch, num_tokens,
                num_topk, num_experts, num_local, deadline, record, NUM_RANKS, RANKS, IDX, TOPK, COUNT_TOKENS,
            )  # fmt: skip
        if (program >= first_sender) & (program < first_sender + num_senders):
            for token in range(program - first_sender, num_tokens, num_senders):
                _send_row(
                    x, topk_idx, control, word + rows, data, token, rank, launch, num_max_tokens, num_topk, num_experts,
                    deadline, record, NUM_RANKS, RANKS, HIDDEN, GROUPS, GROUP, IDX, TOPK, TOKENS, ALIGN, FP8, NATIVE, ROUNDED,
                    PACKED, NUM_SCALES, SLOT_BYTES, SCALES_OFFSET, ROUTES_OFFSET,
                )  # fmt: skip

    if RECEIVES:
        num_own = first_expert(rank + 1, num_experts, NUM_RANKS) - first_expert(rank, num_experts, NUM_RANKS)
        if program == 0:
            _keep_books(
                layout_range, recv_count, recv_stats, wait_stats, control, word + counts, rank, launch, num_local,
                num_own, deadline, record, NUM_RANKS, RANKS,
            )  # fmt: skip
        if program > 0:
            num_of_rank = wait_for_num_tokens(
                control, word, rank, launch, num_max_tokens, deadline, record, NUM_RANKS, RANKS
            )
            peer = tl.arange(0, RANKS)
            num_receivers = tl.num_programs(0) - 1
            for item in range(num_receivers - program, tl.max(num_of_rank, 0) * NUM_RANKS, num_receivers):
                src, token = (rank + item) % NUM_RANKS, item // NUM_RANKS
                if token < pick(num_of_rank, peer, src):
                    _receive_row(
                        recv_x, recv_scales, src_info, control, word + counts, word + rows, data, src, token, rank,
                        launch, num_max_tokens, num_topk, num_local, num_own, deadline, record,
                        NUM_RANKS, RANKS, TOPK, WORD, ROW_WORDS, COLUMNS, NUM_SCALES, SCALES,
                        SLOT_BYTES, SCALES_OFFSET, ROUTES_OFFSET,
                    )  # fmt: skip


@triton.jit
def _announce(
    topk_idx, control, num_tokens_words, counts, announcer, num_announcers, rank, launch, num_tokens, num_topk,
    num_experts, num_local, deadline, record,
    NUM_RANKS: tl.constexpr, RANKS: tl.constexpr, IDX: tl.constexpr, TOPK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Tell all ranks how many tokens this one has, and the owners of experts how many of them name each."""
    wait_for_half(control, rank, launch, deadline, record, NUM_RANKS, RANKS)
    if announcer == 0:
        post_num_tokens(control, num_tokens_words, rank, launch, num_tokens, NUM_RANKS, RANKS)
    for first in range(announcer * EXPERTS_BLOCK, num_experts, num_announcers * EXPERTS_BLOCK):
        expert = first + tl.arange(0, EXPERTS_BLOCK).to(tl.int64)
        is_expert = expert < num_experts
        named = tokens_naming(expert, topk_idx, num_tokens, num_topk, IDX, TOPK, EXPERTS_BLOCK, TOKENS)
        owner = tl.where(is_expert, owner_of(expert, num_experts, NUM_RANKS), rank)
        local = expert - first_expert(owner, num_experts, NUM_RANKS)
        tell_all(words_at(control, owner, counts + rank * num_local + local), launch, named, is_expert)


@triton.jit
def _send_row(
    x, topk_idx, control, rows, data, token, rank, launch, num_max_tokens, num_topk, num_experts, deadline, record,
    NUM_RANKS: tl.constexpr, RANKS: tl.constexpr, HIDDEN: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    IDX: tl.constexpr, TOPK: tl.constexpr, TOKENS: tl.constexpr, ALIGN: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr,
    ROUNDED: tl.constexpr, PACKED: tl.constexpr, NUM_SCALES: tl.constexpr, SLOT_BYTES: tl.constexpr,
    SCALES_OFFSET: tl.constexpr, ROUTES_OFFSET: tl.constexpr,
):  # fmt: skip
    """Send the row of a token, with its scales and expert slots, to every rank that owns one of its experts.

    All that can be known before anything is stored comes first: loads wait for each other where a store or a wait is
    between them.
    """
    group = tl.arange(0, GROUPS)
    channel = (group * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    x_ptr = tl.multiple_of(x.to(tl.pointer_type(tl.int16)), ALIGN) + token * HIDDEN
    bits = tl.load(x_ptr + channel, mask=inside(channel >= 0, channel, HIDDEN, GROUPS * GROUP), other=0)
    peer = tl.arange(0, RANKS).to(tl.int64)
    region = tl.load(control + tl.where(peer < NUM_RANKS, peer, rank))
    expert, owner, local = experts_of(topk_idx, token, num_topk, num_experts, NUM_RANKS, IDX, TOPK)
    before = tokens_naming(expert, topk_idx, token, num_topk, IDX, TOPK, TOPK, TOKENS)
    slot = tl.arange(0, TOPK)
    is_owner = owner[None, :] == peer[:, None]
    is_dst = tl.max(is_owner.to(tl.int32), axis=1)
    expert_slot = tl.where(is_owner, (local * num_max_tokens + before)[None, :], -1).to(tl.int32)
    slot_offset = data + (rank * num_max_tokens + token) * SLOT_BYTES
    wait_for_half(control, rank, launch, deadline, record, NUM_RANKS, RANKS)
    routes_ptr = (region + slot_offset + ROUTES_OFFSET).to(tl.pointer_type(tl.int32))[:, None] + slot[None, :]
    tl.store(routes_ptr, expert_slot, mask=(is_dst > 0)[:, None] & (slot < num_topk)[None, :])
    for _ in range(0, HIDDEN, GROUPS * GROUP):
        words = bits
        if FP8:
            values = from_bf16_bits(bits)
            scale, factor = scales_of(values, ROUNDED)
            words = to_fp8_bits(values * factor[:, None], NATIVE)
            if PACKED:
                exponents = tl.where(group * GROUP < HIDDEN, scale.to(tl.int32, bitcast=True) >> 23, 0)
        mask = inside(channel >= 0, channel, HIDDEN, GROUPS * GROUP)
        for step in range(NUM_RANKS):
            dst = (rank + 1 + step) % NUM_RANKS
            if pick(is_dst, peer, dst) > 0:
                there = pick(region, peer, dst) + slot_offset
                row_ptr = tl.multiple_of(there.to(tl.pointer_type(words.dtype)), 16)
                tl.store(row_ptr + channel, words, mask=mask)
                if PACKED:
                    scales_ptr = (there + SCALES_OFFSET).to(tl.pointer_type(tl.int8))
                    tl.store(scales_ptr + group, exponents.to(tl.int8), mask=group < NUM_SCALES * 4)
                elif FP8:
                    scales_ptr = (there + SCALES_OFFSET).to(tl.pointer_type(tl.float32))
                    tl.store(scales_ptr + group, scale, mask=group < NUM_SCALES)
        group += GROUPS
        channel += GROUPS * GROUP
        bits = tl.load(x_ptr + channel, mask=channel < HIDDEN, other=0)
    flags = pointer(region + 8 * (rows + rank * num_max_tokens + token), tl.int64)
    post_all(flags, launch, is_dst, peer < NUM_RANKS)


@triton.jit
def _keep_books(
    layout_range, recv_count, recv_stats, wait_stats, control, counts, rank, launch, num_local, num_own, deadline,
    record, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Write what came from where, and the statistics."""
    if wait_stats != 0:
        stats_ptr = wait_stats.to(tl.pointer_type(tl.int64)) + tl.arange(0, 1)
        began = clock()
        for src in range(NUM_RANKS):
            for local in range(num_own):
                wait_one(words_at(control, rank, counts + src * num_local + local), launch, AWAIT_COUNTS, rank * 0 + src, deadline, record)  # fmt: skip
            tl.store(stats_ptr + src, tl.load(stats_ptr + src) + clock() - began)
    BLOCK: tl.constexpr = COUNT_BLOCK // RANKS if RANKS < COUNT_BLOCK else 1
    src = tl.arange(0, RANKS).to(tl.int64)[None, :]
    for first in range(0, num_own, BLOCK):
        local = first + tl.arange(0, BLOCK).to(tl.int64)
        mask = (local < num_own)[:, None] & (src < NUM_RANKS)
        words = words_at(control, rank, counts + src * num_local + local[:, None])
        num_rows = hear_all(words, launch, AWAIT_COUNTS, src + 0 * local[:, None], deadline, record, mask)
        begins = tl.cumsum(num_rows, axis=1) - num_rows
        range_ptr = layout_range.to(tl.pointer_type(tl.int64)) + local[:, None] * NUM_RANKS + src
        tl.store(range_ptr, (begins << 32) | num_rows, mask=mask)
        num_of_expert = tl.sum(num_rows, axis=1).to(tl.int32)
        tl.store(recv_count.to(tl.pointer_type(tl.int32)) + local, num_of_expert, mask=local < num_own)
        if recv_stats != 0:
            total_ptr = recv_stats.to(tl.pointer_type(tl.int32)) + local
            tl.atomic_add(total_ptr, num_of_expert, mask=local < num_own, sem="relaxed")


@triton.jit
def _receive_row(
    recv_x, recv_scales, src_info, control, counts, rows, data, src, token, rank, launch, num_max_tokens, num_topk,
    num_local, num_own, deadline, record,
    NUM_RANKS: tl.constexpr, RANKS: tl.constexpr, TOPK: tl.constexpr, WORD: tl.constexpr, ROW_WORDS: tl.constexpr,
    COLUMNS: tl.constexpr, NUM_SCALES: tl.constexpr, SCALES: tl.constexpr, SLOT_BYTES: tl.constexpr,
    SCALES_OFFSET: tl.constexpr, ROUTES_OFFSET: tl.constexpr,
):  # fmt: skip
    """Wait for the row of a token, if it comes here, and copy it to its places."""
    slot = tl.load(control + rank) + data + (src * num_max_tokens + token) * SLOT_BYTES
    flag = words_at(control, rank, rows + src * num_max_tokens + token)
    if wait_one(flag, launch, AWAIT_ROWS, src, deadline, record) != 0:
        # All loads of the slot before the next wait.
        slots = tl.arange(0, TOPK)
        routes_ptr = (slot + ROUTES_OFFSET).to(tl.pointer_type(tl.int32))
        route = tl.load(routes_ptr + slots, mask=slots < num_topk, other=-1)
        row_ptr = tl.multiple_of(slot.to(tl.pointer_type(WORD)), 16)
        column = tl.arange(0, COLUMNS)
        row_words = load_words(row_ptr + column, inside(column >= 0, column, ROW_WORDS, COLUMNS), True)
        if NUM_SCALES > 0:
            scale = tl.arange(0, SCALES)
            scales_ptr = (slot + SCALES_OFFSET).to(tl.pointer_type(tl.int32))
            scales = tl.load(scales_ptr + scale, mask=scale < NUM_SCALES, other=0)
        # Clamped, like the row below: after a wait that ran out, numbers mean nothing.
        most = num_max_tokens.to(tl.int32)
        local = tl.where(route >= 0, tl.minimum(route // most, num_own.to(tl.int32) - 1), -1).to(tl.int64)
        peer = tl.arange(0, RANKS).to(tl.int64)[None, :]
        is_before = (local >= 0)[:, None] & (peer < src)
        there = words_at(control, rank, counts + peer * num_local + tl.maximum(local, 0)[:, None])
        num_before = hear_all(there, launch, AWAIT_COUNTS, peer + 0 * local[:, None], deadline, record, is_before)
        num_rows = num_max_tokens * NUM_RANKS
        row = tl.minimum(tl.sum(num_before, axis=1) + (route % most).to(tl.int64), num_rows - 1)
        for _ in range(0, ROW_WORDS, COLUMNS):
            mask = inside(column >= 0, column, ROW_WORDS, COLUMNS)
            for k in range(num_topk):
                expert = pick(local, slots, k)
                if expert >= 0:
                    at = (expert * num_rows + pick(row, slots, k)) * ROW_WORDS
                    tl.store(tl.multiple_of(recv_x.to(tl.pointer_type(WORD)), 16) + at + column, row_words, mask=mask)
            column += COLUMNS
            row_words = load_words(row_ptr + column, column < ROW_WORDS, True)
        is_place = (slots < num_topk) & (local >= 0)
        place = tl.maximum(local, 0) * num_rows + row
        token_of_place = (token + 0 * place).to(tl.int32)
        tl.store(src_info.to(tl.pointer_type(tl.int32)) + place, token_of_place, mask=is_place)
        if NUM_SCALES > 0:
            # Rows are innermost: `[L, NUM_SCALES, num_rows]` in memory.
            at = ((tl.maximum(local, 0) * NUM_SCALES)[:, None] + scale[None, :]) * num_rows + row[:, None]
            mask = is_place[:, None] & (scale < NUM_SCALES)[None, :]
            tl.store(recv_scales.to(tl.pointer_type(tl.int32)) + at, scales[None, :], mask=mask)
