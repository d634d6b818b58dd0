"""Events: when the work of a call is done, as DeepEP V1 hands it to programs.

On CPU a call has done its work when it returns, so an event there has always happened. On a GPU an event is a
``torch.cuda.Event``.
"""

from __future__ import annotations

from types import TracebackType

import torch

from deep_ep.errors import ConfigError


class EventHandle:
    """A point on the current CUDA stream; on a machine without a GPU, a point that has passed."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_available():
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream())

    def current_stream_wait(self) -> None:
        """Make the current stream wait for this point. May be called often, and on any stream."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """What a call returns to be waited for; also a context manager that waits at its end.

    Every call returns one. Its ``event`` is None unless the call was made with ``async_finish=True``.

    Args:
        event: The point to wait for, or None.
        extra_tensors: Tensors that must stay alive until the event has been waited for.

    Example:
        >>> recv_x, *_, event = buffer.dispatch(x, ..., async_finish=True)
        >>> with event:
        ...     y = shared_expert(x)      # overlaps the exchange; the wait comes after it
    """

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the event.

        Raises:
            ConfigError: If there is no event, because the call was synchronous.
        """
        if self.event is None:
            raise ConfigError(
                "this EventOverlap holds no event: its call was synchronous, so there is nothing to wait for",
                hint="pass async_finish=True, or wait only if `.event is not None`",
            )
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.event is not None:
            self.event.current_stream_wait()
