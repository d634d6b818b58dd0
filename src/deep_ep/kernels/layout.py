"""The two kernels that decide where tokens go: one counts for this rank alone, one tells the counts to all ranks.

**count_tokens** turns expert ids into `Layout`, V1's `get_dispatch_layout`. No peer takes part.

**notify** opens a dispatch with new routing. Its programs 0 to C - 1 each take one channel (a run of consecutive
tokens): they number the channel's tokens per destination (`send_head`) and post how many there are, to the destination
and at home. The last program does the rest, and is the only one that waits for peers:

1. it posts this rank's top-k slots per expert to the experts' owners;
2. it collects its own channel counts, gives their prefix (`channel_prefix_matrix`) and posts their sums to all ranks,
   so that every rank learns the whole matrix of who sends how much to whom;
3. it collects that matrix (`rank_prefix_matrix`), its peers' channel counts (`recv_channel_prefix_matrix`) and its
   experts' slots, and writes the totals to where the host looks, the host's ticket last.

Every count travels inside the signal that announces it (`deep_ep.kernels.signal`), so nothing is cleared or fenced.

Example: rank 0 of 2 has 4 tokens and 2 channels; tokens 0, 1 and 3 go to rank 1. `send_head[:, 1] = [0, 1, -1, 0]`,
OWN_CHANNELS[1] = [2, 1], `channel_prefix_matrix[1] = [2, 3]`, COUNTS[0] = [.., 3] on both ranks, PEER_CHANNELS[0] of
rank 1 = [2, 1] and there `recv_channel_prefix_matrix[0] = [0, 2]`.
"""

import triton
import triton.language as tl

from deep_ep import gpu_layout
from deep_ep.kernels.signal import (
    begin,
    end,
    kernel,
    pointer,
    post_all,
    post_one,
    wait_all,
    wait_for_peers,
    words_at,
)

COUNTS = tl.constexpr(gpu_layout.COUNTS)
OWN_CHANNELS = tl.constexpr(gpu_layout.OWN_CHANNELS)
PEER_CHANNELS = tl.constexpr(gpu_layout.PEER_CHANNELS)
EXPERTS = tl.constexpr(gpu_layout.EXPERTS)
MAX_RANKS = tl.constexpr(gpu_layout.MAX_RANKS)
MAX_CHANNELS = tl.constexpr(gpu_layout.MAX_CHANNELS)
AWAIT_COUNTS = tl.constexpr(gpu_layout.AWAIT_COUNTS)
AWAIT_CHANNELS = tl.constexpr(gpu_layout.AWAIT_CHANNELS)
AWAIT_EXPERTS = tl.constexpr(gpu_layout.AWAIT_EXPERTS)
TOTALS_TICKET = tl.constexpr(gpu_layout.TOTALS_TICKET)
TOTALS_RECV = tl.constexpr(gpu_layout.TOTALS_RECV)
TOTALS_STAGED = tl.constexpr(gpu_layout.TOTALS_STAGED)
TOTALS_EXPERTS = tl.constexpr(gpu_layout.TOTALS_EXPERTS)


@triton.jit
def first_expert(rank, num_experts, num_ranks):
    """Return the first expert of a rank; the first ranks own one more if the experts do not divide evenly."""
    return rank * (num_experts // num_ranks) + tl.minimum(rank, num_experts % num_ranks)


@triton.jit
def owner_of(expert, num_experts, num_ranks):
    """Return the rank that owns an expert."""
    num_each, num_longer = num_experts // num_ranks, num_experts % num_ranks
    num_in_longer = num_longer * (num_each + 1)
    late = num_longer + (expert - num_in_longer) // tl.maximum(num_each, 1)
    return tl.where(expert < num_in_longer, expert // (num_each + 1), late)


@kernel
def count_tokens_kernel(
    topk_idx: tl.int64,
    num_per_rank: tl.int64,
    num_per_expert: tl.int64,
    is_token_in_rank: tl.int64,
    num_tokens: tl.int64,
    num_topk: tl.int64,
    num_experts: tl.int64,
    num_ranks: tl.int64,
    IDX: tl.constexpr,
    TOKENS: tl.constexpr,
    TOPK: tl.constexpr,
):
    """Count a block of tokens into sums that were zero, and mark the ranks of each token.

    Example: with 4 experts on 2 ranks, token [0, 1] counts once for rank 0 and once for each of its experts.
    """
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.arange(0, TOPK)
    is_slot = (token < num_tokens)[:, None] & (slot < num_topk)[None, :]
    idx_ptr = pointer(topk_idx, IDX)
    expert = tl.load(idx_ptr + token[:, None] * num_topk + slot[None, :], mask=is_slot, other=-1).to(tl.int64)
    is_chosen = (expert >= 0) & (expert < num_experts)
    tl.atomic_add(pointer(num_per_expert, tl.int32) + expert, 1, mask=is_chosen, sem="relaxed")
    owner = tl.where(is_chosen, owner_of(expert, num_experts, num_ranks), -1)
    for rank in range(num_ranks):
        is_in = tl.max((owner == rank).to(tl.int32), axis=1)
        mark_ptr = pointer(is_token_in_rank, tl.int8) + token * num_ranks + rank
        tl.store(mark_ptr, is_in.to(tl.int8), mask=token < num_tokens)
        tl.atomic_add(pointer(num_per_rank, tl.int32) + rank, tl.sum(is_in, 0), sem="relaxed")


@kernel
def notify_kernel(
    is_token_in_rank: tl.int64,
    num_per_expert: tl.int64,
    send_head: tl.int64,
    channel_prefix: tl.int64,
    rank_prefix: tl.int64,
    recv_channel_prefix: tl.int64,
    control: tl.int64,
    state: tl.int64,
    record: tl.int64,
    totals: tl.int64,
    ticket: tl.int64,
    num_tokens: tl.int64,
    num_channels: tl.int64,
    num_experts: tl.int64,
    rank: tl.int64,
    timeout: tl.int64,
    NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
):
    """Number the tokens, exchange the counts. One program per channel and one more; see the module docstring."""
    state = pointer(state, tl.int64)
    control = pointer(control, tl.int64)
    rank, record = rank.to(tl.int64), record.to(tl.int64)
    launch, deadline = begin(state, timeout)
    wait_for_peers(control, rank, launch, deadline, record, NUM_RANKS, RANKS)
    program = tl.program_id(0).to(tl.int64)
    if program < num_channels:
        tokens_per_channel = (num_tokens + num_channels - 1) // num_channels
        begin_token = tl.minimum(program * tokens_per_channel, num_tokens)
        end_token = tl.minimum(begin_token + tokens_per_channel, num_tokens)
        num_sent = _number_tokens(
            pointer(is_token_in_rank, tl.int8),
            pointer(send_head, tl.int32),
            begin_token,
            end_token,
            NUM_RANKS,
            RANKS,
            TOKENS,
        )
        peer = tl.arange(0, RANKS).to(tl.int64)
        is_rank = peer < NUM_RANKS
        there = words_at(control, tl.where(is_rank, peer, rank), PEER_CHANNELS + rank * MAX_CHANNELS + program)
        post_all(there, launch, num_sent, is_rank)
        at_home = words_at(control, rank, OWN_CHANNELS + peer * MAX_CHANNELS + program)
        post_all(at_home, launch, num_sent, is_rank)
    else:
        _post_experts(num_per_expert, control, rank, launch, num_experts, NUM_RANKS, EXPERTS_BLOCK)
        totals_ptr = pointer(totals, tl.int64)
        _exchange_counts(
            pointer(channel_prefix, tl.int32),
            pointer(rank_prefix, tl.int32),
            pointer(recv_channel_prefix, tl.int32),
            control,
            totals_ptr,
            num_channels,
            rank,
            launch,
            deadline,
            record,
            NUM_RANKS,
            RANKS,
            CHANNELS,
        )
        _sum_experts(totals_ptr, control, rank, launch, deadline, record, num_experts, NUM_RANKS, RANKS)
        post_one(totals_ptr + TOTALS_TICKET, launch * 0, ticket)
    end(state, control, rank, launch, NUM_RANKS, RANKS)


@triton.jit
def _number_tokens(
    is_in_ptr, head_ptr, begin_token, end_token, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr, TOKENS: tl.constexpr
):
    """Write `send_head` of a channel; return how many of its tokens go to each rank, `[RANKS]`."""
    peer = tl.arange(0, RANKS).to(tl.int64)
    num_sent = tl.zeros([RANKS], tl.int32)
    for block in range(begin_token, end_token, TOKENS):
        token = block + tl.arange(0, TOKENS).to(tl.int64)
        mask = (token < end_token)[:, None] & (peer < NUM_RANKS)[None, :]
        at = token[:, None] * NUM_RANKS + peer[None, :]
        is_in = (tl.load(is_in_ptr + at, mask=mask, other=0) != 0).to(tl.int32)
        head = tl.cumsum(is_in, axis=0) - is_in + num_sent[None, :]
        tl.store(head_ptr + at, tl.where(is_in != 0, head, -1), mask=mask)
        num_sent += tl.sum(is_in, axis=0)
    return num_sent


@triton.jit
def _post_experts(num_per_expert, control, rank, launch, num_experts, NUM_RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Post the slots of each expert to its owner."""
    num_local = (num_experts + NUM_RANKS - 1) // NUM_RANKS
    for block in range(0, num_experts, BLOCK):
        expert = block + tl.arange(0, BLOCK).to(tl.int64)
        mask = expert < num_experts
        slots = tl.load(pointer(num_per_expert, tl.int32) + expert, mask=mask, other=0)
        owner = tl.where(mask, owner_of(expert, num_experts, NUM_RANKS), rank)
        local = expert - first_expert(owner, num_experts, NUM_RANKS)
        post_all(words_at(control, owner, EXPERTS + rank * num_local + local), launch, slots, mask)


@triton.jit
def _exchange_counts(
    channel_prefix,
    rank_prefix,
    recv_channel_prefix,
    control,
    totals,
    num_channels,
    rank,
    launch,
    deadline,
    record,
    NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Collect and pass on the counts of rows; write the three prefix matrices and the totals of rows."""
    row = tl.arange(0, RANKS).to(tl.int64)[:, None]
    channel = tl.arange(0, CHANNELS).to(tl.int64)[None, :]
    mask = (row < NUM_RANKS) & (channel < num_channels)
    own = words_at(control, rank, OWN_CHANNELS + row * MAX_CHANNELS + channel)
    sent = wait_all(own, launch, AWAIT_CHANNELS, rank + 0 * (row + channel), deadline, record, mask)
    tl.store(channel_prefix + row * num_channels + channel, tl.cumsum(sent, axis=1).to(tl.int32), mask=mask)

    column = tl.arange(0, RANKS).to(tl.int64)[None, :]
    is_pair = (row < NUM_RANKS) & (column < NUM_RANKS)
    # Item [p, j]: tell peer p how many tokens go from here to rank j.
    there = words_at(control, tl.where(row < NUM_RANKS, row, rank), COUNTS + rank * MAX_RANKS + column)
    num_sent = tl.sum(sent, axis=1)
    post_all(there, launch, tl.trans(num_sent[:, None] + 0 * column), is_pair)

    words = words_at(control, rank, COUNTS + row * MAX_RANKS + column)
    counts = wait_all(words, launch, AWAIT_COUNTS, row + 0 * column, deadline, record, is_pair)
    tl.store(rank_prefix + row * NUM_RANKS + column, tl.cumsum(counts, axis=0).to(tl.int32), mask=is_pair)
    tl.store(totals + TOTALS_RECV, tl.sum(tl.where(column == rank, counts, 0)))
    # What a rank keeps for itself does not pass through staging.
    moved = tl.where(row == column, 0, counts)
    most = tl.maximum(tl.max(tl.sum(moved, axis=0), axis=0), tl.max(tl.sum(moved, axis=1), axis=0))
    tl.store(totals + TOTALS_STAGED, most)

    words = words_at(control, rank, PEER_CHANNELS + row * MAX_CHANNELS + channel)
    coming = wait_all(words, launch, AWAIT_CHANNELS, row + 0 * channel, deadline, record, mask)
    begins = tl.cumsum(coming, axis=1) - coming
    tl.store(recv_channel_prefix + row * num_channels + channel, begins.to(tl.int32), mask=mask)


@triton.jit
def _sum_experts(
    totals, control, rank, launch, deadline, record, num_experts, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr
):
    """Write, for each expert of this rank, how many top-k slots of all ranks name it."""
    BLOCK: tl.constexpr = 64
    num_local = (num_experts + NUM_RANKS - 1) // NUM_RANKS
    num_own = first_expert(rank + 1, num_experts, NUM_RANKS) - first_expert(rank, num_experts, NUM_RANKS)
    source = tl.arange(0, RANKS).to(tl.int64)[:, None]
    for block in range(0, num_own, BLOCK):
        local = block + tl.arange(0, BLOCK).to(tl.int64)[None, :]
        mask = (source < NUM_RANKS) & (local < num_own)
        words = words_at(control, rank, EXPERTS + source * num_local + local)
        slots = wait_all(words, launch, AWAIT_EXPERTS, source + 0 * local, deadline, record, mask)
        expert = block + tl.arange(0, BLOCK).to(tl.int64)
        tl.store(totals + TOTALS_EXPERTS + expert, tl.sum(slots, axis=0), mask=expert < num_own)
