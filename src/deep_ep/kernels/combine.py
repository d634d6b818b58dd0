"""Combine: every rank pushes the rows it received back to their sources, which add them as they arrive.

As in dispatch, the first programs of a launch send and the last ones receive. The rows that came from source s lie
together, and they go together to a block of s's staging: blocks are ordered by sender, the source's own rows are left
out (it reads them from `x`), and inside a block rows keep their order. A sender takes pieces of `unit_rows` rows,
destination after destination, and announces each in UNITS[me][unit].

A receiver adds tiles of consecutive tokens. The rows of a token are found with the handle alone,

    slot on staging = block of rank j + channel_prefix[j, c - 1] + send_head[t, j]

so it waits for the units that hold them, all at once, and then adds in float32, in the order bias_0 + bias_1 + rank 0
+ rank 1 + ..., and rounds once. A token that went nowhere gives its biases, or zeros.

Example: token 5 of rank 0 went to ranks 0 and 2, where it is row 3 and row 40 of those from rank 0. With units of 16
rows, a receiver waits for UNITS[2][2], and adds row 3 of `x` and slot 40 of rank 2's block.
"""

import triton
import triton.language as tl

from deep_ep import gpu_layout
from deep_ep.kernels.dispatch import row_among_mine, rows_before, rows_between
from deep_ep.kernels.rows import copy_flat, inside, store_words
from deep_ep.kernels.signal import begin, end, give_up, kernel, pointer, post_one, wait_all, wait_for_peers, words_at

UNITS = tl.constexpr(gpu_layout.UNITS)
MAX_UNITS = tl.constexpr(gpu_layout.MAX_UNITS)
AWAIT_SUMS = tl.constexpr(gpu_layout.AWAIT_SUMS)
MAX_UNROLLED = tl.constexpr(8)
KIND_STAGING_FULL = tl.constexpr(gpu_layout.KIND_STAGING_FULL)


@triton.jit
def rows_per_unit(num_rows, unit_rows):
    """Return the size of the units of a block; sender and receiver of the block compute the same."""
    return unit_rows * tl.maximum((num_rows + unit_rows * MAX_UNITS - 1) // (unit_rows * MAX_UNITS), 1)


@triton.jit
def first_slot(rank_prefix, dst, src, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr):
    """Return where the block of rank `src` begins in the staging of rank `dst`, for all ranks `src` of a vector.

    A block has the rows that `dst` sent to `src` in the dispatch. All blocks of `dst` follow each other, by rank.
    """
    rank = tl.arange(0, RANKS).to(tl.int64)
    is_block = (rank < NUM_RANKS) & (rank != dst)
    at = rank_prefix + dst * NUM_RANKS + rank
    num_rows = tl.load(at, mask=is_block, other=0)
    num_rows -= tl.load(at - NUM_RANKS, mask=is_block & (rank * 0 + dst > 0), other=0)
    return tl.sum(tl.where(rank < src, num_rows.to(tl.int64), 0), 0)


@kernel
def combine_kernel(
    x: tl.int64,
    topk_weights: tl.int64,
    bias_0: tl.int64,
    bias_1: tl.int64,
    send_head: tl.int64,
    channel_prefix: tl.int64,
    rank_prefix: tl.int64,
    combined_x: tl.int64,
    combined_weights: tl.int64,
    control: tl.int64,
    staging: tl.int64,
    state: tl.int64,
    record: tl.int64,
    weights_offset: tl.int64,
    num_slots: tl.int64,
    num_tokens: tl.int64,
    num_rows: tl.int64,
    num_channels: tl.int64,
    num_topk: tl.int64,
    rank: tl.int64,
    unit_rows: tl.int64,
    num_senders: tl.int64,
    first_receiver: tl.int64,
    timeout: tl.int64,
    NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    DTYPE: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FLAT: tl.constexpr,
    TOPK: tl.constexpr,
    NUM_BIASES: tl.constexpr,
    STREAM: tl.constexpr,
):
    """Send rows back and add them; see the module docstring."""
    control = pointer(control, tl.int64)
    staging = pointer(staging, tl.int64)
    state = pointer(state, tl.int64)
    send_head = pointer(send_head, tl.int32)
    channel_prefix = pointer(channel_prefix, tl.int32)
    rank_prefix = pointer(rank_prefix, tl.int32)
    rank, record, num_tokens = rank.to(tl.int64), record.to(tl.int64), num_tokens.to(tl.int64)
    launch, deadline = begin(state, timeout)
    program = tl.program_id(0).to(tl.int64)
    peer = tl.arange(0, RANKS).to(tl.int64)

    if NUM_RANKS > 1 and program < num_senders:
        wait_for_peers(control, rank, launch, deadline, record, NUM_RANKS, RANKS)
        from_peer = tl.load(rank_prefix + peer * NUM_RANKS + rank, mask=peer < NUM_RANKS, other=0)
        from_peer -= tl.load(rank_prefix + (peer - 1) * NUM_RANKS + rank, mask=(peer > 0) & (peer < NUM_RANKS), other=0)
        from_peer = tl.where(peer == rank, 0, from_peer.to(tl.int64))
        per_unit = rows_per_unit(from_peer, unit_rows)
        num_pieces = tl.max((from_peer + per_unit - 1) // per_unit, 0) * (NUM_RANKS - 1)
        for piece in range(program, num_pieces, num_senders):
            unit = piece // (NUM_RANKS - 1)
            dst = (rank + 1 + piece % (NUM_RANKS - 1)) % NUM_RANKS
            row = rows_before(rank_prefix, dst, rank, NUM_RANKS)
            num_for_dst = rows_between(rank_prefix, dst, rank, NUM_RANKS)
            unit_size = rows_per_unit(num_for_dst, unit_rows)
            row_in_block = unit * unit_size
            slot = first_slot(rank_prefix, dst, rank, NUM_RANKS, RANKS) + row_in_block
            if row_in_block < num_for_dst:
                num_here = tl.minimum(unit_size, num_for_dst - row_in_block)
                if slot + num_here > num_slots:
                    give_up(record, KIND_STAGING_FULL, dst, launch, slot + num_here)
                # Clamped, like the rows of `x`: a handle that does not fit must not make us touch other memory.
                num_here = tl.minimum(num_here, tl.minimum(num_slots - slot, num_rows - row - row_in_block))
                _send_back(
                    tl.load(staging + dst), weights_offset, slot, x, topk_weights, row + row_in_block, num_here, num_topk,
                    WORD, ALIGN, ROW_WORDS, FLAT, TOPK, STREAM,
                )  # fmt: skip
                post_one(words_at(control, dst, UNITS + rank * MAX_UNITS + unit), launch, num_here)

    if program >= first_receiver:
        tokens_per_channel = tl.maximum((num_tokens + num_channels - 1) // num_channels, 1)
        num_receivers = tl.num_programs(0) - first_receiver
        for tile in range(program - first_receiver, (num_tokens + TOKENS - 1) // TOKENS, num_receivers):
            token = tile * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
            if NUM_RANKS > 1:
                _wait_for_rows(
                    send_head, channel_prefix, rank_prefix, token, num_tokens, num_channels, tokens_per_channel,
                    control, rank, unit_rows, launch, deadline, record, NUM_RANKS, RANKS,
                )  # fmt: skip
            _add_tile(
                combined_x, combined_weights, x, topk_weights, bias_0, bias_1, tl.load(staging + rank), weights_offset,
                send_head, channel_prefix, rank_prefix, token, num_tokens, num_rows, num_slots, num_channels,
                tokens_per_channel, num_topk, rank,
                NUM_RANKS, RANKS, DTYPE, ALIGN, HIDDEN, TOKENS, COLUMNS, TOPK, NUM_BIASES, STREAM,
            )  # fmt: skip
    end(state, control, rank, launch, NUM_RANKS, RANKS)


@triton.jit
def _send_back(
    base, weights_offset, slot, x, topk_weights, row, num_rows, num_topk,
    WORD: tl.constexpr, ALIGN: tl.constexpr, ROW_WORDS: tl.constexpr, FLAT: tl.constexpr, TOPK: tl.constexpr,
    STREAM: tl.constexpr,
):  # fmt: skip
    """Copy consecutive rows of `x` and their weights to consecutive slots of a staging region."""
    if TOPK > 0:
        there, here = base + weights_offset + slot * num_topk * 4, topk_weights + row * num_topk * 4
        copy_flat(there, here, num_rows * num_topk, tl.int32, 4, 512, False)
    word_bytes: tl.constexpr = WORD.primitive_bitwidth // 8
    there, here = base + slot * ROW_WORDS * word_bytes, x + row * ROW_WORDS * word_bytes
    copy_flat(there, here, num_rows * ROW_WORDS, WORD, ALIGN, FLAT, STREAM)


@triton.jit
def _wait_for_rows(
    send_head, channel_prefix, rank_prefix, token, num_tokens, num_channels, tokens_per_channel,
    control, rank, unit_rows, launch, deadline, record, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Wait for the units that hold the rows of some tokens."""
    peer = tl.arange(0, RANKS).to(tl.int64)[None, :]
    is_pair = (token < num_tokens)[:, None] & (peer < NUM_RANKS) & (peer != rank)
    row = row_among_mine(
        send_head, channel_prefix, token[:, None], is_pair, peer, num_channels, tokens_per_channel, NUM_RANKS
    )
    at = rank_prefix + rank * NUM_RANKS + peer
    num_back = tl.load(at, mask=peer < NUM_RANKS, other=0).to(tl.int64)
    num_back -= tl.load(at - NUM_RANKS, mask=(peer < NUM_RANKS) & (peer * 0 + rank > 0), other=0)
    is_awaited = is_pair & (row >= 0)
    unit = tl.minimum(tl.maximum(row, 0) // rows_per_unit(num_back, unit_rows), MAX_UNITS - 1)
    words = words_at(control, rank, UNITS + peer * MAX_UNITS + unit)
    wait_all(words, launch, AWAIT_SUMS, peer + 0 * row, deadline, record, is_awaited)


@triton.jit
def _place_of_rows(
    j, send_head, channel_prefix, rank_prefix, token, num_tokens, num_rows, num_slots, num_channels, tokens_per_channel,
    rank, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Return, for tokens, their row of rank `j`: in `x` if `j` is this rank, else in staging; -1 if there is none."""
    row = row_among_mine(
        send_head, channel_prefix, token, token < num_tokens, j, num_channels, tokens_per_channel, NUM_RANKS
    )
    own_first = rows_before(rank_prefix, rank, rank, NUM_RANKS)
    first = tl.where(j == rank, own_first, first_slot(rank_prefix, rank, j, NUM_RANKS, RANKS))
    most = tl.where(j == rank, num_rows, num_slots)
    # 32 bits: no memory holds 2^31 rows, and these stay in registers.
    return tl.where((row >= 0) & (first + row < most), first + row, -1).to(tl.int32)


@triton.jit
def _add_tile(
    combined_x, combined_weights, x, topk_weights, bias_0, bias_1, staged, weights_offset,
    send_head, channel_prefix, rank_prefix, token, num_tokens, num_rows, num_slots, num_channels,
    tokens_per_channel, num_topk, rank,
    NUM_RANKS: tl.constexpr, RANKS: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr, HIDDEN: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, TOPK: tl.constexpr, NUM_BIASES: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """Add the rows of consecutive tokens, and their weights."""
    is_token = token < num_tokens
    # With few ranks, all places of a row are found once and its loads are in flight together.
    places = ()
    if NUM_RANKS <= MAX_UNROLLED:
        for j in tl.static_range(NUM_RANKS):
            place = _place_of_rows(
                j, send_head, channel_prefix, rank_prefix, token, num_tokens, num_rows, num_slots, num_channels,
                tokens_per_channel, rank, NUM_RANKS, RANKS,
            )  # fmt: skip
            places = places + (place,)
    if TOPK > 0:
        _add_weights(
            combined_weights, topk_weights, staged + weights_offset, send_head, channel_prefix, rank_prefix, token,
            num_tokens, num_rows, num_slots, num_channels, tokens_per_channel, num_topk, rank,
            NUM_RANKS, RANKS, TOKENS, TOPK,
        )  # fmt: skip
    for begin_column in range(0, HIDDEN, COLUMNS):
        column = (begin_column + tl.arange(0, COLUMNS))[None, :]
        at = token[:, None] * HIDDEN + column
        total = tl.zeros([TOKENS, COLUMNS], tl.float32)
        is_here = inside(is_token[:, None], column, HIDDEN, COLUMNS)
        if NUM_BIASES > 0:
            total = _load_values(bias_0, at, is_here, DTYPE, ALIGN, STREAM)
        if NUM_BIASES > 1:
            total += _load_values(bias_1, at, is_here, DTYPE, ALIGN, STREAM)
        if NUM_RANKS <= MAX_UNROLLED:
            for j in tl.static_range(NUM_RANKS):
                mask = inside((places[j] >= 0)[:, None], column, HIDDEN, COLUMNS)
                at_row = places[j].to(tl.int64)[:, None] * HIDDEN + column
                total += _load_values(tl.where(j == rank, x, staged), at_row, mask, DTYPE, ALIGN, STREAM)
        else:
            for j in range(NUM_RANKS):
                place = _place_of_rows(
                    j, send_head, channel_prefix, rank_prefix, token, num_tokens, num_rows, num_slots, num_channels,
                    tokens_per_channel, rank, NUM_RANKS, RANKS,
                )  # fmt: skip
                mask = inside((place >= 0)[:, None], column, HIDDEN, COLUMNS)
                at_row = place.to(tl.int64)[:, None] * HIDDEN + column
                total += _load_values(tl.where(j == rank, x, staged), at_row, mask, DTYPE, ALIGN, STREAM)
        store_words(pointer(combined_x, DTYPE, ALIGN) + at, total.to(DTYPE), is_here, STREAM)


@triton.jit
def _add_weights(
    combined_weights, topk_weights, staged_weights, send_head, channel_prefix, rank_prefix, token,
    num_tokens, num_rows, num_slots, num_channels, tokens_per_channel, num_topk, rank,
    NUM_RANKS: tl.constexpr, RANKS: tl.constexpr, TOKENS: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    """Add the top-k weights that came back with the rows of tokens."""
    slot = tl.arange(0, TOPK).to(tl.int64)[None, :]
    weights = tl.zeros([TOKENS, TOPK], tl.float32)
    for j in range(NUM_RANKS):
        place = _place_of_rows(
            j, send_head, channel_prefix, rank_prefix, token, num_tokens, num_rows, num_slots, num_channels,
            tokens_per_channel, rank, NUM_RANKS, RANKS,
        )  # fmt: skip
        mask = (place >= 0)[:, None] & (slot < num_topk)
        weights_ptr = pointer(tl.where(j == rank, topk_weights, staged_weights), tl.float32)
        weights += tl.load(weights_ptr + place.to(tl.int64)[:, None] * num_topk + slot, mask=mask, other=0.0)
    sum_ptr = pointer(combined_weights, tl.float32) + token[:, None] * num_topk + slot
    tl.store(sum_ptr, weights, mask=(token < num_tokens)[:, None] & (slot < num_topk))


@triton.jit
def _load_values(source, at, mask, DTYPE: tl.constexpr, ALIGN: tl.constexpr, STREAM: tl.constexpr):
    ptrs = pointer(source, DTYPE, ALIGN) + at
    if STREAM:
        return tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
