"""A matplotlib figure as SVG that belongs to the page: its colours, its font, and ids of its own."""

from __future__ import annotations

import io
import re
from html import escape

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

INK = "#fd0001"
GRID = "#fd0002"
SERIES = 8

_VARIABLES = {INK: "var(--soft)", GRID: "var(--grid)"} | {f"#fe00{k:02x}": f"var(--s{k})" for k in range(SERIES)}

_DIGITS = re.compile(r"-?\d+\.\d{2,}")


def colour(index: int) -> str:
    """The placeholder for the page's colour of that number; after the last they begin again."""
    return f"#fe00{index % SERIES:02x}"


def blank(width: float, height: float) -> Figure:
    """A figure whose points are the SVG's units."""
    # by hand and not by pyplot, so that no backend is chosen and no figure is kept
    return Figure(figsize=(width / 72, height / 72), dpi=72)


def settle(figure: Figure) -> None:
    """Lay the figure out now and for good, so that what is laid over it fits."""
    figure.tight_layout(pad=0.5)


def inline(figure: Figure, prefix: str, alt: str, overlay: str) -> str:
    """The figure as an `<svg>` element, with more SVG laid over it."""
    stream = io.StringIO()
    # text as text; and the same page from the same runs
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None})  # type: ignore[no-untyped-call]
    drawing = stream.getvalue()
    body = drawing[drawing.index(">", drawing.index("<svg")) + 1 : drawing.rindex("</svg>")]
    # the metadata names addresses; nothing on the page shall look like one
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    # a tenth of a unit is less than a pixel, and more would be half of the page; texts keep their digits
    body = re.sub(r' (?:d|x|y)="[^"]*"', lambda found: _DIGITS.sub(_tenth, found[0]), body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    body = _own_ids(body, prefix)
    for placeholder, variable in _VARIABLES.items():
        body = body.replace(placeholder, variable)
    width, height = figure.get_size_inches() * 72
    return (
        f'<svg class="plot" viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(alt)}">'
        f"{body}{overlay}</svg>"
    )


def _tenth(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}".removesuffix(".0")


def _own_ids(body: str, prefix: str) -> str:
    """Ids that no other figure of the page has; those that nothing refers to go."""
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', body))
    body = re.sub(r' id="([^"]*)"', lambda found: f' id="{prefix}-{found[1]}"' if found[1] in used else "", body)
    return re.sub(r'(url\(|href=")#', rf"\1#{prefix}-", body)
