"""The figures of the documentation, drawn from the library's own layouts and timelines.

python docs/figures/draw.py FOLDER    writes them as SVG
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deep_ep.layout import ControlLayout, DispatchLayout
from deep_ep.trace.picture import make_figure
from deep_ep.trace.timeline import Timeline

HERE = Path(__file__).parent
COLOURS = ("#4477AA", "#EE6677")
GREY = "#DDDDDD"


def draw_all() -> dict[str, str]:
    """Return every figure as SVG, by file name."""
    timeline = Timeline.from_json((HERE / "timeline.json").read_text())
    figures = {
        "routing.svg": routing(),
        "layout.svg": layout(),
        "protocol.svg": protocol(),
        "timeline.svg": make_figure(timeline),
    }
    # The same file for the same figure.
    with rc_context({"svg.hashsalt": "deep_ep", "svg.fonttype": "none"}):
        return {name: _to_svg(figure) for name, figure in figures.items()}


def routing() -> Figure:
    """Draw where six tokens of two ranks go, with four experts and top-2, and the order in which they arrive."""
    topk_idx = {0: [(0, 1), (1, 2), (3, 0)], 1: [(2, 3), (0, 3), (2, 2)]}
    figure, axes = _canvas(8, 4.2)
    arrivals: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    for src, tokens in topk_idx.items():
        for token, experts in enumerate(tokens):
            for dst in sorted({expert // 2 for expert in experts}):
                arrivals[dst].append((src, token))
    place: dict[tuple[int, int], tuple[float, float]] = {}
    for src, tokens in topk_idx.items():
        axes.text(0.1, -4.2 * src + 0.7, f"rank {src}: tokens and their experts", fontweight="bold")
        for token, experts in enumerate(tokens):
            y = -4.2 * src - token
            _box(axes, 0.1, y, 2.6, COLOURS[src], f"token {token} → experts {experts[0]}, {experts[1]}")
            place[src, token] = (2.7, y)
    for dst, rows in arrivals.items():
        axes.text(6.0, -4.9 * dst + 1.0, f"rank {dst}: experts {2 * dst} and {2 * dst + 1} get", fontweight="bold")
        for row, (src, token) in enumerate(rows):
            y = -4.9 * dst + 0.3 - 0.85 * row
            _box(axes, 6.0, y, 3.2, COLOURS[src], f"row {row}: token {token} of rank {src}", height=0.6)
            axes.annotate(
                "", (5.95, y), place[src, token], arrowprops={"arrowstyle": "->", "color": COLOURS[src], "alpha": 0.7}
            )
    axes.set_xlim(0, 9.4)
    axes.set_ylim(-8.6, 1.7)
    return figure


def layout() -> Figure:
    """Draw the control block of a rank, and an extent with three rows, with their byte offsets."""
    figure, axes = _canvas(8, 3.0)
    area = ControlLayout.area(1) * 8 - ControlLayout.area(0) * 8
    first = ControlLayout.area(0) * 8
    control = [
        ("STEP", ControlLayout.STEP * 8),
        ("WRITTEN, FAILED", ControlLayout.WRITTEN * 8),
        ("integers, even steps", first),
        ("integers, odd steps", first + area),
    ]
    axes.text(0, 1.5, "control block of a rank: only it writes", fontweight="bold")
    _strip(axes, 0.9, [*control, ("", ControlLayout.NUM_BYTES)])
    rows = DispatchLayout(num_rows=3, row_bytes=6, scale_row_bytes=4, num_topk=2, topk_idx_bytes=8, has_src_idx=True)
    names = sorted((getattr(rows, name), name) for name in rows.__slots__ if name != "num_bytes")
    sections = [(name, begin) for begin, name in names]
    axes.text(0, -0.4, "an extent of a receiver: senders write their rows where they belong", fontweight="bold")
    _strip(axes, -1.0, [*sections, ("", rows.num_bytes)])
    axes.set_xlim(-0.1, 10.1)
    axes.set_ylim(-2.0, 2.0)
    return figure


def protocol() -> Figure:
    """Draw one step of two ranks: write, set the signal, wait, read."""
    figure, axes = _canvas(8, 2.6)
    deeds = [
        (0, 0.0, 1.6, COLOURS[0], "write (7, 1)\nto area 1"),
        (0, 1.6, 1.2, "#228833", "STEP := 5"),
        (0, 2.8, 3.4, "white", "wait until STEP of rank 1 is 5"),
        (0, 6.2, 1.8, COLOURS[0], "read (3, 0)"),
        (1, 2.4, 1.6, COLOURS[1], "write (3, 0)\nto area 1"),
        (1, 4.0, 1.2, "#228833", "STEP := 5"),
        (1, 5.2, 1.8, COLOURS[1], "read (7, 1)"),
    ]
    for rank, start, length, colour, text in deeds:
        y = -1.3 * rank
        hatch = "///" if colour == "white" else None
        axes.broken_barh([(start, length)], (y - 0.35, 0.7), facecolor=colour, edgecolor="black", hatch=hatch)
        style = {"color": "black", "backgroundcolor": "white"} if colour == "white" else {"color": "white"}
        axes.text(start + length / 2, y, text, ha="center", va="center", fontsize=8, **style)
    for start, end in (((2.8, -0.35), (5.2, -0.95)), ((5.2, -0.95), (6.2, -0.35))):
        axes.annotate("", end, start, arrowprops={"arrowstyle": "->"})
    for rank in range(2):
        axes.text(-0.2, -1.3 * rank, f"rank {rank}", ha="right", va="center")
    axes.set_xlim(-1.1, 8.2)
    axes.set_ylim(-1.9, 0.6)
    return figure


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    return figure, axes


def _box(axes: Axes, x: float, y: float, width: float, colour: str, text: str, height: float = 0.7) -> None:
    axes.broken_barh([(x, width)], (y - height / 2, height), facecolor=colour)
    axes.text(x + width / 2, y, text, ha="center", va="center", color="white", fontsize=9)


def _strip(axes: Axes, y: float, sections: list[tuple[str, int]]) -> None:
    """Draw sections as boxes of equal width, with the byte that each begins at."""
    width = 10 / (len(sections) - 1)
    for index, (name, begin) in enumerate(sections):
        if name:
            axes.broken_barh([(index * width, width)], (y - 0.3, 0.6), facecolor=GREY, edgecolor="black")
            axes.text((index + 0.5) * width, y, name, ha="center", va="center", fontsize=9)
        axes.text(index * width, y - 0.45, f"{begin:,}", ha="center", va="top", fontsize=8)


def _to_svg(figure: Figure) -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


if __name__ == "__main__":
    for file_name, svg in draw_all().items():
        (Path(sys.argv[1]) / file_name).write_text(svg)
