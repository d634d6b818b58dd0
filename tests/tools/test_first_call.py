"""`deep-ep check --first-call`: what it measures, prints and draws."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from deep_ep.check import first_call
from deep_ep.cli import cli
from deep_ep.phases import PHASES


def test_first_calls_are_measured_in_both_modes_and_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    small = tuple(replace(shape, hidden=256, num_max_tokens_per_rank=8) for shape in first_call.CPU_SHAPES)
    monkeypatch.setattr(first_call, "CPU_SHAPES", small)
    monkeypatch.setattr("deep_ep.check.command.choose_device", lambda _: "cpu")
    picture = tmp_path / "first.png"
    result = CliRunner().invoke(cli, ["check", "--first-call", "--json", "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(r["shape"]["is_low_latency"], r["is_preinitialized"]) for r in records] == [
        (is_low_latency, is_preinitialized) for is_low_latency in (False, True) for is_preinitialized in (False, True)
    ]
    for record in records:
        assert tuple(record["phases_ms"]) == PHASES
        assert (record["phases_ms"]["dummy"] > 0) == record["is_preinitialized"]
        assert len(record["pairs_us"]) == 1 + first_call.NUM_CALLS
        assert record["first_us"] == record["pairs_us"][0]
        assert record["ratio"] == pytest.approx(record["first_us"] / record["median_us"])
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_a_picture_of_nothing_is_refused():
    result = CliRunner().invoke(cli, ["check", "--plot", "first.png"])
    assert result.exit_code == 2
    assert "--plot draws what --first-call measures" in result.output
