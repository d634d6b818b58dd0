"""The picture of a timeline: a row for every lane of every rank, and time to the right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deep_ep import extras
from deep_ep.trace.timeline import Kind, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NUM_STEPS = 2
_COLOURS = {
    "get_dispatch_layout": "#BBBBBB",
    "dispatch": "#4477AA",
    "cached_dispatch": "#66CCEE",
    "combine": "#228833",
    "low_latency_dispatch": "#4477AA",
    "low_latency_combine": "#228833",
}
_WORK_COLOURS = ("#EE6677", "#CCBB44", "#AA3377", "#EE8866", "#882255", "#DDAA33")
_WAIT = {"facecolor": "white", "edgecolor": "black", "hatch": "////", "linewidth": 0.6, "alpha": 0.75}
_MIN_SHARE_OF_LABEL = 0.011  # of the width, for each letter
_LANE_INCHES, _WIDTH_INCHES = 0.42, 13.0


def draw(timeline: Timeline, path: Path, steps: Sequence[int] | None) -> None:
    """Draw some steps of a timeline, the last two if none are named."""
    extras.require("plot")
    figure = make_figure(timeline, steps)
    figure.savefig(path, dpi=130, bbox_inches="tight")


def make_figure(timeline: Timeline, steps: Sequence[int] | None = None) -> Figure:
    """Return the picture as a figure of matplotlib."""
    from matplotlib.figure import Figure

    if steps is None:
        steps = range(max(timeline.num_steps - _NUM_STEPS, 0), timeline.num_steps)
    shown = timeline.of_steps(steps if timeline.num_steps else [-1])
    rows = [(rank, lane) for rank in range(shown.num_ranks) for lane in shown.lanes(rank)]
    figure = Figure(figsize=(_WIDTH_INCHES, 1.7 + _LANE_INCHES * max(len(rows), 1)), layout="constrained")
    axes = figure.add_subplot()
    if not rows:
        axes.text(0.5, 0.5, "nothing was recorded", ha="center", transform=axes.transAxes)
        return figure
    zero_us = min(span.start_us for span in shown.spans)
    width_us = max(span.end_us for span in shown.spans) - zero_us
    unit_us, unit = (1e3, "ms") if width_us > 3e3 else (1.0, "us")
    painter = _Painter(axes, zero_us, unit_us, width_us / unit_us)
    for span in sorted(shown.spans, key=lambda span: span.kind == Kind.WAIT):
        painter.paint(span, rows.index((span.rank, span.lane)))
    _set_axes(axes, rows)
    legend = painter.legend()
    axes.legend(handles=legend, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=5, frameon=False, fontsize=8)
    axes.set_xlabel(f"{unit}, {_describe(shown, list(steps))}")
    return figure


class _Painter:
    """Paints spans as boxes.

    Args:
        axes: Where to.
        zero_us: The time at the left.
        unit_us: The unit of the axis, in us.
        width: The width of the picture, in that unit.
    """

    def __init__(self, axes: Axes, zero_us: float, unit_us: float, width: float) -> None:
        self._axes, self._zero_us, self._unit_us, self._width = axes, zero_us, unit_us, width
        self._works: dict[str, str] = {}
        self._seen: dict[str, dict[str, Any]] = {}

    def paint(self, span: Span, row: int) -> None:
        """Paint a span in a row."""
        start, length = (span.start_us - self._zero_us) / self._unit_us, span.duration_us / self._unit_us
        if span.kind == Kind.STEP:
            self._axes.broken_barh([(start, length)], (row - 0.48, 0.96), facecolor="#F2F2F2", zorder=0)
            self._axes.vlines(start, row - 0.48, row + 0.48, colors="black", linewidth=0.8, zorder=1)
            return
        style, label = self._style_of(span)
        self._seen.setdefault(label, style)
        half = 0.2 if span.kind == Kind.IN_FLIGHT else 0.36
        # A call that lasts a moment still shows.
        self._axes.broken_barh([(start, max(length, self._width * 5e-4))], (row - half, 2 * half), zorder=2, **style)
        is_plain = span.kind == Kind.CALL and span.lane.startswith("host")  # there, waits would hide the word
        if len(label) * _MIN_SHARE_OF_LABEL * self._width < length and span.kind != Kind.WAIT and not is_plain:
            text = self._axes.text(start + length / 2, row, label, ha="center", va="center", fontsize=7, zorder=3)
            text.set_color("black" if span.kind == Kind.IN_FLIGHT else "white")

    def legend(self) -> list[Any]:
        """Return what to put into the legend."""
        from matplotlib.patches import Patch

        return [Patch(label=label, **style) for label, style in self._seen.items()]

    def _style_of(self, span: Span) -> tuple[dict[str, Any], str]:
        if span.kind == Kind.WAIT:
            return _WAIT, "waiting for a peer"
        if span.kind == Kind.WORK:
            colour = _WORK_COLOURS[len(self._works) % len(_WORK_COLOURS)]
            return {"facecolor": self._works.setdefault(span.name, colour)}, span.name
        operation = span.name.removesuffix("_send").removesuffix("_recv")
        colour = _COLOURS.get(operation, "#777777")
        if span.kind == Kind.IN_FLIGHT:
            return {"facecolor": "none", "edgecolor": colour, "linewidth": 1.2}, f"{span.name} in flight"
        return {"facecolor": colour}, operation


def _set_axes(axes: Axes, rows: list[tuple[int, str]]) -> None:
    axes.set_yticks(range(len(rows)), [f"rank {rank}   {lane}" for rank, lane in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.005)
    axes.tick_params(axis="y", length=0)
    for row in range(1, len(rows)):
        if rows[row][0] != rows[row - 1][0]:
            axes.axhline(row - 0.5, color="black", linewidth=0.8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.grid(axis="x", linewidth=0.3, color="#999999")
    axes.set_axisbelow(True)


def _describe(timeline: Timeline, steps: list[int]) -> str:
    which = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}" if steps else "no steps"
    error_us = max(timeline.clock_error_us, default=0.0)
    clocks = f"clocks agree within {error_us:.1f} us" if error_us else "one clock"
    return f"{which} of {timeline.num_ranks} ranks on {timeline.device}; {clocks}"
