"""A place in a JSON document, which knows where it is: what is missing is named in full.

>>> node = Node("waterfall", {"stages": [{"stage": "claim", "median_s": 0.5}]})
>>> node["stages"].the(stage="claim")["median_s"].number
0.5
>>> node["overhead_s"]
Traceback (most recent call last):
tests.throughput.tables.errors.MissingField: waterfall.overhead_s: expected a value, seen stages
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tests.throughput.tables.errors import MissingField


@dataclass(frozen=True, slots=True)
class Node:
    """``value`` is what ``json.loads`` gives; ``where`` its name for people.

    Every access raises ``MissingField`` where something else is found.
    """

    where: str
    value: object

    def __getitem__(self, key: str) -> Node:
        """A field of an object."""
        if not isinstance(self.value, dict):
            raise self._not("an object")
        if key not in self.value:
            seen = ", ".join(map(str, self.value)) or "nothing"
            raise MissingField(f"{self.where}.{key}", "a value", seen)
        return Node(f"{self.where}.{key}", self.value[key])

    @property
    def keys(self) -> list[str]:
        """An object's names, in their order."""
        if not isinstance(self.value, dict):
            raise self._not("an object")
        return list(self.value)

    @property
    def rows(self) -> list[Node]:
        """The items of a list."""
        if not isinstance(self.value, list):
            raise self._not("a list")
        return [Node(f"{self.where}[{at}]", item) for at, item in enumerate(self.value)]

    def the(self, **fields: object) -> Node:
        """The one item of a list whose ``fields`` have these values."""
        found = [row for row in self.rows if all(row[key].value == fields[key] for key in fields)]
        if len(found) != 1:
            which = ", ".join(f"{key}={value}" for key, value in fields.items())
            raise MissingField(self.where, f"one row with {which}", f"{len(found)} of them")
        return found[0]

    @property
    def number(self) -> float:
        """A finite number."""
        good = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        if not good or not math.isfinite(self.value):  # type: ignore[arg-type]
            raise self._not("a number")
        return float(self.value)  # type: ignore[arg-type]

    @property
    def whole(self) -> int:
        """A whole number."""
        if not self.number.is_integer():
            raise self._not("a whole number")
        return int(self.number)

    @property
    def text(self) -> str:
        """A string."""
        if not isinstance(self.value, str):
            raise self._not("a string")
        return self.value

    def _not(self, expected: str) -> MissingField:
        return MissingField(self.where, expected, repr(self.value)[:80])
