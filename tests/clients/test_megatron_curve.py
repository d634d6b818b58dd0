"""C80: over many steps Megatron-core's loss over deep_ep is the loss over all-to-all, but for the order of sums."""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "megatron_curve.py"
pytestmark = pytest.mark.timeout(600)


def test_c80_losses_are_those_of_all_to_all(tmp_path):
    try:
        version("megatron-core")
    except PackageNotFoundError:
        pytest.fail("megatron-core is not installed: run `pip install -e '.[clients]'`")
    path = tmp_path / "record.json"
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    process = subprocess.run(
        [sys.executable, str(PROGRAM), "--steps", "40", "--json", str(path)],
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    record = json.loads(path.read_text())
    # Float32 sums of at most four terms: seen were 5e-7 after 100 steps.
    assert record["largest_difference"] < 1e-4
    losses = record["losses"]["deep_ep"]
    assert len(losses) == 40
    assert losses[-1] < losses[0] - 1
