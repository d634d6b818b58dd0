"""`install.sh` and `setup.py`: what they refuse, and what a build contains."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command, cwd=ROOT, **environment):
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_help_names_every_option():
    result = run("./install.sh", "--help")
    assert result.returncode == 0
    assert all(option in result.stdout for option in ("--nvshmem-dir DIR", "--cuda-arch LIST", "--dev", "PYTHON="))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fast"], "There is no option --fast."),
        (["--cuda-arch"], "--cuda-arch needs a value."),
        (["--cuda-arch", "sm90"], "--cuda-arch is a list of compute capabilities like 9.0 or '8.0;9.0', got sm90."),
        (["--cuda-arch=9.0;x"], "got 9.0;x."),
        (["--nvshmem-dir", "/nonexistent"], "--nvshmem-dir is /nonexistent, which is no folder."),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_installed(arguments, message):
    result = run("./install.sh", *arguments, PYTHON="/nonexistent")
    assert result.returncode == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert "\nhint: " in result.stderr


def test_a_missing_python_is_a_sentence():
    result = run("./install.sh", PYTHON="/nonexistent/python")
    assert result.returncode == 2
    assert result.stderr.startswith("/nonexistent/python was not found.\n\nhint: install Python 3.11 or newer")


def test_a_build_contains_every_module(tmp_path):
    lib, info = tmp_path / "lib", tmp_path / "info"
    info.mkdir()
    command = ("setup.py", "-q", "egg_info", "--egg-base", str(info), "build", "--build-base", str(tmp_path / "temp"))
    result = run(sys.executable, *command, "--build-lib", str(lib))
    assert result.returncode == 0, result.stderr
    sources = {path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*.py")}
    assert sources <= {path.relative_to(lib) for path in lib.rglob("*.py")}
    assert (lib / "deep_ep/py.typed").exists()


def test_an_old_setuptools_is_a_sentence(tmp_path):
    (tmp_path / "setuptools.py").write_text("__version__ = '65.5.0'\n")
    result = run(sys.executable, "setup.py", "build", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr == (
        "setup.py needs setuptools 77 or newer, but version 65.5.0 was found\n"
        "hint: pip install --upgrade setuptools, or: pip install .\n"
    )
