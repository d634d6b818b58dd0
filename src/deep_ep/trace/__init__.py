"""Timelines: when each rank sent, computed and waited, on one clock.

    from deep_ep import trace

    with trace.record(buffer) as recorder:
        for _ in range(3):
            with recorder.step():
                recv_x, *_, handle, _ = buffer.dispatch(...)
                with recorder.span("experts"):
                    y = experts(recv_x)
                out, _, _ = buffer.combine(y, handle)
    timeline = recorder.timeline()  # all ranks together
    if rank == 0:
        timeline.save_chrome("trace.json")  # for ui.perfetto.dev
        timeline.save_picture("trace.png")

While nothing is recorded, calls cost what they cost without this module. The calls of the buffer are recorded by
themselves; `recorder.span` adds what the program does between them. `deep-ep trace` does all that with a small demo.
"""

from __future__ import annotations

from deep_ep.trace.record import Recorder, record
from deep_ep.trace.timeline import Kind, Span, Summary, Timeline

__all__ = ["Kind", "Recorder", "Span", "Summary", "Timeline", "record"]
