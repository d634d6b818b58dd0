"""What programs import from ``deep_ep.utils``.

The modules beside this file have the names and results of those that DeepEP's own tests import; they are imported only
where they are used.
"""

from deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
