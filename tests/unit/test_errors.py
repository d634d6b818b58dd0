"""Errors: kinds that programs can catch, and messages with a remedy."""

import pytest

from deep_ep import errors


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.UnsupportedError, RuntimeError),
        (errors.CapacityError, RuntimeError),
        (errors.MismatchError, RuntimeError),
        (errors.PeerError, RuntimeError),
        (errors.PeerTimeoutError, TimeoutError),
        (errors.DestroyedError, RuntimeError),
    ],
)
def test_an_error_is_ours_and_a_builtin_one(kind, builtin):
    assert issubclass(kind, errors.DeepEPError)
    assert issubclass(kind, builtin)


def test_a_hint_follows_on_a_line_of_its_own():
    assert str(errors.ConfigError("x must be 1, got 2")) == "x must be 1, got 2"
    error = errors.ConfigError("x must be 1, got 2", hint="pass 1")
    assert str(error) == "x must be 1, got 2\nhint: pass 1"
    assert error.hint == "pass 1"


def test_a_timeout_knows_who_is_missing():
    error = errors.PeerTimeoutError("no sign of ranks [5, 7]", [5, 7])
    assert error.missing_ranks == [5, 7]
