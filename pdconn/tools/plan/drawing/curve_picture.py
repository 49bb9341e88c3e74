"""Draws what a store saves of a trace over its capacity, as SVG.

::

    100 % |
          |          ┌──────────  loaded from the store
          |     ┌────┘
          | ────┘
          |▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒  held by the engines' own cache
        0 +---------------------  capacity, logarithmic
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from xml.sax.saxutils import escape

from pdconn.tools.output.units import binary_size
from pdconn.tools.plan.store.curve import Curve

_WIDTH, _HEIGHT = 760.0, 420.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 24.0, 64.0, 64.0
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1b1f27}.title{font-weight:bold;font-size:16px}"
    ".faint{fill:#5c6472}.mid{text-anchor:middle}.end{text-anchor:end}.ground{fill:#fff}"
    ".grid{stroke:#d5d9e0;stroke-width:1}.held{fill:#9aa4b5;fill-opacity:.5}"
    ".loaded{fill:#4c8bf5;fill-opacity:.3}.curve{fill:none;stroke:#2f6fdb;stroke-width:2}"
    ".dot{fill:#2f6fdb}"
    "@media(prefers-color-scheme:dark){text{fill:#e5e8ee}.faint{fill:#a3abba}"
    ".ground{fill:#1a1e26}.grid{stroke:#3a404c}}"
)


def draw_curve(curve: Curve, title: str) -> str:
    """The picture of a curve, as a whole SVG document."""
    return "\n".join(_document(curve, title))


def _document(curve: Curve, title: str) -> Iterator[str]:
    size = f'width="{_WIDTH:g}" height="{_HEIGHT:g}" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    yield f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    yield f'<rect class="ground" width="{_WIDTH:g}" height="{_HEIGHT:g}"/>'
    yield f'<text class="title" x="{_LEFT:g}" y="28">{escape(title)}</text>'
    words = f"{curve.requests:,} requests, {curve.prompt_tokens:,} prompt tokens: share that is"
    yield f'<text class="faint" x="{_LEFT:g}" y="48">{words} not computed</text>'
    for percent in range(0, 101, 20):
        y = _y(percent / 100)
        yield f'<path class="grid" d="M{_LEFT:g} {y:.1f}H{_WIDTH - _RIGHT:g}"/>'
        yield f'<text class="faint end" x="{_LEFT - 8:g}" y="{y + 4:.1f}">{percent} %</text>'
    yield from _areas(curve)
    yield from _dots(curve)
    yield "</svg>\n"


def _areas(curve: Curve) -> Iterator[str]:
    """What engines hold, and above it what stores load."""
    held, first, last = curve.held_share, _LEFT, _WIDTH - _RIGHT
    if held:
        yield _area("held", f"M{first:g} {_y(0):.1f}V{_y(held):.1f}H{last:g}V{_y(0):.1f}Z")
        y = _y(held / 2) + 4
        yield f'<text class="mid" x="{(first + last) / 2:g}" y="{y:.1f}">in the engines</text>'
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in _places(curve))
    x0, x1 = _places(curve)[0][0], _places(curve)[-1][0]
    yield _area("loaded", f"M{x0:.1f} {_y(held):.1f}L{line}L{x1:.1f} {_y(held):.1f}Z")
    yield f'<path class="curve" d="M{line}"/>'


def _area(name: str, path: str) -> str:
    return f'<path class="{name}" d="{path}"/>'


def _dots(curve: Curve) -> Iterator[str]:
    """A dot and its share at each capacity, and the capacity below."""
    places = _places(curve)
    for (x, y), point in zip(places, curve.points, strict=True):
        loaded = 100 * curve.hit_share(point)
        name = binary_size(point.capacity)
        yield f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5">'
        yield f"<title>{name}: {loaded:.1f} % loaded from the store</title></circle>"
        yield f'<text class="mid" x="{x:.1f}" y="{y - 8:.1f}">{loaded:.0f}</text>'
    bottom, until = _HEIGHT - _BOTTOM + 18, float("-inf")
    for (x, _), point in zip(places, curve.points, strict=True):
        if x - until >= 84:  # pixels of a name
            name = binary_size(point.capacity)
            yield f'<text class="faint mid" x="{x:.1f}" y="{bottom:g}">{name}</text>'
            until = x
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield f'<text class="mid" x="{middle:g}" y="{bottom + 24:g}">capacity of the store</text>'


def _places(curve: Curve) -> list[tuple[float, float]]:
    """Where the points are: capacities on a logarithmic scale, one alone in the middle."""
    logs = [math.log(point.capacity) for point in curve.points]
    least, span = logs[0], logs[-1] - logs[0]
    room = _WIDTH - _LEFT - _RIGHT - 80
    return [
        (
            _LEFT + 40 + room * ((one - least) / span if span else 0.5),
            _y(curve.held_share + curve.hit_share(point)),
        )
        for one, point in zip(logs, curve.points, strict=True)
    ]


def _y(share: float) -> float:
    return _TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM)
