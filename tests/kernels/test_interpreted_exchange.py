"""The kernels of the GPU engine, interpreted on the CPU by real processes: small exchanges, every element compared."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
STRESS = Path(__file__).parents[1] / "gpu" / "exchange_stress.py"


@pytest.mark.parametrize(("num_ranks", "num_exchanges"), [(1, 12), (2, 6), (3, 3), (4, 2)])
def test_interpreted_kernels_move_every_element(num_ranks, num_exchanges):
    command = [sys.executable, "-W", "ignore", str(STRESS), "--ranks", str(num_ranks)]
    command += ["--exchanges", str(num_exchanges), "--tokens", "20", "--timeout", "60"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
