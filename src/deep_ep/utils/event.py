"""Events, under the name of the module in which DeepEP 2 keeps them."""

from deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
