"""The blocks that each pod holds, by the engines' own block hashes.  Pure.

A block hash identifies a whole prefix and is the same in every group and engine.  Blocks are held
in a *plane*, a pair of KV cache group and medium; an engine that does not report groups has planes
of group None.  How they are kept, :mod:`pdconn.router.prefix.held_blocks` says.

Bounded: a pod has at most ``max_blocks`` blocks, and all pods together have at most ``MAX_PLANES``
planes; further blocks are counted and ignored, which can only make a hit look shorter.  An empty
plane is dropped.  Cost: about 160 bytes per hash in Python and 40 if compiled, however many pods
hold it, of which 8 per plane and 64 pods (``tests/throughput/routing.py`` measures it).
``tests/throughput/index`` compares it with Dynamo's.

vLLM keeps each block that it computed, even if it already has one with the same hash: with windows
and states that is common, as a hit that they cut makes it recompute blocks of full attention.  It
reports each copy, and each eviction.  So copies on the GPU are counted, and a block is held until
the last copy is removed.  In vLLM's ``full`` report mode an engine also repeats blocks that it
already holds, and later removes them once; for such engines ``counts_copies`` is off, since
counting removed blocks as held would attract prompts to an engine that has to compute them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pdconn.router.prefix.groups import KINDS, OUTSIDE, REMOTE, STORED, GroupSpec, Needs
from pdconn.router.prefix.held_blocks import POD_BITS, Slots, Words, held_blocks
from pdconn.router.prefix.kv_events import Cleared, Event, Removed, Stored

Plane = tuple[int | None, str]
"""Group and medium."""

MAX_PLANES = 256
"""Maximum pairs of group and medium, over all pods."""
GPU = "gpu"
"""The medium of an engine's own memory."""


@dataclass(slots=True)
class Pod:
    """A data-parallel rank of an engine.

    Attributes:
        name: as it was added.
        place: its number; bit ``place % 64`` of word ``place // 64``.
        groups: the groups that its events have described.
        seen: groups that its events have named, described or not.
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
        self._held = held_blocks()
        self._planes: dict[Plane, int] = {}
        self._in_plane: Counter[Plane] = Counter()
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
        return self._held.num_hashes

    @property
    def num_words(self) -> int:
        """Number of words that hold one bit for each pod."""
        return self._held.num_words

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
            if place == self.num_words * POD_BITS:
                self._held.add_word()
            self._places.append(None)
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
            self.learn_from(name, event)
            self.store_blocks(name, event.group, event.medium, _held(event))

    def store_blocks(
        self, name: str, group: int | None, medium: str, hashes: Sequence[int]
    ) -> None:
        """Add blocks to a pod, by hashes of 64 bits; one that it already holds gets a copy."""
        pod = self.add_pod(name)
        self._see_group(pod, group)
        plane = (group, medium)
        number = self._number_of(plane)
        if number is None:
            pod.refused += len(hashes)
            return
        room = max(0, self._max_blocks - pod.num_blocks)
        counts_copies = self._counts_copies and medium == GPU
        stored, refused = self._held.store(pod.place, number, hashes, room, counts_copies)
        pod.refused += refused
        self._count(pod, plane, stored)

    def remove_blocks(
        self, name: str, group: int | None, medium: str, hashes: Sequence[int]
    ) -> None:
        """Remove blocks from a pod, one copy of each."""
        pod = self.add_pod(name)
        plane = (group, medium)
        number = self._planes.get(plane)
        if number is None:
            pod.unknown_removals += len(hashes)
            return
        removed, unknown = self._held.remove(pod.place, number, hashes)
        pod.unknown_removals += unknown
        self._count(pod, plane, -removed)

    def clear_pod(self, name: str) -> None:
        """Remove all blocks of a pod; its group descriptions stay."""
        pod = self.add_pod(name)
        if not pod.num_blocks:
            return
        removed = self._held.clear(pod.place)
        for plane, number in list(self._planes.items()):
            self._count(pod, plane, -removed.get(number, 0))

    def num_copies(self, name: str) -> int:
        """Copies of a pod's blocks beside the first of each."""
        return self._held.num_copies(self._pods[name].place)

    # Look-ups

    def slots_of(self, hashes: Sequence[int]) -> Slots:
        """The slot of each hash, ``NO_SLOT`` for hashes that no pod holds.

        Slots are valid until the index changes.
        """
        return np.frombuffer(self._held.slots_of(hashes), np.intp)

    def leading_slots_of(self, hashes: Sequence[int]) -> Slots:
        """The slots of the hashes before the first one that no pod holds."""
        return np.frombuffer(self._held.leading_slots_of(hashes), np.intp)

    def planes(self) -> Iterator[Plane]:
        """Every pair of group and medium in which a pod holds blocks."""
        return iter(self._planes)

    def held(self, plane: Plane, word: int, slots: Slots) -> Words:
        """For each slot, the pods of one word that hold it, as bits."""
        return np.frombuffer(self._held.held(self._planes[plane], word, slots), np.uint64)

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

    # What events teach

    def learn_from(self, name: str, event: Stored) -> None:
        """Learn a group's description, and the size of a store's rows."""
        pod = self.add_pod(name)
        group, kind = event.group, event.kind
        self._see_group(pod, group)
        if group is None or kind is None:
            return
        if event.medium in (STORED, REMOTE) and event.hashes and KINDS.get(kind) is Needs.WHOLE:
            self.learn_row(name, len(event.hashes) * event.block_tokens)
        known = pod.groups.get(group)
        block_tokens = event.block_tokens
        if known is not None:
            # A partial block is stored with its own size, which is not the group's.
            block_tokens = max(block_tokens, known.block_tokens)
            if (kind, event.window, block_tokens) == (known.kind, known.window, known.block_tokens):
                return
        eagle = group in self.eagle_groups
        self.learn_group(name, group, GroupSpec(kind, event.window, block_tokens, eagle))

    def _see_group(self, pod: Pod, group: int | None) -> None:
        if group is not None and group not in pod.seen:
            pod.seen.add(group)
            self.version += 1

    def _number_of(self, plane: Plane) -> int | None:
        """The number of a plane, created on first use; None if there are too many planes."""
        number = self._planes.get(plane)
        if number is None and len(self._planes) < MAX_PLANES:
            number = self._planes[plane] = self._held.add_plane()
        return number

    def _count(self, pod: Pod, plane: Plane, more: int) -> None:
        """Count ``more`` blocks of a pod in a plane; an empty plane is dropped."""
        pod.num_blocks += more
        pod.num_stored += more if plane[1] in OUTSIDE else 0
        self._in_plane[plane] += more
        if not self._in_plane[plane]:
            del self._in_plane[plane]
            self._held.drop_plane(self._planes.pop(plane))


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
