"""Packages that only tools need: which extra brings them, and what to say when they are missing."""

from __future__ import annotations

from importlib.util import find_spec

from deep_ep.errors import UnsupportedError

EXTRAS = {
    "cli": ("click", "rich"),
    "plot": ("matplotlib",),
    "monitor": ("prometheus_client",),
}


class MissingExtraError(UnsupportedError):
    """A package that a tool needs is not installed."""


def require(extra: str) -> None:
    """Return if the packages of an extra can be imported.

    Args:
        extra: A key of `EXTRAS`.

    Raises:
        MissingExtraError: If one is missing; it says how to install them.
    """
    missing = [name for name in EXTRAS[extra] if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"this needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            hint=f"pip install 'deep-ep[{extra}]'",
        )
