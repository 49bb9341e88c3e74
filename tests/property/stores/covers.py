"""Prompts that several sources fill, drawn at random: what is held, a store, a lender.

The store's rows may end anywhere, and be lost from any row on while they are loaded: the lender
fills what is left.  Bytes are the labels of :mod:`tests.property.oracle`, as if one engine had
computed all of the prompt; each byte may be written once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from pdconn.planning import cover
from pdconn.planning.plan import Gaps, Need, Pairing, Plan
from pdconn.store.format.row import RowKind
from pdconn.store.rank.row_pairing import unsaved_layers
from registration.references import KVCacheGroupReference
from tests.property.oracle import UNTOUCHED, Side, _inside
from tests.property.stores.stored import ZERO, Labels, Store, StoredCase, _of, lent_cases
from transport import Spans


@dataclass(repr=False)
class Cover:
    """A request of ``case.boundary`` tokens, of which ``case.held`` are held.

    Attributes:
        lender: has all of it.
        num_rows: rows of full attention that the store has, from the first on.
        num_read: of these, rows before the first that is lost while they are loaded.
        plans_first: whether the lender's reads are planned before that is known.
    """

    case: StoredCase
    lender: Side
    num_rows: int
    num_read: int
    plans_first: bool

    def __repr__(self) -> str:
        rows = f"{self.num_read} of {self.num_rows} rows"
        return f"{self.case!r}, {rows}, lender {self.lender.layout} TP {self.lender.tp}"


@st.composite
def covers(draw: st.DrawFn) -> Cover:
    """Any three engines of a model, and any cut of a prompt."""
    case, lender = draw(lent_cases())
    groups = case.reader.ranks[0].groups
    # A local hit ends with a block of every group.
    unit = int(np.lcm.reduce([group.block_tokens for group in groups]))
    case.held = draw(st.sampled_from([0, (case.boundary - 1) // (2 * unit) * unit]))
    most, first = case.boundary // case.block_tokens, case.held // case.block_tokens
    num_rows = draw(st.sampled_from([most, most - 1, draw(st.integers(0, most))]))
    num_read = max(0, draw(st.sampled_from([num_rows, num_rows - 1, min(first + 1, num_rows)])))
    return Cover(case, lender, num_rows, num_read, draw(st.booleans()))


@dataclass
class Filled:
    """A rank's memory, and how often each byte was written."""

    got: dict[int, Labels]
    times: dict[int, Labels] = field(default_factory=dict)

    @classmethod
    def untouched(cls, side: Side, rank: int) -> Filled:
        """Before anything is written."""
        got = {at: np.full_like(it, UNTOUCHED) for at, it in side.labels(rank, False).items()}
        return cls(got, {at: np.zeros_like(it) for at, it in got.items()})

    def copy(self, origin: dict[int, Labels], pairs: Iterable[tuple[int, int, int]]) -> None:
        """Copy runs: addresses of ours and of theirs, and bytes."""
        for local, remote, nbytes in pairs:
            base, into = _inside(self.got, local, nbytes)
            from_base, source = _inside(origin, remote, nbytes)
            self.got[base][into] = origin[from_base][source]
            self.times[base][into] += 1

    def zero(self, gaps: Gaps) -> None:
        """Fill gaps with zeros."""
        for local, nbytes in zip(gaps.local.tolist(), gaps.nbytes.tolist(), strict=True):
            base, into = _inside(self.got, local, nbytes)
            self.got[base][into] = ZERO
            self.times[base][into] += 1


@dataclass
class Sources:
    """How a request is filled; mutants change one method."""

    cover: Cover

    # What mutants change

    def tokens(self) -> range:
        """What the store has behind what is held."""
        case = self.cover.case
        return range(case.held, max(case.held, self.cover.num_rows * case.block_tokens))

    def filled(self, part: Need, groups: Sequence[KVCacheGroupReference]) -> Need:
        """What of it the store fills."""
        lost = self.cover.num_read < self.cover.num_rows
        end = self.cover.num_read * self.cover.case.block_tokens if lost else None
        return cover.until(part, groups, end)

    def left(self, part: Need, filled: Need) -> Need:
        return cover.left_of(part, filled)

    def rest(self, need: Need, part: Need) -> Need:
        return cover.rest_of(need, part)

    # The ways of a byte

    def fill(self, rank: int) -> Filled:
        """Fill a rank's memory from all sources."""
        given = self.cover
        reader, groups = given.case.reader, given.case.reader.ranks[rank].groups
        need = Need.for_range(given.case.held, given.case.boundary, reader.tables)
        made = Filled.untouched(reader, rank)
        part = cover.first_part(need, groups, self.tokens())
        filled = self.filled(part, groups)
        if any(filled.tokens):
            self._load(made, rank, filled)
        left, rest = self.left(part, filled), self.rest(need, part)
        pairing = Pairing.between(reader.ranks[rank], given.lender.ranks, rank)
        asked = [rest, left] if given.plans_first else [cover.with_left(left, rest)]
        for number, one in enumerate(asked):
            plan = pairing.plan(one, given.lender.tables)
            made_of_lender(made, plan, given.lender)
            if not number:  # what is left are whole blocks, of which nothing is to be zeroed
                made.zero(pairing.gaps(one))
        return made

    def _load(self, made: Filled, rank: int, need: Need) -> None:
        """As a rank's reader does."""
        given, store = self.cover, Store(self.cover.case)
        store.save()
        references = given.case.reader.ranks[rank]
        own = store.share(references)
        for gaps in self._zeroed(store, rank, need):
            made.zero(gaps)
        share = _of(own, RowKind.FA)
        if not share.slabs:
            return
        pairing = store.pairing(references, share, saves=False)
        first = given.case.held // given.case.block_tokens
        host, rows = store._fetched(share, pairing.stride, list(range(first, given.num_rows)))
        spans: Spans = store.spans_to_load(pairing, need, rows)
        made.copy(host, _runs(spans))

    def _zeroed(self, store: Store, rank: int, need: Need) -> Iterator[Gaps]:
        references = self.cover.case.reader.ranks[rank]
        own = store.share(references)
        for kind in RowKind:
            share = _of(own, kind)
            if share.slabs:
                yield from store.gaps(store.pairing(references, share, saves=False), need)
        left = unsaved_layers(references, [_of(own, kind) for kind in RowKind])
        if left is not None:
            yield left.whole_blocks(need)


def made_of_lender(made: Filled, plan: Plan, lender: Side) -> None:
    """Carry a plan out."""
    for their_rank, spans in plan.reads:
        made.copy(lender.labels(their_rank), _runs(spans))


def _runs(spans: Spans) -> Iterator[tuple[int, int, int]]:
    return zip(spans.local.tolist(), spans.remote.tolist(), spans.nbytes.tolist(), strict=True)


def check(sources: Sources, rank: int) -> None:
    """Fill a rank's memory, and compare it with what the lender alone would have made of it.

    Raises:
        AssertionError: a byte that is missing, wrong, stale, or written twice.
    """
    given = sources.cover
    made, reader = sources.fill(rank), given.case.reader
    alone = Filled.untouched(reader, rank)
    need = Need.for_range(given.case.held, given.case.boundary, reader.tables)
    pairing = Pairing.between(reader.ranks[rank], given.lender.ranks, rank)
    made_of_lender(alone, pairing.plan(need, given.lender.tables), given.lender)
    alone.zero(pairing.gaps(need))
    for base, wanted in alone.got.items():
        assert made.times[base].max(initial=0) <= 1, "a byte was written twice"
        wrong = np.flatnonzero(made.got[base] != wanted)
        assert not len(wrong), f"{len(wrong)} bytes are wrong, the first at {wrong[0]}"
