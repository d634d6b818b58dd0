"""Tunings that were found: where they are kept, which one holds, and what becomes of files that make no sense."""

import json
import logging

import pytest

from deep_ep import tuned
from deep_ep.engines.low_latency_plans import LowLatencyTuning
from deep_ep.tuning import CpuTuning, GpuTuning


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEP_EP_CACHE_DIR", str(tmp_path))
    tuned._warn.cache_clear()
    return tmp_path / "tuned"


def entry(kind="GpuTuning", num_ranks=2, **parameters):
    return {"kind": kind, "num_ranks": num_ranks, "parameters": parameters}


def test_without_a_file_the_defaults_hold():
    assert tuned.load(GpuTuning, "A GPU", 2) == GpuTuning()


def test_what_was_saved_holds_for_its_kind_device_and_number_of_ranks(folder):
    path = tuned.save("A GPU", entry(num_warps=8, combine_tile=[16, 512]))
    assert path == folder / "a-gpu.json"
    assert tuned.load(GpuTuning, "A GPU", 2) == GpuTuning(num_warps=8, combine_tile=(16, 512))
    assert tuned.load(GpuTuning, "A GPU", 4) == GpuTuning()
    assert tuned.load(GpuTuning, "B GPU", 2) == GpuTuning()
    assert tuned.load(LowLatencyTuning, "A GPU", 2) == LowLatencyTuning()


def test_a_new_entry_takes_the_place_of_the_old_one_and_leaves_the_others(folder):
    tuned.save("A GPU", entry(num_warps=8))
    tuned.save("A GPU", entry(num_ranks=4, num_warps=4))
    tuned.save("A GPU", entry(num_warps=32))
    assert tuned.load(GpuTuning, "A GPU", 2).num_warps == 32
    assert tuned.load(GpuTuning, "A GPU", 4).num_warps == 4
    assert len(tuned.find_all("A GPU")) == 2
    assert [path.name for path in folder.iterdir()] == ["a-gpu.json"]
    assert tuned.remove("A GPU") == folder / "a-gpu.json"
    assert tuned.remove("A GPU") is None
    assert tuned.load(GpuTuning, "A GPU", 2) == GpuTuning()


@pytest.mark.parametrize(
    "content",
    [
        "no JSON",
        "[]",
        json.dumps({"entries": ["text"]}),
        json.dumps({"entries": [{"kind": "CpuTuning", "num_ranks": 2}]}),
        json.dumps({"entries": [entry("CpuTuning", spin_us=-1)]}),
        json.dumps({"entries": [entry("CpuTuning", spin_us="long")]}),
        json.dumps({"entries": [entry("CpuTuning", warp_speed=9)]}),
    ],
)
def test_a_file_that_makes_no_sense_is_told_once_and_left_out(folder, caplog, content):
    folder.mkdir()
    (folder / "a-cpu.json").write_text(content)
    with caplog.at_level(logging.WARNING, "deep_ep"):
        assert tuned.load(CpuTuning, "A CPU", 2) == CpuTuning()
        assert tuned.load(CpuTuning, "A CPU", 2) == CpuTuning()
    assert len(caplog.records) == 1
    assert "a-cpu.json is left out, the default tuning holds" in caplog.text


def test_a_trial_holds_inside_only():
    tuned.save("A CPU", entry("CpuTuning", spin_us=3.0))
    with tuned.trying(CpuTuning(spin_us=7.0)):
        assert tuned.load(CpuTuning, "A CPU", 2).spin_us == 7.0
    assert tuned.load(CpuTuning, "A CPU", 2).spin_us == 3.0


def test_ranks_that_disagree_take_the_default(caplog):
    mine = GpuTuning(num_warps=8)

    def everyone(words):
        return [list(words), [0]]

    assert tuned.agree(mine, GpuTuning(), lambda words: [list(words)] * 2) == mine
    with caplog.at_level(logging.WARNING, "deep_ep"):
        assert tuned.agree(mine, GpuTuning(), everyone) == GpuTuning()
    assert "ranks have different tunings" in caplog.text
