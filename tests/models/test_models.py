"""The protocols as models in Promela, explored fully; and that a mistake in each of them is found.

Needs spin and a C compiler (`apt install spin gcc`), which Python's package index does not have: without them the test
is skipped with a sentence, or fails if DEEP_EP_TEST_NEEDS_SPIN is set. `python tests/models/test_models.py` writes the
counts of states, also of the larger models, to benchmarks/results/models.json.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
RIGHT = [
    ("steps", ""),
    ("steps", "CALM"),
    ("steps", "RANKS=2"),
    ("exchange", ""),
    ("exchange", "CALM"),
    ("launches", ""),
    ("launches", "CALM"),
    ("launches", "RANKS=3"),
    ("low_latency", ""),
    ("low_latency", "MASKS"),
    ("masks", "STEPS=1"),
]
LARGE = [("masks", "STEPS=2"), ("low_latency", "RANKS=3 CALLS=3")]
"""Some ten million states each: for the record, not for every test run."""
WRONG = [
    ("steps", "FLAG_FIRST"),
    ("steps", "ONE_AREA"),
    ("steps", "NO_NUMBER"),
    ("exchange", "FLAG_FIRST"),
    ("exchange", "OFFER_IN_USE"),
    ("exchange", "NO_NUMBER"),
    ("launches", "FLAG_FIRST"),
    ("launches", "NO_NUMBER"),
    ("launches", "NO_FINISHED"),
    ("low_latency", "FLAG_FIRST"),
    ("low_latency", "NO_NUMBER"),
    ("low_latency", "ONE_HALF"),
    ("low_latency", "NO_ACK"),
    ("masks", "STEPS=1 NO_MARK"),
    ("masks", "STEPS=1 NO_LOOK"),
]


def explore(model: str, options: str) -> tuple[int, int, str]:
    """Return the errors found, the states stored, and what was found."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(FOLDER / f"{model}.pml", folder)
        defines = [f"-D{option}" for option in options.split()]
        for command in (
            ["spin", "-a", *defines, f"{model}.pml"],
            ["gcc", "-O1", "-w", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c"],
        ):
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=240)
        report = subprocess.run(
            ["./pan", "-m1000000"], cwd=folder, check=True, capture_output=True, text=True, timeout=280
        ).stdout
    # Depth that did not suffice, or states that were not reached for another reason, would make this worthless.
    assert "max search depth too small" not in report
    assert "Search not completed" not in report or "errors: 0" not in report
    errors = int(re.search(r"errors: (\d+)", report).group(1))
    states = int(re.search(r"(\d+) states, stored", report).group(1))
    found = re.search(r"pan:1: (.*)", report)
    return errors, states, found.group(1) if found else ""


def explore_all(kinds: list[tuple[str, str]]) -> list[tuple[int, int, str]]:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda kind: explore(*kind), kinds))


@pytest.fixture(scope="module", autouse=True)
def _spin():
    missing = [name for name in ("spin", "gcc") if shutil.which(name) is None]
    remedy = f"the models of the protocols need {' and '.join(missing)}: run `apt install spin gcc`"
    if missing and not os.environ.get("DEEP_EP_TEST_NEEDS_SPIN"):
        pytest.skip(remedy)
    assert not missing, remedy


@pytest.mark.timeout(900)
def test_the_protocols_have_no_deadlock_and_read_what_was_written():
    for kind, (errors, states, found) in zip(RIGHT, explore_all(RIGHT), strict=True):
        assert (errors, states > 1000) == (0, True), (kind, found)


@pytest.mark.timeout(900)
def test_a_mistake_in_a_protocol_is_found():
    for kind, (errors, _, found) in zip(WRONG, explore_all(WRONG), strict=True):
        assert errors == 1, kind
        assert re.match(r"assertion violated|invalid end state", found), (kind, found)


def write_counts() -> None:
    counts = {"spin": subprocess.run(["spin", "-V"], capture_output=True, text=True, check=True).stdout.strip()}
    for name, kinds in (("right", RIGHT + LARGE), ("mutated", WRONG)):
        counts[name] = [
            {"model": model, "options": options, "errors": errors, "states": states, "found": found}
            for (model, options), (errors, states, found) in zip(kinds, explore_all(kinds), strict=True)
        ]
    path = FOLDER.parents[1] / "benchmarks" / "results" / "models.json"
    path.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(write_counts())
