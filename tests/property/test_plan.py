"""Law 1: every byte needed is written once, from the right source, and no other byte."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pdconn.planning.plan import Need, Pairing, Plan
from pdconn.protocol.ticket import trimmed
from tests.layouts import LAYOUTS
from tests.property.oracle import Group, Model, Side, check

NUM_BLOCKS = 80


@dataclasses.dataclass
class Case:
    ours: Side
    theirs: Side
    need: Need
    rank: int

    def plan(self) -> Plan:
        pairing = Pairing.of(self.ours.ranks[self.rank], self.theirs.ranks, self.rank)
        return pairing.plan(self.need, self.theirs.tables)

    def check(self, plan: Plan) -> None:
        check(plan, self.ours, self.rank, self.theirs, self.need)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    windows = draw(st.sampled_from([(None,), (5,), (None, 6), (None, 3, 9)]))
    sizes = [draw(st.integers(1, 3)) for _ in windows]
    names = iter(f"l{i}" for i in range(16))
    groups = tuple(
        Group(tuple(next(names) for _ in range(size)), window)
        for size, window in zip(sizes, windows, strict=True)
    )
    heads = draw(st.sampled_from([1, 2, 4]))
    model = Model(groups, heads, draw(st.sampled_from([1, 3])))
    tokens = draw(st.integers(1, 24))
    tables = []
    blocks = [draw(st.sampled_from([1, 2, 3, 4, 6, 8])) for _ in range(2)]
    held = draw(st.integers(0, (tokens - 1) // blocks[1])) * blocks[1]
    until = draw(st.integers(held, tokens))
    for block, computed in ((blocks[0], tokens), (blocks[1], until)):
        ids = iter(draw(st.permutations(range(1, NUM_BLOCKS))))
        made = []
        for group in groups:
            # Both keep the window of the token that decode will compute first.
            reach = 0 if group.window is None else max(0, until - group.window + 1)
            skipped = reach // block
            made.append([0] * skipped + [next(ids) for _ in range(-(-computed // block) - skipped)])
        tables.append(tuple(trimmed(table) for table in made))
    layouts = [draw(st.sampled_from(LAYOUTS)) for _ in range(2)]
    degrees = [draw(st.sampled_from([1, 2, 4, 8])) for _ in range(2)]
    theirs = Side(model, layouts[0], blocks[0], degrees[0], NUM_BLOCKS, tables[0], 1 << 30)
    ours = Side(model, layouts[1], blocks[1], degrees[1], NUM_BLOCKS, tables[1], 1 << 40)
    return Case(ours, theirs, Need(held, until, tables[1]), draw(st.integers(0, degrees[1] - 1)))


_long = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@_long
@given(cases())
def test_every_needed_byte_once_from_the_right_source(case: Case) -> None:
    case.check(case.plan())


MUTANTS = {
    "one byte off at the source": lambda s: dataclasses.replace(s, remote=s.remote + np.uint64(1)),
    "one byte off at the target": lambda s: dataclasses.replace(s, local=s.local + np.uint64(1)),
    "one run lost": lambda s: dataclasses.replace(
        s, local=s.local[1:], remote=s.remote[1:], nbytes=s.nbytes[1:]
    ),
    "one run too long": lambda s: dataclasses.replace(s, nbytes=s.nbytes + np.uint64(1)),
    "one run twice": lambda s: dataclasses.replace(
        s,
        local=np.append(s.local, s.local[:1]),
        remote=np.append(s.remote, s.remote[:1]),
        nbytes=np.append(s.nbytes, s.nbytes[:1]),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_the_oracle_catches(mutant: str, case: Case) -> None:
    """Negative control: the same check fails on a plan that is slightly wrong."""
    plan = case.plan()
    assume(plan.reads)
    (rank, spans), *rest = plan.reads
    wrong = dataclasses.replace(plan, reads=((rank, MUTANTS[mutant](spans)), *rest))
    with pytest.raises(AssertionError):
        case.check(wrong)
