"""Where a hit may end, given a group's blocks, as words with one bit per pod.  Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdconn.router.prefix.groups import GroupSpec
from pdconn.router.prefix.held_blocks import Words

ALL = np.uint64(2**64 - 1)


def tail_ends(held: Words, need: int) -> Words:
    """The ends at which the last ``need`` blocks are held, or all from block 0.

    A run of n blocks is one of a and, before it, one of b = n - a, so n is reached by doubling.
    Blocks before block 0 count as held.
    """
    if need == 0:
        return np.full(len(held), ALL)
    run, length = held.copy(), 1
    while length < need:
        more = min(length, need - length)
        run[more:] &= run[: max(0, len(run) - more)].copy()
        length += more
    return run


def chunk_ends(held: Words, spec: GroupSpec) -> Words:
    """The ends at which the current chunk's blocks are held; a whole chunk needs none after it."""
    assert spec.window is not None
    size = spec.window // spec.block_tokens
    if size > len(held):
        return np.bitwise_and.accumulate(held)
    chunks = np.append(held, np.zeros(-len(held) % size, np.uint64)).reshape(-1, size)
    ends = np.bitwise_and.accumulate(chunks, axis=1)
    ends[:, -1] = ALL
    return ends.reshape(-1)[: len(held)]


def covered(held: Words, every: int) -> Words:
    """For each hash block, whether a block covers it, completely or as far as it was filled.

    A block of ``every`` hash blocks is held under the hash of its last one, a partial block under
    that of the last one filled, so either covers the hash blocks before it in the block::

        held      . . . x   . x . .   . . . .
        covered   x x x x   x x . .   . . . .
    """
    every = max(1, min(every, len(held)))  # longer blocks cover no more, and would be padded
    parts = np.append(held, np.zeros(-len(held) % every, np.uint64)).reshape(-1, every)
    reach = np.bitwise_or.accumulate(parts[:, ::-1], axis=1)[:, ::-1]
    return np.ascontiguousarray(reach).reshape(-1)[: len(held)]


def fine_ends(held: Words, every: int) -> Words:
    """The ends that full attention allows after any hash block: all blocks before are covered."""
    return np.bitwise_and.accumulate(covered(held, every))


def last_ends(valid: Words) -> tuple[list[int], list[int]]:
    """The pods with any valid end, and the number of rows up to the last one."""
    if not len(valid):
        return [], []
    reaches = np.bitwise_or.accumulate(valid[::-1])
    changes = np.add((reaches[1:] != reaches[:-1]).nonzero()[0], 1).tolist()
    places: list[int] = []
    ends: list[int] = []
    seen = 0
    for behind in (0, *changes):
        word = int(reaches[behind])
        fresh, seen = word & ~seen, word
        while fresh:
            lowest = fresh & -fresh
            places.append(lowest.bit_length() - 1)
            ends.append(len(valid) - behind)
            fresh ^= lowest
    return places, ends


def _bits(words: Words) -> NDArray[np.uint8]:
    """Words as rows of 64 zeros and ones, pod 0 first."""
    octets = words.astype("<u8").view(np.uint8).reshape(len(words), 8)
    return np.unpackbits(octets, axis=1, bitorder="little")


def count(held: Words, places: list[int], inside: NDArray[np.bool_]) -> NDArray[np.float64]:
    """For each pod at ``places`` the number of blocks that it holds within its hit."""
    counted: NDArray[np.float64] = (_bits(held)[:, places] & inside).sum(axis=0, dtype=np.float64)
    return counted
