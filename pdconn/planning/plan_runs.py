"""The runs of a plan: pairs of blocks times templates, as columns of addresses.

Sub-blocks are paired by token position: which of ours is filled from which of theirs.

A plan is made for every pull, on a thread that shares the interpreter's lock with the model.
Its time is that of its operations on arrays.  So groups with equal templates are laid out at once:
vLLM's groups overlay each other in one allocation, so those of a hybrid model usually are::

    group 0   ids 7 9        ┐
    group 1   ids 4 8        ├─►  ids 7 9 4 8 1 3 5  ─►  one column of addresses
    group 2   ids 1 3 5      ┘

A few runs are laid out without arrays: forty operations of numpy on data that the CPU's caches
lost since the pull before take longer than a loop over forty blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np

from pdconn.planning.planning_errors import BlockOutOfRange, MissingBlock
from pdconn.planning.template import I64, Side, Template
from pdconn.protocol.ticket import BlockList
from transport import Device, Spans
from transport.types import U64, merge_runs


@dataclass(frozen=True, slots=True)
class Located:
    """Sub-blocks of one side, by number from the beginning of the prompt.

    ``per_block`` of them make up a block, and ``blocks`` says which block that is.
    """

    wanted: range
    per_block: int
    blocks: BlockList

    def arrays(self) -> tuple[I64, I64 | None]:
        """Block id (0 where the list has none) and index in the block of each, shape (n,).

        Blocks that are not divided have no index, and their ids are a piece of the list itself.
        """
        ids, here = self.blocks.array, self._piece()
        if here is not None:
            return ids[here], None
        numbers = np.arange(self.wanted.start, self.wanted.stop, dtype=np.int64)
        position = numbers // self.per_block - self.blocks.first
        inside = (position >= 0) & (position < len(ids))
        if inside.all():
            found = ids[position]
        else:
            found = np.zeros(len(numbers), dtype=np.int64)
            found[inside] = ids[position[inside]]
        return found, None if self.per_block == 1 else numbers % self.per_block

    def lists(self) -> tuple[Sequence[int], Sequence[int] | None]:
        """The same without arrays."""
        ids, here = self.blocks.ids, self._piece()
        if here is not None:
            return ids[here], None
        first, per_block, count = self.blocks.first, self.per_block, len(self.blocks.ids)
        positions = [number // per_block - first for number in self.wanted]
        found = [ids[at] if 0 <= at < count else 0 for at in positions]
        return found, None if per_block == 1 else [number % per_block for number in self.wanted]

    def _piece(self) -> slice | None:
        """Where in the list of blocks they are, if they are blocks and all of them are there."""
        start, stop = self.wanted.start - self.blocks.first, self.wanted.stop - self.blocks.first
        if self.per_block == 1 and 0 <= start <= stop <= len(self.blocks.ids):
            return slice(start, stop)
        return None


@dataclass(frozen=True, slots=True)
class Pairs:
    """Sub-blocks to move: the first of ours is filled from the first of theirs, and so on.

    Attributes:
        first_token: of the prompt, in the first of them.
        holes: sub-blocks before the window; ``hits`` are held already.
    """

    ours: Located
    theirs: Located
    first_token: int
    holes: int
    hits: int

    def __len__(self) -> int:
        return len(self.ours.wanted)


def check_ids(template: Template, pairs: Pairs) -> None:
    """Refuse pairs with a hole, or with an id beyond its cache.

    Raises:
        MissingBlock: the first token that has no block on one side.
        BlockOutOfRange: the highest id of one side.
    """
    group = f"group {template.our_group}"
    ours, theirs = pairs.ours.arrays()[0], pairs.theirs.arrays()[0]
    for ids, missing in ((ours, "have no block of ours"), (theirs, "are needed and not lent")):
        if not ids.all():
            at = pairs.first_token + int(np.argmin(ids != 0)) * template.sub_block_tokens
            raise MissingBlock(f"{group}: tokens from {at} on {missing}")
    for side, ids, num_blocks in (
        ("ours", ours, template.ours.num_blocks),
        ("theirs", theirs, template.theirs.num_blocks),
    ):
        highest = int(ids.max())
        if highest >= num_blocks:
            raise BlockOutOfRange(f"{group}: block id, {side} {highest} of {num_blocks} blocks")


FEW_RUNS = 256
"""Up to so many runs of a plan are laid out without arrays."""

Run = tuple[int, int, int]
"""Our address, theirs, and bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Runs from one rank of the peer: the columns of :class:`transport.Spans`, not yet merged."""

    local: U64
    remote: U64
    nbytes: U64


@dataclass(frozen=True, slots=True, eq=False)
class AlikeTemplates:
    """Equal templates, each with its number: of every block they make the same runs.

    Attributes:
        run_nbytes: bytes of a run, where all have as many.
        rows: of each run our start, stride and step, theirs, and bytes; none of many.
    """

    numbered: tuple[tuple[int, Template], ...]
    run_nbytes: int | None
    rows: tuple[tuple[int, ...], ...]

    @property
    def template(self) -> Template:
        """One of them."""
        return self.numbered[0][1]

    def few(self, pairs: Mapping[int, Pairs]) -> list[Run] | None:
        """As :meth:`columns`, without arrays."""
        runs: list[Run] = []
        for number, template in self.numbered:
            if number in pairs:
                runs += self._few_of(template, pairs[number])
        runs.sort()
        return runs or None

    def columns(self, pairs: Mapping[int, Pairs]) -> Columns | None:
        """Every run of every pair, by our address, so that neighbours in memory can merge.

        An engine allocates block ids in any order, and layers may lie outside of blocks.

        Args:
            pairs: of each template, by its number; those without any are left out.

        Raises:
            MissingBlock, BlockOutOfRange: an id is a hole, or beyond its cache.
        """
        used = [pairs[number] for number, _ in self.numbered if number in pairs]
        if not used:
            return None
        template = self.template
        ours, our_sub = _joined([one.ours.arrays() for one in used])
        theirs, their_sub = _joined([one.theirs.arrays() for one in used])
        if not (
            _all_in(ours, template.ours.num_blocks) and _all_in(theirs, template.theirs.num_blocks)
        ):
            for number, each in self.numbered:
                if number in pairs:
                    check_ids(each, pairs[number])
        local = _addresses(template.ours, ours, our_sub)
        remote = _addresses(template.theirs, theirs, their_sub)
        order = np.argsort(local) if (local[1:] < local[:-1]).any() else None
        if order is not None:
            local, remote = local[order], remote[order]
        if self.run_nbytes is not None:
            return Columns(local, remote, np.full(len(local), self.run_nbytes, np.uint64))
        shape = len(ours), len(template.nbytes)
        nbytes = np.broadcast_to(template.nbytes.astype(np.uint64), shape).reshape(-1)
        return Columns(local, remote, nbytes if order is None else nbytes[order])

    def _few_of(self, template: Template, pairs: Pairs) -> list[Run]:
        (ours, our_sub), (theirs, their_sub) = pairs.ours.lists(), pairs.theirs.lists()
        if not (
            0 < min(ours) <= max(ours) < template.ours.num_blocks
            and 0 < min(theirs) <= max(theirs) < template.theirs.num_blocks
        ):
            check_ids(template, pairs)
        if len(self.rows) == 1 and our_sub is None and their_sub is None:
            our_start, our_stride, _, their_start, their_stride, _, nbytes = self.rows[0]
            return [
                (our_start + our * our_stride, their_start + their * their_stride, nbytes)
                for our, their in zip(ours, theirs, strict=True)
            ]
        return [
            (
                our_start + our * our_stride + our_at * our_step,
                their_start + their * their_stride + their_at * their_step,
                nbytes,
            )
            for our, our_at, their, their_at in zip(
                ours, our_sub or repeat(0), theirs, their_sub or repeat(0), strict=False
            )
            for our_start, our_stride, our_step, their_start, their_stride, their_step, nbytes
            in self.rows
        ]  # fmt: skip


def alike(templates: Sequence[Template]) -> tuple[AlikeTemplates, ...]:
    """``templates``, equal ones together, in order of the peer's ranks."""
    found: dict[tuple[object, ...], list[tuple[int, Template]]] = {}
    for number, template in enumerate(templates):
        found.setdefault(_compared(template), []).append((number, template))
    made = [
        AlikeTemplates(tuple(some), _equal(some[0][1].nbytes), _rows(some[0][1]))
        for some in found.values()
    ]
    return tuple(sorted(made, key=lambda some: some.template.their_rank))


def few_spans(parts: Sequence[Sequence[Run]], ours: Device, theirs: Device) -> Spans:
    """All runs of one rank of the peer, neighbours merged; at least one part.

    Raises:
        BadSpans: an address that is none.
    """
    local: list[int] = []
    remote: list[int] = []
    sizes: list[int] = []
    our_end = their_end = -1
    for our, their, nbytes in chain.from_iterable(parts):
        if our == our_end and their == their_end:
            sizes[-1] += nbytes
        else:
            local.append(our)
            remote.append(their)
            sizes.append(nbytes)
        our_end, their_end = our + nbytes, their + nbytes
    return Spans.merged_few(local, remote, sizes, ours, theirs)


def many_spans(parts: Sequence[Columns], ours: Device, theirs: Device) -> Spans:
    """As :func:`few_spans`, of arrays."""
    if len(parts) == 1:
        local, remote, nbytes = parts[0].local, parts[0].remote, parts[0].nbytes
    else:
        local = np.concatenate([part.local for part in parts])
        remote = np.concatenate([part.remote for part in parts])
        nbytes = np.concatenate([part.nbytes for part in parts])
    merged = merge_runs(nbytes, local, remote)
    if merged is not None:
        first, nbytes = merged
        local, remote = local[first], remote[first]
    return Spans.merged(local, remote, nbytes, ours, theirs)


def _compared(template: Template) -> tuple[object, ...]:
    """What is equal of two templates that are laid out at once."""
    return (
        template.their_rank,
        template.their_device,
        template.ours.num_blocks,
        template.theirs.num_blocks,
        *(column.tobytes() for column in _columns(template)),
    )


def _columns(template: Template) -> tuple[I64, ...]:
    ours, theirs = template.ours, template.theirs
    return (
        ours.start, ours.stride, ours.step, theirs.start, theirs.stride, theirs.step,
        template.nbytes,
    )  # fmt: skip


def _rows(template: Template) -> tuple[tuple[int, ...], ...]:
    if len(template.nbytes) > FEW_RUNS:
        return ()
    return tuple(zip(*(column.tolist() for column in _columns(template)), strict=True))


def _equal(numbers: I64) -> int | None:
    """The number that all of them are, if it is one."""
    if not len(numbers) or not (numbers == numbers[0]).all():
        return None
    return int(numbers[0])


def _all_in(ids: I64, num_blocks: int) -> bool:
    """Whether every id is from 1 to ``num_blocks - 1``; there is one at least.

    As unsigned numbers, what is below 1 is very large once 1 is taken away.
    """
    return int(np.maximum.reduce(ids.view(np.uint64) - np.uint64(1))) < num_blocks - 1


def _joined(located: list[tuple[I64, I64 | None]]) -> tuple[I64, I64 | None]:
    """Ids and sub-blocks of all; no sub-blocks if all are the first of their block."""
    if len(located) == 1:
        return located[0]
    ids = np.concatenate([each for each, _ in located])
    if all(sub is None for _, sub in located):
        return ids, None
    subs = [np.zeros_like(each) if sub is None else sub for each, sub in located]
    return ids, np.concatenate(subs)


def _addresses(side: Side, ids: I64, sub: I64 | None) -> U64:
    """Where each run of each block begins, block by block."""
    if len(side.start) == 1 and sub is None:  # the usual case, without a second axis
        table = ids * side.stride
        table += side.start
        return table.view(np.uint64)
    table = ids[:, None] * side.stride[None, :]
    table += side.start[None, :]
    if sub is not None:
        table += sub[:, None] * side.step[None, :]
    return table.ravel().view(np.uint64)
