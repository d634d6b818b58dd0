"""`deep-ep waits`: the reports of all ranks as one table."""

from click.testing import CliRunner

from deep_ep.cli import cli as main
from deep_ep.watchdog import Wait, conclude, find_waits

LOG = """
rank 0: no sign of a header in dispatch from ranks [2] after 5.0 s (step 9 is awaited; rank 2 is at 8)
hint: look for an error or a slow step on those ranks; DEEP_EP_TIMEOUT_S sets the limit
[rank1] deep_ep.errors.PeerTimeoutError: rank 1: no sign of rows in low-latency combine from ranks [0, 2] after 5.0 s \
(call 9 is awaited; rank 0 is at 8, rank 2 is at 7)
rank 3: waited 0.5 s for rank 2 and its dispatched rows (launch 7, last seen 6)
rank 4: waited 0.5 s for rank 2 and its combined rows (low-latency call 8, last seen 6); it is masked
"""


def test_reports_are_found_in_logs():
    waits = find_waits(LOG + LOG)
    assert waits[0] == Wait(0, (2,), "dispatch", "step 9", "a header", "rank 2 is at 8", 5.0)
    assert waits[1].missing == (0, 2)
    assert (waits[2].number, waits[2].awaited, waits[2].seen) == ("launch 7", "dispatched rows", "rank 2 is at 6")
    assert [wait.rank for wait in waits] == [0, 1, 3, 4]


def test_the_silent_rank_is_the_one_to_look_at():
    assert conclude(find_waits(LOG)) == [
        "rank 2 is awaited by ranks [0, 1, 3, 4] and has reported nothing: look there first"
    ]


def test_ranks_in_different_calls_wait_for_each_other():
    text = "".join(
        f"rank {rank}: no sign of a header in {call} from ranks [{1 - rank}] after 5.0 s "
        f"(step 3 is awaited; rank {1 - rank} is at 2)"
        for rank, call in enumerate(("dispatch", "combine"))
    )
    assert conclude(find_waits(text))[0].startswith("ranks 0 and 1 wait for each other")


def test_the_command_prints_one_table(tmp_path):
    (tmp_path / "rank0.log").write_text(LOG)
    result = CliRunner().invoke(main, ["waits", str(tmp_path / "rank0.log")])
    assert result.exit_code == 1
    assert "low-latency combine" in result.output
    assert "rank 2 is awaited" in result.output
    assert CliRunner().invoke(main, ["waits"], input="all is well").exit_code == 0
