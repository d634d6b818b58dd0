"""Signals between ranks, waits with a deadline, and how a launch begins and ends. All memory ordering is here.

**A signal** is one 8-byte word with one writer. Its high half is the number of the launch that wrote it, its low half
a value. Nobody clears a word: a reader in launch n waits until the high half is n. Only words that their writer may
write again before they are read are awaited with `AT_LEAST`, by a wrapping difference; these are written in every
launch, so that they are never 2^31 launches old, which would read as news. 2^32 launches are no end. A word may carry its news itself (a count), or publish what its writer
stored before it (rows): the write has release order, the read has acquire order.

**Reuse.** All ranks make the same launches in the same order, and there is one rule: *in launch n a rank writes to a
peer only after that peer has ended launch n - 1.* Each rank tells so in the FINISHED words of its peers. Hence
whatever launch n - 1 left in a peer's memory has been read, and single buffers suffice, with no barrier at the end.

    launch 7 on rank 0                        launch 7 on rank 1
    waits for FINISHED[1] >= 6                waits for FINISHED[0] >= 6
    stores rows in rank 1's staging           ...
    UNITS[0][u] of rank 1 = (7, num rows)     waits for UNITS[0][u] >= 7, reads the rows
    last program to end: LAUNCH = 7,          last program to end: LAUNCH = 7,
      FINISHED[0] of rank 1 = (7, 0)            FINISHED[1] of rank 0 = (7, 0)

**The number of a launch** lives on the device, so that a replayed CUDA graph counts like any other launch. Each
program reads it when it begins; the last program to end, known by a count of programs, advances it.

**Deadlines.** A wait that runs out writes what it awaited into pinned memory, marks the state as broken and goes on
as if it had succeeded: results are then garbage, which the host never hands out, and every later wait gives up at once.
What a kernel computes from awaited words must therefore be clamped before it addresses memory.

**Two forms.** On a GPU the words are read and written with inline PTX. The interpreter has no PTX; there they are plain
atomics, and a deadline is a number of spins. It runs the programs of a launch one after the other, so a program must
never wait for a later program of its own launch.
"""

import inspect

import triton
import triton.language as tl

from deep_ep import gpu_layout

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)

FINISHED = tl.constexpr(gpu_layout.FINISHED)
STATE_LAUNCH = tl.constexpr(gpu_layout.STATE_LAUNCH)
STATE_ENDED = tl.constexpr(gpu_layout.STATE_ENDED)
STATE_BROKEN = tl.constexpr(gpu_layout.STATE_BROKEN)
RECORD_KIND = tl.constexpr(gpu_layout.RECORD_KIND)
RECORD_WHO = tl.constexpr(gpu_layout.RECORD_WHO)
RECORD_LAUNCH = tl.constexpr(gpu_layout.RECORD_LAUNCH)
RECORD_SEEN = tl.constexpr(gpu_layout.RECORD_SEEN)
RECORD_BROKEN = tl.constexpr(gpu_layout.RECORD_BROKEN)
KIND_TIMEOUT = tl.constexpr(gpu_layout.KIND_TIMEOUT)
AWAIT_FINISHED = tl.constexpr(gpu_layout.AWAIT_FINISHED)

# The lanes of a warp leave the loop together: each by itself would leave the warp split up, with what follows run for
# each lane.
_POLL_TEXT = (
    """{
    .reg .pred late, any;
    .reg .b32 high;
    .reg .b64 now, one;
    mov.b64 $0, 0;
    setp.ne.s32 late, $6, 0;
    again:
    @late ld.acquire.sys.global.b64 $0, [$1];
    mov.b64 {_, high}, $0;
    sub.s32 high, high, $2;
    setp.lt.and.s32 late, high, 0, late;
    vote.sync.any.pred any, late, 0xffffffff;
    @!any bra done;
    mov.u64 now, %globaltimer;
    setp.lt.u64 any, now, $3;
    vote.sync.any.pred any, any, 0xffffffff;
    @any bra again;
    setp.ne.and.u64 late, $3, 0, late;
    @!late bra done;
    mov.b64 one, 1;
    ld.global.b64 now, [$4+RECORD_BROKEN];
    st.global.b64 [now], one;
    st.global.b64 [$4+RECORD_WHO], $5;
    cvt.s64.s32 now, $2;
    st.global.b64 [$4+RECORD_LAUNCH], now;
    st.global.b64 [$4+RECORD_SEEN], $0;
    st.release.sys.global.b64 [$4+RECORD_KIND], one;
    done:
    }""".replace("RECORD_BROKEN", str(8 * gpu_layout.RECORD_BROKEN))
    .replace("RECORD_WHO", str(8 * gpu_layout.RECORD_WHO))
    .replace("RECORD_LAUNCH", str(8 * gpu_layout.RECORD_LAUNCH))
    .replace("RECORD_SEEN", str(8 * gpu_layout.RECORD_SEEN))
    .replace("RECORD_KIND", str(8 * gpu_layout.RECORD_KIND))
)
_POLL_PTX = tl.constexpr(_POLL_TEXT.replace("setp.lt.and.s32", "setp.ne.and.s32"))
_POLL_AT_LEAST_PTX = tl.constexpr(_POLL_TEXT)
_POLL_CONSTRAINTS = tl.constexpr("=&l,l,r,l,l,l,r")
_POST_ONE_PTX = tl.constexpr(
    """{
    .reg .pred p;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 p, thread, 0;
    @p st.release.sys.global.b64 [$1], $2;
    mov.b32 $0, 0;
    }"""
)
_ADD_ONE_PTX = tl.constexpr(_POST_ONE_PTX.value.replace("st.release.sys.global.b64", "red.relaxed.gpu.global.add.u64"))
_POST_MANY_PTX = tl.constexpr(
    """{
    .reg .pred p;
    setp.ne.s32 p, $3, 0;
    @p st.release.sys.global.b64 [$1], $2;
    mov.b32 $0, 0;
    }"""
)
_TELL_MANY_PTX = tl.constexpr(_POST_MANY_PTX.value.replace("st.release", "st.relaxed"))


def kernel(function):
    """Make a kernel whose run-time arguments never cause a new compilation; they are all 64-bit integers."""
    parameters = inspect.signature(function).parameters.values()
    runtime = [parameter.name for parameter in parameters if parameter.annotation is not tl.constexpr]
    return triton.jit(do_not_specialize=runtime)(function)


@triton.jit
def pointer(address, TYPE: tl.constexpr, ALIGN: tl.constexpr = 1):
    """Return an address, an integer, as a pointer; promise that it is a multiple of `ALIGN` bytes."""
    # The interpreter gives small integers, such as the address of nothing, only 32 bits. The promise must be made
    # here, where the pointer is: on what a function returns it is lost, and with it every wide access.
    ptr = address.to(tl.int64).to(tl.pointer_type(TYPE))
    if ALIGN > 1:
        ptr = tl.multiple_of(ptr, ALIGN)
    return ptr


@triton.jit
def words_at(table, peer, word):
    """Return pointers to words of the control regions of peers; `table` holds where those regions begin."""
    return pointer(tl.load(table + peer) + 8 * word, tl.int64)


@triton.jit
def deadline_of(state, timeout):
    """Return the deadline of waits that begin now. A broken state has no patience."""
    if INTERPRET:
        deadline = timeout
    else:
        deadline = tl.inline_asm_elementwise(
            "{ mov.u64 $0, %globaltimer; add.u64 $0, $0, $1; }",
            "=&l,l",
            [timeout],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    return tl.where(tl.load(state + STATE_BROKEN) != 0, 0, deadline)


@triton.jit
def begin(state, timeout):
    """Return the number of this launch and the deadline of its waits."""
    return tl.load(state + STATE_LAUNCH) + 1, deadline_of(state, timeout)


@triton.jit
def add_one(ptr, value):
    """Add to a word of this GPU, from a scalar pointer, without waiting for what it was."""
    if INTERPRET:
        tl.atomic_add(ptr, value, sem="relaxed", scope="gpu")
    else:
        tl.inline_asm_elementwise(_ADD_ONE_PTX, "=r,l,l", [ptr, value], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def end(state, table, rank, launch, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr):
    """Count this program as ended; the last one of the launch tells the peers and advances the number."""
    # Every thread of the program has made its last access to shared memory ...
    tl.debug_barrier()
    # ... and, through this chain of acquire and release, so has every program before the last one.
    num_ended = tl.atomic_add(state + STATE_ENDED, 1, sem="acq_rel", scope="gpu") + 1
    if num_ended == tl.num_programs(0):
        tl.store(state + STATE_ENDED, 0)
        tl.store(state + STATE_LAUNCH, launch)
        peer = tl.arange(0, RANKS)
        is_peer = (peer < NUM_RANKS) & (peer != rank)
        post_all(words_at(table, tl.where(is_peer, peer, rank), FINISHED + rank), launch, peer * 0, is_peer)


@triton.jit
def wait_for_peers(table, rank, launch, deadline, record, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr):
    """Wait until every peer has ended the previous launch, so that its memory may be written."""
    peer = tl.arange(0, RANKS)
    is_peer = (peer < NUM_RANKS) & (peer != rank)
    wait_all(words_at(table, rank, FINISHED + peer), launch - 1, AWAIT_FINISHED, peer, deadline, record, is_peer, True)


@triton.jit
def post_one(ptr, launch, value):
    """Raise a signal, from a scalar pointer, that publishes all that this program has stored."""
    # Triton 3.6 puts no barrier before a release: without this one, other warps' stores could come after it.
    tl.debug_barrier()
    word = (launch << 32) | value
    if INTERPRET:
        tl.atomic_xchg(ptr, word, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(_POST_ONE_PTX, "=r,l,l", [ptr, word], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def post_all(ptrs, launch, values, mask):
    """Raise many signals that carry their values; they publish all that this program has stored."""
    tl.debug_barrier()
    words = (launch << 32) | values.to(tl.int64)
    if INTERPRET:
        tl.atomic_xchg(ptrs, words, mask=mask, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            _POST_MANY_PTX, "=r,l,l,r", [ptrs, words, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def tell_all(ptrs, launch, values, mask):
    """Raise many signals that are their own news: they publish nothing else, and wait for nothing."""
    words = (launch << 32) | values.to(tl.int64)
    if INTERPRET:
        tl.atomic_xchg(ptrs, words, mask=mask, sem="relaxed", scope="sys")
    else:
        tl.inline_asm_elementwise(
            _TELL_MANY_PTX, "=r,l,l,r", [ptrs, words, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait_one(ptr, launch, what: tl.constexpr, peer, deadline, record):
    """Wait for one signal; return its value. What its writer stored before it may be read after this."""
    if INTERPRET:
        one = tl.zeros([1], tl.int64)
        value = tl.sum(wait_all(ptr + one, launch, what, peer + one, deadline, record, one == 0), 0)
    else:
        value = _poll(ptr, launch, what, peer, deadline, record, 1, False)
        tl.debug_barrier()
    return value & 0xFFFFFFFF


@triton.jit
def wait_all(ptrs, launch, what: tl.constexpr, peers, deadline, record, mask, AT_LEAST: tl.constexpr = False):
    """Wait for many signals, those where `mask` is true; return their values, 0 where it is false.

    Args:
        ptrs: The words.
        launch: The number to wait for.
        what: What is awaited, for the record.
        peers: Whose words they are, for the record.
        deadline: When to give up.
        record: Where to leave word of that.
        mask: Which words to wait for.
        AT_LEAST: Whether a later number will do.
    """
    if INTERPRET:
        words = _spin(ptrs, launch, what, peers, deadline, record, mask, AT_LEAST)
    else:
        words = _poll(ptrs, launch, what, peers, deadline, record, mask.to(tl.int32), AT_LEAST)
        tl.debug_barrier()
    return words & 0xFFFFFFFF


@triton.jit
def is_late(words, launch, AT_LEAST: tl.constexpr):
    """Tell which words have not come to a number."""
    behind = ((words >> 32) - launch).to(tl.int32)
    if AT_LEAST:
        return behind < 0
    return behind != 0


@triton.jit
def hear_all(ptrs, launch, what: tl.constexpr, peers, deadline, record, mask, AT_LEAST: tl.constexpr = False):
    """Wait for many signals that are their own news (`tell_all`); return their values, 0 where `mask` is false.

    What their writers stored before may not be read after this: that takes `wait_all`, which for 16 words of one warp
    takes 4 us longer, also when all of them are there.

    A tensor of up to 32 words is held by each warp by itself, so warps may leave the loop at different times, each with
    words that have come. Larger ones are spread over warps, some of which may hold the same word, loaded at different
    times: those are loaded once more after the loop, when all of them have come for all. There the loop has barriers, so
    all warps leave it together: the time takes part in the same reduction as the words.
    """
    words = tl.load(ptrs, mask=mask, other=0, volatile=True)
    if INTERPRET:
        words = _spin(ptrs, launch, what, peers, deadline, record, mask, AT_LEAST)
    else:
        is_waiting = _is_any_late(words, launch, mask & (_now() < deadline), AT_LEAST)
        while is_waiting:
            words = tl.load(ptrs, mask=mask, other=0, volatile=True)
            is_waiting = _is_any_late(words, launch, mask & (_now() < deadline), AT_LEAST)
        if ptrs.numel > 32:
            tl.debug_barrier()
            words = tl.load(ptrs, mask=mask, other=0, volatile=True)
        if _is_any_late(words, launch, mask, AT_LEAST):
            # Time has run out: this waits no more, but leaves word for the host. No barrier: warps may not agree.
            words = _poll(ptrs, launch, what, peers, deadline, record, mask.to(tl.int32), AT_LEAST)
    return words & 0xFFFFFFFF


@triton.jit
def _is_any_late(words, launch, mask, AT_LEAST: tl.constexpr):
    return tl.max((mask & is_late(words, launch, AT_LEAST)).to(tl.int32)) > 0


@triton.jit
def _now():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _poll(ptrs, launch, what: tl.constexpr, peers, deadline, record, is_awaited, AT_LEAST: tl.constexpr):
    return tl.inline_asm_elementwise(
        _POLL_AT_LEAST_PTX if AT_LEAST else _POLL_PTX,
        _POLL_CONSTRAINTS,
        [ptrs, launch.to(tl.int32), deadline, record, _who(what, peers), is_awaited],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def give_up(record, kind: tl.constexpr, peer, launch, seen):
    """Leave word for the host that results are not to be used, for another reason than a wait."""
    ptr = pointer(record, tl.int64)
    tl.store(pointer(tl.load(ptr + RECORD_BROKEN), tl.int64), 1)
    tl.store(ptr + RECORD_WHO, peer)
    tl.store(ptr + RECORD_LAUNCH, launch)
    tl.store(ptr + RECORD_SEEN, seen)
    post_one(ptr + RECORD_KIND, launch * 0, kind)


@triton.jit
def _who(what: tl.constexpr, peers):
    return peers.to(tl.int64) | (what << 32)


@triton.jit
def _spin(ptrs, launch, what: tl.constexpr, peers, num_max_spins, record, mask, AT_LEAST: tl.constexpr):
    """Do for the interpreter what `_POLL_PTX` does on a GPU."""
    ptr = pointer(record, tl.int64)
    broken = pointer(tl.load(ptr + RECORD_BROKEN), tl.int64)
    zeros = tl.zeros(mask.shape, tl.int64)
    num_spins = tl.where(tl.load(broken) != 0, num_max_spins, 0)
    words = tl.where(mask, tl.atomic_add(ptrs, zeros, mask=mask, sem="acquire", scope="sys"), 0)
    late = mask & is_late(words, launch, AT_LEAST)
    while (tl.max(late.to(tl.int32)) > 0) & (num_spins < num_max_spins):
        words = tl.where(mask, tl.atomic_add(ptrs, zeros, mask=mask, sem="acquire", scope="sys"), 0)
        late = mask & is_late(words, launch, AT_LEAST)
        num_spins += 1
    if (tl.max(late.to(tl.int32)) > 0) & (tl.load(broken) == 0):
        tl.store(broken, 1)
        tl.store(ptr + RECORD_WHO, tl.max(tl.where(late, _who(what, peers), 0)))
        tl.store(ptr + RECORD_LAUNCH, launch)
        tl.store(ptr + RECORD_SEEN, tl.max(tl.where(late, words, 0)))
        tl.store(ptr + RECORD_KIND, KIND_TIMEOUT)
    return words
