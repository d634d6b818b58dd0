"""`deep_ep.trace` and `deep-ep trace`: what is recorded, on which clock, and what is made of it."""

import json
import time

import pytest
import torch
from click.testing import CliRunner

from deep_ep import Buffer, metrics, trace
from deep_ep.cli import cli
from deep_ep.errors import ConfigError
from deep_ep.trace.clocks import DeviceClock, offset_to_first_rank
from deep_ep.trace.picture import make_figure
from deep_ep.trace.record import _spread_flights
from deep_ep.trace.timeline import Kind, Span, Timeline
from rank_pool import FreshRanks, PerRank

NUM_EXPERTS = 8
NORMAL = ["get_dispatch_layout", "dispatch", "combine"]
LOW_LATENCY = [f"low_latency_{call}_{half}" for call in ("dispatch", "combine") for half in ("send", "recv")]


def step(buffer, recorder):
    x, topk_idx = torch.randn(16, 64).to(torch.bfloat16), torch.randint(NUM_EXPERTS, (16, 2))
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
    layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
    recv_x, _, _, _, handle, _ = buffer.dispatch(x, **layout)
    with recorder.span("experts"):
        y = recv_x * 2
    buffer.combine(y, handle)
    recv_x, _, handle, _, hook = buffer.low_latency_dispatch(
        x, topk_idx, 16, NUM_EXPERTS, use_fp8=False, return_recv_hook=True
    )
    with recorder.span("shared expert"):
        torch.relu(x)
    hook()
    _, _, hook = buffer.low_latency_combine(recv_x, topk_idx, torch.rand(16, 2), handle, return_recv_hook=True)
    hook()


def record_steps(rank, num_steps, late_s):
    buffer = Buffer(rank.group, low_latency_mode=True, device="cpu")
    step(buffer, trace.Recorder(buffer))
    rank.meet("warm")
    with trace.record(buffer) as recorder:
        for _ in range(num_steps):
            if rank.rank == 1:
                time.sleep(late_s)  # is the one that is late
            with recorder.step():
                step(buffer, recorder)
    timeline = recorder.timeline()
    assert "run" not in vars(buffer.latency)
    assert "_wait_for_peers" not in vars(buffer.runtime.exchanger.control)
    step(buffer, recorder)
    assert recorder.timeline() == timeline, "what comes after the block is not recorded"
    buffer.destroy()
    return timeline.to_json()


@pytest.fixture(scope="module")
def timeline(pool):
    texts = pool.run(2, record_steps, 2, 0.3)
    assert texts[0] == texts[1]
    return Timeline.from_json(texts[0])


def test_every_call_of_every_step_is_there_on_every_rank(timeline):
    assert (timeline.num_ranks, timeline.num_steps, timeline.device) == (2, 2, "cpu")
    for rank in range(2):
        for number in range(2):
            mine = [span for span in timeline.spans if (span.rank, span.step) == (rank, number)]
            assert [span.name for span in mine if span.kind == Kind.CALL] == NORMAL + LOW_LATENCY
            assert [span.name for span in mine if span.kind == Kind.WORK] == ["experts", "shared expert"]
            flights = [span.name for span in mine if span.kind == Kind.IN_FLIGHT]
            assert flights == ["low_latency_dispatch", "low_latency_combine"]
            (whole,) = [span for span in mine if span.kind == Kind.STEP]
            assert all(whole.start_us <= span.start_us <= span.end_us <= whole.end_us for span in mine)


def test_waits_lie_within_calls_and_name_the_late_rank(timeline):
    waits = [span for span in timeline.spans if span.kind == Kind.WAIT]
    calls = [span for span in timeline.spans if span.kind == Kind.CALL]
    for wait in waits:
        assert any(
            call.rank == wait.rank and call.start_us <= wait.start_us and wait.end_us <= call.end_us for call in calls
        )
        assert wait.waits_us[wait.rank] == 0
    summary = next(s for s in timeline.summarise() if (s.rank, s.name) == (0, "dispatch"))
    assert summary.late_rank == 1
    assert 0 < summary.wait_us <= summary.total_us


def test_ranks_are_on_one_clock(timeline):
    # Rank 0 cannot have its rows before rank 1 has begun to send them.
    ends = [s.end_us for s in timeline.spans if (s.rank, s.kind, s.name) == (0, Kind.CALL, "dispatch")]
    starts = [s.start_us for s in timeline.spans if (s.rank, s.kind, s.name) == (1, Kind.CALL, "dispatch")]
    assert all(start < end for start, end in zip(starts, ends, strict=True))
    assert timeline.clock_error_us == (0.0, 0.0)


def test_chrome_trace_has_lanes_and_nested_slices(timeline, tmp_path):
    timeline.save_chrome(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    events = content["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(rank, lane): name for rank in range(2) for lane, name in enumerate(["host", "in flight"])}
    for place in names:
        open_slices = []
        slices = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == place]
        assert slices
        for event in slices:
            begin, end = event["ts"], event["ts"] + event["dur"]
            while open_slices and open_slices[-1] <= begin:
                open_slices.pop()
            # A slice lies within the one that it begins in, to a hundredth of a microsecond.
            assert not open_slices or end <= open_slices[-1] + 0.01
            open_slices.append(end)


def test_the_picture_has_a_row_for_every_lane_and_draws_the_last_steps(timeline, tmp_path):
    (axes,) = make_figure(timeline).axes
    assert [label.get_text().split("   ")[0] for label in axes.get_yticklabels()] == ["rank 0"] * 2 + ["rank 1"] * 2
    legend = {text.get_text() for text in axes.get_legend().get_texts()}
    assert {"dispatch", "combine", "experts", "waiting for a peer", "low_latency_dispatch in flight"} <= legend
    assert "steps 0 to 1 of 2 ranks on cpu" in axes.get_xlabel()
    timeline.save_picture(tmp_path / "trace.png", steps=[1])
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    make_figure(Timeline(num_ranks=2, device="cpu", spans=()))


def record_hosts(rank):
    buffer = Buffer(rank.group, low_latency_mode=True, device="cpu")
    metrics.serve(buffer)
    with trace.record(buffer) as recorder, recorder.step():
        step(buffer, recorder)
    timeline = recorder.timeline()
    waits = [span for span in timeline.spans if span.kind == Kind.WAIT]
    assert all(len(span.waits_us) == rank.num_ranks for span in waits)
    hosts = buffer.topology.hosts
    assert len(hosts) == 2
    for span in waits:
        awaited = {peer for peer, waited_us in enumerate(span.waits_us) if waited_us}
        assert any({span.rank} | awaited <= set(ranks) for ranks in hosts)
    buffer.destroy()
    return [[s.name for s in timeline.spans if (s.rank, s.kind) == (r, Kind.CALL)] for r in range(rank.num_ranks)]


def test_ranks_of_several_hosts_are_recorded(tmp_path):
    env = PerRank({"DEEP_EP_NODE_ID": host, "TMPDIR": str(tmp_path)} for host in ("a", "b", "b"))
    with FreshRanks(3, record_hosts, env=env) as ranks:
        assert ranks.results() == [[NORMAL + LOW_LATENCY] * 3] * 3


def test_a_timeline_before_the_end_is_refused(pool):
    assert pool.run(1, ask_too_early) == ["leave the block first"]


def ask_too_early(rank):
    with trace.record(rank.buffer()) as recorder, pytest.raises(ConfigError) as error:
        recorder.timeline()
    return str(error.value).rpartition(": ")[2]


def span(lane, kind, name, start_us, end_us, **fields):
    return Span(rank=0, lane=lane, kind=kind, name=name, step=0, start_us=start_us, end_us=end_us, **fields)


def test_exchanges_in_flight_at_once_have_lanes_of_their_own():
    times = [(0, 10), (5, 20), (10, 12), (15, 18)]
    flights = [span("in flight", Kind.IN_FLIGHT, "low_latency_dispatch", *time) for time in times]
    lanes = [flight.lane for flight in _spread_flights(flights)]
    assert lanes == ["in flight", "in flight 2", "in flight", "in flight"]


def test_overlap_is_counted_once():
    spans = (
        span("stream: communication", Kind.CALL, "dispatch", 10, 30),
        span("stream: default", Kind.WORK, "a", 0, 15),
        span("stream: default", Kind.WORK, "b", 12, 20),
        span("stream: default", Kind.WORK, "c", 28, 40),
        span("stream: communication", Kind.WORK, "d", 20, 28),
    )
    summaries = Timeline(num_ranks=1, device="cpu", spans=spans).summarise()
    assert {s.name: s.overlap_us for s in summaries}["dispatch"] == 12


def test_clocks_of_two_kernels_are_brought_together(monkeypatch):
    monkeypatch.setattr("deep_ep.trace.clocks.boot_id_words", lambda: [1, 2])
    now = [1000]
    difference = 123_456

    def clock():
        now[0] += 7
        return now[0]

    def all_gather(words):
        now[0] += 40  # the way there and back
        if len(words) == 2:
            return [[3, 4], list(words)]
        return [[clock() + difference], list(words)]

    offset = offset_to_first_rank(1, all_gather, clock)
    assert offset.low <= difference <= offset.high
    assert abs(offset.middle - difference) <= offset.error < 60
    assert offset_to_first_rank(0, lambda words: [list(words)] * 2, clock).error == 0


class Gpu:
    """A device whose clock starts elsewhere and runs slower than that of the host."""

    rate = 0.999

    def __init__(self):
        self.host_ns = 5_000_000

    def read_host(self):
        self.host_ns += 300
        return self.host_ns

    def new_event(self):
        gpu = self

        class Event:
            def record(self):
                gpu.host_ns += 1500
                self.host_ns = gpu.host_ns

            def query(self):
                gpu.host_ns += 2000
                return True

            def elapsed_time(self, other):
                return (other.host_ns - self.host_ns) * gpu.rate / 1e6

        return Event()


def test_events_of_a_gpu_come_onto_the_clock_of_the_host():
    gpu = Gpu()
    clock = DeviceClock(gpu.new_event, gpu.read_host)
    events = []
    for _ in range(3):
        anchor = clock.drop_anchor()
        gpu.host_ns += 20_000_000
        event = gpu.new_event()
        event.record()
        events.append((event, anchor))
    clock.stop()
    assert clock.error_ns < 3000
    for event, anchor in events:
        assert abs(clock.host_ns(event, anchor) - event.host_ns) <= clock.error_ns


def run_command(*arguments):
    return CliRunner().invoke(cli, ["trace", "--device", "cpu", "--tokens", "8", "--hidden", "32", *arguments])


@pytest.mark.parametrize("mode", [[], ["--low-latency"]], ids=["normal", "low-latency"])
def test_command_writes_a_picture_and_a_trace(mode, tmp_path):
    result = run_command("--steps", "2", "--out", str(tmp_path / "new"), "--json", *mode)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert {"experts", "shared expert"} < {line["name"] for line in lines}
    assert {line["rank"] for line in lines} == {0, 1}
    assert all(line["num_spans"] == 2 for line in lines)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["trace.json", "trace.png"]
    assert "ui.perfetto.dev" in result.stderr


def test_command_prints_a_table(tmp_path):
    result = run_command("--ranks", "1", "--steps", "1", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "overlaps work" in result.stdout
    assert "\x1b" not in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "0"], "--ranks"),
        (["--steps", "0"], "--steps"),
        (["--topk", "9"], "--topk must be at most --experts, got 9 and 8"),
        (["--slow-rank", "2"], "--slow-rank must be one of the 2 ranks, got 2"),
        (["--out", __file__], "--out"),
    ],
)
def test_wrong_usage_is_code_2(arguments, said, tmp_path):
    result = run_command(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_without_matplotlib_there_is_one_sentence_and_the_remedy(monkeypatch):
    monkeypatch.setattr("deep_ep.extras.find_spec", lambda name: None if name == "matplotlib" else name)
    result = run_command()
    assert result.exit_code == 2
    assert result.stderr == (
        "Error: this needs matplotlib, which is not installed\nhint: pip install 'deep-ep[plot]'\n"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_sentence_and_the_remedy():
    result = CliRunner().invoke(cli, ["trace", "--device", "cuda"])
    assert result.exit_code == 1
    assert "hint: --device cpu" in result.stderr
