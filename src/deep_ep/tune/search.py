"""The search: one parameter at a time, each candidate beside the best so far, in turn, in the same minute.

A candidate is compared with the best so far by calls that take turns, so that whatever slows the machine slows both.
It is dropped after a quarter of the calls if it is clearly slower. It becomes the best only if it is faster by more
than the noise, on the mean of all cases, is slower on none, **and** everything that it returns is right. When a round
over all parameters has brought nothing, or time is up, the best is compared with the default once more, with more
calls; if it does not win again, the default stays.

Example: spin_us is 200 by default. 50 is faster by 6 %, so it is verified and becomes the best; 0 is slower than 50 by
20 % after a quarter of its calls and is dropped; at the end 50 against 200 is faster by 5 %, and 50 is kept.

What noise is, is measured first: the default against itself.

All ranks take the same decisions, as each time is that of the slowest rank and known to all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from deep_ep import tuned
from deep_ep.bench import oracle
from deep_ep.bench.case import Case
from deep_ep.bench.clock import time_calls, time_graphs
from deep_ep.bench.measure import time_sms
from deep_ep.bench.oracle import LowLatencyCalls, NormalCalls
from deep_ep.bench.ranks import Rank
from deep_ep.buffer import Buffer
from deep_ep.engines.low_latency_plans import LowLatencyTuning
from deep_ep.tuning import CpuTuning, GpuTuning

_LEAST_NOISE = 0.03
"""Differences of less than this part count as none, and less than twice that of the default and itself."""
_HOPELESS = 1.15
_MAX_ROUNDS = 3

Space = Mapping[str, Sequence[Any]]
SPACES: dict[type[Any], Space] = {
    CpuTuning: {"spin_us": (50.0, 0.0, 500.0, 2000.0)},
    GpuTuning: {
        "num_channels_per_peer": (4, 8, 2),
        "num_warps": (8, 32),
        "push_bytes": (16384, 65536),
        "copy_bytes": (32768, 131072),
        "unit_bytes": (458752, 1835008),
    },
    # Formats of the wire that are less precise than the default are left out.
    LowLatencyTuning: {"programs_per_sm": (2, 4), "num_warps": (8, 2), "wire_bits": (32,)},
}
"""What is tried of each kind of tuning, besides its defaults."""


SMS = (8, 12, 16, 20, 24, 32)
"""Numbers of SMs that are timed: how many a program gives is its own choice, so this is told and not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What became of one candidate.

    Attributes:
        parameters: What differs from the default.
        ratio: Its time over that of the best so far.
        verdict: "best", "slower", "noise" or "wrong".
        reason: Why, if it is wrong.
    """

    parameters: dict[str, Any]
    ratio: float
    verdict: str
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a search found.

    Attributes:
        tuning: The best; the default if nothing beats it.
        noise: The part by which times may differ without meaning.
        gain: The time of the default over that of the best.
        default_us: The times of the cases with the default, in their order.
        tuned_us: And with the best.
        trials: All candidates.
        is_complete: Whether all rounds were made before time was up.
        sms: On GPUs in normal mode: the geometric mean over the cases of the time in us of a dispatch and a combine,
            with the best, by number of SMs.
    """

    tuning: Any
    noise: float
    gain: float = 1.0
    default_us: list[float] = field(default_factory=list)
    tuned_us: list[float] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    is_complete: bool = True
    sms: dict[int, float] = field(default_factory=dict)


def kind_of(case: Case, device: str) -> type[Any]:
    """Return the kind of tuning that a case depends on."""
    if device == "cpu":
        return CpuTuning
    return GpuTuning if case.mode == "normal" else LowLatencyTuning


def search(
    rank: Rank, default: Any, space: Space, cases: Sequence[Case], num_iterations: int, budget_s: float
) -> Outcome:
    """Search a space; all ranks together.

    Args:
        rank: Where.
        default: The tuning to begin with.
        space: The values to try of each of its fields.
        cases: What is timed; one kind of tuning must hold for all of them.
        num_iterations: How often a call is timed in a comparison.
        budget_s: No candidate is begun after so many seconds.
    """
    end_s = time.monotonic() + budget_s
    failure = _failure(rank, default, cases)
    if failure is not None:
        raise oracle.VerificationError(f"the default is wrong, so there is nothing to tune: {failure}")
    noise = 2 * abs(_mean_ratio(_compare(rank, default, default, cases, num_iterations)) - 1)
    best, outcome = default, Outcome(tuning=default, noise=max(noise, _LEAST_NOISE))
    for _ in range(_MAX_ROUNDS):
        before = best
        for name, value in [(name, value) for name, values in space.items() for value in values]:
            candidate = replace(best, **{name: value})
            if candidate == default or any(trial.parameters == _changes(candidate) for trial in outcome.trials):
                continue
            if rank.slowest({"overdue_s": time.monotonic() - end_s})["overdue_s"] > 0:
                outcome.is_complete = False
                break
            trial = _try(rank, candidate, best, cases, num_iterations, outcome.noise)
            outcome.trials.append(trial)
            best = candidate if trial.verdict == "best" else best
        if best == before or not outcome.is_complete:
            break
    times = _compare(rank, best, default, cases, 3 * num_iterations)
    gain = 1 / _mean_ratio(times)
    if best != default and gain >= 1 + outcome.noise / 2 and _slowest_ratio(times) <= 1 + outcome.noise:
        outcome.tuning, outcome.gain = best, gain
    pairs = times if outcome.tuning != default else [(default_us, default_us) for _, default_us in times]
    outcome.tuned_us, outcome.default_us = [t for t, _ in pairs], [d for _, d in pairs]
    return outcome


def sweep_sms(rank: Rank, tuning: Any, cases: Sequence[Case], num_iterations: int) -> dict[int, float]:
    """Return how long a dispatch and a combine take under a tuning, by number of SMs; the mean over the cases."""
    with tuned.trying(tuning):
        buffer = oracle.make_buffer(rank, *cases)
    times: dict[int, float] = {}
    for num_sms in SMS:
        swept = [time_sms(rank, buffer, case, num_sms, num_iterations) for case in cases]
        logs = [math.log(line["dispatch_us"] + line["combine_us"]) for line in swept]
        times[num_sms] = round(math.exp(sum(logs) / len(logs)), 1)
    buffer.destroy()
    return times


def enough_sms(sms: Mapping[int, float], noise: float) -> int:
    """Return the least number of SMs that is as fast as any, but for noise.

    Example:
        >>> enough_sms({8: 130.0, 12: 102.0, 16: 100.0, 24: 101.0}, 0.03)
        12
    """
    fastest = min(sms.values())
    return min(num_sms for num_sms, us in sms.items() if us <= fastest * (1 + noise))


def _try(rank: Rank, candidate: Any, best: Any, cases: Sequence[Case], num_iterations: int, noise: float) -> Trial:
    """Compare a candidate with the best so far, and report on it."""
    trial = _judge(rank, candidate, best, cases, num_iterations, noise)
    if rank.rank == 0:
        rank.report(trial)
    return trial


def _judge(rank: Rank, candidate: Any, best: Any, cases: Sequence[Case], num_iterations: int, noise: float) -> Trial:
    parameters = _changes(candidate)
    times = _compare(rank, candidate, best, cases, num_iterations // 4)
    ratio = _mean_ratio(times)
    if ratio < _HOPELESS:
        times = _compare(rank, candidate, best, cases, num_iterations)
        ratio = _mean_ratio(times)
    if not ratio < 1 - noise or _slowest_ratio(times) > 1 + noise:
        verdict = "noise" if abs(ratio - 1) <= noise else "slower"
        return Trial(parameters=parameters, ratio=ratio, verdict=verdict)
    failure = _failure(rank, candidate, cases)
    if failure is not None:
        return Trial(parameters=parameters, ratio=ratio, verdict="wrong", reason=failure)
    return Trial(parameters=parameters, ratio=ratio, verdict="best")


def _changes(tuning: Any) -> dict[str, Any]:
    default = tuned.parameters_of(type(tuning)())
    return {name: value for name, value in tuned.parameters_of(tuning).items() if value != default[name]}


def _failure(rank: Rank, tuning: Any, cases: Sequence[Case]) -> str | None:
    """Return what is wrong with the results under a tuning."""
    with tuned.trying(tuning):
        buffer = oracle.make_buffer(rank, *cases)
    try:
        return oracle.first_failure(rank, buffer, cases)
    finally:
        buffer.destroy()


def _compare(
    rank: Rank, candidate: Any, other: Any, cases: Sequence[Case], num_iterations: int
) -> list[tuple[float, float]]:
    """Return the times of each case in us, under two tunings whose calls take turns."""
    buffers = []
    for tuning in (candidate, other):
        with tuned.trying(tuning):
            buffers.append(oracle.make_buffer(rank, *cases))
    times = []
    for case in cases:
        calls = {str(index): _call(rank, buffer, case) for index, buffer in enumerate(buffers)}
        is_graph = case.mode != "normal" and rank.device.type == "cuda"
        clock = time_graphs if is_graph else time_calls
        measured = clock(rank, calls, max(num_iterations, 4))
        times.append((measured["0"], measured["1"]))
    for buffer in buffers:
        buffer.destroy()
    return times


def _call(rank: Rank, buffer: Buffer, case: Case) -> Callable[[], Any]:
    """Return a dispatch and a combine of a case, as one call."""
    if case.mode == "normal":
        normal = NormalCalls(buffer, case, rank)
        recv_x, *_, handle, _ = normal.dispatch()
        y = _random_rows(recv_x)

        def exchange() -> None:
            normal.dispatch()
            normal.combine(y, handle)

        return exchange
    low_latency = LowLatencyCalls(buffer, case, rank)
    rows = _random_rows(low_latency.dispatch()[0])

    def pair() -> None:
        handle = low_latency.dispatch()[2]
        low_latency.combine(rows, handle)

    return pair


def _random_rows(recv_x: Any) -> torch.Tensor:
    rows = recv_x[0] if isinstance(recv_x, tuple) else recv_x
    return torch.randn(rows.shape, dtype=torch.bfloat16, device=rows.device)


def _mean_ratio(times: Sequence[tuple[float, float]]) -> float:
    """Return the geometric mean, over the cases, of the candidate's time over the other's."""
    return math.exp(sum(math.log(candidate / other) for candidate, other in times) / len(times))


def _slowest_ratio(times: Sequence[tuple[float, float]]) -> float:
    return max(candidate / other for candidate, other in times)
