"""Dispatch: rows go once to every rank that owns one of their experts, and are copied out while others are in flight.

A launch has two kinds of programs. The first `num_senders` send, those from `first_receiver` on receive; with a
single program it does both, one after the other. Each sender cuts the tokens of this rank into **units** of
`unit_tokens` consecutive tokens. A piece of work is one unit for one destination, and pieces go round the senders unit
by unit, so that the front of what has arrived moves evenly through every destination's rows.

    sender                                            receiver, on the destination
    NUM_UNITS[me] = units, to all (program 0)         copies this rank's own rows straight to the output
    for each piece:                                   waits for NUM_UNITS of all sources
      stores its rows in the destination's staging    for each (unit, source), the same order:
      stores UNIT_STARTS[me][unit]                      waits for UNITS[source][unit]
      UNITS[me][unit] = number of rows                  copies that many rows from staging to the output

Where a row goes needs no exchange: with the handle of the routing, the row that token t of channel c takes among the
rows of rank j is

    rank_prefix[me - 1, j] + channel_prefix[j, c - 1] + send_head[t, j]

and its staging slot is the same, less the rows that j keeps for itself if those come before. So rows of one unit for
one destination are consecutive there, results do not depend on timing, and receivers copy long stretches.

Example: rank 1 of 2 sends tokens 0..31 as unit 0; 20 of them go to rank 0, which keeps 50 rows of its own. They become
rows 50..69 of rank 0; in its staging they are slots 0..19, UNIT_STARTS[1][0] = 0 and UNITS[1][0] = (launch, 20).
"""

import triton
import triton.language as tl

from deep_ep import gpu_layout
from deep_ep.kernels.layout import first_expert
from deep_ep.kernels.rows import copy_flat, copy_rows
from deep_ep.kernels.signal import (
    begin,
    end,
    give_up,
    kernel,
    pointer,
    post_all,
    post_one,
    wait_all,
    wait_for_peers,
    wait_one,
    words_at,
)

NUM_UNITS = tl.constexpr(gpu_layout.NUM_UNITS)
UNITS = tl.constexpr(gpu_layout.UNITS)
UNIT_STARTS = tl.constexpr(gpu_layout.UNIT_STARTS)
MAX_UNITS = tl.constexpr(gpu_layout.MAX_UNITS)
AWAIT_NUM_UNITS = tl.constexpr(gpu_layout.AWAIT_NUM_UNITS)
AWAIT_ROWS = tl.constexpr(gpu_layout.AWAIT_ROWS)
KIND_STAGING_FULL = tl.constexpr(gpu_layout.KIND_STAGING_FULL)
KIND_OUTPUT_FULL = tl.constexpr(gpu_layout.KIND_OUTPUT_FULL)
UNIT_BLOCK = tl.constexpr(64)


@triton.jit
def rows_before(rank_prefix, src, dst, NUM_RANKS: tl.constexpr):
    """Return how many rows of rank `dst` come from ranks before `src`."""
    return tl.load(rank_prefix + (src - 1) * NUM_RANKS + dst, mask=src > 0, other=0).to(tl.int64)


@triton.jit
def rows_between(rank_prefix, src, dst, NUM_RANKS: tl.constexpr):
    """Return how many rows rank `src` sends to rank `dst`."""
    until = tl.load(rank_prefix + src * NUM_RANKS + dst).to(tl.int64)
    return until - rows_before(rank_prefix, src, dst, NUM_RANKS)


@triton.jit
def row_among_mine(
    send_head, channel_prefix, token, is_token, dst, num_channels, tokens_per_channel, NUM_RANKS: tl.constexpr
):
    """Return each token's row among those that this rank sends to `dst`, -1 if it does not go there."""
    head = tl.load(send_head + token * NUM_RANKS + dst, mask=is_token, other=-1).to(tl.int64)
    channel = token // tokens_per_channel
    before = channel_prefix + dst * num_channels + channel - 1
    return tl.where(head >= 0, head + tl.load(before, mask=is_token & (channel > 0), other=0), -1)


@kernel
def dispatch_kernel(
    x: tl.int64,
    scales: tl.int64,
    topk_idx: tl.int64,
    topk_weights: tl.int64,
    send_head: tl.int64,
    channel_prefix: tl.int64,
    rank_prefix: tl.int64,
    recv_x: tl.int64,
    recv_scales: tl.int64,
    recv_topk_idx: tl.int64,
    recv_topk_weights: tl.int64,
    recv_src_idx: tl.int64,
    control: tl.int64,
    staging: tl.int64,
    state: tl.int64,
    record: tl.int64,
    src_offset: tl.int64,
    idx_offset: tl.int64,
    weights_offset: tl.int64,
    scales_offset: tl.int64,
    row_words: tl.int64,
    num_slots: tl.int64,
    num_tokens: tl.int64,
    num_recv: tl.int64,
    num_channels: tl.int64,
    num_topk: tl.int64,
    num_scales: tl.int64,
    scale_stride_token: tl.int64,
    scale_stride: tl.int64,
    num_experts: tl.int64,
    rank: tl.int64,
    unit_tokens: tl.int64,
    num_senders: tl.int64,
    first_receiver: tl.int64,
    timeout: tl.int64,
    NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FLAT: tl.constexpr,
    IDX: tl.constexpr,
    TOPK: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_META: tl.constexpr,
    STREAM: tl.constexpr,
):
    """Send and receive rows, and with `HAS_META` what belongs to them; see the module docstring.

    `TOPK` and `SCALES` are the next powers of two, 0 if the rows carry none.
    """
    control = pointer(control, tl.int64)
    staging = pointer(staging, tl.int64)
    state = pointer(state, tl.int64)
    send_head = pointer(send_head, tl.int32)
    channel_prefix = pointer(channel_prefix, tl.int32)
    rank_prefix = pointer(rank_prefix, tl.int32)
    rank, record, num_tokens = rank.to(tl.int64), record.to(tl.int64), num_tokens.to(tl.int64)
    launch, deadline = begin(state, timeout)
    program = tl.program_id(0).to(tl.int64)
    tokens_per_channel = tl.maximum((num_tokens + num_channels - 1) // num_channels, 1)
    num_units = (num_tokens + unit_tokens - 1) // unit_tokens

    if NUM_RANKS > 1 and program < num_senders:
        wait_for_peers(control, rank, launch, deadline, record, NUM_RANKS, RANKS)
        if program == 0:
            peer = tl.arange(0, RANKS).to(tl.int64)
            is_peer = (peer < NUM_RANKS) & (peer != rank)
            there = words_at(control, tl.where(is_peer, peer, rank), NUM_UNITS + rank)
            post_all(there, launch, peer * 0 + num_units, is_peer)
        for piece in range(program, num_units * (NUM_RANKS - 1), num_senders):
            unit = piece // (NUM_RANKS - 1)
            dst = (rank + 1 + piece % (NUM_RANKS - 1)) % NUM_RANKS
            base = tl.load(staging + dst)
            first = rows_before(rank_prefix, rank, dst, NUM_RANKS)
            first -= tl.where(rank > dst, rows_between(rank_prefix, dst, dst, NUM_RANKS), 0)
            start, num_rows = _extent_of_unit(
                send_head,
                channel_prefix,
                unit,
                unit_tokens,
                dst,
                num_tokens,
                num_channels,
                tokens_per_channel,
                NUM_RANKS,
            )
            if first + start + num_rows > num_slots:
                give_up(record, KIND_STAGING_FULL, dst, launch, first + start + num_rows)
            if num_rows > 0:
                _push_unit(
                    base, base + scales_offset, base + idx_offset, base + weights_offset, base + src_offset, first, num_slots,
                    x, scales, topk_idx, topk_weights, send_head, channel_prefix, unit, unit_tokens, dst,
                    num_tokens, num_channels, tokens_per_channel, num_topk, num_scales, scale_stride_token, scale_stride, num_experts, row_words,
                    NUM_RANKS, WORD, ALIGN, ROW_WORDS, ROWS, COLUMNS, IDX, TOPK, SCALES, HAS_META, STREAM,
                )  # fmt: skip
                tl.store(words_at(control, dst, UNIT_STARTS + rank * MAX_UNITS + unit), start)
            post_one(words_at(control, dst, UNITS + rank * MAX_UNITS + unit), launch, num_rows)

    if program >= first_receiver:
        receiver, num_receivers = program - first_receiver, tl.num_programs(0) - first_receiver
        first = rows_before(rank_prefix, rank, rank, NUM_RANKS)
        for unit in range(receiver, num_units, num_receivers):
            _push_unit(
                recv_x, recv_scales, recv_topk_idx, recv_topk_weights, recv_src_idx, first, num_recv,
                x, scales, topk_idx, topk_weights, send_head, channel_prefix, unit, unit_tokens, rank,
                num_tokens, num_channels, tokens_per_channel, num_topk, num_scales, scale_stride_token, scale_stride, num_experts, row_words,
                NUM_RANKS, WORD, ALIGN, ROW_WORDS, ROWS, COLUMNS, IDX, TOPK, SCALES, HAS_META, STREAM,
            )  # fmt: skip
        num_rows = rows_before(rank_prefix, rank * 0 + NUM_RANKS, rank, NUM_RANKS)
        if num_rows > num_recv:
            give_up(record, KIND_OUTPUT_FULL, rank, launch, num_rows)
        if HAS_META:
            _mark_unused(recv_topk_idx, recv_src_idx, num_rows, num_recv, num_topk, receiver, num_receivers, IDX, TOPK)
        if NUM_RANKS > 1:
            peer = tl.arange(0, RANKS).to(tl.int64)
            is_peer = (peer < NUM_RANKS) & (peer != rank)
            units = words_at(control, rank, NUM_UNITS + peer)
            units = wait_all(units, launch, AWAIT_NUM_UNITS, peer, deadline, record, is_peer)
            num_pieces = tl.minimum(tl.max(units, 0), MAX_UNITS) * (NUM_RANKS - 1)
            own = rows_between(rank_prefix, rank, rank, NUM_RANKS)
            base = tl.load(staging + rank)
            for piece in range(receiver, num_pieces, num_receivers):
                unit = piece // (NUM_RANKS - 1)
                src = (rank + 1 + piece % (NUM_RANKS - 1)) % NUM_RANKS
                if unit < tl.sum(tl.where(peer == src, units, 0), 0):
                    word = words_at(control, rank, UNITS + src * MAX_UNITS + unit)
                    num_rows = wait_one(word, launch, AWAIT_ROWS, src, deadline, record)
                    start = tl.load(words_at(control, rank, UNIT_STARTS + src * MAX_UNITS + unit), volatile=True)
                    first = rows_before(rank_prefix, src, rank, NUM_RANKS)
                    # Clamped: after a wait that ran out, these numbers mean nothing.
                    row = first + tl.minimum(tl.maximum(start, 0), num_recv)
                    slot = row - tl.where(src > rank, own, 0)
                    num_rows = tl.minimum(num_rows, tl.minimum(num_recv - row, num_slots - slot))
                    _copy_out(
                        recv_x, recv_scales, recv_topk_idx, recv_topk_weights, recv_src_idx,
                        base, base + scales_offset, base + idx_offset, base + weights_offset, base + src_offset,
                        row, slot, num_rows, num_topk, num_scales,
                        WORD, ALIGN, ROW_WORDS, FLAT, IDX, TOPK, SCALES, HAS_META, STREAM,
                    )  # fmt: skip
    end(state, control, rank, launch, NUM_RANKS, RANKS)


@triton.jit
def _extent_of_unit(
    send_head,
    channel_prefix,
    unit,
    unit_tokens,
    dst,
    num_tokens,
    num_channels,
    tokens_per_channel,
    NUM_RANKS: tl.constexpr,
):
    """Return the first row of a unit among this rank's rows for `dst`, and how many it has."""
    end_token = tl.minimum((unit + 1) * unit_tokens, num_tokens)
    start, num_rows = num_tokens, num_tokens * 0
    for block in range(unit * unit_tokens, end_token, UNIT_BLOCK):
        token = block + tl.arange(0, UNIT_BLOCK).to(tl.int64)
        row = row_among_mine(
            send_head, channel_prefix, token, token < end_token, dst, num_channels, tokens_per_channel, NUM_RANKS
        )
        start = tl.minimum(start, tl.min(tl.where(row >= 0, row, num_tokens), 0))
        num_rows += tl.sum((row >= 0).to(tl.int64), 0)
    return tl.where(num_rows > 0, start, 0), num_rows


@triton.jit
def _push_unit(
    dst_x, dst_scales, dst_idx, dst_weights, dst_src, first, num_max_rows,
    x, scales, topk_idx, topk_weights, send_head, channel_prefix, unit, unit_tokens, dst,
    num_tokens, num_channels, tokens_per_channel, num_topk, num_scales, scale_stride_token, scale_stride, num_experts, row_words,
    NUM_RANKS: tl.constexpr, WORD: tl.constexpr, ALIGN: tl.constexpr, ROW_WORDS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, IDX: tl.constexpr, TOPK: tl.constexpr, SCALES: tl.constexpr, HAS_META: tl.constexpr,
    STREAM: tl.constexpr,
):  # fmt: skip
    """Store what a unit has for rank `dst` at its rows there, which begin at `first`."""
    end_token = tl.minimum((unit + 1) * unit_tokens, num_tokens)
    for block in range(unit * unit_tokens, end_token, ROWS):
        token = block + tl.arange(0, ROWS).to(tl.int64)
        row = row_among_mine(
            send_head, channel_prefix, token, token < end_token, dst, num_channels, tokens_per_channel, NUM_RANKS
        )
        is_row = (row >= 0) & (first + row < num_max_rows)
        row += first
        if SCALES > 0:
            column = tl.arange(0, SCALES).to(tl.int64)
            mask = is_row[:, None] & (column < num_scales)[None, :]
            src_ptr = pointer(scales, tl.int32) + token[:, None] * scale_stride_token
            dst_ptr = pointer(dst_scales, tl.int32) + row[:, None] * num_scales + column[None, :]
            tl.store(dst_ptr, tl.load(src_ptr + column[None, :] * scale_stride, mask=mask), mask=mask)
        if HAS_META:
            tl.store(pointer(dst_src, tl.int32) + row, token.to(tl.int32), mask=is_row)
            if TOPK > 0:
                slot = tl.arange(0, TOPK).to(tl.int64)
                mask = is_row[:, None] & (slot < num_topk)[None, :]
                src_at = token[:, None] * num_topk + slot[None, :]
                dst_at = row[:, None] * num_topk + slot[None, :]
                expert = tl.load(pointer(topk_idx, IDX) + src_at, mask=mask, other=-1).to(tl.int64)
                weight = tl.load(pointer(topk_weights, tl.float32) + src_at, mask=mask, other=0.0)
                first_own = first_expert(dst, num_experts, NUM_RANKS)
                is_own = (expert >= first_own) & (expert < first_expert(dst + 1, num_experts, NUM_RANKS))
                local = tl.where(is_own, expert - first_own, -1)
                tl.store(pointer(dst_idx, IDX) + dst_at, local.to(IDX), mask=mask)
                tl.store(pointer(dst_weights, tl.float32) + dst_at, tl.where(is_own, weight, 0.0), mask=mask)
        copy_rows(dst_x, row, x, token, is_row, row_words, WORD, ALIGN, ROW_WORDS, COLUMNS, STREAM)


@triton.jit
def _copy_out(
    recv_x, recv_scales, recv_topk_idx, recv_topk_weights, recv_src_idx,
    staged_x, staged_scales, staged_idx, staged_weights, staged_src,
    row, slot, num_rows, num_topk, num_scales,
    WORD: tl.constexpr, ALIGN: tl.constexpr, ROW_WORDS: tl.constexpr, FLAT: tl.constexpr, IDX: tl.constexpr,
    TOPK: tl.constexpr, SCALES: tl.constexpr, HAS_META: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """Copy consecutive rows from staging slots to the output."""
    if SCALES > 0:
        recv_at, staged_at = recv_scales + row * num_scales * 4, staged_scales + slot * num_scales * 4
        copy_flat(recv_at, staged_at, num_rows * num_scales, tl.int32, 4, 1024, False)
    if HAS_META:
        copy_flat(recv_src_idx + row * 4, staged_src + slot * 4, num_rows, tl.int32, 4, 64, False)
        if TOPK > 0:
            idx_bytes: tl.constexpr = IDX.primitive_bitwidth // 8
            at, from_at = recv_topk_idx + row * num_topk * idx_bytes, staged_idx + slot * num_topk * idx_bytes
            copy_flat(at, from_at, num_rows * num_topk, IDX, idx_bytes, 512, False)
            at, from_at = recv_topk_weights + row * num_topk * 4, staged_weights + slot * num_topk * 4
            copy_flat(at, from_at, num_rows * num_topk, tl.int32, 4, 512, False)
    word_bytes: tl.constexpr = WORD.primitive_bitwidth // 8
    recv_at, staged_at = recv_x + row * ROW_WORDS * word_bytes, staged_x + slot * ROW_WORDS * word_bytes
    copy_flat(recv_at, staged_at, num_rows * ROW_WORDS, WORD, ALIGN, FLAT, STREAM)


@triton.jit
def _mark_unused(
    recv_topk_idx,
    recv_src_idx,
    num_rows,
    num_recv,
    num_topk,
    receiver,
    num_receivers,
    IDX: tl.constexpr,
    TOPK: tl.constexpr,
):
    """Write -1 in the rows past the last one, which exist if the caller asked for more than there are."""
    BLOCK: tl.constexpr = 1024
    for block in range(num_rows + receiver * BLOCK, num_recv, num_receivers * BLOCK):
        row = block + tl.arange(0, BLOCK).to(tl.int64)
        tl.store(pointer(recv_src_idx, tl.int32) + row, -1, mask=row < num_recv)
    if TOPK > 0:
        for block in range(num_rows * num_topk + receiver * BLOCK, num_recv * num_topk, num_receivers * BLOCK):
            at = block + tl.arange(0, BLOCK).to(tl.int64)
            unused = tl.full([BLOCK], -1, IDX)
            tl.store(pointer(recv_topk_idx, IDX) + at, unused, mask=at < num_recv * num_topk)
