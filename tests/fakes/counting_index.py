"""An index that takes every repeated store for another copy: a reference for the router's.

An engine may hold two copies of a block, and removes both.  The router's index counts a block
once, as events do not tell a copy from a report of what is held already.  This one counts, so
it knows exactly what an engine holds as long as the engine only reports what it stores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pdconn.router.events.caches import PrefixCaches
from pdconn.router.prefix.index import Index
from pdconn.router.prefix.score import Scorer


class CountingIndex(Index):
    """Blocks with the number of their copies."""

    def __init__(self, eagle_groups: frozenset[int] = frozenset()) -> None:
        super().__init__(eagle_groups=eagle_groups)
        self._copies: Counter[tuple[str, int | None, str, int]] = Counter()

    def store(self, name: str, group: int | None, medium: str, hashes: Iterable[int]) -> None:
        blocks = list(hashes)
        self.add(name)
        held = self.held_by(name, blocks).get((group, medium), [])
        self._copies.update((name, group, medium, block) for block in held)
        super().store(name, group, medium, blocks)

    def remove(self, name: str, group: int | None, medium: str, hashes: Iterable[int]) -> None:
        for block in hashes:
            key = (name, group, medium, block)
            if self._copies[key]:
                self._copies[key] -= 1
            else:
                super().remove(name, group, medium, [block])

    def clear(self, name: str) -> None:
        for key in [key for key in self._copies if key[0] == name]:
            del self._copies[key]
        super().clear(name)


class CountingCaches(PrefixCaches):
    """The router's caches with such an index."""

    def __init__(self) -> None:
        super().__init__()
        self.index = CountingIndex()
        self._scorer = Scorer(self.index, self.weights)
