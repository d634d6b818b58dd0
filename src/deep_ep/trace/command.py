"""`deep-ep trace`: a layer of experts on ranks of this host, recorded and drawn."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from torch import Tensor

from deep_ep import extras, trace
from deep_ep.bench.ranks import Rank, choose_device, run_ranks
from deep_ep.buffer import Buffer
from deep_ep.errors import ConfigError
from deep_ep.screen import Screen
from deep_ep.trace.timeline import Timeline

_POSITIVE = click.IntRange(min=1)


@dataclass(frozen=True)
class Demo:
    """What the demo does: all sizes are per rank, except the number of experts."""

    num_steps: int
    num_tokens: int
    hidden: int
    num_experts: int
    num_topk: int
    is_low_latency: bool
    slow_rank: int


@click.command
@click.option("--ranks", "num_ranks", type=_POSITIVE, default=2, show_default=True, help="Ranks to start on this host.")
@click.option(
    "--steps",
    "num_steps",
    type=_POSITIVE,
    default=4,
    show_default=True,
    help="Steps to record; the last two are drawn.",
)
@click.option("--tokens", "num_tokens", type=_POSITIVE, default=256, show_default=True, help="Tokens of each rank.")
@click.option("--hidden", type=_POSITIVE, default=512, show_default=True, help="Size of a token's row.")
@click.option("--experts", "num_experts", type=_POSITIVE, default=8, show_default=True, help="Experts on all ranks.")
@click.option("--topk", "num_topk", type=_POSITIVE, default=2, show_default=True, help="Experts of a token.")
@click.option("--low-latency", "is_low_latency", is_flag=True, help="Use low-latency calls with hooks.")
@click.option("--slow-rank", default=-1, help="A rank whose experts work three times, to see who waits for it.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where to run; without it on GPUs, if there are.")
@click.option(
    "--out",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Folder for trace.png and trace.json; without it the current one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print lines of JSON.")
def command(num_ranks: int, folder: Path, device: str | None, *, as_json: bool, **options: int) -> None:
    """Record a small layer of experts; draw which lanes overlap and which wait.

    Writes trace.png, and trace.json for https://ui.perfetto.dev. To record your own program, see `deep_ep.trace`.
    """
    extras.require("plot")
    screen = Screen()
    demo = Demo(**options)  # type: ignore[arg-type]
    if demo.num_topk > demo.num_experts:
        raise ConfigError(f"--topk must be at most --experts, got {demo.num_topk} and {demo.num_experts}")
    if demo.slow_rank >= num_ranks:
        raise ConfigError(f"--slow-rank must be one of the {num_ranks} ranks, got {demo.slow_rank}")
    folder.mkdir(parents=True, exist_ok=True)
    text = run_ranks(num_ranks, run_demo, demo, device=choose_device(device))[0]
    timeline = Timeline.from_json(text)
    timeline.save_chrome(folder / "trace.json")
    timeline.save_picture(folder / "trace.png")
    _print(screen, timeline, as_json=as_json)
    screen.note(f"{folder / 'trace.png'} shows the last steps; open {folder / 'trace.json'} in https://ui.perfetto.dev")


def run_demo(rank: Rank, demo: Demo) -> str:
    """Run and record the demo on one rank; return the timeline as JSON, on rank 0."""
    torch.manual_seed(rank.rank)
    buffer = Buffer(rank.group, low_latency_mode=demo.is_low_latency, device=rank.device)
    layer = _Layer(buffer, rank, demo)
    for _ in range(2):  # maps memory, compiles kernels
        layer.step(trace.Recorder(buffer))
    with trace.record(buffer) as recorder:
        for _ in range(demo.num_steps):
            with recorder.step():
                layer.step(recorder)
    timeline = recorder.timeline()
    buffer.destroy()
    return timeline.to_json() if rank.rank == 0 else ""


class _Layer:
    """Experts that do as much as those of a small model; a shared expert that needs no exchange."""

    def __init__(self, buffer: Buffer, rank: Rank, demo: Demo) -> None:
        self.buffer, self.demo = buffer, demo
        self.repeats = 3 if rank.rank == demo.slow_rank else 1
        shape = (demo.num_tokens, demo.hidden)
        self.x = torch.randn(shape, device=rank.device).to(torch.bfloat16)
        scores = torch.randn(demo.num_tokens, demo.num_experts, device=rank.device)
        self.topk_weights, self.topk_idx = scores.softmax(-1).topk(demo.num_topk)
        # Many CPUs have no arithmetic in bfloat16.
        dtype = torch.float32 if rank.device.type == "cpu" else torch.bfloat16
        self.weight = torch.randn(demo.hidden, demo.hidden, device=rank.device).to(dtype) / demo.hidden**0.5

    def step(self, recorder: trace.Recorder) -> None:
        """Run the layer once."""
        if self.demo.is_low_latency:
            self._low_latency_step(recorder)
        else:
            self._normal_step(recorder)

    def _normal_step(self, recorder: trace.Recorder) -> None:
        buffer = self.buffer
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(self.topk_idx, self.demo.num_experts)
        recv_x, _, _, _, handle, event = buffer.dispatch(
            self.x,
            topk_idx=self.topk_idx,
            topk_weights=self.topk_weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            async_finish=True,
        )
        with event, recorder.span("shared expert"):
            self._expert(self.x)
        assert isinstance(recv_x, Tensor)
        assert handle is not None
        with recorder.span("experts"):
            y = self._experts(recv_x)
        _, _, event = buffer.combine(y, handle, async_finish=True)
        with event, recorder.span("next layer"):
            self._expert(self.x)

    def _low_latency_step(self, recorder: trace.Recorder) -> None:
        buffer, demo = self.buffer, self.demo
        recv_x, _, handle, _, receive = buffer.low_latency_dispatch(
            self.x, self.topk_idx, demo.num_tokens, demo.num_experts, use_fp8=False, return_recv_hook=True
        )
        with recorder.span("shared expert"):
            self._expert(self.x)
        assert receive is not None
        receive()
        assert isinstance(recv_x, Tensor)
        with recorder.span("experts"):
            y = self._experts(recv_x)
        _, _, receive = buffer.low_latency_combine(y, self.topk_idx, self.topk_weights, handle, return_recv_hook=True)
        with recorder.span("next layer"):
            self._expert(self.x)
        assert receive is not None
        receive()

    def _experts(self, x: Tensor) -> Tensor:
        for _ in range(self.repeats):
            y = self._expert(x)
        return y

    def _expert(self, x: Tensor) -> Tensor:
        return torch.relu(x.to(self.weight.dtype) @ self.weight).to(x.dtype)


def _print(screen: Screen, timeline: Timeline, *, as_json: bool) -> None:
    summaries = timeline.summarise()
    if as_json:
        for summary in summaries:
            screen.record(asdict(summary))
        return
    rows = [
        (
            str(summary.rank),
            summary.lane,
            summary.name,
            str(summary.num_spans),
            f"{summary.total_us / summary.num_spans:,.0f}",
            f"{100 * summary.wait_us / max(summary.total_us, 1e-9):.0f} %",
            "" if summary.late_rank is None else f"rank {summary.late_rank}",
            f"{100 * summary.overlap_us / max(summary.total_us, 1e-9):.0f} %",
        )
        for summary in summaries
    ]
    columns = ["rank>", "lane", "what", "times>", "mean us>", "waited>", "longest for", "overlaps work>"]
    screen.table(columns, rows, title=f"{timeline.num_steps} steps on {timeline.device}")
