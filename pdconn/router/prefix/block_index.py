"""The blocks that each pod holds, by the engines' own block hashes.  Pure.

A block hash identifies a whole prefix and is the same in every group and engine, so it gets one
*slot*, and each pod one *bit*.  The held blocks are then one machine word per slot for each
*plane*, a pair of group and medium::

                       slot 0  slot 1  slot 2  …      slot 0 is for hashes that no pod holds
    (0, "gpu")  word 0   0     0b011   0b001          bit p: pod p holds this block
    (1, "gpu")  word 0   0     0b010   0b000
    (None, "cpu")  …                                  an engine that does not report groups

64 pods share a word, so a look-up of a request's chain costs at most one dictionary access per
block and one gather per plane, whatever the number of pods.

Bounded: a pod has at most ``max_blocks`` blocks, and all pods together have at most ``MAX_PLANES``
planes; further blocks are counted and ignored, which can only make a hit look shorter.  An empty
plane is dropped.  Cost: about 160 bytes per hash, however many pods hold it, of which 8 per plane
and 64 pods (``tests/throughput/routing.py`` measures it).  ``tests/throughput/index`` compares it
with Dynamo's.

vLLM keeps each block that it computed, even if it already has one with the same hash: with windows
and states that is common, as a hit that they cut makes it recompute blocks of full attention.  It
reports each copy, and each eviction.  So copies on the GPU are counted, and a block is held until
the last copy is removed.  In vLLM's ``full`` report mode an engine also repeats blocks that it
already holds, and later removes them once; for such engines ``counts_copies`` is off, since
counting removed blocks as held would attract prompts to an engine that has to compute them.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat, takewhile
from operator import truth

import numpy as np
from numpy.typing import NDArray

from pdconn.router.prefix.groups import KINDS, OUTSIDE, REMOTE, STORED, GroupSpec, Needs
from pdconn.router.prefix.kv_events import Cleared, Event, Removed, Stored

Words = NDArray[np.uint64]
Slots = NDArray[np.intp]
Plane = tuple[int | None, str]
"""Group and medium."""

POD_BITS = 64
"""Pods that share a machine word."""
_FIRST_SLOTS = 1024
_FIRST_PART = 64
"""Hashes of a look-up that are searched for one by one; only further ones in rows of slots."""
_PART = 512
"""Hashes that are searched for in rows at a time."""
_SHORT_ROW = 8
"""After a shorter row of slots the rest of a part is searched for one by one."""
_TOGETHER = 16
"""Blocks of an event from which on they are processed by numpy."""
MAX_PLANES = 256
"""Maximum pairs of group and medium, over all pods."""
GPU = "gpu"
"""The medium of an engine's own memory."""
NO_SLOT = 0
"""The slot of hashes that no pod holds."""
_NO_SLOTS: Slots = np.empty(0, np.intp)


@dataclass(slots=True)
class Pod:
    """A data-parallel rank of an engine.

    Attributes:
        name: as it was added.
        place: its number; bit ``place % 64`` of word ``place // 64``.
        groups: the groups that its events have described.
        seen: groups that its events have named, described or not.
        copies: copies of a block beside the first, by plane and slot.
        row_tokens: a hit that needs stored blocks ends at a multiple of this; None until reported.
        num_blocks: blocks held, counted per plane.
        num_stored: of these, blocks in a store.
        unknown_removals: removals of blocks that it was not known to hold.
        refused: blocks beyond ``max_blocks``.
    """

    name: str
    place: int
    groups: dict[int, GroupSpec] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    copies: dict[tuple[Plane, int], int] = field(default_factory=dict)
    row_tokens: int | None = None
    num_blocks: int = 0
    num_stored: int = 0
    unknown_removals: int = 0
    refused: int = 0


class Index:
    """The blocks of all pods by hash, plane and pod.

    Args:
        max_blocks: limit of one pod's blocks, counted per plane.
        eagle_groups: groups that EAGLE or MTP drafters read, which events do not report.
        counts_copies: whether storing a block again adds a copy of it.
    """

    def __init__(
        self,
        max_blocks: int = 4_000_000,
        eagle_groups: frozenset[int] = frozenset(),
        *,
        counts_copies: bool = True,
    ) -> None:
        self._max_blocks = max_blocks
        self.eagle_groups = eagle_groups
        self._counts_copies = counts_copies
        self._pods: dict[str, Pod] = {}
        self._places: list[str | None] = []
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._hashes = array("Q", [0])
        self._holders = array("I", [0])
        self._planes: dict[Plane, list[Words]] = {}
        self._in_plane: Counter[Plane] = Counter()
        self._capacity = _FIRST_SLOTS
        self.version = 0
        """Changes with pods and their groups, not with blocks."""

    # Pods

    @property
    def pods(self) -> dict[str, Pod]:
        """Every pod by name; read-only."""
        return self._pods

    @property
    def num_hashes(self) -> int:
        """Number of hashes that some pod holds."""
        return len(self._slots)

    @property
    def num_words(self) -> int:
        """Number of words that hold one bit for each pod."""
        return -(-len(self._places) // POD_BITS)

    def name_at(self, place: int) -> str | None:
        """The pod with this number, or None."""
        return self._places[place] if place < len(self._places) else None

    def add_pod(self, name: str) -> Pod:
        """The pod of this name; a new one holds no blocks."""
        known = self._pods.get(name)
        if known is not None:
            return known
        place = self._places.index(None) if None in self._places else len(self._places)
        if place == len(self._places):
            self._places.append(None)
            for words in self._planes.values():
                if len(words) < self.num_words:
                    words.append(np.zeros(self._capacity, np.uint64))
        self._places[place] = name
        self._pods[name] = Pod(name, place)
        self.version += 1
        return self._pods[name]

    def drop_pod(self, name: str) -> None:
        """Remove a pod and its blocks; unknown pods are ignored."""
        if name in self._pods:
            self.clear_pod(name)
            self._places[self._pods.pop(name).place] = None
            self.version += 1

    def learn_group(self, name: str, group: int, spec: GroupSpec) -> None:
        """Set the description of a pod's group."""
        pod = self.add_pod(name)
        if pod.groups.get(group) != spec:
            pod.groups[group] = spec
            pod.seen.add(group)
            self.version += 1

    def learn_row(self, name: str, row_tokens: int) -> None:
        """Set the row size of a pod's store in tokens; of several sizes, their common divisor."""
        pod = self.add_pod(name)
        common = math.gcd(pod.row_tokens or 0, row_tokens)
        if common != pod.row_tokens:
            pod.row_tokens = common
            self.version += 1

    # Blocks

    def apply_event(self, name: str, event: Event) -> None:
        """Apply an event of a pod."""
        if isinstance(event, Cleared):
            self.clear_pod(name)
        elif isinstance(event, Removed):
            self.remove_blocks(name, event.group, event.medium, event.hashes)
        else:
            self._learn_from(name, event)
            self.store_blocks(name, event.group, event.medium, _held(event))

    def store_blocks(
        self, name: str, group: int | None, medium: str, hashes: Iterable[int]
    ) -> None:
        """Add blocks to a pod, by hashes of 64 bits; one that it already holds gets a copy."""
        pod = self.add_pod(name)
        if group is not None and group not in pod.seen:
            pod.seen.add(group)
            self.version += 1
        plane = (group, medium)
        words = self._words_of(plane)
        if words is None:
            pod.refused += sum(1 for _ in hashes)
            return
        together = isinstance(hashes, list) and len(hashes) >= _TOGETHER
        if together and self._store_together(pod, plane, hashes):  # type: ignore[arg-type]
            return
        word = words[pod.place // POD_BITS].data
        bit = 1 << pod.place % POD_BITS
        slots, holders = self._slots, self._holders
        room = self._max_blocks - pod.num_blocks
        copies = pod.copies if self._counts_copies and medium == GPU else None
        stored = 0
        for block in hashes:
            slot = slots.get(block)
            if slot is None:
                if stored >= room:
                    pod.refused += 1
                    continue
                if not self._free and len(self._hashes) == self._capacity:
                    self._grow()
                    word = self._planes[plane][pod.place // POD_BITS].data
                slot = self._take_slot(block)
            held = word[slot]
            if held & bit:
                if copies is not None:
                    copies[plane, slot] = copies.get((plane, slot), 0) + 1
                continue
            if stored >= room:
                pod.refused += 1
            else:
                word[slot] = held | bit
                holders[slot] += 1
                stored += 1
        self._count_in_pod(pod, plane, stored)

    def remove_blocks(
        self, name: str, group: int | None, medium: str, hashes: Iterable[int]
    ) -> None:
        """Remove blocks from a pod, one copy of each."""
        pod = self.add_pod(name)
        plane = (group, medium)
        words = self._planes.get(plane)
        if words is None:
            pod.unknown_removals += sum(1 for _ in hashes)
            return
        together = isinstance(hashes, list) and len(hashes) >= _TOGETHER and not pod.copies
        if together and self._remove_together(pod, plane, hashes):  # type: ignore[arg-type]
            return
        word = words[pod.place // POD_BITS].data
        bit = 1 << pod.place % POD_BITS
        before = pod.num_blocks
        for block in hashes:
            slot = self._slots.get(block, NO_SLOT)
            held = word[slot]
            if not held & bit:
                pod.unknown_removals += 1
                continue
            if pod.copies and (plane, slot) in pod.copies:
                _take_one(pod.copies, (plane, slot))
                continue
            word[slot] = held ^ bit
            pod.num_blocks -= 1
            self._release_slot(slot)
        del word  # a view would keep the plane alive
        pod.num_stored += pod.num_blocks - before if medium in OUTSIDE else 0
        self._count(plane, pod.num_blocks - before)

    def clear_pod(self, name: str) -> None:
        """Remove all blocks of a pod; its group descriptions stay."""
        pod = self.add_pod(name)
        if not pod.num_blocks:
            return
        number, bit = pod.place // POD_BITS, np.uint64(1 << pod.place % POD_BITS)
        for plane, words in list(self._planes.items()):
            word = words[number]
            held = np.flatnonzero(word & bit).tolist()
            for slot in held:
                self._release_slot(slot)
            word &= ~bit
            self._count(plane, -len(held))
        pod.num_blocks = pod.num_stored = 0
        pod.copies.clear()

    # Many blocks at once: the same as one by one, in a third of the time.  Both do nothing and
    # return False where blocks are listed twice, or would be counted as copies or as unknown.

    def _store_together(self, pod: Pod, plane: Plane, hashes: list[int]) -> bool:
        number = len(hashes)
        if number > self._max_blocks - pod.num_blocks or len(set(hashes)) < number:
            return False
        word, bit = pod.place // POD_BITS, np.uint64(1 << pod.place % POD_BITS)
        slots = self.slots_of(hashes)
        if (self._planes[plane][word][slots] & bit).any():
            return False
        new = np.flatnonzero(slots == NO_SLOT)
        if len(new):
            all_new = len(new) == number
            slots[new] = self._take_slots(
                hashes if all_new else [hashes[row] for row in new.tolist()]
            )
        self._planes[plane][word][slots] |= bit
        np.frombuffer(self._holders, np.uintc)[slots] += 1
        self._count_in_pod(pod, plane, number)
        return True

    def _remove_together(self, pod: Pod, plane: Plane, hashes: list[int]) -> bool:
        word, bit = pod.place // POD_BITS, np.uint64(1 << pod.place % POD_BITS)
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
        self._count_in_pod(pod, plane, -len(hashes))
        return True

    # Look-ups

    def slots_of(self, hashes: Sequence[int]) -> Slots:
        """The slot of each hash, ``NO_SLOT`` for hashes that no pod holds."""
        found = map(self._slots.get, hashes, repeat(NO_SLOT))
        return np.fromiter(found, np.intp, len(hashes))

    def leading_slots_of(self, hashes: Sequence[int]) -> Slots:
        """The slots of the hashes before the first one that no pod holds."""
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

    def planes(self) -> Iterator[Plane]:
        """Every pair of group and medium in which a pod holds blocks."""
        return iter(self._planes)

    def held(self, plane: Plane, word: int, slots: Slots) -> Words:
        """For each slot, the pods of one word that hold it, as bits."""
        return self._planes[plane][word][slots]

    def held_by(self, name: str, hashes: Sequence[int]) -> dict[Plane, list[int]]:
        """The blocks among ``hashes`` that a pod holds, by plane."""
        pod = self._pods[name]
        word, bit = pod.place // POD_BITS, np.uint64(1 << pod.place % POD_BITS)
        slots = self.slots_of(hashes)
        found: dict[Plane, list[int]] = {}
        for plane in self._planes:
            rows = np.flatnonzero(self.held(plane, word, slots) & bit)
            if len(rows):
                found[plane] = [hashes[row] for row in rows.tolist()]
        return found

    # Slots

    def _learn_from(self, name: str, event: Stored) -> None:
        group, kind = event.group, event.kind
        if group is None or kind is None:
            return
        if event.medium in (STORED, REMOTE) and event.hashes and KINDS.get(kind) is Needs.WHOLE:
            self.learn_row(name, len(event.hashes) * event.block_tokens)
        known = self.add_pod(name).groups.get(group)
        block_tokens = event.block_tokens
        if known is not None:
            # A partial block is stored with its own size, which is not the group's.
            block_tokens = max(block_tokens, known.block_tokens)
            if (kind, event.window, block_tokens) == (known.kind, known.window, known.block_tokens):
                return
        eagle = group in self.eagle_groups
        self.learn_group(name, group, GroupSpec(kind, event.window, block_tokens, eagle))

    def _words_of(self, plane: Plane) -> list[Words] | None:
        """The words of a plane, created on first use; None if there are too many planes."""
        words = self._planes.get(plane)
        if words is None and len(self._planes) < MAX_PLANES:
            words = [np.zeros(self._capacity, np.uint64) for _ in range(self.num_words)]
            self._planes[plane] = words
        return words

    def _count_in_pod(self, pod: Pod, plane: Plane, more: int) -> None:
        """Count ``more`` blocks of a pod in a plane."""
        pod.num_blocks += more
        pod.num_stored += more if plane[1] in OUTSIDE else 0
        self._count(plane, more)

    def _count(self, plane: Plane, more: int) -> None:
        """Count ``more`` blocks in a plane; an empty plane is dropped."""
        self._in_plane[plane] += more
        if not self._in_plane[plane]:
            del self._in_plane[plane], self._planes[plane]

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


def _take_one(copies: dict[tuple[Plane, int], int], key: tuple[Plane, int]) -> None:
    if copies[key] > 1:
        copies[key] -= 1
    else:
        del copies[key]


def _held(event: Stored) -> Sequence[int]:
    """The blocks that an event reports and that the engine holds.

    In the ``full`` report mode vLLM names every block of a hit, though of states it holds only the
    last.  A first store omits the skipped blocks, so that the event has more tokens than named
    blocks.
    """
    if len(event.hashes) < 2 or KINDS.get(event.kind or "") is not Needs.STATE:
        return event.hashes
    is_whole = event.num_tokens == len(event.hashes) * event.block_tokens
    return event.hashes[-1:] if event.parent is None and is_whole else event.hashes


def alignment(specs: Iterable[GroupSpec], hash_block_tokens: int) -> int:
    """The divisor of every hit in tokens: vLLM's ``scheduler_block_size``."""
    return math.lcm(hash_block_tokens, *(spec.block_tokens for spec in specs))
