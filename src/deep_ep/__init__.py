"""Expert-parallel communication for mixture-of-experts models, with the interface of DeepEP.

Importing this package has no side effect: it starts nothing, reads no setting, and needs neither a GPU nor Triton.
"""

from importlib.metadata import PackageNotFoundError, version

from deep_ep import utils
from deep_ep.buffer import Buffer
from deep_ep.config import Config, topk_idx_t
from deep_ep.events import EventHandle, EventOverlap

try:
    __version__ = version("deep-ep")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "__version__", "topk_idx_t", "utils"]
