"""Where everything lies in the memory that the ranks of a host share when their tensors are on GPUs.

Each rank owns two regions, and every rank of the host can write to both. This file is the only place that knows an
offset; the engine and the kernels read it.

**Control** holds signals and nothing else. A signal is one 8-byte word with one writer: the number of a launch in
the high half, a value in the low half. Words are zeroed once and never cleared: a reader waits until the high half
has reached the launch it is in. With S ranks at most (`MAX_RANKS`), U units (`MAX_UNITS`) and so on, in words:

    FINISHED        [S]       written by peer p when its launch n has ended
    NUM_UNITS       [S]       written by peer p: into how many units it cut its tokens
    COUNTS          [S, S]    written by peer i, item j: the tokens that i sends to rank j
    OWN_CHANNELS    [S, C]    written by this rank, item [j, c]: its tokens for rank j in channel c
    PEER_CHANNELS   [S, C]    written by peer i, item c: the tokens for this rank in i's channel c
    EXPERTS         [R * L]   written by peer i, item [i, l]: top-k slots of i that name local expert l
    UNITS           [S, U]    written by peer p: the rows of its unit u have landed; the value is their number
    UNIT_STARTS     [S, U]    no signal but a plain number that UNITS publishes: the unit's first row, counted
                              among the rows that p sends to this rank

**Staging** holds rows under way, as an array of slots for each thing that a row consists of: its bytes, its source
index, expert ids, weights and scales. Where the arrays begin depends on the call (`StagingLayout`), and all ranks
compute the same.

Example: bf16 rows of 7168 elements, top-8 with 8-byte ids and no scales need 14336 + 4 + 64 + 32 = 14436 bytes per
slot, so 450 MB hold 31,171 of them. With 8 ranks and 4096 tokens each, about 18,800 are in use at once.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_RANKS = 64
MAX_CHANNELS = 512
MAX_EXPERTS = 16384
MAX_UNITS = 1024
WORD_BYTES = 8

FINISHED = 0
NUM_UNITS = FINISHED + MAX_RANKS
COUNTS = NUM_UNITS + MAX_RANKS
OWN_CHANNELS = COUNTS + MAX_RANKS * MAX_RANKS
PEER_CHANNELS = OWN_CHANNELS + MAX_RANKS * MAX_CHANNELS
EXPERTS = PEER_CHANNELS + MAX_RANKS * MAX_CHANNELS
UNITS = EXPERTS + MAX_EXPERTS + MAX_RANKS
UNIT_STARTS = UNITS + MAX_RANKS * MAX_UNITS
CONTROL_BYTES = (UNIT_STARTS + MAX_RANKS * MAX_UNITS) * WORD_BYTES

# A rank's private state on its device: the number of its last launch, how many programs of the running launch have
# ended, and whether a wait has ever run out.
STATE_LAUNCH, STATE_ENDED, STATE_BROKEN = range(3)
STATE_WORDS = 8

# What a kernel leaves in pinned memory when it gives up: the kind of trouble, what was awaited and of whom (in the
# high and the low half of one word), the launch it was in, and the word it saw or the rows it needed. The host leaves
# there for the kernels where STATE_BROKEN is.
RECORD_KIND, RECORD_WHO, RECORD_LAUNCH, RECORD_SEEN, RECORD_BROKEN = range(5)
RECORD_WORDS = 8
KIND_TIMEOUT, KIND_STAGING_FULL, KIND_OUTPUT_FULL = 1, 2, 3

AWAITED = (
    "the end of its previous call",
    "its token counts",
    "its channel counts",
    "its expert counts",
    "the number of its parts",
    "its dispatched rows",
    "its combined rows",
)
AWAIT_FINISHED, AWAIT_COUNTS, AWAIT_CHANNELS, AWAIT_EXPERTS, AWAIT_NUM_UNITS, AWAIT_ROWS, AWAIT_SUMS = range(7)

# What the host reads of a dispatch with new routing, in pinned memory: the ticket that the host gave the launch,
# the rows this rank receives, the most rows that any rank has in its staging, then a count per local expert.
TOTALS_TICKET, TOTALS_RECV, TOTALS_STAGED, TOTALS_EXPERTS = 0, 1, 2, 8
TOTALS_WORDS = TOTALS_EXPERTS + MAX_EXPERTS

_ARRAY_ALIGNMENT_BYTES = 128


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ARRAY_ALIGNMENT_BYTES) * _ARRAY_ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class StagingLayout:
    """The arrays of slots in a staging region for one kind of row.

    Args:
        row_bytes: Bytes of a row of `x`.
        topk: Expert slots per row, 0 if the rows carry none.
        idx_bytes: Bytes of an expert id, 0 if the rows carry none.
        num_scales: Four-byte scales per row.
    """

    row_bytes: int
    topk: int = 0
    idx_bytes: int = 0
    num_scales: int = 0

    @property
    def slot_bytes(self) -> int:
        """Return the bytes that one row takes in all arrays together."""
        return self.row_bytes + 4 + self.topk * (self.idx_bytes + 4) + self.num_scales * 4

    def num_slots(self, staging_bytes: int) -> int:
        """Return how many rows fit into a staging region."""
        return max(staging_bytes - 5 * _ARRAY_ALIGNMENT_BYTES, 0) // max(self.slot_bytes, 1)

    def num_bytes(self, num_slots: int) -> int:
        """Return the bytes of a staging region that holds so many rows."""
        return num_slots * self.slot_bytes + 5 * _ARRAY_ALIGNMENT_BYTES

    def offsets(self, num_slots: int) -> tuple[int, int, int, int]:
        """Return where source indices, expert ids, weights and scales begin; the rows begin at 0."""
        src = _align(num_slots * self.row_bytes)
        idx = _align(src + num_slots * 4)
        weights = _align(idx + num_slots * self.topk * self.idx_bytes)
        scales = _align(weights + num_slots * self.topk * 4)
        return src, idx, weights, scales
