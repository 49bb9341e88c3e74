"""The picture of the architecture, light and dark: ``python -m tests.project.docs.architecture``.

One description drawn twice, so that the two files cannot come to differ; a test compares both
with what is drawn now.  Boxes and arrows are placed by hand, to be read at 800 pixels.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.project.docs.generate import DOCS

WIDTH, HEIGHT = 800, 500

LEFT, RIGHT = 20, 490
"""Where the prefill engine and the decode engine begin; each is 290 wide."""


Place = tuple[int, int, int, int]
"""Left, top, width and height of a box."""


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of one picture.

    Attributes:
        page: behind everything.
        engine: inside an engine.
        box: inside a part.
        line: borders and thin arrows.
        text: names.
        quiet: what stands below a name.
        accent: KV memory, and what moves its bytes.
    """

    page: str
    engine: str
    box: str
    line: str
    text: str
    quiet: str
    accent: str


THEMES: Mapping[str, Theme] = {
    "light": Theme("#ffffff", "#f3f5f8", "#ffffff", "#57606a", "#1f2328", "#57606a", "#0b62c4"),
    "dark": Theme("#0d1117", "#161b22", "#21262d", "#9198a1", "#f0f6fc", "#9198a1", "#58a6ff"),
}


def picture(theme: Theme) -> str:
    """The whole SVG."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="system-ui, sans-serif" role="img">',
        "<title>pdconn: a request, its ticket and its KV</title>",
        *_heads(theme),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{theme.page}"/>',
        *_boxes(theme),
        *_requests(theme),
        *_hand_over(theme),
        *_stores(theme),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _heads(theme: Theme) -> Iterator[str]:
    yield "<defs>"
    for name, colour, size in (("thin", theme.line, 9), ("thick", theme.accent, 18)):
        yield (
            f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="{size}" '
            f'markerHeight="{size}" markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
            f'<path d="M0 0L10 5L0 10z" fill="{colour}"/></marker>'
        )
    yield "</defs>"


def _boxes(theme: Theme) -> Iterator[str]:
    yield from _box(theme, (20, 20, 110, 52), "Client", "OpenAI API")
    yield from _box(theme, (250, 20, 530, 52), "Router", "pdconn proxy, or another router")
    yield from _engine(
        theme, LEFT, "Prefill engine (vLLM)",
        ("Scheduler", "pins the blocks of the prompt"),
        ("Lender thread", "keeps a lease for each prompt"),
        ("Workers", "compute the prompt"),
    )  # fmt: skip
    yield from _engine(
        theme, RIGHT, "Decode engine (vLLM)",
        ("Scheduler", "allocates blocks for the pull"),
        ("Puller thread, one per rank", "claims, plans and reads"),
        ("Workers", "compute the last token, then the answer"),
    )  # fmt: skip


def _engine(theme: Theme, x: int, title: str, *parts: tuple[str, str]) -> Iterator[str]:
    yield (
        f'<rect x="{x}" y="140" width="290" height="262" rx="8" fill="{theme.engine}" '
        f'stroke="{theme.line}"/>'
    )
    yield _text(x + 16, 162, title, theme.text, size=14, bold=True)
    for row, (name, does) in enumerate(parts):
        yield from _box(theme, (x + 16, 172 + 54 * row, 258, 46), name, does)
    yield from _box(
        theme, (x + 16, 334, 258, 54), "KV memory", "registered once, at the start", accent=True
    )


def _requests(theme: Theme) -> Iterator[str]:
    """What goes over HTTP: requests, the ticket, tokens."""
    yield _arrow(theme, 130, 37, 250, 37)
    yield _text(190, 31, "request", theme.quiet, middle=True)
    yield _arrow(theme, 250, 57, 130, 57)
    yield _text(190, 72, "tokens", theme.quiet, middle=True)
    yield _arrow(theme, 265, 72, 265, 140)
    yield from _step(theme, 251, 106, 1, "prompt, for one token", left=True)
    yield _arrow(theme, 295, 140, 295, 72)
    yield from _step(theme, 310, 106, 2, "ticket: where its KV is")
    yield _arrow(theme, 520, 72, 520, 140)
    yield from _step(theme, 535, 106, 3, "request and ticket")
    yield _arrow(theme, 700, 140, 700, 72)
    yield from _step(theme, 715, 106, 6, "tokens")


def _hand_over(theme: Theme) -> Iterator[str]:
    """What goes between the engines: small messages, and the KV."""
    yield _arrow(theme, 294, 249, 506, 249, both=True)
    yield from _step(theme, 328, 228, 4, "claim, renew, confirm")
    yield _text(400, 268, "side channel (TCP)", theme.quiet, middle=True)
    yield (
        f'<line x1="294" y1="361" x2="502" y2="361" stroke="{theme.accent}" stroke-width="5" '
        f'marker-end="url(#thick)"/>'
    )
    yield from _step(theme, 336, 342, 5, "one-sided READ")
    yield _text(400, 382, "NIXL over UCX", theme.quiet, middle=True)


def _stores(theme: Theme) -> Iterator[str]:
    yield from _box(
        theme, (100, 440, 600, 46), "Store (optional)",
        "rows of KV in a folder, on a shared file system or in S3", dashed=True,
    )  # fmt: skip
    for x in (165, 635):
        yield _arrow(theme, x, 390, x, 440, both=True)
        yield _text(x + 12, 425, "save, load", theme.quiet)


def _box(
    theme: Theme, at: Place, name: str, does: str, *, accent: bool = False, dashed: bool = False
) -> Iterator[str]:
    x, y, width, height = at
    stroke = theme.accent if accent else theme.line
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    yield (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{theme.box}" '
        f'stroke="{stroke}" stroke-width="{2 if accent else 1}"{dashes}/>'
    )
    middle = x + width // 2
    yield _text(
        middle, y + height // 2 - 4, name, stroke if accent else theme.text, size=13,
        bold=True, middle=True,
    )  # fmt: skip
    yield _text(middle, y + height // 2 + 14, does, theme.quiet, middle=True)


def _step(
    theme: Theme, x: int, y: int, number: int, words: str, *, left: bool = False
) -> list[str]:
    """A numbered label; the number stands at ``x``, and the words go left or right of it."""
    side = -14 if left else 14
    anchor = ' text-anchor="end"' if left else ""
    return [
        f'<circle cx="{x}" cy="{y}" r="9" fill="{theme.accent}"/>',
        _text(x, y + 4, str(number), theme.page, bold=True, middle=True),
        f'<text x="{x + side}" y="{y + 4}" font-size="12" fill="{theme.text}"{anchor}>'
        f"{html.escape(words)}</text>",
    ]


def _arrow(theme: Theme, x1: int, y1: int, x2: int, y2: int, *, both: bool = False) -> str:
    start = ' marker-start="url(#thin)"' if both else ""
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{theme.line}" '
        f'stroke-width="1.5" marker-end="url(#thin)"{start}/>'
    )


def _text(
    x: int, y: int, words: str, colour: str,
    *, size: int = 12, bold: bool = False, middle: bool = False,
) -> str:  # fmt: skip
    weight = ' font-weight="600"' if bold else ""
    anchor = ' text-anchor="middle"' if middle else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}"{weight}{anchor}>'
        f"{html.escape(words)}</text>"
    )


def main() -> None:
    """Draw both."""
    for name, theme in THEMES.items():
        path = DOCS / f"images/architecture-{name}.svg"
        path.write_text(picture(theme), encoding="utf-8")


if __name__ == "__main__":
    main()
