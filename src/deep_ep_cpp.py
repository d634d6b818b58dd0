"""The names that programs import from DeepEP's native module of V1."""

from deep_ep.config import Config, topk_idx_t
from deep_ep.events import EventHandle

__all__ = ["Config", "EventHandle", "topk_idx_t"]
