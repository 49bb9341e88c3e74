"""The built-in shapes, and the families whose ``config.json`` is read: ``pdconn plan --list``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from pdconn.tools.output.columns import Column, cells, document, headings
from pdconn.tools.output.table import table
from pdconn.tools.plan.forecast_report import kv_document
from pdconn.tools.plan.hf.model_families import FAMILIES
from pdconn.tools.plan.model_shape import LayerSort, ModelShape
from pdconn.tools.plan.shapes import SHAPES


def _number(value: int | None) -> str:
    return str(value or "-")


_SORT: tuple[Column[LayerSort], ...] = (
    Column(None, "part", lambda sort: sort.part),
    Column(None, "kind", lambda sort: sort.kind, write=str),
    Column("layers", "layers", lambda sort: len(sort.layers)),
    Column("kind", None, lambda sort: sort.kind, lambda kind: kind.removesuffix("_attention")),
    Column("window", "window", lambda sort: sort.window, _number),
    Column("KV heads", "kv_heads", lambda sort: sort.heads),
    Column("bytes a row\nand head", "row_bytes_per_head", lambda sort: sort.row_nbytes),
    Column("tokens\na row", "tokens_per_row", lambda sort: sort.row_tokens),
    Column("block\n(fixed)", "block_tokens", lambda sort: sort.block_tokens, _number),
)


@dataclass(frozen=True)
class ShapesReport:
    """One line per sort of attention layers of each shape."""

    shapes: Sequence[ModelShape] = SHAPES

    def text(self, width: int | None = None) -> str:
        """The table, and the names of the families."""
        rows = [
            [shape.name, *cells(_SORT, sort)] for shape in self.shapes for sort in shape.attention
        ]
        families = f"a config.json is read if its model_type is one of {', '.join(FAMILIES)}"
        return (
            f"{table(['model', *headings(_SORT)], rows, width)}\n\n"
            f"{fill(families, min(100, width or 100))}"
        )

    def document(self) -> dict[str, Any]:
        """The layers, nested by shape."""
        shapes = [
            {
                "name": shape.name,
                "kv": kv_document(shape),
                "sorts": [document(_SORT, sort) for sort in shape.attention],
            }
            for shape in self.shapes
        ]
        return {"shapes": shapes, "model_types": list(FAMILIES)}
