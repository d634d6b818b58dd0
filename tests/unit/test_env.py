"""Environment variables: read when they are needed, refused when they make no sense."""

import pytest

from deep_ep import env
from deep_ep.errors import ConfigError


def test_every_variable_is_in_the_table_and_explained():
    declared = [value for value in vars(env).values() if isinstance(value, env.EnvVar)]
    assert set(declared) == set(env.ALL_VARIABLES)
    names = [variable.name for variable in env.ALL_VARIABLES]
    assert len(set(names)) == len(names)
    for variable in env.ALL_VARIABLES:
        assert variable.name.isupper()
        assert variable.meaning.endswith(".")


@pytest.mark.parametrize("variable", env.ALL_VARIABLES, ids=lambda variable: variable.name)
def test_a_variable_that_is_not_set_or_empty_has_its_default(monkeypatch, variable):
    monkeypatch.delenv(variable.name, raising=False)
    assert variable.get() == variable.default
    monkeypatch.setenv(variable.name, "  ")
    assert variable.get() == variable.default


def test_timeout_is_read_anew_each_time(monkeypatch):
    for text, value in {"5": 5.0, " 0.25 ": 0.25, "1e3": 1000.0}.items():
        monkeypatch.setenv("DEEP_EP_TIMEOUT_S", text)
        assert env.TIMEOUT_S.get() == value


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan", "1,5"])
def test_a_timeout_that_makes_no_sense_is_refused(monkeypatch, text):
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", text)
    with pytest.raises(ConfigError, match="DEEP_EP_TIMEOUT_S must be a positive number of seconds") as error:
        env.TIMEOUT_S.get()
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("text", ["yes please", "2", "-1"])
def test_a_switch_is_0_or_1(monkeypatch, text):
    monkeypatch.setenv("DEEP_EP_USE_P2P", text)
    with pytest.raises(ConfigError, match="DEEP_EP_USE_P2P must be 0 or 1"):
        env.USE_P2P.get()
    for good, value in {"0": False, "1": True}.items():
        monkeypatch.setenv("DEEP_EP_USE_P2P", good)
        assert env.USE_P2P.get() is value
