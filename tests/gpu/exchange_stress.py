"""Random exchanges on GPUs, every element compared; run by test_stress.py or by hand, one process per rank.

    python tests/gpu/exchange_stress.py --ranks 8 --exchanges 1000 --seed 1 [--load] [--staged]

Shapes, routing, data types and delays are drawn anew for each round, the same on all ranks, so that each rank can
tell what it must receive. With `--load`, a matrix product keeps the GPU busy on another stream. Without a GPU
the kernels are interpreted (set TRITON_INTERPRET=1, and ask for few tokens).
"""

import argparse
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src"), str(Path(__file__).resolve().parents[1] / "kernels")]


# Few enough that kernels are compiled once for each: hidden, dtype, topk, id dtype, scales, biases.
PROFILES = [
    (7, torch.float32, 3, torch.int64, 0, 1),
    (1024, torch.bfloat16, 8, torch.int64, 0, 0),
    (2880, torch.bfloat16, 4, torch.int32, 0, 2),
    (130, torch.float16, 2, torch.int64, 1, 0),
    (128, torch.bfloat16, 9, torch.int64, 5, 0),
    (1, torch.bfloat16, 1, torch.int32, 0, 0),
]


def draw_case(rng, num_ranks, num_max_tokens):
    hidden, dtype, topk, idx_dtype, num_scales, num_biases = rng.choice(PROFILES)
    num_experts = max(rng.choice([num_ranks, 2 * num_ranks, 2 * num_ranks + 1, 8 * num_ranks]), topk)
    choices = [0, 1, num_max_tokens // 10, num_max_tokens]
    return {
        "hidden": hidden,
        "dtype": dtype,
        "topk": topk,
        "experts": num_experts,
        "tokens": [rng.randint(0, rng.choice(choices)) for _ in range(num_ranks)],
        "num_sms": rng.choice([1, 2, 4, 7]),
        "idx_dtype": idx_dtype,
        "num_scales": num_scales,
        "seed": rng.randrange(1 << 30),
        "is_skewed": rng.random() < 0.2,
        "num_cached": rng.randint(0, 2),
        "has_worst": rng.random() < 0.2,
        "num_biases": num_biases,
    }


def make_inputs(case, src, device):
    generator = torch.Generator(device=device).manual_seed(case["seed"] + src)
    tokens, topk, experts = case["tokens"][src], case["topk"], case["experts"]
    x = torch.randn(tokens, case["hidden"], generator=generator, device=device).to(case["dtype"])
    scores = torch.rand(tokens, experts, generator=generator, device=device)
    if case["is_skewed"]:
        scores[:, :topk] += 1
    weights, idx = scores.topk(topk, dim=-1)
    idx = idx.masked_fill(torch.rand(tokens, topk, generator=generator, device=device) < 0.1, -1)
    scales = torch.rand(tokens, case["num_scales"], generator=generator, device=device)
    return x, idx.to(case["idx_dtype"]), weights.float(), scales


def owners(idx, num_experts, num_ranks):
    table = torch.cat(
        [torch.full((len(part),), r) for r, part in enumerate(torch.arange(num_experts).tensor_split(num_ranks))]
    )
    table = torch.cat([table, torch.tensor([-1])]).to(idx.device)
    return table[idx.long()]


def same(name, got, want, case):
    got_bytes, want_bytes = (t.reshape(-1).clone().view(torch.uint8) for t in (got, want))
    if got.shape != want.shape or got.dtype != want.dtype or not torch.equal(got_bytes, want_bytes):
        raise AssertionError(f"{name} is wrong: {tuple(got.shape)} {tuple(want.shape)} in {case}")


def exchange(engine, rank, num_ranks, case, device):
    from deep_ep.config import Config
    from deep_ep.engines.base import CachedDispatchRequest, CombineRequest, DispatchRequest

    inputs = [make_inputs(case, src, device) for src in range(num_ranks)]
    owner = [owners(idx, case["experts"], num_ranks) for _, idx, _, _ in inputs]
    goes = [torch.stack([(o == r).any(1) for r in range(num_ranks)], 1) for o in owner]
    x, idx, weights, scales = inputs[rank]
    scales = scales if case["num_scales"] else None
    config = Config(case["num_sms"])
    layout = engine.compute_layout(idx, case["experts"])
    same("is_token_in_rank", layout.is_token_in_rank, goes[rank], case)
    num_worst = max(sum(case["tokens"]), 1) if case["has_worst"] else 0
    out = engine.dispatch(
        DispatchRequest(
            x=x,
            scales=scales,
            topk_idx=idx,
            topk_weights=weights,
            layout=layout,
            expert_alignment=1,
            num_worst_tokens=num_worst,
            config=config,
        )
    )
    first = sum(len(part) for part in torch.arange(case["experts"]).tensor_split(num_ranks)[:rank])
    come = [goes[src][:, rank] for src in range(num_ranks)]
    want_x = torch.cat([inputs[src][0][come[src]] for src in range(num_ranks)])
    n = want_x.size(0)
    is_own = torch.cat([(owner[src] == rank)[come[src]] for src in range(num_ranks)])
    want_idx = torch.cat([inputs[src][1][come[src]] for src in range(num_ranks)])
    want_weights = torch.cat([inputs[src][2][come[src]] for src in range(num_ranks)])
    same("recv_x", out.x[:n], want_x, case)
    same("recv_topk_idx", out.topk_idx[:n], torch.where(is_own, want_idx - first, -1).to(idx.dtype), case)
    same("recv_topk_weights", out.topk_weights[:n], torch.where(is_own, want_weights, 0.0), case)
    want_src = torch.cat([mask.nonzero()[:, 0] for mask in come]).int()
    same("recv_src_idx", out.handle.recv_src_idx[:n], want_src, case)
    if num_worst:
        assert bool((out.topk_idx[n:] == -1).all()), f"unused rows are marked in {case}"
    else:
        assert out.x.size(0) == n, f"{out.x.size(0)} rows, want {n} in {case}"
        num_own = len(torch.arange(case["experts"]).tensor_split(num_ranks)[rank])
        want_counts = [int(sum((i == first + e).sum() for _, i, _, _ in inputs)) for e in range(num_own)]
        assert out.num_recv_tokens_per_expert == want_counts, f"expert counts in {case}"
    if scales is not None:
        same("recv_scales", out.scales[:n], torch.cat([inputs[s][3][come[s]] for s in range(num_ranks)]), case)
    for i in range(case["num_cached"]):
        again, _ = engine.dispatch_cached(
            CachedDispatchRequest(x=x * (i + 2), scales=None, handle=out.handle, config=config)
        )
        same("cached recv_x", again[:n], torch.cat([inputs[s][0][come[s]] * (i + 2) for s in range(num_ranks)]), case)
    biases = tuple(torch.randn_like(x) for _ in range(case["num_biases"]))
    # Rows come back scaled by their rank, so that an exchange of two ranks' rows would show.
    y, y_weights = engine.combine(
        CombineRequest(
            x=out.x * (rank + 1), topk_weights=out.topk_weights, biases=biases, handle=out.handle, config=config
        )
    )
    want_y = biases[0].float() if biases else torch.zeros_like(x, dtype=torch.float32)
    if len(biases) > 1:
        want_y = want_y + biases[1].float()
    for r in range(num_ranks):
        want_y = want_y + torch.where(goes[rank][:, r : r + 1], (x * (r + 1)).float(), 0.0)
    same("combined_x", y + 0, want_y.to(x.dtype) + 0, case)
    same("combined_topk_weights", y_weights, torch.where(idx >= 0, weights, 0.0), case)


def worker(rank, num_ranks, port, args):  # noqa: C901
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    if not has_gpu:
        torch.set_num_threads(1)
        import interpreter_fixes

        interpreter_fixes.install()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    from deep_ep.engines.gpu import GpuEngine
    from deep_ep.memory.rendezvous import Rendezvous

    engine = GpuEngine(Rendezvous(dist.group.WORLD), 1 << 20, args.timeout, device, use_peer_access=not args.staged)
    rng, own_rng = random.Random(args.seed), random.Random(rank)
    side = torch.cuda.Stream() if args.load else None
    a = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16) if args.load else None
    begin = time.monotonic()
    done = 0
    for done in range(1, args.exchanges + 1):
        if args.load:
            with torch.cuda.stream(side):
                for _ in range(2):
                    torch.mm(a, a)
        if own_rng.random() < 0.1:
            time.sleep(own_rng.random() * 0.005)
        exchange(engine, rank, num_ranks, draw_case(rng, num_ranks, args.tokens), device)
        if args.seconds and done % 20 == 0:
            # All ranks stop at the same exchange.
            late = torch.tensor([time.monotonic() - begin > args.seconds], dtype=torch.int32)
            dist.all_reduce(late)
            if late.item():
                break
    engine.check()
    if has_gpu:
        torch.cuda.synchronize()
    dist.barrier()
    engine.close()
    if rank == 0:
        took = time.monotonic() - begin
        print(f"{done} exchanges on {num_ranks} ranks: all elements right, {took:.1f} s", flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--exchanges", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after this time, however many were asked for")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=400, help="the most that a rank sends")
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--staged", action="store_true", help="go through pinned host memory")
    parser.add_argument("--timeout", type=float, default=20.0)
    arguments = parser.parse_args()
    mp.spawn(worker, args=(arguments.ranks, 20000 + os.getpid() % 20000, arguments), nprocs=arguments.ranks)
