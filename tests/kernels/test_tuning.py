"""How calls are divided among programs, and that a new division reaches the next launch."""

import dataclasses

import pytest
import torch

from deep_ep.tuning import GpuTuning, split_programs

pytest.importorskip("triton")


class OneRank:
    rank, num_ranks = 0, 2

    @staticmethod
    def all_gather(words):
        return [list(words), list(words)]


@pytest.mark.parametrize("num_sms", [1, 2, 3, 20, 24, 132])
@pytest.mark.parametrize("num_ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("num_channels", [0, 1, 10, 1000])
def test_programs_stay_within_the_bound_and_all_roles_are_filled(num_sms, num_ranks, num_channels):
    num_programs, num_senders, first_receiver = split_programs(num_sms, num_ranks, num_channels)
    assert num_programs == num_sms
    assert 0 <= first_receiver < num_programs
    assert num_senders >= (num_ranks > 1)
    # Programs that send come first; unless there is only one, none of them receives too.
    assert num_senders == first_receiver or num_programs == 1


def test_more_channels_per_peer_are_more_senders():
    assert [split_programs(24, 3, n)[1] for n in (1, 2, 5)] == [2, 4, 10]


def test_a_new_tuning_reaches_the_next_plan(monkeypatch):
    from deep_ep.engines import gpu

    monkeypatch.setattr(gpu, "StagedMemory", lambda num_bytes, *_: FakeMemory(num_bytes))
    engine = gpu.GpuEngine(OneRank, 1 << 20, 1.0, torch.device("cpu"))
    monkeypatch.setattr(engine, "_is_interpreted", True)
    launched = []
    engine._running().launch = lambda _, num_programs, arguments, *__: launched.append((num_programs, arguments[-3]))
    from deep_ep.config import Config
    from deep_ep.engines.base import CachedDispatchRequest, Handle

    zeros = torch.zeros(2, 2, dtype=torch.int32)
    handle = Handle(zeros, zeros, zeros, zeros[0], zeros.bool(), zeros)
    request = CachedDispatchRequest(x=torch.zeros(2, 64), scales=None, handle=handle, config=Config(24))
    engine.dispatch_cached(request)
    engine.tuning = dataclasses.replace(GpuTuning(), num_channels_per_peer=3)
    engine.dispatch_cached(request)
    engine.dispatch_cached(dataclasses.replace(request, config=Config(12)))
    assert launched == [(24, 8), (24, 3), (12, 3)]


class FakeMemory:
    def __init__(self, num_bytes):
        self.num_bytes, self.table = num_bytes, torch.zeros(2, dtype=torch.int64)

    def close(self):
        pass
