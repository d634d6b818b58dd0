"""`deep-ep tune`: never a wrong candidate, never one that does not win, and the file that is read at the next start."""

import json

import pytest
from click.testing import CliRunner

from deep_ep import tuned
from deep_ep.bench import oracle
from deep_ep.bench.case import Case
from deep_ep.bench.ranks import run_ranks
from deep_ep.buffer import Buffer
from deep_ep.cli import cli
from deep_ep.tune import search as search_module
from deep_ep.tune.search import search
from deep_ep.tuning import CpuTuning

TINY = Case(num_tokens=4, hidden=8, num_topk=2)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEP_EP_CACHE_DIR", str(tmp_path))
    return tmp_path / "tuned"


class OneRank:
    """A rank without processes: what the search asks of one."""

    rank, num_ranks = 0, 1

    def __init__(self):
        self.reports = []

    def report(self, trial):
        self.reports.append(trial)

    def slowest(self, values):
        return values


def search_among(monkeypatch, us_of, wrong=(), budget_s=60.0, values=(1.0, 2.0, 3.0)):
    """Search among values of spin_us whose times are known; `us_of(spin_us, num_iterations)`."""
    compared = []

    def compare(_, candidate, other, cases, num_iterations):
        compared.append((candidate.spin_us, other.spin_us, num_iterations))
        return [(us_of(candidate.spin_us, num_iterations), us_of(other.spin_us, num_iterations)) for _ in cases]

    monkeypatch.setattr(search_module, "_compare", compare)
    failure = lambda _, tuning, __: "a row is wrong" if tuning.spin_us in wrong else None  # noqa: E731
    monkeypatch.setattr(search_module, "_failure", failure)
    outcome = search(OneRank(), CpuTuning(), {"spin_us": values}, [TINY], 40, budget_s)
    return outcome, compared


def test_the_fastest_wins(monkeypatch):
    outcome, _ = search_among(monkeypatch, lambda spin_us, _: {1.0: 90.0, 2.0: 70.0, 3.0: 80.0}.get(spin_us, 100.0))
    assert outcome.tuning == CpuTuning(spin_us=2.0)
    assert outcome.gain == pytest.approx(100 / 70)
    assert [trial.verdict for trial in outcome.trials] == ["best", "best", "slower"]
    assert (outcome.default_us, outcome.tuned_us) == ([100.0], [70.0])


def test_a_wrong_candidate_never_wins(monkeypatch):
    outcome, _ = search_among(monkeypatch, lambda spin_us, _: 10.0 if spin_us == 2.0 else 100.0, wrong=(2.0,))
    assert outcome.tuning == CpuTuning()
    (trial,) = (trial for trial in outcome.trials if trial.verdict == "wrong")
    assert (trial.parameters, trial.reason) == ({"spin_us": 2.0}, "a row is wrong")


def test_a_wrong_default_is_an_error(monkeypatch):
    with pytest.raises(oracle.VerificationError, match="the default is wrong"):
        search_among(monkeypatch, lambda *_: 1.0, wrong=(200.0,))


def test_noise_does_not_win(monkeypatch):
    outcome, _ = search_among(monkeypatch, lambda spin_us, _: 98.0 if spin_us == 2.0 else 100.0)
    assert outcome.tuning == CpuTuning()
    assert outcome.gain == 1.0
    assert {trial.verdict for trial in outcome.trials} == {"noise"}


def test_a_default_that_stays_has_one_time(monkeypatch):
    # The same calls are faster the second time.
    times = iter(float(us) for us in range(1000, 0, -1))
    outcome, _ = search_among(monkeypatch, lambda *_: next(times), values=())
    assert outcome.tuning == CpuTuning()
    assert outcome.default_us == outcome.tuned_us


def test_what_wins_once_and_not_again_is_not_kept(monkeypatch):
    # With the many calls of the end it turns out to be slower.
    outcome, _ = search_among(monkeypatch, lambda spin_us, n: (50.0 if n < 100 else 150.0) if spin_us == 2 else 100.0)
    assert [trial.verdict for trial in outcome.trials] == ["noise", "best", "slower"]
    assert outcome.tuning == CpuTuning()
    assert outcome.default_us == outcome.tuned_us == [100.0]


def test_a_hopeless_candidate_is_dropped_early(monkeypatch):
    _, compared = search_among(monkeypatch, lambda spin_us, _: 300.0 if spin_us == 1.0 else 100.0)
    assert [n for candidate, _, n in compared if candidate == 1.0] == [10]
    assert [n for candidate, _, n in compared if candidate == 3.0] == [10, 40]


def test_no_candidate_begins_after_the_budget(monkeypatch):
    outcome, _ = search_among(monkeypatch, lambda *_: 100.0, budget_s=-1.0)
    assert outcome.trials == []
    assert not outcome.is_complete


def test_the_fewest_sms_that_are_fast_are_enough():
    assert search_module.enough_sms({8: 130.0, 12: 102.0, 16: 100.0, 24: 101.0}, 0.03) == 12
    assert search_module.enough_sms({8: 130.0, 12: 110.0, 16: 100.0}, 0.03) == 16


def sweep(rank):
    # On CPU ranks the number of SMs changes nothing but the channels of the handle.
    return search_module.sweep_sms(rank, CpuTuning(), [TINY], 4)


def test_a_sweep_times_each_number_of_sms_alike_on_all_ranks():
    first, second = run_ranks(2, sweep)
    assert first == second
    assert list(first) == list(search_module.SMS)
    assert all(us > 0 for us in first.values())


def tuned_spin_us(rank):
    buffer = Buffer(rank.group, device="cpu")
    try:
        return buffer.runtime.exchanger.control._spin_s * 1e6
    finally:
        buffer.destroy()


def test_what_was_found_is_kept_used_and_told(folder):
    arguments = ["tune", "tiny", "--device", "cpu", "--iterations", "4", "--budget-s", "0", "--json"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    (record,) = (json.loads(line) for line in result.stdout.splitlines())
    assert record["kind"] == "CpuTuning"
    assert record["num_ranks"] == 2
    assert record["parameters"] == {"spin_us": 200.0}
    assert record["is_complete"] is False
    assert {"gain", "noise", "default_us", "tuned_us", "torch", "commit", "date", "cases"} <= record.keys()
    path = folder / tuned.file_name(tuned.cpu_device())
    assert record["file"] == str(path)

    tuned.save(tuned.cpu_device(), record | {"parameters": {"spin_us": 123.0}, "gain": 1.25})
    assert {round(spin_us) for spin_us in run_ranks(2, tuned_spin_us)} <= {123, 0}  # 0 with one core
    result = CliRunner().invoke(cli, ["check"])
    assert "Tuning of 2 ranks: CpuTuning(spin_us=123.0), 25 % faster than the defaults" in result.stdout
    result = CliRunner().invoke(cli, ["tune", "--device", "cpu", "--reset"])
    assert result.stdout == f"Removed {path}.\n"
    assert "Tuning: the defaults" in CliRunner().invoke(cli, ["check"]).stdout


def test_wrong_usage_is_exit_code_2():
    for arguments in (["nonsense"], ["--iterations", "0"], ["--budget-s", "soon"]):
        assert CliRunner().invoke(cli, ["tune", "--device", "cpu", *arguments]).exit_code == 2
