"""Draws latency and bandwidth against size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deep_ep.bench.measure import Record

_CALLS = (
    ("dispatch", "tab:blue", "-", "dispatch"),
    ("combine", "tab:orange", "-", "combine"),
    ("torch_dispatch", "tab:blue", ":", "dispatch by torch.distributed"),
    ("torch_combine", "tab:orange", ":", "combine by torch.distributed"),
)
_MARKERS = "osD^v*"


def draw(records: list[Record], title: str, path: str) -> None:
    """Write a picture with a line for each call and each kind of case; the kind of file is that of its name.

    Args:
        records: What `measure` returned. Cases that differ in nothing but their size are joined by a line.
        title: What ran where.
        path: The file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.8), layout="constrained")
    FigureCanvasAgg(figure)
    latency, bandwidth = figure.subplots(1, 2)
    kinds = _kinds(records)
    for marker, (kind, group) in zip(_MARKERS * len(kinds), kinds.items(), strict=False):
        for call, colour, line, label in _CALLS:
            points = sorted((r["sent_bytes"], r[f"{call}_us"]) for r in group if f"{call}_us" in r)
            points = [point for point in points if point[0]]
            if not points:
                continue
            num_bytes, us = zip(*points, strict=True)
            fill = "white" if call.startswith("torch") else colour
            style = {"color": colour, "linestyle": line, "marker": marker, "markersize": 6, "markerfacecolor": fill}
            name = f"{label}, {kind}" if len(kinds) > 1 else label
            latency.plot(num_bytes, us, label=name, **style)
            bandwidth.plot(num_bytes, [b / t / 1e3 for b, t in points], label=name, **style)
    for axes, what in ((latency, "latency, us"), (bandwidth, "bandwidth, GB/s")):
        axes.set(xlabel="bytes that the busiest rank sends", ylabel=what, xscale="log", yscale="log")
        axes.xaxis.set_major_formatter(_format_bytes)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.grid(visible=True, which="both", alpha=0.2)
    figure.legend(*latency.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=130)


def _kinds(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Group records by all that is not a size."""
    kinds: dict[str, list[Record]] = {}
    for record in records:
        kind = f"{record['mode']}, top-{record['num_topk']} of {record['num_experts']}, {record['dtype']}"
        if record["routing"] != "uniform":
            kind += f", {record['routing']}"
        kinds.setdefault(kind, []).append(record)
    return kinds


def _format_bytes(value: Any, _: Any = None) -> str:
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:g} {unit}"
        value /= 1000
    return f"{value:g} GB"
