"""The low-latency kernels, interpreted on the CPU by real processes, against their specification."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
PROGRAM = Path(__file__).parent / "low_latency_exchange.py"


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_interpreted_kernels_do_as_the_reference_says(num_ranks):
    command = [sys.executable, "-W", "ignore", str(PROGRAM), "--ranks", str(num_ranks)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
