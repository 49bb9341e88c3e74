"""Checks of lent bytes: they pass on every honest pull and on no other one.

Ranks' memory is random bytes at made-up addresses.  A plan is carried out on them and on
the oracle's labels, so that each byte that was pulled is known by layer, head and row;
which of them a check covers is then found once more, cell by cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdconn.integrity.checks import Checks, Corrupted, Expected
from pdconn.integrity.lent import LentSums, lent_sums
from pdconn.integrity.memory import U8, Cells, gathered
from pdconn.integrity.sums import I64, UNIT_TOKENS, Terms
from pdconn.planning.plan import Pairing, Plan
from pdconn.planning.planning_errors import PlanningError
from pdconn.planning.template import Piece, build_templates, match_pieces
from pdconn.protocol.proof import NOTHING
from registration.references import AttentionKind, KVCacheReferences
from tests.property.cases import Case, cases
from tests.property.oracle import Group
from tests.property.scale import drawn
from tests.property.test_plan import MUTANTS
from transport import Spans


class Bytes:
    """A rank's memory, random, at the addresses that its references say."""

    def __init__(self, references: KVCacheReferences, seed: int) -> None:
        drawn_from = np.random.default_rng(seed)
        self.at: dict[int, U8] = {
            memory.base: drawn_from.integers(0, 256, memory.nbytes, dtype=np.uint8)
            for memory in references.memories()
        }

    def gather(self, cells: Cells, step: int, ids: I64, strips: I64) -> Iterable[U8]:
        return gathered(self.at[cells.memory.base], cells, step, ids, strips)

    def part(self, start: int, nbytes: int) -> U8:
        """The bytes from an address on; fewer at the end of memory, none outside of it."""
        for base, memory in self.at.items():
            if base <= start < base + len(memory):
                return memory[start - base : start - base + nbytes]
        return np.empty(0, dtype=np.uint8)


@dataclass
class Pulled:
    """Every byte that a plan moves, one row each: where to, and what the oracle calls it."""

    local: NDArray[np.int64]
    remote: NDArray[np.int64]
    rank: NDArray[np.int64]
    label: NDArray[np.int64]

    @classmethod
    def by(cls, case: Case, plan: Plan) -> Pulled:
        columns: list[list[NDArray[np.int64]]] = [[], [], [], []]
        for rank, spans in plan.reads:
            labels = case.theirs.labels(rank)
            for local, remote, nbytes in _runs(spans):
                base = max(base for base in labels if base <= remote)
                columns[0].append(np.arange(local, local + nbytes))
                columns[1].append(np.arange(remote, remote + nbytes))
                columns[2].append(np.full(nbytes, rank))
                columns[3].append(labels[base][remote - base : remote - base + nbytes])
        empty = [np.empty(0, dtype=np.int64)]
        return cls(*(np.concatenate(empty + column) for column in columns))

    def covered(self, case: Case, terms: Terms) -> NDArray[np.bool_]:
        """Which bytes a check must cover: units whose every written row was pulled."""
        layer, head, row = self.label >> 48, (self.label >> 40) & 0xFF, (self.label >> 20) & 0xFFFFF
        rows, written = np.ones(64, dtype=np.int64), np.zeros(64, dtype=np.int64)
        for group in case.theirs.groups:
            for number in group.numbers:
                rows[number], written[number] = _cut(group, terms)
        unit = row // rows[layer]
        wanted = np.minimum((unit + 1) * rows[layer], written[layer]) - unit * rows[layer]
        found = np.unique(np.stack([layer, head, unit, row])[:, row < written[layer]], axis=1)
        units, counts = np.unique(found[:3], axis=1, return_counts=True)
        count = {tuple(key): int(n) for key, n in zip(units.T.tolist(), counts, strict=True)}
        have = [
            count.get(key, 0)
            for key in zip(layer.tolist(), head.tolist(), unit.tolist(), strict=True)
        ]
        return (row < written[layer]) & (np.array(have, dtype=np.int64) == wanted)


def _cut(group: Group, terms: Terms) -> tuple[int, int]:
    """Rows of a unit, and rows that were written, as the oracle numbers rows."""
    if group.sort.kind is AttentionKind.STATE:
        return 1, 1
    if group.sort.opaque:
        return 1, -(-terms.num_tokens // group.block_tokens)
    tokens = max(terms.unit_tokens, group.sort.ratio)
    rows = max(n for n in range(1, group.rows + 1) if _cuts(group, tokens // group.sort.ratio, n))
    return rows, -(-terms.num_tokens // group.sort.ratio)


def _cuts(group: Group, limit: int, rows: int) -> bool:
    return limit % rows == 0 and group.rows % rows == 0


def _runs(spans: Spans) -> list[tuple[int, int, int]]:
    columns = (spans.local.tolist(), spans.remote.tolist(), spans.nbytes.tolist())
    return list(zip(*columns, strict=True))


@dataclass
class Pull:
    """One pull of a case: both sides' memory, the lender's sums and what is asked for."""

    case: Case
    terms: Terms
    ours: Bytes = field(init=False)
    theirs: dict[int, Bytes] = field(init=False)
    expected: tuple[Expected, ...] = field(init=False)
    lent: dict[int, LentSums] = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        ours, theirs = case.ours.ranks[case.rank], case.theirs.ranks
        self.ours = Bytes(ours, seed=99)
        self.expected = Checks.between(ours, theirs, case.rank).expect(case.need, self.terms)
        sources = Pairing.between(ours, theirs, case.rank).ranks
        self.theirs = {rank: Bytes(theirs[rank], rank) for rank in range(len(theirs))}
        self.lent = {
            rank: lent_sums(self.theirs[rank], theirs[rank], case.theirs.tables, self.terms)
            for rank in sources
        }

    def copy(self, plan: Plan) -> None:
        """Carry a plan out, from whichever rank has the addresses; none may lie outside."""
        for _, spans in plan.reads:
            for local, remote, nbytes in _runs(spans):
                into = self.ours.part(local, nbytes)
                origin = max((it.part(remote, nbytes) for it in self.theirs.values()), key=len)
                assume(len(into) == len(origin) == nbytes)
                into[:] = origin

    def check(self) -> int:
        """Compare every rank's sums; how many pieces were compared."""
        pieces = 0
        for expected in self.expected:
            lent = self.lent[expected.rank]
            ours = expected.ours(self.ours)
            expected.compare(sum((lent.answer(ask) for ask in expected.asks), NOTHING), ours)
            pieces += ours.pieces
        return pieces


@st.composite
def pulls(draw: st.DrawFn, sampled: bool = False) -> Pull:
    case = draw(cases())
    unit_tokens = draw(st.sampled_from([1, 2, 4, UNIT_TOKENS]))
    return Pull(case, Terms(draw(st.text(max_size=5)), case.theirs.tokens, sampled, unit_tokens))


@drawn(100)
@given(pulls())
def test_honest_pulls_pass_and_cover_each_unit_that_was_read_whole(pull: Pull) -> None:
    plan = pull.case.plan()
    pull.copy(plan)
    pull.check()
    covered = Pulled.by(pull.case, plan).covered(pull.case, pull.terms)
    assert sum(expected.nbytes for expected in pull.expected) == covered.sum()


@drawn(100)
@given(pulls(), st.data())
def test_one_changed_byte_of_ours_fails_the_check(pull: Pull, data: st.DataObject) -> None:
    plan = pull.case.plan()
    pulled = Pulled.by(pull.case, plan)
    covered = pulled.covered(pull.case, pull.terms)
    assume(covered.any())
    pull.copy(plan)
    byte = pull.ours.part(data.draw(st.sampled_from(pulled.local[covered].tolist())), 1)
    byte ^= data.draw(st.integers(1, 255))
    with pytest.raises(Corrupted):
        pull.check()


@drawn(100)
@given(pulls(), st.data())
def test_no_other_byte_of_ours_matters(pull: Pull, data: st.DataObject) -> None:
    plan = pull.case.plan()
    pulled = Pulled.by(pull.case, plan)
    keep = pulled.local[pulled.covered(pull.case, pull.terms)]
    pull.copy(plan)
    for base, memory in pull.ours.at.items():
        other = np.ones(len(memory), dtype=bool)
        other[keep[(keep >= base) & (keep < base + len(memory))] - base] = False
        memory[other] ^= 0xFF
    pull.check()


@drawn(100)
@given(pulls(), st.data())
def test_blocks_written_anew_after_they_were_lent_fail_the_check(
    pull: Pull, data: st.DataObject
) -> None:
    """The block is used by another request between the sum and the read."""
    plan = pull.case.plan()
    pulled = Pulled.by(pull.case, plan)
    where = np.flatnonzero(pulled.covered(pull.case, pull.terms))
    assume(len(where))
    at = data.draw(st.sampled_from(where.tolist()))
    pull.theirs[int(pulled.rank[at])].part(int(pulled.remote[at]), 1)[:] ^= 1
    pull.copy(plan)
    with pytest.raises(Corrupted):
        pull.check()


def _two_blocks_swapped(case: Case) -> Plan:
    """The last two blocks of our first group that has two come into each other's place."""
    tables = list(case.need.blocks)
    for number, table in enumerate(tables):
        if len(table.ids) > 1:
            tables[number] = replace(table, ids=(*table.ids[:-2], *table.ids[:-3:-1]))
            break
    need = replace(case.need, blocks=tuple(tables))
    return case.pairing().plan(need, case.theirs.tables)


def _by(case: Case, change: Callable[[list[Piece]], list[Piece]]) -> Plan:
    ours, theirs = case.ours.ranks[case.rank], case.theirs.ranks
    pieces = change(match_pieces(ours, theirs, case.rank))
    templates = tuple(build_templates(ours, theirs, pieces))
    return replace(case.pairing(), templates=templates).plan(case.need, case.theirs.tables)


def _heads_reversed(case: Case) -> Plan:
    """All heads come from the right rank, in reverse order: no byte is lost."""
    return _by(
        case,
        lambda pieces: [
            replace(
                piece,
                our_head=piece.our_head + head,
                their_head=piece.their_head + piece.num_heads - 1 - head,
                num_heads=1,
            )
            for piece in pieces
            for head in range(piece.num_heads)
        ],
    )


def _layers_exchanged(case: Case) -> Plan:
    """Two layers of one group and rank are each other's source."""

    def exchanged(pieces: list[Piece]) -> list[Piece]:
        for i, j in combinations(range(len(pieces)), 2):
            a, b = pieces[i], pieces[j]
            if replace(a, ours=b.ours, theirs=b.theirs) == b:
                pieces[i], pieces[j] = replace(a, theirs=b.theirs), replace(b, theirs=a.theirs)
                return pieces
        assume(False)
        return pieces

    return _by(case, exchanged)


WRONG = {name: MUTANTS[name] for name in (
    "one head off", "one block off", "holes ignored", "another rank",
    "one byte off at the source", "one byte off at the target", "one run lost",
)} | {
    "two blocks swapped": _two_blocks_swapped,
    "heads reversed": _heads_reversed,
    "layers exchanged": _layers_exchanged,
}  # fmt: skip


@pytest.mark.parametrize("mutant", WRONG)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(pulls())
def test_plans_that_go_wrong_fail_the_check(mutant: str, pull: Pull) -> None:
    """Heads off by one, blocks swapped, a run lost: whenever covered bytes came out wrong."""
    right = pull.case.plan()
    try:
        wrong = WRONG[mutant](pull.case)
    except PlanningError:
        assume(False)
    pulled = Pulled.by(pull.case, right)
    covered = pulled.local[pulled.covered(pull.case, pull.terms)].tolist()
    pull.copy(right)
    honest = [int(pull.ours.part(address, 1)[0]) for address in covered]
    pull.ours = Bytes(pull.case.ours.ranks[pull.case.rank], seed=99)
    pull.copy(wrong)
    assume(honest != [int(pull.ours.part(address, 1)[0]) for address in covered])
    with pytest.raises(Corrupted):
        pull.check()


@drawn(100)
@given(pulls())
def test_units_of_a_row_cover_every_written_row_that_was_pulled(pull: Pull) -> None:
    case, terms = pull.case, replace(pull.terms, unit_tokens=1)
    pulled = Pulled.by(case, case.plan())
    layer, row = pulled.label >> 48, (pulled.label >> 20) & 0xFFFFF
    written = np.zeros(64, dtype=np.int64)
    for group in case.theirs.groups:
        written[list(group.numbers)] = _cut(group, terms)[1]
    assert (pulled.covered(case, terms) == (row < written[layer])).all()


@drawn(100)
@given(pulls(sampled=True))
def test_both_sides_choose_the_same_sample(pull: Pull) -> None:
    """The lender has sums of its sample only; it could not answer for another block."""
    pull.copy(pull.case.plan())
    few = pull.check()
    every = Pull(pull.case, replace(pull.terms, sampled=False))
    every.copy(pull.case.plan())
    assert few <= every.check()
    every.expected = pull.expected
    assert every.check() == few
