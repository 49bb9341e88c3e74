"""Law 13: of a block that a pull fills, every byte is read or zeroed, and none that is held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdconn.planning.plan import Need
from pdconn.planning.runs import NO_GAPS, Gaps
from tests.property.cases import Case, cases
from tests.property.oracle import expected_gaps
from tests.property.scale import drawn


@drawn(400)
@given(cases())
def test_what_is_not_pulled_of_a_blocks_rows_is_a_gap(case: Case) -> None:
    check(case, case.pairing().gaps(case.need))


@drawn(100)
@given(cases())
def test_gaps_and_reads_share_no_byte(case: Case) -> None:
    gaps = _marked(case, case.pairing().gaps(case.need))
    for _, spans in case.plan().reads:
        for base, memory in gaps.items():
            for start, nbytes in zip(spans.local.tolist(), spans.nbytes.tolist(), strict=True):
                assert not memory[max(0, start - base) : max(0, start - base + nbytes)].any()


def check(case: Case, gaps: Gaps) -> None:
    """Raises AssertionError: a byte too many, or one too few."""
    found = _marked(case, gaps)
    for base, wanted in expected_gaps(case.ours, case.theirs, case.rank, case.need).items():
        assert (found[base] == wanted).all()


def _marked(case: Case, gaps: Gaps) -> dict[int, NDArray[np.bool_]]:
    made = {
        base: np.zeros(len(labels), dtype=bool)
        for base, labels in case.ours.labels(case.rank, False).items()
    }
    for start, nbytes in zip(gaps.local.tolist(), gaps.nbytes.tolist(), strict=True):
        [base] = [base for base, memory in made.items() if base <= start < base + len(memory)]
        assert not made[base][start - base : start - base + nbytes].any(), "a byte twice"
        made[base][start - base : start - base + nbytes] = True
    return made


def _of(case: Case, tokens: Callable[[range], range]) -> Gaps:
    need = Need(tuple(tokens(one) for one in case.need.tokens), case.need.blocks)
    return case.pairing().gaps(need)


def _cut(case: Case, keep: slice) -> Gaps:
    gaps = case.pairing().gaps(case.need)
    return replace(gaps, local=gaps.local[keep], nbytes=gaps.nbytes[keep])


def _nudged(case: Case, by: int) -> Gaps:
    gaps = case.pairing().gaps(case.need)
    return replace(gaps, local=gaps.local + np.uint64(by))


MUTANTS: dict[str, Callable[[Case], Gaps]] = {
    "none": lambda case: NO_GAPS,
    "what is held": lambda case: _of(case, lambda tokens: range(0, tokens.stop)),
    "as if it ended later": lambda case: _of(
        case, lambda tokens: range(tokens.start, tokens.stop + 1)
    ),
    "one run lost": lambda case: _cut(case, slice(1, None)),
    "one byte off": lambda case: _nudged(case, 1),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_the_oracle_catches(mutant: str, data: st.DataObject) -> None:
    """Negative control: the same check fails on gaps that are slightly wrong."""
    case = data.draw(cases())
    right, wrong = case.pairing().gaps(case.need), MUTANTS[mutant](case)
    assume(_bytes(right) != _bytes(wrong))
    with pytest.raises((AssertionError, ValueError)):
        check(case, wrong)


def _bytes(gaps: Gaps) -> tuple[bytes, bytes]:
    return gaps.local.tobytes(), gaps.nbytes.tobytes()
