"""What each rank of `two_hosts.py` runs: scenarios between two hosts that share nothing but a network."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "ranks")]

from test_hosts import BUFFERS as NORMAL_BUFFERS
from test_hosts import check_results, run_exchange

from deep_ep import Buffer
from deep_ep.errors import DeepEPError
from low_latency_cases import FORMATS, Case, run_round
from rank_pool import _dumps
from strategies import ROUTINGS, Exchange


class Rank:
    """This rank, as the rank tests know it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.num_ranks, self.group = dist.get_rank(), dist.get_world_size(), group


def check(rank, args):
    """Compare normal and low-latency mode with their specifications."""
    buffer = Buffer(rank.group, low_latency_mode=True)
    names = ["AB"[host] for host in buffer.topology.host_of]
    assert buffer.topology.num_hosts == 2, buffer.topology
    hosts = "".join(names)
    NORMAL_BUFFERS[hosts, id(rank.group)] = buffer
    num_tokens = (33, 1, 0, 20, 7, 64, 12, 5)[: rank.num_ranks]
    exchanges = [
        Exchange(
            num_tokens=num_tokens, hidden=72, num_topk=4, num_experts=11, routing=routing, num_biases=i % 3, seed=i
        )
        for i, routing in enumerate(ROUTINGS)
    ]
    exchanges.append(Exchange(num_tokens=(300,) * rank.num_ranks, hidden=2048, num_topk=3, num_experts=16))
    exchanges.append(Exchange(num_tokens=num_tokens, kind="fp8 column-major scales", hidden=513, num_spare_tokens=5))
    folder = Path(os.environ["TWO_HOSTS_FOLDER"])
    for number, exchange in enumerate(exchanges):
        path = folder / f"{number}.{rank.rank}.pickle"
        path.write_bytes(_dumps(run_exchange(rank, hosts, exchange, True)))
        dist.barrier()
        if rank.rank == 0:
            paths = [folder / f"{number}.{peer}.pickle" for peer in range(rank.num_ranks)]
            check_results(hosts, exchange, [pickle.loads(path.read_bytes()) for path in paths], True)
    for seed, row_format in enumerate(FORMATS):
        for split in (False, True):
            case = Case(16, 256, 3, 9, row_format, split=split, has_empty_rank=split)
            run_round(buffer._low_latency, case, rank.rank, rank.num_ranks, seed, torch.device("cpu"))
    return {"num_exchanges": len(exchanges), "num_rounds": 2 * len(FORMATS), "hosts": buffer.topology.hosts}


def measure(rank, args):
    """Count the bytes on the wire, and the time, of dispatch, combine and a flat all_to_all of the same rows."""
    num_tokens, hidden, num_topk, num_experts, num_calls = 1024, 4096, 8, 64, 9
    buffer = Buffer(rank.group)
    topology, host = buffer.topology, buffer.topology.host
    generator = torch.Generator().manual_seed(rank.rank)
    x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    idx = scores.argsort(1)[:, :num_topk].contiguous()
    weights = torch.rand(num_tokens, num_topk, generator=generator)
    per_rank, per_host, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, num_experts)

    def dispatch():
        return buffer.dispatch(x, None, per_rank, per_host, in_rank, per_expert, idx, weights)

    recv_x, _, recv_weights, _, handle, _ = dispatch()
    away = [r for r in range(rank.num_ranks) if topology.host_of[r] != host]
    rows = torch.cat([x[in_rank[:, r]] for r in range(rank.num_ranks)])
    sent = per_rank.tolist()
    got = [0] * rank.num_ranks
    counts = [torch.zeros(rank.num_ranks, dtype=torch.int64) for _ in range(rank.num_ranks)]
    dist.all_gather(counts, torch.tensor(sent))
    got = [int(line[rank.rank]) for line in counts]
    flat_out = torch.empty(sum(got), hidden, dtype=x.dtype)
    flat = [part.view(torch.int32) for part in (flat_out, rows)]
    is_away = [r if r in away else -1 for r in range(rank.num_ranks)]
    calls = {
        "dispatch": dispatch,
        "cached dispatch": lambda: buffer.dispatch(x, handle=handle),
        "combine": lambda: buffer.combine(recv_x, handle, topk_weights=recv_weights),
        "flat all_to_all": lambda: dist.all_to_all_single(*flat, got, sent),
    }
    crossing = sum(int(per_host[h]) for h in range(topology.num_hosts) if h != host)
    flat_crossing = sum(sent[r] for r in is_away if r >= 0)
    result = {
        "tokens_to_other_hosts": crossing,
        "tokens_to_other_ranks_of_other_hosts": flat_crossing,
        "row_bytes": hidden * 2,
        "shape": [num_tokens, hidden, num_topk, num_experts],
    }
    interface = Path("/sys/class/net") / os.environ["GLOO_SOCKET_IFNAME"] / "statistics"
    for name, call in calls.items():
        call()
        dist.barrier()
        before = int((interface / "tx_bytes").read_text())
        times_s = []
        for _ in range(num_calls):
            start = time.monotonic()
            call()
            times_s.append(time.monotonic() - start)
        dist.barrier()
        after = int((interface / "tx_bytes").read_text())
        result[name] = {"host_tx_bytes": (after - before) / num_calls, "s": median(times_s)}
    return result


def suffer(rank, args):
    """Exchange until something happens; tell what was raised, and when."""
    timeout_s = float(args[0])
    buffer = Buffer(rank.group, timeout_s=timeout_s)
    x = torch.randn(256, 1024).bfloat16()
    idx = torch.stack([torch.randperm(16)[:4] for _ in range(256)])
    weights = torch.rand(256, 4)
    folder, num_calls = Path(os.environ["TWO_HOSTS_FOLDER"]), 0
    while True:
        try:
            per_rank, per_host, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 16)
            recv_x, _, _, _, handle, _ = buffer.dispatch(x, None, per_rank, per_host, in_rank, per_expert, idx, weights)
            buffer.combine(recv_x, handle)
        except DeepEPError as error:
            raised_s = time.monotonic()
            first = {"kind": type(error).__name__, "message": str(error), "at_s": raised_s}
            try:
                buffer.dispatch(x, handle=handle)
            except DeepEPError as again:
                first["again"] = f"{type(again).__name__}: {again}"
            first["again_s"] = time.monotonic() - raised_s
            buffer.destroy()
            return first
        num_calls += 1
        if num_calls == 20:
            (folder / f"{rank.rank}.ready").touch()


def main() -> None:
    scenario, *args = sys.argv[1:]
    folder = Path(os.environ["TWO_HOSTS_FOLDER"])
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=rank == 0, timeout=timedelta(seconds=60)
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=120))
    result = {"check": check, "measure": measure, "suffer": suffer}[scenario](Rank(dist.group.WORLD), args)
    partial = folder / f"{rank}.partial"
    partial.write_text(json.dumps(result))
    partial.rename(folder / f"{rank}.json")
    if scenario != "suffer":
        dist.barrier()
    else:
        # Rank 0 has the store of the world: it goes last.
        deadline = time.monotonic() + 30
        while rank == 0 and time.monotonic() < deadline and not (folder / "end").exists():
            time.sleep(0.05)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
