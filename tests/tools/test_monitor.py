"""`deep_ep.metrics` and `deep-ep monitor`, read as Prometheus reads them."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import urllib.request

import pytest
import torch
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from deep_ep import Buffer, metrics
from deep_ep.cli import cli
from deep_ep.errors import ConfigError
from deep_ep.extras import MissingExtraError
from deep_ep.monitor.ranks import Process, find_processes, scrape
from deep_ep.monitor.view import operation_lines, rank_lines, read
from rank_pool import FreshRanks

NUM_EXPERTS, HIDDEN, NUM_TOKENS = 6, 32, 10
FAMILIES = [
    "deep_ep_buffer_info",
    "deep_ep_calls",
    "deep_ep_call_seconds",
    "deep_ep_call_first_seconds",
    "deep_ep_call_median_seconds",
    "deep_ep_call_p99_seconds",
    "deep_ep_moved_bytes",
    "deep_ep_peer_wait_seconds",
    "deep_ep_expert_tokens",
    "deep_ep_expert_imbalance_ratio",
]


def fetch(url):
    with urllib.request.urlopen(url, timeout=10) as reply:
        return {family.name: family for family in text_string_to_metric_families(reply.read().decode())}


def values(family, name, **labels):
    """Return the samples that have these labels, by rank."""
    return {
        int(s.labels["rank"]): s.value for s in family.samples if s.name == name and labels.items() <= s.labels.items()
    }


def be_measured(rank):
    """Make known calls, then stay until the test has read."""
    buffer = Buffer(rank.group, low_latency_mode=True, device="cpu")
    x = torch.randn(NUM_TOKENS, HIDDEN)
    topk_idx = torch.zeros(NUM_TOKENS, 1, dtype=torch.int64)  # all tokens of all ranks go to expert 0
    topk_idx[0] = NUM_EXPERTS - 1
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
    for _ in range(3):
        recv_x, _, _, _, handle, _ = buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=torch.ones(NUM_TOKENS, 1),
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        buffer.combine(recv_x, handle)
    buffer.dispatch(x, handle=handle)
    for _ in range(2):
        buffer.low_latency_dispatch(x.to(torch.bfloat16), topk_idx, NUM_TOKENS, NUM_EXPERTS, use_fp8=False)
    rank.meet("measured")
    rank.store.wait(["never"])  # stays until it is killed


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder for temporary files of this test alone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


@pytest.fixture
def job(folder):
    """Two ranks that were started with DEEP_EP_METRICS=1 and stay until they have been read."""
    with FreshRanks(2, be_measured, env={"DEEP_EP_METRICS": "1", "TMPDIR": str(folder)}) as ranks:
        ranks.wait_for("measured")
        yield ranks


def run_monitor(*arguments):
    return CliRunner().invoke(cli, ["monitor", *arguments])


def test_ranks_are_scraped_shown_and_gone(job, folder):
    processes = find_processes()
    assert {process.pid for process in processes} == set(job.pids())
    assert {process.address for process in processes} == {"127.0.0.1"}
    check_one_rank(processes[0])
    check_server(job, folder)

    result = run_monitor("--json")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert {(line["rank"], line["num_calls"]) for line in lines if line.get("operation") == "combine"} == {
        (0, 3),
        (1, 3),
    }
    by_rank = {line["rank"]: line for line in lines if "imbalance" in line}
    assert by_rank[0]["busiest_expert"] == 0
    assert by_rank[0]["imbalance"] == 3  # one of three experts has it all
    assert by_rank[1]["busiest_expert"] == NUM_EXPERTS - 1

    result = run_monitor("--once")
    assert result.exit_code == 0
    assert re.search(r"^ +0 +combine +3 ", result.stdout, re.MULTILINE)
    assert "\x1b" not in result.output

    job.kill(0, 1)
    assert find_processes() == []
    result = run_monitor("--once")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "DEEP_EP_METRICS=1" in result.stderr


def check_one_rank(process):
    families = fetch(f"http://127.0.0.1:{process.port}/metrics")
    assert sorted(families) == sorted(FAMILIES)
    times = families["deep_ep_call_seconds"]
    assert times.type == "histogram"
    (count,) = values(times, "deep_ep_call_seconds_count", operation="dispatch").values()
    buckets = [s.value for s in times.samples if s.name.endswith("bucket") and s.labels["operation"] == "dispatch"]
    assert (count, buckets[-1]) == (3, 3)
    assert buckets == sorted(buckets)


def check_server(job, folder):
    server = subprocess.Popen(
        [sys.executable, "-m", "deep_ep", "monitor", "--serve", "--port", "0"],
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = server.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        families = fetch(url)
    finally:
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=20)
    assert server.returncode == 0
    assert "Traceback" not in errors
    assert sorted(families) == sorted([*FAMILIES, "deep_ep_processes"])
    assert families["deep_ep_processes"].samples[0].value == 2
    pids = {int(s.labels["pid"]) for s in families["deep_ep_calls"].samples}
    assert pids == set(job.pids())

    calls = families["deep_ep_calls"]
    expected = {"get_dispatch_layout": 1, "dispatch": 3, "combine": 3, "cached_dispatch": 1, "low_latency_dispatch": 2}
    for operation, num_calls in expected.items():
        assert values(calls, "deep_ep_calls_total", operation=operation) == {0: num_calls, 1: num_calls}, operation
    # Rank 0 owns experts 0 to 2 and gets all tokens of both ranks but one each, rank 1 gets these two.
    num_rows = {0: 2 * (NUM_TOKENS - 1), 1: 2}
    moved = families["deep_ep_moved_bytes"]
    for operation, num_calls, row_bytes in (
        ("dispatch", 3, 4 * HIDDEN),
        ("combine", 3, 4 * HIDDEN),
        ("cached_dispatch", 1, 4 * HIDDEN),
        ("low_latency_dispatch", 2, 2 * HIDDEN),
    ):
        expected = {rank: num_calls * rows * row_bytes for rank, rows in num_rows.items()}
        assert values(moved, "deep_ep_moved_bytes_total", operation=operation) == expected, operation
    tokens = families["deep_ep_expert_tokens"]
    for expert, rank in ((0, 0), (NUM_EXPERTS - 1, 1)):
        assert values(tokens, "deep_ep_expert_tokens_total", expert=str(expert)) == {rank: 5 * num_rows[rank]}
    waits = families["deep_ep_peer_wait_seconds"]
    assert values(waits, "deep_ep_peer_wait_seconds_total", peer="0")[0] == 0


def serve_from_two_buffers(rank, folder):
    os.environ["TMPDIR"] = folder
    import tempfile

    tempfile.tempdir = None
    first, second = (Buffer(rank.group, device="cpu") for _ in range(2))
    place = metrics.serve(first)
    assert metrics.serve(first) == metrics.serve(second) == place
    with pytest.raises(ConfigError, match=rf"port must be 0 or {place[1]}"):
        metrics.serve(second, port=place[1] ^ 1)
    topk_idx = torch.randint(4, (8, 2))
    second.get_dispatch_layout(topk_idx, 4)
    info = fetch(f"http://127.0.0.1:{place[1]}/metrics")["deep_ep_buffer_info"]
    assert [sample.labels["buffer"] for sample in info.samples] == ["0", "1"]
    # Low-latency counts of 32 bits start over; what is served does not.
    counter = metrics.BufferMetrics(first, 7, torch.device("cpu"))
    rows = counter._count_expert_rows(4, 10)
    for total in (2**31 - 1, -(2**31) + 4, 6):
        rows.fill_(total)
        counter.fold()
    assert counter.expert_tokens[0] == 2**32 + 6
    first.destroy()
    second.destroy()
    del first, second
    assert fetch(f"http://127.0.0.1:{place[1]}/metrics")["deep_ep_buffer_info"].samples == []


def test_one_server_serves_all_buffers_of_a_process(tmp_path):
    with FreshRanks(1, serve_from_two_buffers, str(tmp_path)) as ranks:
        ranks.results()


def test_without_metrics_calls_are_as_they_were(pool):
    pool.run(1, check_untouched)


def check_untouched(rank):
    buffer = Buffer(rank.group, device="cpu")
    assert "run" not in vars(buffer.latency)
    assert buffer.count_expert_rows is None
    buffer.destroy()


def test_ports_are_told_to_this_user_alone(folder):
    path = metrics.folder_of_ranks()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="belongs to this user alone"):
        metrics.folder_of_ranks()
    path.rmdir()
    path.symlink_to(folder)
    with pytest.raises(ConfigError, match="belongs to this user alone"):
        metrics.folder_of_ranks()


def test_what_dead_processes_left_is_forgotten(folder):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = metrics.folder_of_ranks() / f"{ended.pid}.json"
    left.write_text(json.dumps({"pid": ended.pid, "address": "127.0.0.1", "port": 1}))
    (metrics.folder_of_ranks() / "torn.json").write_text('{"pid":')
    assert find_processes() == []
    assert not left.exists()


def test_a_process_that_does_not_answer_is_no_error():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        assert scrape(Process(1, "127.0.0.1", listening.getsockname()[1])) == []


def reading(calls, moved, waits, tokens):
    text = 'deep_ep_buffer_info{rank="1",buffer="0",num_ranks="2",device="cpu",pid="9"} 1\n'
    text += f'deep_ep_calls_total{{rank="1",buffer="0",operation="dispatch"}} {calls}\n'
    text += 'deep_ep_call_median_seconds{rank="1",buffer="0",operation="dispatch"} 2e-3\n'
    text += 'deep_ep_call_p99_seconds{rank="1",buffer="0",operation="dispatch"} 3e-3\n'
    text += f'deep_ep_moved_bytes_total{{rank="1",buffer="0",operation="dispatch"}} {moved}\n'
    text += f'deep_ep_peer_wait_seconds_total{{rank="1",buffer="0",peer="0"}} {waits}\n'
    for expert, count in tokens.items():
        text += f'deep_ep_expert_tokens_total{{rank="1",buffer="0",expert="{expert}"}} {count}\n'
    return read([(Process(9, "127.0.0.1", 1), list(text_string_to_metric_families(text)))])


def test_rates_are_between_two_readings():
    before, now = reading(10, 0, 1.0, {4: 100, 5: 0}), reading(30, 4e9, 1.5, {4: 110, 5: 30})
    (operation,) = operation_lines(now, before, 2.0)
    assert (operation.calls_per_s, operation.gb_per_s, operation.median_us) == (10, 2, 2000)
    (rank,) = rank_lines(now, before, 2.0)
    assert (rank.wait_share, rank.late_rank) == (0.25, 0)
    assert (rank.num_tokens, rank.busiest_expert, rank.imbalance) == (40, 5, 1.5)
    (rank,) = rank_lines(now, {}, 2.0)
    assert (rank.wait_share, rank.num_tokens, rank.busiest_expert) == (None, 140, 4)


def test_live_view_says_what_to_do_without_ranks(folder, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("deep_ep.monitor.command.time.sleep", interrupt)
    result = run_monitor()
    assert result.exit_code == 0
    assert "DEEP_EP_METRICS=1" in re.sub(r"\s+", " ", result.stdout)


def test_dashboard_asks_for_metrics_that_exist(tmp_path):
    path = tmp_path / "dashboard.json"
    result = run_monitor("--dashboard", str(path))
    assert (result.exit_code, result.stdout) == (0, "")
    queries = [t["expr"] for panel in json.loads(path.read_text())["panels"] for t in panel["targets"]]
    asked = set(re.findall(r"deep_ep_\w+", " ".join(queries)))
    served = {family + end for family in [*FAMILIES, "deep_ep_processes"] for end in ("", "_total", "_bucket")}
    assert asked <= served


def test_a_port_that_is_taken_is_code_2():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run_monitor("--serve", "--port", str(port))
    assert result.exit_code == 2
    assert f"--port {port} cannot be served" in result.stderr


@pytest.mark.parametrize("arguments", [["--interval", "0"], ["--port", "70000"]])
def test_wrong_usage_is_code_2(arguments):
    assert run_monitor(*arguments).exit_code == 2


def test_without_prometheus_client_there_is_one_sentence_and_the_remedy(monkeypatch):
    monkeypatch.setattr("deep_ep.extras.find_spec", lambda name: None if name == "prometheus_client" else name)
    result = run_monitor()
    assert result.exit_code == 2
    assert result.stderr == (
        "Error: this needs prometheus_client, which is not installed\nhint: pip install 'deep-ep[monitor]'\n"
    )
    with pytest.raises(MissingExtraError):
        metrics.serve(None)
