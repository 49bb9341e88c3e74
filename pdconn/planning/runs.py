"""The runs of a plan: block pairs times templates, as columns of addresses.

A plan is made for every pull, on a thread that shares the interpreter's lock with the model.  A
prompt of a thousand tokens has forty blocks, so what counts is not the size of the arrays but
how many operations there are.  Therefore groups whose templates are alike are laid out at once:
vLLM's groups overlay each other in one allocation, so a hybrid model's usually are::

    group 0   ids 7 9        ┐
    group 1   ids 4 8        ├─►  ids 7 9 4 8 1 3 5  ─►  one column of addresses
    group 2   ids 1 3 5      ┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pdconn.planning.errors import BlockOutOfRange, MissingBlock
from pdconn.planning.template import I64, Side, Template
from transport import Device, Spans
from transport.runs import merge_runs
from transport.types import U64


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Sub-blocks to move: block ids and sub-block indices of both sides, shape (n,).

    Attributes:
        our_sub, their_sub: None where blocks are not divided: every index is 0.
        first_token: of the prompt, in the first of them.
        holes: sub-blocks before the window; ``hits`` are held already.
    """

    ours: I64
    our_sub: I64 | None
    theirs: I64
    their_sub: I64 | None
    first_token: int
    holes: int
    hits: int


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Runs from one rank of the peer: the columns of :class:`transport.Spans`, not yet merged."""

    local: U64
    remote: U64
    nbytes: U64


@dataclass(frozen=True, slots=True, eq=False)
class AlikeTemplates:
    """Templates, each with its number, that say the same of every block.

    Attributes:
        run_nbytes: bytes of a run, where all have as many.
    """

    numbered: tuple[tuple[int, Template], ...]
    run_nbytes: int | None

    @property
    def template(self) -> Template:
        """One of them."""
        return self.numbered[0][1]

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
        ours = _joined([one.ours for one in used])
        theirs = _joined([one.theirs for one in used])
        if not (
            _all_in(ours, template.our_num_blocks) and _all_in(theirs, template.their_num_blocks)
        ):
            for number, each in self.numbered:
                if number in pairs:
                    _check_ids(each, pairs[number])
        local = _addresses(template.ours, ours, _sub([(one.ours, one.our_sub) for one in used]))
        remote = _addresses(
            template.theirs, theirs, _sub([(one.theirs, one.their_sub) for one in used])
        )
        order = np.argsort(local) if (local[1:] < local[:-1]).any() else None
        if order is not None:
            local, remote = local[order], remote[order]
        if self.run_nbytes is not None:
            return Columns(local, remote, np.full(len(local), self.run_nbytes, np.uint64))
        shape = len(ours), len(template.nbytes)
        nbytes = np.broadcast_to(template.nbytes.astype(np.uint64), shape).reshape(-1)
        return Columns(local, remote, nbytes if order is None else nbytes[order])


def alike(templates: Sequence[Template]) -> tuple[AlikeTemplates, ...]:
    """``templates`` by what they say, in order of the peer's ranks."""
    found: dict[tuple[object, ...], list[tuple[int, Template]]] = {}
    for number, template in enumerate(templates):
        found.setdefault(_says(template), []).append((number, template))
    made = [AlikeTemplates(tuple(some), _equal(some[0][1].nbytes)) for some in found.values()]
    return tuple(sorted(made, key=lambda some: some.template.their_rank))


def spans_of(parts: Sequence[Columns], ours: Device, theirs: Device) -> Spans:
    """All runs of one rank of the peer, neighbours merged; at least one part."""
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


def _says(template: Template) -> tuple[object, ...]:
    """What must be equal for two templates to be laid out at once."""
    sides = (template.ours, template.theirs)
    columns = (column for side in sides for column in (side.start, side.stride, side.step))
    return (
        template.their_rank,
        template.their_device,
        template.our_num_blocks,
        template.their_num_blocks,
        template.nbytes.tobytes(),
        *(column.tobytes() for column in columns),
    )


def _equal(numbers: I64) -> int | None:
    """The number that all of them are, if it is one."""
    first = int(numbers[0]) if len(numbers) else None
    return first if len(numbers) and bool((numbers == first).all()) else None


def _all_in(ids: I64, num_blocks: int) -> bool:
    """Whether every id is from 1 to ``num_blocks - 1``; there is one at least.

    As unsigned numbers, what is below 1 is very large once 1 is taken away.
    """
    return int(np.maximum.reduce(ids.view(np.uint64) - np.uint64(1))) < num_blocks - 1


def _check_ids(template: Template, pairs: Pairs) -> None:
    """Name what is wrong with ids that are not all in.

    Raises:
        MissingBlock: the first token that has no block on one side.
        BlockOutOfRange: the highest id of one side.
    """
    group = f"group {template.our_group}"
    for ids, missing in (
        (pairs.ours, "have no block of ours"),
        (pairs.theirs, "are needed and not lent"),
    ):
        if not ids.all():
            at = pairs.first_token + int(np.argmin(ids != 0)) * template.sub_block_tokens
            raise MissingBlock(f"{group}: tokens from {at} on {missing}")
    for side, ids, num_blocks in (
        ("ours", pairs.ours, template.our_num_blocks),
        ("theirs", pairs.theirs, template.their_num_blocks),
    ):
        highest = int(ids.max())
        if highest >= num_blocks:
            raise BlockOutOfRange(f"{group}: block id, {side} {highest} of {num_blocks} blocks")


def _joined(arrays: list[I64]) -> I64:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _sub(of: list[tuple[I64, I64 | None]]) -> I64 | None:
    """The sub-block of each pair, or None if all are the first."""
    if all(sub is None for _, sub in of):
        return None
    return _joined([np.zeros_like(ids) if sub is None else sub for ids, sub in of])


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
