"""Every environment variable that the library reads, declared once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from deep_ep.errors import ConfigError

T = TypeVar("T")


def _positive_float(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError
    return value


def _num_bytes(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError
    return text == "1"


@dataclass(frozen=True, slots=True)
class EnvVar(Generic[T]):
    """One environment variable: its name, how its text is read, and what holds when it is not set.

    Attributes:
        name: The variable.
        parse: Turns the text into the value; raises ``ValueError`` on text that makes no sense.
        default: The value when the variable is not set or empty.
        rule: What the text must be, in words, for error messages.
        meaning: One sentence for the documentation.
    """

    name: str
    parse: Callable[[str], T]
    default: T
    rule: str
    meaning: str

    @property
    def text(self) -> str:
        """What the variable is set to; empty if it is not set."""
        return os.environ.get(self.name, "").strip()

    def get(self) -> T:
        """Return the value in force.

        Raises:
            ConfigError: If the text cannot be read.
        """
        text = self.text
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise ConfigError(f"{self.name} must be {self.rule}, got {text!r}") from None


TIMEOUT_S: EnvVar[float | None] = EnvVar(
    "DEEP_EP_TIMEOUT_S",
    _positive_float,
    None,
    "a positive number of seconds",
    "How long a call waits for a peer before it raises PeerTimeoutError; without it 100, 150 or 300 for up to 8, up to "
    "64 or more ranks.",
)

USE_P2P = EnvVar(
    "DEEP_EP_USE_P2P",
    _switch,
    True,
    "0 or 1",
    "Whether GPUs of a host address each other's memory; 0 makes them go through pinned host memory.",
)

NODE_ID = EnvVar(
    "DEEP_EP_NODE_ID",
    str,
    "",
    "a word",
    "The host of this rank, in place of what is found out; ranks of one machine with different words are taken for "
    "ranks of different hosts.",
)

RDMA_BUFFER_SIZE = EnvVar(
    "DEEP_EP_RDMA_BUFFER_SIZE",
    _num_bytes,
    0,
    "a number of bytes, at least 0",
    "What num_rdma_bytes is when a program leaves it at 0: bytes that a rank keeps for messages between hosts; without "
    "it 256, 512 or 1024 MiB for up to 8, up to 64 or more ranks.",
)

GLOO_SOCKET_IFNAME = EnvVar(
    "GLOO_SOCKET_IFNAME",
    str,
    "",
    "the name of a network interface",
    "The interface that CPU ranks of different hosts exchange over; Gloo reads it.",
)

METRICS = EnvVar(
    "DEEP_EP_METRICS",
    _switch,
    False,
    "0 or 1",
    "1 makes every buffer serve its metrics on a free port of 127.0.0.1, where deep-ep monitor finds them.",
)

DISABLE_SM90_FEATURES = EnvVar(
    "DISABLE_SM90_FEATURES",
    _switch,
    False,
    "0 or 1",
    "1 makes kernels use plain loads and stores only; compute capability 8.0 works without it.",
)

DISABLE_AGGRESSIVE_PTX_INSTRS = EnvVar(
    "DISABLE_AGGRESSIVE_PTX_INSTRS",
    _switch,
    False,
    "0 or 1",
    "1 makes kernels use no cache hints on the loads and stores of rows.",
)

CACHE_DIR = EnvVar(
    "DEEP_EP_CACHE_DIR",
    str,
    "~/.cache/deep_ep",
    "a folder",
    "Where compiled kernels and the shapes of calls are kept; ranks and jobs may share it.",
)

TORCH_CUDA_ARCH_LIST = EnvVar(
    "TORCH_CUDA_ARCH_LIST",
    str,
    "",
    "compute capabilities such as 9.0;10.0",
    "What `deep-ep warm` and the build compile kernels for, where they are not told.",
)

NVSHMEM_DIR = EnvVar(
    "NVSHMEM_DIR",
    str,
    "",
    "a folder",
    "Where NVSHMEM is installed; `deep-ep check` looks at it, and nothing else does: this version needs none.",
)

ALL_VARIABLES: tuple[EnvVar[Any], ...] = (
    TIMEOUT_S,
    USE_P2P,
    NODE_ID,
    RDMA_BUFFER_SIZE,
    GLOO_SOCKET_IFNAME,
    METRICS,
    DISABLE_SM90_FEATURES,
    DISABLE_AGGRESSIVE_PTX_INSTRS,
    CACHE_DIR,
    TORCH_CUDA_ARCH_LIST,
    NVSHMEM_DIR,
)


def variables_set(*prefixes: str) -> dict[str, str]:
    """Return the variables of this process whose names begin with one of the prefixes, in order of their names."""
    return {name: text for name, text in sorted(os.environ.items()) if name.startswith(prefixes)}


def replace_all(variables: dict[str, str]) -> None:
    """Give this process these variables and no others; for tools that run ranks of their own."""
    os.environ.clear()
    os.environ.update(variables)
