"""Line plots over epochs, and the plot of quality against structure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from espalier.app.report import svg

WIDTH, HEIGHT = 400, 280
POINTS = 400
SLICES = 40


@dataclass(frozen=True)
class Line:
    """Values over epochs, of one run or, with a band from `low` to `high`, of several; `main` ones are drawn solid."""

    label: str
    colour: int
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    main: bool = True
    low: NDArray[np.float64] | None = None
    high: NDArray[np.float64] | None = None

    def between(self, low: float, high: float) -> Line:
        """The part of the line in that range."""
        return self.take(((self.x >= low) & (self.x <= high)).nonzero()[0])

    def take(self, kept: NDArray[np.intp]) -> Line:
        """The line of these points only."""
        band = [None if edge is None else edge[kept] for edge in (self.low, self.high)]
        return Line(self.label, self.colour, self.x[kept], self.y[kept], self.main, *band)

    @property
    def name(self) -> str:
        """What the line is called where its style cannot be seen."""
        return self.label if self.main else f"{self.label}, weights"


@dataclass(frozen=True)
class Point:
    """One run, or the paper's number, in the plot of quality against structure."""

    label: str
    colour: int
    x: float
    y: float
    hollow: bool


@dataclass(frozen=True)
class Style:
    """What is drawn beside the lines."""

    key: str
    title: str
    unit: str
    scale: Literal["linear", "log", "symlog"] = "linear"
    zoom: bool = False
    stages: tuple[float, ...] = ()
    frame: float = math.inf  # times the highest end of a line up to which a logarithmic axis reaches


def thin(x: NDArray[np.float64], y: NDArray[np.float64], most: int = POINTS) -> NDArray[np.intp]:
    """Which points to keep: the first, the last, and the lowest and highest of each stretch, so that spikes stay."""
    if len(x) <= most:
        return np.arange(len(x))
    keep = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), (most - 2) // 2):
        keep |= {int(part[y[part].argmin()]), int(part[y[part].argmax()])}
    return np.array(sorted(keep))


def lines(style: Style, data: Sequence[Line]) -> str:
    """The lines as an `<svg>` element, with their values on hover."""
    figure = svg.blank(WIDTH, HEIGHT)
    axes = _frame(figure.subplots(), style.title, "epoch")
    busy = len({line.label for line in data}) > 4
    for full in data:
        line = full.take(thin(full.x, full.y))
        if line.main and line.low is not None and line.high is not None:
            shade = svg.colour(line.colour)
            axes.fill_between(line.x, line.low, line.high, color=shade, alpha=0.18, linewidth=0, zorder=2)
        axes.plot(
            line.x,
            line.y,
            color=svg.colour(line.colour),
            linewidth=(1.2 if busy else 1.7) if line.main else 0.9,
            linestyle="-" if line.main else (0, (4, 2.5)),
            alpha=0.9 if line.main else 0.65,
            marker="o" if len(line.x) == 1 else "",
            markersize=4,
            zorder=3 if line.main else 2,
        )
    everything = np.concatenate([line.x for line in data])
    low, high = float(everything.min()), float(everything.max())
    axes.set_xlim(low - 0.02 * (high - low or 1), high + 0.02 * (high - low or 1))
    _limits(axes, style, data)
    for stage in style.stages:
        if low < stage < high:
            axes.axvline(stage, color=svg.INK, linewidth=0.7, linestyle=(0, (1, 2)), alpha=0.7, zorder=1)
    ends = "; ".join(f"{line.label}, ends at {_value(line, -1)}{style.unit}" for line in data if line.main)
    alt = f"Line plot: {style.title}, epochs {low:g} to {high:g}. {ends}."
    svg.settle(figure)
    return svg.inline(figure, style.key, alt, _slices(axes, style, data))


def points(key: str, x_label: str, y_label: str, data: Sequence[Point]) -> str:
    """The points as an `<svg>` element."""
    figure = svg.blank(WIDTH, HEIGHT)
    axes = _frame(figure.subplots(), y_label, x_label)
    for point in data:
        axes.plot(
            [point.x],
            [point.y],
            marker="D" if point.hollow else "o",
            markersize=7,
            markerfacecolor="none" if point.hollow else svg.colour(point.colour),
            markeredgecolor=svg.colour(point.colour),
            markeredgewidth=1.4,
            alpha=1 if point.hollow else 0.8,
        )
    axes.margins(0.12)
    svg.settle(figure)
    areas = []
    for point in data:
        x, y = axes.transData.transform((point.x, point.y))
        text = escape(f"{point.label}: {point.y:.4g} at {point.x:.4g} %")
        areas.append(f'<circle class="spot" cx="{x:.1f}" cy="{HEIGHT - y:.1f}" r="8"><title>{text}</title></circle>')
    told = "; ".join(f"{point.label}: {point.y:.4g} at {point.x:.4g} %" for point in data)
    return svg.inline(figure, key, f"Scatter plot: {y_label} against {x_label}. {told}.", "".join(areas))


def _frame(axes: Axes, title: str, x_label: str) -> Axes:
    """Light axes: the title stands where the eye looks first, not turned on its side."""
    _title(axes, title)
    axes.set_xlabel(x_label, fontsize=12, color=svg.INK)
    axes.patch.set_visible(False)
    axes.figure.patch.set_visible(False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(svg.GRID)
    axes.tick_params(which="both", colors=svg.INK, labelsize=12, length=0)
    axes.grid(axis="y", color=svg.GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}".replace("-", "−")))
    return axes


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=12.5, color=svg.INK, pad=8)


def _limits(axes: Axes, style: Style, data: Sequence[Line]) -> None:
    if style.scale == "symlog":
        # one flip is the least there is: below it the axis is straight, down to a zero that can be seen
        top = max(1.0, max(float(line.y.max()) for line in data))
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(-0.12, top * 1.5)
        axes.yaxis.set_major_locator(FixedLocator([0, *10.0 ** np.arange(0, np.floor(np.log10(top)) + 1)]))
        axes.yaxis.set_minor_locator(FixedLocator([]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        return
    if style.scale == "log":
        axes.set_yscale("log")
        low, high = _range(data)
        highest = style.frame * max(float(line.y[-1]) for line in data)
        if high > highest:  # the lines are to be told apart where they end
            axes.set_ylim(low / 1.1, highest)
            _title(axes, f"{style.title} · cut off above {highest:,.0f}")
            high = highest
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,), numticks=8))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if style.zoom:
        low, high = _range([line for line in data if line.main])
        # the dashed lines may widen the view, but not so far that the solid ones become flat
        low_all, high_all = _range(data)
        if high_all - low_all <= 3 * (high - low):
            low, high = low_all, high_all
        if style.scale == "log":
            axes.set_ylim(low / 1.03, high * 1.03)
            axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        else:
            room = 0.1 * (high - low) or max(abs(high) * 0.01, 1e-6)
            axes.set_ylim(low - room, high + room)


def _value(line: Line, at: int) -> str:
    if line.low is None or line.high is None:
        return f"{line.y[at]:.4g}"
    return f"{line.y[at]:.4g} ({line.low[at]:.4g} to {line.high[at]:.4g})"


def _range(data: Sequence[Line]) -> tuple[float, float]:
    values = np.concatenate([edge for line in data for edge in (line.y, line.low, line.high) if edge is not None])
    return float(values.min()), float(values.max())


def _slices(axes: Axes, style: Style, data: Sequence[Line]) -> str:
    """Upright strips over the plot; each says, on hover and without a script, what the lines are there."""
    looks = np.unique(np.concatenate([line.x for line in data]))
    if len(looks) > SLICES:
        looks = looks[np.linspace(0, len(looks) - 1, SLICES).round().astype(int)]
    left, right = axes.get_xlim()
    edges = [left, *((a + b) / 2 for a, b in pairwise(looks)), right]
    bottom, top = (axes.transAxes.transform((0, share))[1] for share in (0, 1))
    strips = []
    for centre, (start, stop) in zip(looks, pairwise(edges), strict=True):
        told = [f"epoch {centre:g}"]
        for line in data:
            if line.x[0] <= centre <= line.x[-1]:
                told.append(f"{line.name}: {_value(line, int(np.abs(line.x - centre).argmin()))}{style.unit}")
        x0, x1 = (axes.transData.transform((x, 1))[0] for x in (start, stop))
        strips.append(
            f'<rect class="strip" x="{x0:.1f}" y="{HEIGHT - top:.1f}" width="{x1 - x0:.1f}" '
            f'height="{top - bottom:.1f}"><title>{escape(chr(10).join(told))}</title></rect>'
        )
    return "".join(strips)
