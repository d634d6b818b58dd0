"""Expert-parallel communication for mixture-of-experts models, with the interface of DeepEP.

Importing this package has no side effect: it starts nothing, reads no setting, and needs neither a GPU nor Triton.
What it exports is loaded when it is first named, so that `deep-ep --help` need not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deep_ep import nn, ops, utils
    from deep_ep.buffer import Buffer
    from deep_ep.config import Config, topk_idx_t
    from deep_ep.events import EventHandle, EventOverlap
    from deep_ep.ops import combine, dispatch, low_latency_combine, low_latency_dispatch

try:
    __version__ = version("deep-ep")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

_HOMES = {
    "Buffer": "deep_ep.buffer",
    "combine": "deep_ep.ops",
    "dispatch": "deep_ep.ops",
    "low_latency_combine": "deep_ep.ops",
    "low_latency_dispatch": "deep_ep.ops",
    "Config": "deep_ep.config",
    "EventHandle": "deep_ep.events",
    "EventOverlap": "deep_ep.events",
    "topk_idx_t": "deep_ep.config",
}

_MODULES = ("nn", "ops", "utils")

__all__ = [
    "Buffer",
    "Config",
    "EventHandle",
    "EventOverlap",
    "__version__",
    "combine",
    "dispatch",
    "low_latency_combine",
    "low_latency_dispatch",
    "nn",
    "ops",
    "topk_idx_t",
    "utils",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"deep_ep.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
