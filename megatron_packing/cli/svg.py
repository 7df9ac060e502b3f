"""How is a picture drawn without a library, for a page that refers to nothing outside itself? As plain SVG text.

Coordinates are pixels from the upper left corner. Colours are classes that the page's style sheet defines, so that one
page serves light and dark screens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A picture's plot area: data from `low` to `high` upwards between `top` and `bottom`."""

    left: float = 64
    top: float = 12
    width: float = 820
    height: float = 220
    low: float = 0.0
    high: float = 1.0

    @property
    def bottom(self) -> float:
        """Where `low` is."""
        return self.top + self.height

    def y(self, value: float) -> float:
        """Where a value is."""
        return self.bottom - (value - self.low) / (self.high - self.low) * self.height

    def x(self, share: float) -> float:
        """Where a share of the width is, 0 at the left."""
        return self.left + share * self.width


def picture(parts: Iterable[str], *, width: float, height: float, label: str) -> str:
    """An `svg` element that shrinks with the page; `label` is what a screen reader says."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" style="max-width:{width:g}px" role="img" '
        f'aria-label="{escape(label, quote=True)}">{"".join(parts)}</svg>'
    )


def box(x: float, y: float, width: float, height: float, style: str, tip: str = "") -> str:
    """A rectangle; `tip` is shown under the mouse."""
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<rect class="{style}" x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" '
        f'height="{max(height, 0):.2f}">{inside}</rect>'
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", style: str = "") -> str:
    """Words, whose base line starts, is centred or ends (`anchor`: start, middle, end) at a point."""
    return f'<text class="{style}" x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(points: Sequence[tuple[float, float]], style: str, tip: str = "") -> str:
    """A line through points."""
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
    return f'<polyline class="line {style}" points="{path}">{inside}</polyline>'


def y_axis(frame: Frame, ticks: Sequence[float], form: str) -> str:
    """Lines across the plot area with their values at the left."""
    parts = []
    for tick in ticks:
        y = frame.y(tick)
        parts.append(line([(frame.left, y), (frame.left + frame.width, y)], "grid"))
        parts.append(text(frame.left - 6, y + 4, f"{tick:{form}}", anchor="end"))
    return "".join(parts)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from `low` to `high`, at most `most` + 1 of them: 1, 2 or 5 times a power of 10 apart."""
    span = max(high - low, 1e-9)
    steps = (factor * 10.0**power for power in range(-6, 19) for factor in (1, 2, 5))
    step = next(step for step in steps if span / step <= most)
    first = -(-low // step)
    return [number * step for number in range(int(first), int(high // step + 1e-9) + 1)]
