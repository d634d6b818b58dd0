"""What programs import from ``deep_ep.utils``."""

from deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
