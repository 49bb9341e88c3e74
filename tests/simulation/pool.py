"""Blocks of a simulated lender: lent by any number of tickets, found again until they are reused.

As vLLM's block pool: what nobody holds is free and keeps its content until it is taken.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable


class BlockPool:
    """``num_blocks`` blocks, of which block 0 is never used."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(1, num_blocks))
        self._holders: Counter[int] = Counter()
        self._content: dict[int, tuple[int, int]] = {}

    def take(self, number: int, count: int) -> tuple[int, ...] | None:
        """Blocks for request ``number``, the last ones freed first; None without room."""
        if len(self.free) < count:
            return None
        blocks = tuple(self.free.pop() for _ in range(count))
        for position, block in enumerate(blocks):
            self._holders[block] = 1
            self._content[block] = (number, position)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One ticket more lends these."""
        for block in blocks:
            if not self._holders[block]:
                self.free.remove(block)
            self._holders[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """One ticket less lends these."""
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                self.free.append(block)

    def prefixes(self) -> dict[int, tuple[int, ...]]:
        """By request the leading blocks of it that are found."""
        found: dict[int, dict[int, int]] = defaultdict(dict)
        for block, (number, position) in sorted(self._content.items()):
            found[number][position] = block
        return {number: _leading(blocks) for number, blocks in sorted(found.items()) if 0 in blocks}

    def forget(self) -> None:
        """Nothing is found any more; what is lent stays lent."""
        self._content.clear()


def _leading(blocks: dict[int, int]) -> tuple[int, ...]:
    end = 0
    while end in blocks:
        end += 1
    return tuple(blocks[position] for position in range(end))
