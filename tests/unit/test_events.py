"""Events, as programs make, pass, change and wait for them."""

import pytest

from deep_ep import Buffer, EventHandle, EventOverlap
from deep_ep.errors import ConfigError


def test_a_handle_can_be_waited_for_again_and_again():
    event = EventHandle()
    event.current_stream_wait()
    event.current_stream_wait()


def test_an_overlap_without_an_event_cannot_be_waited_for():
    overlap = EventOverlap()
    assert overlap.event is None
    assert overlap.extra_tensors is None
    with pytest.raises(ConfigError, match="no event"):
        overlap.current_stream_wait()


def test_an_overlap_is_a_context_with_or_without_an_event():
    for overlap in (EventOverlap(None), EventOverlap(EventHandle())):
        with overlap as entered:
            assert entered is overlap


def test_leaving_the_context_waits():
    class Recorder:
        num_waits = 0

        def current_stream_wait(self):
            self.num_waits += 1

    recorder = Recorder()
    with EventOverlap(recorder):
        assert recorder.num_waits == 0
    assert recorder.num_waits == 1


def test_the_event_of_an_overlap_may_be_exchanged():
    first, second = EventOverlap(None), EventOverlap(EventHandle(), (1, 2))
    first.event = second.event
    first.current_stream_wait()
    assert second.extra_tensors == (1, 2)


def test_capture_gives_an_event_of_now():
    overlap = Buffer.capture()
    assert isinstance(overlap, EventOverlap)
    assert isinstance(overlap.event, EventHandle)
    overlap.current_stream_wait()
