"""Merging runs of bytes that continue each other; the one place that does it.

    theirs   [0, 4)  [4, 8)  [8, 12)            [0, 8)     [8, 12)
    ours     [0, 4)  [4, 8)  [16, 20)    ──►    [0, 8)     [16, 20)

Three runs of 4 bytes.  The second begins where the first ends on both sides, so they become
one run of 8 bytes.  The third continues the second on their side only, so it stays apart.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_Int = TypeVar("_Int", np.uint64, np.int64)


def merge_runs(
    nbytes: NDArray[_Int], *sides: NDArray[_Int], alike: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.intp], NDArray[_Int]] | None:
    """The runs that remain once neighbours are merged, or None if there are no neighbours.

    Run i + 1 merges into run i where every one of ``sides`` says that it begins where run i
    ends.  Order is kept: runs that are listed out of order do not merge.

    Args:
        nbytes: bytes of each run, of shape (n,).
        sides: addresses of each run, of shape (n,) each; at least one.
        alike: of shape (n - 1,): whether runs i and i + 1 may merge at all.

    Returns:
        The indices of the runs that remain, and their bytes after merging.

    >>> merge_runs(np.array([4, 4, 4]), np.array([0, 4, 16]))
    (array([0, 2]), array([8, 4]))
    """
    if len(nbytes) < 2:
        return None
    joins = alike
    for addresses in sides:
        follows = addresses[:-1] + nbytes[:-1] == addresses[1:]
        joins = follows if joins is None else joins & follows
    if joins is None or not np.logical_or.reduce(joins):
        return None
    begins = np.ones(len(nbytes), dtype=np.bool_)
    np.logical_not(joins, out=begins[1:])
    first = begins.nonzero()[0]
    return first, np.add.reduceat(nbytes, first)
