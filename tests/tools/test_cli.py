"""The command line itself: help, versions, wrong usage, missing packages."""

import json
import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

import deep_ep
from deep_ep import cli as cli_module
from deep_ep.cli import cli
from deep_ep.errors import ConfigError, PeerTimeoutError
from deep_ep.screen import Screen


def run_python(code, **env):
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, timeout=60, check=False
    )


def test_help_names_every_command_and_loads_no_torch():
    code = "import sys; sys.argv = ['deep-ep', '--help']\n"
    code += "import atexit; atexit.register(lambda: print('torch' in sys.modules))\n"
    code += "from deep_ep.__main__ import main; main()"
    result = run_python(code)
    assert result.returncode == 0
    assert all(f"  {name} " in result.stdout for name in cli_module.COMMANDS)
    assert result.stdout.endswith("False\n")


def test_version():
    result = CliRunner().invoke(cli, ["--version"])
    assert (result.exit_code, result.output) == (0, f"deep-ep {deep_ep.__version__}\n")


def test_every_command_has_complete_help():
    for name in cli_module.COMMANDS:
        result = CliRunner().invoke(cli, [name, "--help"])
        assert result.exit_code == 0, result.output
        command = cli.get_command(click.Context(cli), name)
        assert all(parameter.help for parameter in command.params if isinstance(parameter, click.Option)), name


@pytest.mark.parametrize("arguments", [["dispach"], ["--dispach"]])
def test_wrong_usage_is_code_2(arguments):
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert "dispach" in result.stderr


@pytest.mark.parametrize(
    ("error", "exit_code"), [(ConfigError("a is 1", hint="try 2"), 2), (PeerTimeoutError("late", [1], hint="try 2"), 1)]
)
def test_an_error_of_the_library_is_a_sentence_and_a_hint(monkeypatch, error, exit_code):
    @click.command
    def command():
        raise error

    monkeypatch.setattr(sys.modules[__name__], "command", command, raising=False)
    monkeypatch.setitem(cli_module.COMMANDS, "fails", (f"{__name__}:command", "Fails."))
    result = CliRunner().invoke(cli, ["fails"])
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert result.stderr == f"Error: {error}\n"
    assert "hint: try 2" in result.stderr


def test_without_click_there_is_one_sentence_and_the_remedy():
    code = "import sys; sys.modules['click'] = None\n"
    code += "from deep_ep.__main__ import main; main()"
    result = run_python(code)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == ("deep-ep: this needs click, which is not installed\nhint: pip install 'deep-ep[cli]'\n")


def test_there_is_no_colour_where_there_is_no_terminal(capsys):
    screen = Screen()
    screen.table(["what", "us>"], [["ok", "1"], ["problem", "x" * 300]])
    screen.line("Test Dispatch:", "PASSED")
    screen.record({"a": 1})
    screen.note("a note")
    with screen.progress("cases", 2) as advance:
        advance()
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert "x" * 300 in out
    assert "Test Dispatch: PASSED\n" in out
    assert json.loads(out.splitlines()[-1]) == {"a": 1}
    assert err == "a note\n"
