"""How the kernels of the GPU engine are cut up: programs per role, tiles, units.

The defaults were measured on two H200s (`benchmarks/results/gpu_normal_2xh200.json`). 16 warps leave each thread 128
registers, which the wide tiles need; with 32 warps the same kernels spill.
"""

from __future__ import annotations

from dataclasses import dataclass

_MAX_SENDERS = 10


@dataclass(frozen=True, slots=True)
class CpuTuning:
    """How CPU ranks wait for each other.

    Attributes:
        spin_us: How long a rank that waits keeps its core before it yields it to others; where there are fewer cores
            than ranks, it yields at once.
    """

    spin_us: float = 200.0

    def __post_init__(self) -> None:
        if not self.spin_us >= 0:
            raise ValueError(f"spin_us must be at least 0, got {self.spin_us}")


@dataclass(frozen=True, slots=True)
class GpuTuning:
    """Launch parameters that all ranks of a group must share.

    Attributes:
        num_warps: Warps per program of the kernels that move rows.
        push_bytes: Bytes that a program loads at a time when it gathers rows; the loop over a row's parts is
            unrolled, so several times as much is in flight.
        copy_bytes: Bytes that a program loads at a time when it copies a long stretch.
        unit_bytes: About how many bytes of rows are announced by one signal.
        combine_tile: Tokens and elements of a row that a program adds at a time; (0, 0) chooses by the group's size.
        stream: Whether payload is moved with cache hints; without, with plain loads and stores.
        num_channels_per_peer: Programs that carry rows to each peer; 0 chooses by the group's size.
    """

    num_warps: int = 16
    push_bytes: int = 32768
    copy_bytes: int = 65536
    unit_bytes: int = 917504
    combine_tile: tuple[int, int] = (0, 0)
    stream: bool = True
    num_channels_per_peer: int = 0


def split_programs(num_sms: int, num_ranks: int, num_channels_per_peer: int) -> tuple[int, int, int]:
    """Return how many programs to launch, how many of them send, and which is the first that receives.

    A rank with R - 1 peers sends (R - 1) / R of its rows and writes all that it receives, so work divides as
    R - 1 to R.

    Example:
        >>> split_programs(24, 2, 0)
        (24, 8, 8)
    """
    num_programs = max(num_sms, 1)
    if num_ranks == 1:
        return num_programs, 0, 0
    if num_programs == 1:
        return 1, 1, 0
    num_senders = min(round(num_programs * (num_ranks - 1) / (2 * num_ranks - 1)), _MAX_SENDERS)
    if num_channels_per_peer:
        num_senders = num_channels_per_peer * (num_ranks - 1)
    num_senders = min(max(num_senders, 1), num_programs - 1)
    return num_programs, num_senders, num_senders


def combine_tile(tuning: GpuTuning, num_ranks: int) -> tuple[int, int]:
    """Return the tokens and elements of a row to add at a time: as many as fit into registers with all ranks' rows."""
    if tuning.combine_tile != (0, 0):
        return tuning.combine_tile
    if num_ranks <= 2:
        return 16, 1024
    return (16, 512) if num_ranks <= 4 else (8, 512)


def unit_rows(tuning: GpuTuning, row_bytes: int) -> int:
    """Return how many tokens or rows are announced by one signal.

    Example:
        >>> unit_rows(GpuTuning(), 14336), unit_rows(GpuTuning(), 65536)
        (64, 16)
    """
    rows = max(tuning.unit_bytes // max(row_bytes, 1), 1)
    return min(max(1 << (rows.bit_length() - 1), 16), 64)


def next_power_of_two(value: int) -> int:
    """Return the smallest power of two that is at least `value`, which is at least 1."""
    return 1 << (value - 1).bit_length()


def tile_columns(row_words: int, num_max_columns: int) -> int:
    """Return how many words of a row a tile takes, a power of two.

    One that divides the row wastes no lane; if only small ones do, the row's end is masked instead.

    Example:
        >>> tile_columns(1792, 512), tile_columns(360, 512), tile_columns(5, 512)
        (256, 512, 8)
    """
    divisor = row_words & -row_words
    if min(divisor, num_max_columns) >= min(64, row_words):
        return min(divisor, num_max_columns)
    return min(next_power_of_two(row_words), num_max_columns)
