"""The blocks that pods hold, as slots of hashes and words of bits.  Pure.

A block hash identifies a whole prefix and is the same in every group and engine, so it gets one
*slot*, and each pod one *bit*.  The held blocks are then one machine word per slot for each
*plane*::

                slot 0  slot 1  slot 2  …      slot 0 is for hashes that no pod holds
    plane 0  word 0   0     0b011   0b001      bit p: the pod at place p holds this block
    plane 1  word 0   0     0b010   0b000

64 pods share a word, so a look-up of a request's chain costs at most one dictionary access per
block and one gather per plane, whatever the number of pods.

This is the Python; :mod:`pdconn.router.prefix.compiled` has the same in C++, in which it costs a
fifth.  Which one an index has, :func:`held_blocks` says.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import repeat, takewhile
from operator import truth
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pdconn.router.prefix.compiled import extension

Words = NDArray[np.uint64]
Slots = NDArray[np.intp]

POD_BITS = 64
"""Pods that share a machine word."""
NO_SLOT = 0
"""The slot of hashes that no pod holds."""
_FIRST_SLOTS = 1024
_FIRST_PART = 64
"""Hashes of a look-up that are searched for one by one; only further ones in rows of slots."""
_PART = 512
"""Hashes that are searched for in rows at a time."""
_SHORT_ROW = 8
"""After a shorter row of slots the rest of a part is searched for one by one."""
_TOGETHER = 16
"""Blocks of an event from which on they are processed by numpy."""
_NO_SLOTS: Slots = np.empty(0, np.intp)


class HeldBlocks(Protocol):
    """The blocks that pods hold, by number of pod and plane."""

    @property
    def num_hashes(self) -> int:
        """Number of hashes that some pod holds."""

    @property
    def num_words(self) -> int:
        """Number of words that hold one bit for each pod."""

    def add_word(self) -> None:
        """Make room for another 64 pods."""

    def add_plane(self) -> int:
        """The number of a new plane."""

    def drop_plane(self, plane: int, /) -> None:
        """Forget a plane in which no pod holds a block."""

    def store(
        self, place: int, plane: int, hashes: Sequence[int], room: int, counts_copies: bool, /
    ) -> tuple[int, int]:
        """Add blocks to a pod, by hashes of 64 bits.

        Args:
            place: number of the pod.
            plane: number of the plane.
            hashes: of the blocks.
            room: blocks that may be added; more are refused.
            counts_copies: whether a block that the pod holds already gets a copy.

        Returns:
            Blocks that were added, and that were refused.
        """

    def remove(self, place: int, plane: int, hashes: Sequence[int], /) -> tuple[int, int]:
        """Remove blocks from a pod, one copy of each.

        Returns:
            Blocks of which the last copy was removed, and blocks that the pod does not hold.
        """

    def clear(self, place: int, /) -> dict[int, int]:
        """Remove all blocks of a pod; how many of each plane."""

    def num_copies(self, place: int, /) -> int:
        """Copies of a pod's blocks beside the first of each."""

    def slots_of(self, hashes: Sequence[int], /) -> bytes | NDArray[Any]:
        """The slot of each hash as ``intp``, ``NO_SLOT`` for hashes that no pod holds."""

    def leading_slots_of(self, hashes: Sequence[int], /) -> bytes | NDArray[Any]:
        """The slots of the hashes before the first one that no pod holds."""

    def held(self, plane: int, word: int, slots: Slots, /) -> bytes | NDArray[Any]:
        """For each slot, the pods of one word that hold it, as bits of ``uint64``."""


def held_blocks() -> HeldBlocks:
    """No blocks yet; compiled, where that is there."""
    if extension.module is None:
        return PythonBlocks()
    made: HeldBlocks = extension.module.HeldBlocks()
    return made


class PythonBlocks:
    """The blocks that pods hold, in Python; the functions are documented in :class:`HeldBlocks`."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._hashes = array("Q", [0])
        self._holders = array("I", [0])
        self._planes: dict[int, list[Words]] = {}
        self._copies: dict[int, dict[tuple[int, int], int]] = {}
        self._capacity = _FIRST_SLOTS
        self._num_words = 0

    @property
    def num_hashes(self) -> int:
        return len(self._slots)

    @property
    def num_words(self) -> int:
        return self._num_words

    def add_word(self) -> None:
        self._num_words += 1
        for words in self._planes.values():
            words.append(np.zeros(self._capacity, np.uint64))

    def add_plane(self) -> int:
        numbers = range(len(self._planes) + 1)
        plane = next(number for number in numbers if number not in self._planes)
        self._planes[plane] = [np.zeros(self._capacity, np.uint64) for _ in range(self._num_words)]
        return plane

    def drop_plane(self, plane: int, /) -> None:
        del self._planes[plane]

    def store(
        self, place: int, plane: int, hashes: Sequence[int], room: int, counts_copies: bool, /
    ) -> tuple[int, int]:
        if _TOGETHER <= len(hashes) <= room and self._store_together(place, plane, hashes):
            return len(hashes), 0
        word = self._planes[plane][place // POD_BITS].data
        bit = 1 << place % POD_BITS
        slots, holders = self._slots, self._holders
        stored = refused = 0
        for block in hashes:
            slot = slots.get(block)
            if slot is None:
                if stored >= room:
                    refused += 1
                    continue
                if not self._free and len(self._hashes) == self._capacity:
                    self._grow()
                    word = self._planes[plane][place // POD_BITS].data
                slot = self._take_slot(block)
            held = word[slot]
            if held & bit:
                if counts_copies:
                    copies = self._copies.setdefault(place, {})
                    copies[plane, slot] = copies.get((plane, slot), 0) + 1
            elif stored >= room:
                refused += 1
            else:
                word[slot] = held | bit
                holders[slot] += 1
                stored += 1
        return stored, refused

    def remove(self, place: int, plane: int, hashes: Sequence[int], /) -> tuple[int, int]:
        copies = self._copies.get(place)
        if len(hashes) >= _TOGETHER and not copies and self._remove_together(place, plane, hashes):
            return len(hashes), 0
        word = self._planes[plane][place // POD_BITS].data
        bit = 1 << place % POD_BITS
        removed = unknown = 0
        for block in hashes:
            slot = self._slots.get(block, NO_SLOT)
            held = word[slot]
            if not held & bit:
                unknown += 1
            elif copies and (plane, slot) in copies:
                _take_one(copies, (plane, slot))
            else:
                word[slot] = held ^ bit
                removed += 1
                self._release_slot(slot)
        return removed, unknown

    def clear(self, place: int, /) -> dict[int, int]:
        number, bit = place // POD_BITS, np.uint64(1 << place % POD_BITS)
        removed = {}
        for plane, words in self._planes.items():
            word = words[number]
            held = np.flatnonzero(word & bit).tolist()
            for slot in held:
                self._release_slot(slot)
            word &= ~bit
            if held:
                removed[plane] = len(held)
        self._copies.pop(place, None)
        return removed

    def num_copies(self, place: int, /) -> int:
        return sum(self._copies.get(place, {}).values())

    # Many blocks at once: the same as one by one, in a third of the time.  Both do nothing and
    # return False where blocks are listed twice, or would be counted as copies or as unknown.

    def _store_together(self, place: int, plane: int, hashes: Sequence[int]) -> bool:
        number = len(hashes)
        if len(set(hashes)) < number:
            return False
        word, bit = place // POD_BITS, np.uint64(1 << place % POD_BITS)
        slots = self.slots_of(hashes)
        if (self._planes[plane][word][slots] & bit).any():
            return False
        new = np.flatnonzero(slots == NO_SLOT)
        if len(new):
            all_new = len(new) == number
            slots[new] = self._take_slots(
                list(hashes) if all_new else [hashes[row] for row in new.tolist()]
            )
        self._planes[plane][word][slots] |= bit
        np.frombuffer(self._holders, np.uintc)[slots] += 1
        return True

    def _remove_together(self, place: int, plane: int, hashes: Sequence[int]) -> bool:
        word, bit = place // POD_BITS, np.uint64(1 << place % POD_BITS)
        slots = self.slots_of(hashes)
        held = self._planes[plane][word]
        if not (held[slots] & bit).all() or len(set(hashes)) < len(hashes):
            return False
        held[slots] ^= bit
        holders = np.frombuffer(self._holders, np.uintc)
        holders[slots] -= 1
        gone = np.flatnonzero(holders[slots] == 0)
        for row in gone.tolist():
            del self._slots[hashes[row]]
        self._free += slots[gone].tolist()
        return True

    # Look-ups

    def slots_of(self, hashes: Sequence[int], /) -> Slots:
        found = map(self._slots.get, hashes, repeat(NO_SLOT))
        return np.fromiter(found, np.intp, len(hashes))

    def leading_slots_of(self, hashes: Sequence[int], /) -> Slots:
        get, parts, begin, end = self._slots.get, [], 0, _FIRST_PART
        while begin < len(hashes):
            part = hashes[begin:end]
            rows = self._slots_in_rows(part) if begin else _NO_SLOTS
            rest = part[len(rows) :]
            more = list(takewhile(truth, map(get, rest)))  # a slot of a hash is never 0
            parts += [rows, np.array(more, np.intp)]
            if len(more) < len(rest):
                break
            begin, end = end, end + _PART
        return np.concatenate(parts) if parts else _NO_SLOTS

    def _slots_in_rows(self, hashes: Sequence[int]) -> Slots:
        """The slots of the first of these hashes, of as many as lie in long rows.

        Blocks that were stored together have slots in a row.  To compare these with the prompt
        takes a tenth of the time of the dictionary, where each hash is somewhere else in memory.
        """
        asked = np.array(hashes, np.uint64)
        known = np.frombuffer(self._hashes, np.uint64)
        holders = np.frombuffer(self._holders, np.uintc)
        rows, begin = [], 0
        while begin < len(asked):
            slot = self._slots.get(hashes[begin], NO_SLOT)
            there = slice(slot, slot + len(asked) - begin)
            same = known[there] == asked[begin : begin + len(known[there])]
            same &= holders[there] > 0  # else the hash of a slot is an old one
            row = len(same) if same.all() else int(same.argmin())
            if row < _SHORT_ROW:
                break
            rows.append(np.arange(slot, slot + row))
            begin += row
        return np.concatenate(rows) if rows else _NO_SLOTS

    def held(self, plane: int, word: int, slots: Slots, /) -> Words:
        return self._planes[plane][word][slots]

    # Slots

    def _take_slot(self, block: int) -> int:
        if self._free:
            slot = self._free.pop()
            self._hashes[slot] = block
        else:
            slot = len(self._hashes)
            self._hashes.append(block)
            self._holders.append(0)
        self._slots[block] = slot
        return slot

    def _take_slots(self, blocks: list[int]) -> Slots:
        """A slot for each of these different hashes, none of which has one.

        In a row where possible, for :meth:`leading_slots_of`: an engine evicts the blocks of a
        prompt from its end, so that free slots are in descending order.
        """
        reused = min(len(self._free), len(blocks))
        slots = sorted(self._free[len(self._free) - reused :])
        del self._free[len(self._free) - reused :]
        slots += range(len(self._hashes), len(self._hashes) + len(blocks) - reused)
        found, new = np.array(slots, np.intp), array("Q", blocks)
        known = np.frombuffer(self._hashes, np.uint64)
        known[found[:reused]] = np.frombuffer(new, np.uint64)[:reused]
        del known  # a view would keep the array from growing
        self._hashes += new[reused:]
        self._holders.frombytes(bytes((len(blocks) - reused) * self._holders.itemsize))
        while len(self._hashes) > self._capacity:
            self._grow()
        self._slots.update(zip(blocks, slots, strict=True))
        return found

    def _release_slot(self, slot: int) -> None:
        self._holders[slot] -= 1
        if self._holders[slot] == 0:
            block = self._hashes[slot]
            del self._slots[block]
            self._free.append(slot)

    def _grow(self) -> None:
        more = np.zeros(self._capacity, np.uint64)
        self._capacity *= 2
        for words in self._planes.values():
            words[:] = [np.concatenate((word, more)) for word in words]


def _take_one(copies: dict[tuple[int, int], int], key: tuple[int, int]) -> None:
    if copies[key] > 1:
        copies[key] -= 1
    else:
        del copies[key]
