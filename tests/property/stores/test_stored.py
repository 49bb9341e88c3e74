"""What one engine saved, any other loads: every byte that is read later is the right one."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from pdconn.planning.planning_errors import MissingBlock, PlanningError
from pdconn.store.format.prompt_rows import pieces
from pdconn.store.format.row import store_layout
from registration.references import AttentionKind
from tests.property.scale import drawn
from tests.property.stores.stored import Store, StoredCase, check, first_read, stored_cases
from tests.property.stores.wrong_stores import MUTANTS, RowUnitShort


@drawn(60)
@given(stored_cases(), st.data())
def test_every_byte_that_is_read_later_is_loaded_and_no_other_is_touched(
    case: StoredCase, data: st.DataObject
) -> None:
    assert store_layout(case.writer.ranks, case.block_tokens) == case.layout
    store = Store(case)
    ranks = st.integers(0, len(case.reader.ranks) - 1)
    for rank in data.draw(st.sets(ranks, min_size=1, max_size=3)):
        check(store, rank)


def test_the_cases_are_not_all_alike() -> None:
    """The law above is worth what is drawn for it."""
    seen: Counter[str] = Counter()

    @settings(
        max_examples=250,
        database=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(stored_cases())
    def count(case: StoredCase) -> None:
        seen.update(_traits(case))

    count()
    expected = {
        "opaque", "opaque window", "compressed", "chunks", "a chunk's end", "pieces", "a tail",
        "held", "other TP", "stages", "other blocks", "other layout", "replicas",
        "a compressor", "a compressor that keeps nothing", "a compressor not in step with rows",
        "a compressor of opaque blocks",
        "a state", "a state of two pieces", "a state of parts", "a state beside a window",
        "a state of other blocks",
    }  # fmt: skip
    assert seen.keys() == expected
    assert min(seen.values()) >= 5, seen


def _traits(case: StoredCase) -> set[str]:
    sorts = [group.sort for group in case.reader.groups]
    chunks = [s for s in sorts if s.kind is AttentionKind.CHUNKED_LOCAL]
    compressors = [s for s in sorts if s.compress_ratio > 1]
    states = [s for s in sorts if s.is_state]
    wa, writer, reader = case.layout.wa, case.writer, case.reader
    sizes = [
        {n: g.block_tokens for g in side.groups for n in g.numbers} for side in (writer, reader)
    ]
    found = {
        "opaque": any(s.opaque and not s.is_state for s in sorts),
        "opaque window": any(s.opaque and s.window is not None for s in sorts),
        "compressed": any(s.ratio > 1 for s in sorts),
        "chunks": bool(chunks),
        "a chunk's end": any(s.reach(case.boundary) == case.boundary for s in chunks),
        "pieces": len(pieces(wa, case.boundary)) > 1,
        "a tail": wa is not None and any(s.tokens < case.block_tokens for s in wa.sections),
        "held": 0 < case.held < case.boundary,
        "other TP": writer.tp != reader.tp,
        "stages": len(writer.stages) != len(reader.stages),
        "other blocks": sizes[0] != sizes[1],
        "other layout": writer.layout != reader.layout,
        "replicas": any(s.heads < reader.tp for s in sorts),
        "a compressor": any((s.window or 0) > s.compress_ratio for s in compressors),
        "a compressor that keeps nothing": any(
            first_read(s, case.boundary, case.block_tokens) == case.boundary for s in compressors
        ),
        "a compressor not in step with rows": any(
            case.block_tokens % s.compress_ratio for s in compressors
        ),
        "a compressor of opaque blocks": any(s.opaque for s in compressors),
        "a state": bool(states),
        "a state of two pieces": any(s.tail_nbytes for s in states),
        "a state of parts": any(s.heads > 1 for s in states) and writer.tp != reader.tp,
        "a state beside a window": bool(states) and any(s.window is not None for s in sorts),
        "a state of other blocks": any(
            sizes[0][n] != sizes[1][n] for s in states for n in s.numbers
        ),
    }
    return {name for name, is_so in found.items() if is_so}


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_account_catches(mutant: str) -> None:
    """Negative control: some case shows each mutant, by its bytes and not by an exception."""
    find(
        stored_cases(),
        lambda case: _is_caught(MUTANTS[mutant](case)),
        settings=settings(
            max_examples=2000, database=None, derandomize=True, phases=(Phase.generate,)
        ),
    )


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
def test_a_row_of_a_unit_too_few_is_refused_when_it_is_saved() -> None:
    """Negative control: rows and windows that do not agree are an error, not wrong bytes."""

    def is_refused(case: StoredCase) -> bool:
        compressed = any(group.sort.compress_ratio > 1 for group in case.reader.groups)
        try:
            RowUnitShort(case).save()
        except MissingBlock:
            return compressed
        return False

    find(
        stored_cases(),
        is_refused,
        settings=settings(
            max_examples=2000, database=None, derandomize=True, phases=(Phase.generate,)
        ),
    )


def _is_caught(store: Store) -> bool:
    try:
        for rank in range(min(4, len(store.case.reader.ranks))):
            check(store, rank)
    except AssertionError:
        return True
    except (PlanningError, KeyError):
        return False
    return False
