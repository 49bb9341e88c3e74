"""Law 1: every byte needed is written once, from the right source, and no other byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdconn.planning import plan as plans
from pdconn.planning import plan_runs as runs
from pdconn.planning.plan import Pairing, Plan
from pdconn.planning.planning_errors import PlanningError
from pdconn.planning.template import Piece, build_templates, match_pieces
from pdconn.protocol.ticket import BlockList
from registration.references import AttentionKind
from tests.property.cases import Case, cases
from tests.property.oracle import head_range
from tests.property.scale import drawn
from transport import Spans


@drawn(250)
@given(cases())
def test_every_needed_byte_once_from_the_right_source(case: Case) -> None:
    case.check(case.plan())


@drawn(60)
@given(cases())
def test_few_runs_are_laid_out_as_many_are(case: Case) -> None:
    """Without arrays as with them: the oracle above sees few, engines with long prompts many."""
    planned = []
    for most in (0, runs.FEW_RUNS):
        with mock.patch.object(plans, "FEW_RUNS", most):
            planned.append(case.plan())
    many, few = planned
    assert _columns(few) == _columns(many)
    assert (few.moved, few.num_runs, few.begins) == (many.moved, many.num_runs, many.begins)


@drawn(60)
@given(cases())
def test_runs_are_as_long_as_both_sides_allow(case: Case) -> None:
    """No run of a group ends where another one begins on both sides."""
    pairing = case.pairing()
    for template in pairing.templates:
        one = replace(pairing, templates=(template,))
        for _, spans in one.plan(case.need, case.theirs.tables).reads:
            assert not _joins(spans).any()


def _joins(spans: Spans) -> NDArray[np.bool_]:
    order = np.argsort(spans.local)
    local, remote, nbytes = spans.local[order], spans.remote[order], spans.nbytes[order]
    joins: NDArray[np.bool_] = (local[:-1] + nbytes[:-1] == local[1:]) & (
        remote[:-1] + nbytes[:-1] == remote[1:]
    )
    return joins


def _one_head_off(case: Case) -> Plan:
    """Read heads from where their neighbours are."""
    ours, theirs = case.ours.ranks[case.rank], case.theirs.ranks
    pieces = match_pieces(ours, theirs, case.rank)
    shifted = [replace(piece, their_head=max(0, piece.their_head - 1)) for piece in pieces]
    templates = tuple(build_templates(ours, theirs, shifted))
    return replace(case.pairing(), templates=templates).plan(case.need, case.theirs.tables)


def _one_block_off(case: Case) -> Plan:
    """Read the lender's list as if it began a block later."""
    late = tuple(BlockList(table.first - 1, table.ids) for table in case.theirs.tables)
    return case.pairing().plan(case.need, late)


def _padding_moved(case: Case) -> Plan:
    """Take the padding behind a page for its last bytes."""
    assume(case.ours.padding and case.theirs.padding)

    pairing = case.pairing()
    longer = tuple(replace(t, nbytes=t.nbytes + case.ours.padding) for t in pairing.templates)
    return replace(pairing, templates=longer).plan(case.need, case.theirs.tables)


def _holes_ignored(case: Case) -> Plan:
    """Pair by list index, as if no list began with holes: vLLM's in-tree pairing."""
    tables = tuple(BlockList(0, table.ids) for table in case.theirs.tables)
    return case.pairing().plan(case.need, tables)


def _other_replicas(case: Case) -> Plan:
    """Take the ranks of the peer in another order than they announced."""
    ranks = case.theirs.ranks
    pairing = Pairing.between(case.ours.ranks[case.rank], [*ranks[1:], ranks[0]], case.rank)
    return pairing.plan(case.need, case.theirs.tables)


def _engine_ids(case: Case) -> Plan:
    """Take the engine's ids for those of kernel blocks."""
    assume(any(group.parts > 1 for group in case.theirs.groups))
    return case.pairing().plan(case.need, case.theirs.engine_tables)


def _kernel_blocks_joined(case: Case) -> Plan:
    """Describe split blocks as if a block had the bytes of an unsplit one."""
    theirs = case.theirs
    assume(any(group.parts > 1 and group.sort.heads > theirs.tp for group in theirs.groups))
    groups = tuple(
        replace(group, block_tokens=group.block_tokens * group.parts, parts=1)
        for group in theirs.groups
    )
    wrong = replace(theirs, groups=groups, tables=theirs.engine_tables, ranks=[])
    return replace(case, theirs=wrong).plan()


def _one_hit(case: Case) -> Plan:
    """Take the hit of one group for that of all."""
    need = replace(case.need, tokens=(case.need.tokens[0],) * len(case.need.tokens))
    return case.pairing().plan(need, case.theirs.tables)


def _their_heads(case: Case, head: Callable[[Piece], int]) -> Plan:
    ours, theirs = case.ours.ranks[case.rank], case.theirs.ranks
    pieces = match_pieces(ours, theirs, case.rank)
    moved = [
        replace(p, their_head=head(p) % (p.theirs.num_heads - p.num_heads + 1)) for p in pieces
    ]
    templates = tuple(build_templates(ours, theirs, moved))
    return replace(case.pairing(), templates=templates).plan(case.need, case.theirs.tables)


def _state_undivided(case: Case) -> Plan:
    """Take the first parts of a state for any rank's."""
    kinds = [group.kind for group in case.ours.ranks[case.rank].groups]
    assume(AttentionKind.STATE in kinds)

    def head(piece: Piece) -> int:
        return 0 if kinds[piece.our_group] is AttentionKind.STATE else piece.their_head

    return _their_heads(case, head)


def _one_number_of_heads(case: Case) -> Plan:
    """Place every layer's heads as those of the layers that have most."""
    counts = [group.sort.heads for group in case.ours.groups]
    assume(len(set(counts)) > 1)
    tp, rank = case.ours.tp, case.rank % case.ours.tp
    most, _ = head_range(max(counts), tp, rank)

    def head(piece: Piece) -> int:
        first, _ = head_range(counts[piece.our_group], tp, rank)
        return piece.their_head + most - first

    return _their_heads(case, head)


def _spans(mutate: Callable[[Spans], Spans]) -> Callable[[Case], Plan]:
    def mutant(case: Case) -> Plan:
        plan = case.plan()
        assume(plan.reads)
        (rank, spans), *rest = plan.reads
        return replace(plan, reads=((rank, mutate(spans)), *rest))

    return mutant


MUTANTS: dict[str, Callable[[Case], Plan]] = {
    "one head off": _one_head_off,
    "one block off": _one_block_off,
    "padding moved": _padding_moved,
    "holes ignored": _holes_ignored,
    "another rank": _other_replicas,
    "ids of the engine's blocks": _engine_ids,
    "kernel blocks joined": _kernel_blocks_joined,
    "one hit": _one_hit,
    "a state undivided": _state_undivided,
    "one number of heads": _one_number_of_heads,
    "one byte off at the source": _spans(lambda s: replace(s, remote=s.remote + np.uint64(1))),
    "one byte off at the target": _spans(lambda s: replace(s, local=s.local + np.uint64(1))),
    "one run too long": _spans(lambda s: replace(s, nbytes=s.nbytes + np.uint64(1))),
    "one run lost": _spans(
        lambda s: replace(s, local=s.local[1:], remote=s.remote[1:], nbytes=s.nbytes[1:])
    ),
    "one run twice": _spans(
        lambda s: replace(
            s,
            local=np.append(s.local, s.local[:1]),
            remote=np.append(s.remote, s.remote[:1]),
            nbytes=np.append(s.nbytes, s.nbytes[:1]),
        )
    ),
}


FROM_ONE_RANK = ("ids of the engine's blocks", "kernel blocks joined", "one number of heads")
"""Seen where a rank holds several heads: that of an engine without tensor parallelism."""


@pytest.mark.parametrize("mutant", MUTANTS)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_the_oracle_catches(mutant: str, data: st.DataObject) -> None:
    """Negative control: the same check fails on a plan that is slightly wrong."""
    case = data.draw(cases(splits=mutant in FROM_ONE_RANK))
    try:
        wrong = MUTANTS[mutant](case)
    except PlanningError:
        assume(False)
    assume(_columns(wrong) != _columns(case.plan()))
    with pytest.raises(AssertionError):
        case.check(wrong)


def _columns(plan: Plan) -> list[tuple[int, bytes, bytes, bytes]]:
    return [
        (rank, spans.local.tobytes(), spans.remote.tobytes(), spans.nbytes.tobytes())
        for rank, spans in plan.reads
    ]
