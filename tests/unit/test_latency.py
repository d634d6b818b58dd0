"""What `buffer.latency` counts, with clocks and events that the test turns by hand."""

import contextlib
import logging
import time

import pytest
import torch

from deep_ep import latency
from deep_ep.errors import ConfigError
from deep_ep.latency import LatencyMonitor

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


class Clock:
    """Stands for the clock of the host: a call moves it."""

    def __init__(self, monkeypatch):
        self.now_ns = 0
        monkeypatch.setattr(latency, "perf_counter_ns", lambda: self.now_ns)

    def take_us(self, us):
        self.now_ns += int(us * 1000)


def test_the_first_call_is_kept_apart(monkeypatch):
    clock, monitor = Clock(monkeypatch), LatencyMonitor(0, 2, CPU)
    for us in (9000, *range(1, 101)):
        monitor.run("combine", clock.take_us, us)
    stats = monitor.snapshot()["combine"]
    assert (stats.num_calls, stats.num_timed, stats.sum_us) == (101, 101, 9000 + 5050)
    assert (stats.first_us, stats.last_us, stats.median_us, stats.p99_us) == (9000, 100, 51, 99)


def test_a_single_call_is_all_there_is(monkeypatch):
    clock, monitor = Clock(monkeypatch), LatencyMonitor(0, 2, CPU)
    monitor.run("dispatch", clock.take_us, 7)
    stats = monitor.snapshot()["dispatch"]
    assert (stats.first_us, stats.last_us, stats.median_us, stats.p99_us) == (7, 7, 7, 7)
    assert list(monitor.snapshot()) == ["dispatch"]


def test_old_times_make_room(monkeypatch):
    clock, monitor = Clock(monkeypatch), LatencyMonitor(0, 2, CPU)
    for us in (1, *[500] * latency.NUM_KEPT, *[3] * latency.NUM_KEPT):
        monitor.run("combine", clock.take_us, us)
    stats = monitor.snapshot()["combine"]
    assert (stats.num_calls, stats.median_us, stats.p99_us) == (1 + 2 * latency.NUM_KEPT, 3, 3)


def test_a_histogram_counts_every_time_once(monkeypatch):
    clock, monitor = Clock(monkeypatch), LatencyMonitor(0, 2, CPU)
    for us in (9000, 100, 101, 150, 10_000_000):
        monitor.run("combine", clock.take_us, us)
    counts = dict(zip((*latency.HISTOGRAM_BOUNDS_US, "more"), monitor.snapshot()["combine"].histogram, strict=True))
    assert {bound: count for bound, count in counts.items() if count} == {100: 1, 150: 2, 10_000: 1, "more": 1}


def test_observers_make_the_calls_while_they_are_there(monkeypatch):
    clock, monitor = Clock(monkeypatch), LatencyMonitor(0, 2, CPU)
    seen = []

    def observer(name):
        def observe(run, operation, call, *args):
            seen.append((name, operation))
            result = run(operation, call, *args)
            seen.append((name, result))
            return result

        return observe

    inner, outer = observer("inner"), observer("outer")
    monitor.add_observer(inner)
    monitor.add_observer(outer)
    assert monitor.run("combine", lambda us: clock.take_us(us) or us, 7) == 7
    assert seen == [("outer", "combine"), ("inner", "combine"), ("inner", 7), ("outer", 7)]
    monitor.remove_observer(inner)
    monitor.run("combine", clock.take_us, 8)
    assert len(seen) == 6
    monitor.remove_observer(outer)
    assert "run" not in vars(monitor)
    monitor.run("combine", clock.take_us, 9)
    assert (len(seen), monitor.snapshot()["combine"].num_calls) == (6, 3)


def test_a_call_that_raises_is_not_counted():
    monitor = LatencyMonitor(0, 2, CPU)
    with pytest.raises(ZeroDivisionError):
        monitor.run("combine", lambda: 1 // 0)
    assert monitor.snapshot() == {}
    monitor.run("combine", int)
    assert monitor.snapshot()["combine"].num_calls == 1


def test_a_warning_names_the_slowest_peer_and_comes_once_a_minute(monkeypatch, caplog):
    clock, waited_ns, now_s = Clock(monkeypatch), [0, 0, 0], [1000.0]
    monkeypatch.setattr(latency.time, "monotonic", lambda: now_s[0])
    monitor = LatencyMonitor(1, 3, CPU, waited_ns)
    monitor.set_threshold_us("combine", 500)

    def slow_call():
        waited_ns[2] += 800_000
        clock.take_us(900)

    with caplog.at_level(logging.WARNING, "deep_ep"):
        monitor.run("combine", slow_call)  # the first call is no surprise
        assert caplog.messages == []
        for _ in range(3):
            monitor.run("combine", slow_call)
        assert caplog.messages == ["rank 1: combine took 900 us, more than 500 us; it waited longest for rank 2"]
        now_s[0] += 61
        monitor.run("combine", slow_call)
        assert len(caplog.messages) == 2
        monitor.set_threshold_us("combine", None)
        now_s[0] += 61
        monitor.run("combine", slow_call)
        assert len(caplog.messages) == 2
    assert monitor.peer_waits_us() == [0, 0, 6 * 800]


def test_only_low_latency_calls_between_gpus_have_a_threshold_at_first(monkeypatch, caplog):
    clock, monitor = Clock(monkeypatch), LatencyMonitor(0, 2, CPU)
    for operation in latency.OPERATIONS:
        monitor.run(operation, clock.take_us, 10_000)
        monitor.run(operation, clock.take_us, 10_000)
    assert caplog.messages == []


@pytest.mark.parametrize(("operation", "threshold_us"), [("disptach", 1.0), ("dispatch", 0.0), ("dispatch", -1.0)])
def test_wrong_thresholds_are_refused(operation, threshold_us):
    with pytest.raises(ConfigError, match="must be"):
        LatencyMonitor(0, 2, CPU).set_threshold_us(operation, threshold_us)


def test_a_call_costs_little_host_time():
    monitor, num_calls = LatencyMonitor(0, 8, CPU, [0] * 8), 1000

    def seconds(step):
        start = time.perf_counter()
        for _ in range(num_calls):
            step()
        return time.perf_counter() - start

    def call():
        return None

    timed = min(seconds(lambda: monitor.run("combine", call)) for _ in range(20))
    plain = min(seconds(lambda: call()) for _ in range(20))
    assert (timed - plain) / num_calls < 10e-6  # measured: under 1 us


class Device:
    """Stands for a stream of a GPU: work that has been put there, and how far it has come."""

    def __init__(self, monkeypatch):
        self.now_ms, self.num_records, self.is_capturing, self.num_done = 0.0, 0, False, 0
        device = self

        class Event:
            def record(self):
                assert not device.is_capturing
                self.at_ms, self.number = device.now_ms, device.num_records
                device.num_records += 1

            def query(self):
                return self.number < device.num_done

            def elapsed_time(self, end):
                assert end.query(), "an event was looked at before it had happened"
                return end.at_ms - self.at_ms

        monkeypatch.setattr(latency, "_new_event", Event)
        monkeypatch.setattr(latency, "_is_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(latency, "apart_from_captures", contextlib.nullcontext)

    def work_us(self, us):
        self.now_ms += us / 1000


def test_device_times_are_read_when_the_device_is_done(monkeypatch):
    device, monitor = Device(monkeypatch), LatencyMonitor(0, 2, GPU)
    for us in (300, *[20] * 15, 40):
        monitor.run("low_latency_dispatch", device.work_us, us)
    assert monitor.snapshot() == {}
    device.num_done = 4
    assert monitor.snapshot()["low_latency_dispatch"].num_timed == 2
    device.num_done = 6
    stats = monitor.snapshot()["low_latency_dispatch"]
    assert (stats.num_calls, stats.num_timed) == (17, 3)  # calls 1, 9 and 17
    assert (stats.first_us, stats.median_us, stats.last_us) == pytest.approx((300, 40, 40))
    assert device.num_records == 6


def test_a_call_that_is_captured_is_not_timed(monkeypatch):
    device, monitor = Device(monkeypatch), LatencyMonitor(0, 2, GPU)
    device.is_capturing = True
    monitor.run("low_latency_combine", device.work_us, 10)
    assert device.num_records == 0
    assert monitor.wait_stats("low_latency_combine") is None
    device.is_capturing = False
    monitor.run("low_latency_combine", device.work_us, 10)
    assert device.num_records == 2


def test_low_latency_calls_between_gpus_warn_above_500_us(monkeypatch, caplog):
    device, monitor = Device(monkeypatch), LatencyMonitor(0, 2, GPU)
    for _ in range(17):
        monitor.run("low_latency_dispatch", device.work_us, 700)
        monitor.run("combine", device.work_us, 700)
    device.num_done = device.num_records
    with caplog.at_level(logging.WARNING, "deep_ep"):
        monitor.snapshot()
    assert caplog.messages == [
        "rank 0: low_latency_dispatch took 700 us, more than 500 us; no wait for a peer was seen"
    ]
