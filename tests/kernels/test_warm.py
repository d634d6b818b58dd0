"""Kernels that are compiled ahead of time are found where nothing may be compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)
pytest.importorskip("click")

from click.testing import CliRunner

from deep_ep import warm
from deep_ep.errors import ConfigError
from deep_ep.shapes import ExchangeShape

ROOT = Path(__file__).parents[2]
SHAPE = "hidden=256,topk=3,experts=8,tokens=8"

FIND_WITHOUT_COMPILING = """
import sys, triton
def refuse(*_, **__):
    raise SystemExit("compilation is forbidden here")
triton.compile = refuse
import deep_ep
from deep_ep import kernel_cache, warm
from deep_ep.engines.gpu_kernels import load_kernels
assert deep_ep.__file__.startswith(sys.argv[1]), deep_ep.__file__
variants = warm.variants_of(warm.parse_shape(sys.argv[2]), 2, 90)
for variant in variants:
    assert load_kernels().find(*variant, 90).cubin[:4] == b"\\x7fELF"
print(len(variants))
"""


@pytest.mark.timeout(600)
def test_a_package_with_kernels_compiles_nothing(tmp_path):
    library = tmp_path / "lib"
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"DEEP_EP_CACHE_DIR": str(tmp_path / "cache"), "PYTHONWARNINGS": "ignore"}
    build = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path), "--build-lib", str(library)]
    build += ["--preinitialize-optimized", "--shapes", SHAPE, "--ranks", "2"]
    subprocess.run(build, cwd=ROOT, env=environment, check=True, timeout=500, capture_output=True)
    assert len(list((library / "deep_ep" / "prebuilt").iterdir())) == 6
    environment |= {"DEEP_EP_CACHE_DIR": str(tmp_path / "another cache"), "PYTHONPATH": str(library)}
    for shape, expected in ((SHAPE, "6\n"), (SHAPE.replace("256", "512"), "")):
        run = [sys.executable, "-c", FIND_WITHOUT_COMPILING, str(library), shape]
        found = subprocess.run(run, env=environment, check=False, timeout=120, capture_output=True, text=True)
        assert found.stdout == expected, found.stderr
        assert ("compilation is forbidden here" in found.stderr) == (not expected)


def test_shapes_are_read():
    assert warm.parse_shape("hidden=7168,topk=8,experts=256,tokens=128,low-latency,fp8") == ExchangeShape(
        hidden=7168, num_topk=8, num_experts=256, num_max_tokens_per_rank=128, is_low_latency=True, use_fp8=True
    )
    for text, wrong in (("hidden=7168", "missing"), (f"{SHAPE},fast", "'fast'"), (f"{SHAPE},topk=-1", "'topk=-1'")):
        with pytest.raises(ConfigError, match=wrong):
            warm.parse_shape(text)


def test_architectures_are_read(monkeypatch):
    texts = {"9.0": 90, "sm_80": 80, "9.0a": 90, "10.0+PTX": 100, "12.1": 121}
    assert {text: warm.parse_capability(text) for text in texts} == texts
    for text in ("7.5", "hopper", "", "9.x"):
        with pytest.raises(ConfigError, match="an architecture must be like"):
            warm.parse_capability(text)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a+PTX 10.0")
    assert warm.choose_capabilities([]) == [80, 90, 100]
    assert warm.choose_capabilities(["9.0"]) == [90]


def test_the_command_refuses_what_it_cannot_read():
    result = CliRunner().invoke(warm.command, ["--arch", "hopper"])
    assert isinstance(result.exception, ConfigError)
