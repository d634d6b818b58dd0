"""Config: the tuning knobs of a normal-mode call; ClusterProfile: what follows from the number of ranks alone.

The numbers of `Config`'s tables and the formulas of its hints are DeepEP V1's, so that a program which sizes its
buffer from them asks for the same bytes as before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from deep_ep.errors import ConfigError

topk_idx_t = torch.int64
"""The dtype of expert ids that this library hands out and prefers to be given."""

_NUM_MAX_NVL_PEERS = 8
_NUM_MAX_TOPK = _NUM_MAX_SCALES = 128
_BUFFER_ALIGNMENT_BYTES = 128
_NUM_META_BYTES = 8


def _align(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Config:
    """How a normal-mode call is cut up (DeepEP V1's ``Config``).

    Args:
        num_sms: Upper bound on the streaming multiprocessors a call uses. ``num_sms // 2`` is the number of
            channels, the runs of consecutive tokens that the handle's prefix matrices tell apart.
        num_max_nvl_chunked_send_tokens: Tokens sent at once inside a host.
        num_max_nvl_chunked_recv_tokens: Tokens a receive queue holds inside a host.
        num_max_rdma_chunked_send_tokens: Tokens sent at once between hosts.
        num_max_rdma_chunked_recv_tokens: Tokens a receive queue holds between hosts; rounded up to a multiple
            of the tokens sent at once.

    Raises:
        ConfigError: If a value is out of range.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        if self.num_sms < 0:
            raise ConfigError(f"num_sms must be at least 0, got {self.num_sms}")
        for wire in ("nvl", "rdma"):
            send_name, recv_name = f"num_max_{wire}_chunked_send_tokens", f"num_max_{wire}_chunked_recv_tokens"
            send, recv = getattr(self, send_name), getattr(self, recv_name)
            if not 0 < send < recv:
                raise ConfigError(f"0 < {send_name} < {recv_name} must hold, got {send} and {recv}")
        send, recv = self.num_max_rdma_chunked_send_tokens, self.num_max_rdma_chunked_recv_tokens
        if send > recv // 2:
            raise ConfigError(
                "num_max_rdma_chunked_send_tokens must be at most half of num_max_rdma_chunked_recv_tokens, "
                f"got {send} and {recv}"
            )
        object.__setattr__(self, "num_max_rdma_chunked_recv_tokens", _align(recv, send))

    @property
    def num_channels(self) -> int:
        """Return the number of channels, at least one."""
        return max(self.num_sms // 2, 1)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the bytes V1 would want for exchange inside a host.

        Args:
            hidden_bytes: Bytes of one token's row.
            num_ranks: Ranks of the group.
        """
        _check_hint_arguments(hidden_bytes, num_ranks)
        num_rdma_ranks = max(num_ranks // _NUM_MAX_NVL_PEERS, 1)
        num_nvl_ranks = min(num_ranks, _NUM_MAX_NVL_PEERS)
        num_queues = self.num_sms // 2 * num_nvl_ranks
        per_token = hidden_bytes + _NUM_META_BYTES + _metadata_bytes()
        num_bytes = num_queues * (2 * num_rdma_ranks + 3) * 4
        num_bytes += num_queues * self.num_max_nvl_chunked_recv_tokens * per_token
        return _align(num_bytes, _BUFFER_ALIGNMENT_BYTES)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the bytes V1 would want for exchange between hosts of eight ranks; 0 for up to eight ranks.

        Args:
            hidden_bytes: Bytes of one token's row.
            num_ranks: Ranks of the group.
        """
        _check_hint_arguments(hidden_bytes, num_ranks)
        if num_ranks <= _NUM_MAX_NVL_PEERS:
            return 0
        num_rdma_ranks = -(-num_ranks // _NUM_MAX_NVL_PEERS)
        num_queues = self.num_sms // 2 * num_rdma_ranks
        per_token = hidden_bytes + _NUM_META_BYTES + _metadata_bytes() + 16
        num_bytes = num_queues * (_NUM_MAX_NVL_PEERS * 2 + 2) * 2 * 4
        num_bytes += num_queues * self.num_max_rdma_chunked_recv_tokens * per_token * 2
        return _align(num_bytes, _BUFFER_ALIGNMENT_BYTES)


def _metadata_bytes() -> int:
    return _NUM_MAX_TOPK * topk_idx_t.itemsize + _NUM_MAX_TOPK * 4 + _NUM_MAX_SCALES * 4


def _check_hint_arguments(hidden_bytes: int, num_ranks: int) -> None:
    if hidden_bytes < 0:
        raise ConfigError(f"hidden_bytes must be at least 0, got {hidden_bytes}")
    if num_ranks < 1:
        raise ConfigError(f"num_ranks must be at least 1, got {num_ranks}")


# ranks: (nvl send, nvl recv, rdma send, rdma recv)
_DISPATCH_TABLE = {
    2: (24, 256, 6, 128),
    4: (6, 256, 6, 128),
    8: (6, 256, 6, 128),
    16: (36, 288, 20, 128),
    24: (32, 288, 8, 128),
    32: (32, 288, 8, 128),
    48: (32, 288, 8, 128),
    64: (32, 288, 8, 128),
    96: (20, 480, 12, 128),
    128: (20, 560, 12, 128),
    144: (32, 720, 12, 128),
    160: (28, 720, 12, 128),
}
_COMBINE_TABLE = {
    2: (10, 256, 6, 128),
    4: (9, 256, 6, 128),
    8: (4, 256, 6, 128),
    16: (4, 288, 12, 128),
    24: (1, 288, 8, 128),
    32: (1, 288, 8, 128),
    48: (1, 288, 8, 128),
    64: (1, 288, 8, 128),
    96: (1, 480, 8, 128),
    128: (1, 560, 8, 128),
    144: (2, 720, 8, 128),
    160: (2, 720, 8, 128),
}


@lru_cache
def dispatch_config(num_ranks: int, num_sms: int) -> Config:
    """Return the recommended dispatch config for a group size."""
    return _lookup(_DISPATCH_TABLE, num_ranks, num_sms)


@lru_cache
def combine_config(num_ranks: int, num_sms: int) -> Config:
    """Return the recommended combine config for a group size."""
    return _lookup(_COMBINE_TABLE, num_ranks, num_sms)


def _lookup(table: dict[int, tuple[int, int, int, int]], num_ranks: int, num_sms: int) -> Config:
    """Take the row of the next size that V1 tabulates; V1 itself refuses sizes in between."""
    if num_ranks < 1:
        raise ConfigError(f"num_ranks must be at least 1, got {num_ranks}")
    size = next((size for size in table if size >= num_ranks), max(table))
    return Config(num_sms, *table[size])


@dataclass(frozen=True, slots=True)
class ClusterProfile:
    """What a group of some size wants of the machines it runs on; `Buffer.profile`.

    A value that is given elsewhere (an argument, a variable of the environment) goes before the profile's.

    Attributes:
        name: What to call it.
        num_max_ranks: The largest group that it is chosen for.
        num_max_nvl_peers: Ranks that a host is taken to have where there is no group to ask: in `buffer_size_hint`.
        num_qps_per_rank: Connections to each network peer.
        num_rdma_bytes: Network buffer of a group that spans hosts.
        num_chunks: Parts that an exchange between hosts is cut into, so that passing on overlaps the network.
        timeout_s: How long a call waits for a peer.
    """

    name: str
    num_max_ranks: int
    num_max_nvl_peers: int
    num_qps_per_rank: int
    num_rdma_bytes: int
    num_chunks: int
    timeout_s: float

    @staticmethod
    def of(choice: ClusterProfile | str | None, num_ranks: int) -> ClusterProfile:
        """Return the profile of a group.

        Args:
            choice: A profile, or the name of one, or None to choose by the number of ranks.
            num_ranks: Ranks of the group.

        Raises:
            ConfigError: If there is no such profile.

        Example:
            >>> ClusterProfile.of(None, 16).name
            'medium'
        """
        if isinstance(choice, ClusterProfile):
            return choice
        if choice is None:
            return next(profile for profile in PROFILES.values() if num_ranks <= profile.num_max_ranks)
        if choice not in PROFILES:
            raise ConfigError(f"profile must be one of {', '.join(PROFILES)} or a ClusterProfile, got {choice!r}")
        return PROFILES[choice]

    def warning_of(self, num_network_peers: int, num_nics: int) -> str | None:
        """Return what to warn of where a host has few network cards for its network peers, else None.

        Args:
            num_network_peers: Other hosts that a rank exchanges with.
            num_nics: Network cards of this host; 0 where nobody could tell.
        """
        if num_nics == 0 or num_network_peers <= 2 * num_nics:
            return None
        return (
            f"{num_network_peers} network peers share {num_nics} network cards, more than two for each card: they will "
            f"wait for each other, with {self.num_qps_per_rank} connections to each peer"
        )


# name, most ranks, nvl peers, qps per rank, rdma bytes, chunks, timeout_s
_PROFILE_TABLE = (
    ("small", 8, 8, 2, 256 << 20, 4, 100.0),
    ("medium", 64, 12, 3, 512 << 20, 8, 150.0),
    ("large", 1 << 31, 16, 4, 1 << 30, 16, 300.0),
)
PROFILES = {row[0]: ClusterProfile(*row) for row in _PROFILE_TABLE}


class BufferSizeHint(NamedTuple):
    """Bytes to make a buffer with."""

    num_nvl_bytes: int
    num_rdma_bytes: int


def buffer_size_hint(
    num_max_tokens_per_rank: int,
    hidden_bytes: int,
    num_ranks: int,
    num_topk: int = 0,
    num_scales: int = 0,
    profile: ClusterProfile | str | None = None,
) -> BufferSizeHint:
    """Return twice the bytes of the largest exchange; `Buffer.get_buffer_size_hint` says more."""
    _check_hint_arguments(hidden_bytes, num_ranks)
    for name, value in {
        "num_max_tokens_per_rank": num_max_tokens_per_rank,
        "num_topk": num_topk,
        "num_scales": num_scales,
    }.items():
        if value < 0:
            raise ConfigError(f"{name} must be at least 0, got {value}")
    chosen = ClusterProfile.of(profile, num_ranks)
    num_other_hosts = -(-num_ranks // chosen.num_max_nvl_peers) - 1
    row_bytes = hidden_bytes + 4 * num_scales + 12 * num_topk + 4
    slack_bytes = 5 * _BUFFER_ALIGNMENT_BYTES
    nvl_bytes = num_ranks * num_max_tokens_per_rank * row_bytes + slack_bytes
    rdma_bytes = num_other_hosts * (num_max_tokens_per_rank * row_bytes + slack_bytes)
    return BufferSizeHint(2 * nvl_bytes, 2 * rdma_bytes)
