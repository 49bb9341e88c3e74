"""Values of a row, each described once for the table and for the JSON document.

>>> from types import SimpleNamespace
>>> columns = [
...     Column("rows", "fa.rows", lambda one: one.rows, "{:,}".format),
...     Column("size\\nMB", "fa.bytes", lambda one: one.nbytes, lambda n: f"{n / 1e6:.1f}"),
...     Column(None, "name", lambda one: one.name),
... ]
>>> one = SimpleNamespace(rows=1200, nbytes=2_500_000, name="a")
>>> cells(columns, one)
['1,200', '2.5']
>>> document(columns, one)
{'fa': {'rows': 1200, 'bytes': 2500000}, 'name': 'a'}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pdconn.tools.output.table import table

R = TypeVar("R")
P = TypeVar("P")


def _unchanged(value: Any) -> object:
    return value


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """One value of a row of type ``R``.

    Attributes:
        heading: heading in the table; None: the value is in the document only.
        key: key in the document, with dots between levels; None: the value is in the table only.
        value: reads the value.
        show: formats it for the table.
        write: converts it for the document.
    """

    heading: str | None
    key: str | None
    value: Callable[[R], Any]
    show: Callable[[Any], str] = str
    write: Callable[[Any], object] = _unchanged


def of_part(columns: Iterable[Column[P]], part: Callable[[R], P]) -> list[Column[R]]:
    """Columns of a part, as columns of the row that has the part.

    >>> from operator import attrgetter
    >>> from types import SimpleNamespace
    >>> row = SimpleNamespace(cost=SimpleNamespace(runs=7))
    >>> document(of_part([Column("runs", "runs", attrgetter("runs"))], attrgetter("cost")), row)
    {'runs': 7}
    """

    def of_row(column: Column[P]) -> Column[R]:
        def value(row: R) -> Any:
            return column.value(part(row))

        return Column(column.heading, column.key, value, column.show, column.write)

    return [of_row(column) for column in columns]


def headings(columns: Iterable[Column[R]]) -> list[str]:
    """The headings of the table."""
    return [column.heading for column in columns if column.heading is not None]


def cells(columns: Iterable[Column[R]], row: R) -> list[str]:
    """One line of the table."""
    return [column.show(column.value(row)) for column in columns if column.heading is not None]


def document(columns: Iterable[Column[R]], row: R) -> dict[str, Any]:
    """One object of the document, its keys in the order of ``columns``."""
    made: dict[str, Any] = {}
    for column in columns:
        if column.key is None:
            continue
        *above, last = column.key.split(".")
        level = made
        for name in above:
            level = level.setdefault(name, {})
        level[last] = column.write(column.value(row))
    return made


def text_table(columns: Sequence[Column[R]], rows: Iterable[R], width: int | None = None) -> str:
    """The table of ``rows``; ``width`` as :func:`~pdconn.tools.output.table.table` takes it."""
    return table(headings(columns), [cells(columns, row) for row in rows], width)
