"""What can go wrong, one class per kind.

Every message is one sentence with the names and values at hand; where there is a remedy, it follows on a line
of its own that starts with ``hint:``.
"""

from __future__ import annotations


class DeepEPError(Exception):
    """Base of every error that this library raises on purpose.

    Args:
        message: One sentence: what was expected, what was found, with names and values.
        hint: What the reader can do about it, if anything.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")
        self.hint = hint


class ConfigError(DeepEPError, ValueError):
    """An argument, a setting or a tensor breaks a rule; nothing has been sent."""


class UnsupportedError(DeepEPError, RuntimeError):
    """This machine, build or device cannot do what was asked."""


class CapacityError(DeepEPError, RuntimeError):
    """Memory that a call needs could not be had; the message tells how many bytes."""


class MismatchError(DeepEPError, RuntimeError):
    """The ranks of a group disagree about a call: its kind, its shapes or its handle."""


class PeerError(DeepEPError, RuntimeError):
    """A peer failed in the middle of a call; its own error tells why."""


class PeerTimeoutError(DeepEPError, TimeoutError):
    """A peer did not do its part of a call within the time limit.

    Attributes:
        missing_ranks: The ranks that were still awaited.
    """

    def __init__(self, message: str, missing_ranks: list[int], hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.missing_ranks = missing_ranks


class MaskedError(DeepEPError, RuntimeError):
    """The other ranks have masked this one, and go on without it."""


class DestroyedError(DeepEPError, RuntimeError):
    """A buffer was used after ``destroy`` or after a call on it had timed out."""
