"""The staging area of all ranks: which bytes of it belong to which fetch.

Every rank has an area of the same size and gets the same offsets, so that no rank can run out
of room that the scheduler believes to have.  First fit, in whole pages.
"""

from __future__ import annotations

from bisect import insort

from pdconn.store.format.layout import aligned


class StagingSpace:
    """Free and taken byte ranges of ``nbytes``.  One thread."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._taken: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, number: int, nbytes: int) -> int | None:
        """The offset of ``nbytes`` for fetch ``number``, or None when there is no such room now."""
        nbytes, at = aligned(max(nbytes, 1)), 0
        for offset, end, _ in self._taken:
            if offset - at >= nbytes:
                break
            at = end
        if at + nbytes > self.nbytes:
            return None
        insort(self._taken, (at, at + nbytes, number))
        return at

    def free(self, number: int) -> None:
        """The bytes of fetch ``number`` may be taken again."""
        self._taken = [entry for entry in self._taken if entry[2] != number]
