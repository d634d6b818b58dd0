"""Compiled kernels on disk: made once for all, found again, never taken when they are damaged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from deep_ep import kernel_cache
from deep_ep.engines.gpu_kernels import load_kernels
from deep_ep.engines.gpu_plans import count_variant
from deep_ep.kernel_cache import KernelCode

pytestmark = pytest.mark.filterwarnings("ignore")

CODE = KernelCode(name="some_kernel", num_params=3, num_warps=4, shared_bytes=16, cubin=b"\x7fELF\n\n and so on")
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEP_EP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refuse():
    raise AssertionError("this would compile")


def test_a_kernel_is_found_again(cache):
    assert kernel_cache.find_or_compile("key", lambda: CODE) == CODE
    assert kernel_cache.find_or_compile("key", refuse) == CODE
    assert sorted(path.name for path in (cache / "kernels").iterdir()) == ["key", "key.lock"]


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:20], lambda _: b"", lambda _: b"{}\nx"])
def test_a_damaged_file_is_made_anew(cache, caplog, damage):
    kernel_cache.find_or_compile("key", lambda: CODE)
    path = cache / "kernels" / "key"
    path.write_bytes(damage(path.read_bytes()))
    assert kernel_cache.find_or_compile("key", lambda: CODE) == CODE
    assert "is damaged" in caplog.text
    assert KernelCode.unpack(path.read_bytes()) == CODE


def test_a_kernel_that_came_with_the_package_is_not_compiled(tmp_path, monkeypatch):
    (tmp_path / "prebuilt").mkdir()
    (tmp_path / "prebuilt" / "key").write_bytes(CODE.pack())
    monkeypatch.setattr(kernel_cache, "PREBUILT", tmp_path / "prebuilt")
    assert kernel_cache.find_or_compile("key", refuse) == CODE


def test_without_a_folder_kernels_are_compiled_all_the_same(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEEP_EP_CACHE_DIR", str(tmp_path / "file"))
    assert kernel_cache.find_or_compile("key", lambda: CODE) == CODE
    assert "no kernel cache" in caplog.text


def test_the_key_depends_on_what_the_code_depends_on():
    keys = {
        kernel_cache.key_of("deep_ep.kernels.combine.combine_kernel", constants, num_warps, capability)
        for constants in ((1, True), (1, 1), (2, True))
        for num_warps in (4, 8)
        for capability in (80, 90)
    }
    assert len(keys) == 12


def test_shapes_are_remembered_the_last_one_first(cache):
    shapes = [{"hidden": hidden} for hidden in range(70)]
    for i, shape in enumerate(shapes):
        kernel_cache.remember(shape)
        name = max((cache / "seen").glob("*.json"), key=lambda path: path.stat().st_ctime_ns)
        os.utime(name, (i, i))
    kernel_cache.remember(shapes[40])
    seen = kernel_cache.seen()
    assert seen[0] == shapes[40]
    assert len(seen) == 64
    assert shapes[69] in seen
    assert shapes[0] not in seen


COMPILE_AND_COUNT = """
import warnings; warnings.simplefilter("ignore")
from deep_ep.engines.gpu_kernels import load_kernels
from deep_ep.engines.gpu_plans import count_variant
from deep_ep.kernels import launch
import torch
compiled, compile_for = [], launch.compile_for
launch.compile_for = lambda *args: compiled.append(args) or compile_for(*args)
kernels = load_kernels()
input()
kernels.find(*count_variant(kernels, 8, torch.int64), 90)
print(len(compiled))
"""


def test_processes_that_start_together_compile_once():
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", COMPILE_AND_COUNT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    counts = [process.communicate(timeout=200)[0].strip() for process in processes]
    assert sorted(counts) == ["0", "0", "1"]


def test_compiled_code_takes_our_parameters_and_two_of_tritons():
    import torch

    kernels = load_kernels()
    variant = count_variant(kernels, 8, torch.int64)
    code = kernels.find(*variant, 90)
    num_own = sum(not parameter.is_constexpr for parameter in variant.kernel.params)
    assert code.num_params == num_own + 2
    assert (code.name, code.num_warps) == ("count_tokens_kernel", 4)
    assert code.cubin[:4] == b"\x7fELF"


def test_calls_launch_what_is_prepared():
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "launched_variants.py")],
        capture_output=True,
        text=True,
        timeout=250,
        env=environment | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), *sys.path])},
        check=False,
    )
    assert result.stdout == "as prepared\n", result.stdout + result.stderr
