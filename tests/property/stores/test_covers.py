"""A prompt that several sources fill is what one of them alone would have made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from pdconn.planning import cover
from pdconn.planning.plan import Need
from pdconn.planning.planning_errors import PlanningError
from registration.references import KVCacheGroupReference
from tests.property.scale import drawn
from tests.property.stores.covers import Cover, Sources, check, covers


@drawn(60)
@given(covers(), st.data())
def test_every_byte_is_filled_once_by_a_source_that_has_it(
    given: Cover, data: st.DataObject
) -> None:
    ranks = st.integers(0, len(given.case.reader.ranks) - 1)
    for rank in data.draw(st.sets(ranks, min_size=1, max_size=3)):
        check(Sources(given), rank)


def test_the_covers_are_not_all_alike() -> None:
    """The law above is worth what is drawn for it."""
    seen: Counter[str] = Counter()

    @settings(
        max_examples=200, database=None, derandomize=True, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(covers())
    def count(given: Cover) -> None:
        tokens = Sources(given).tokens()
        rows = given.case.held // given.case.block_tokens
        is_lost = rows < given.num_read < given.num_rows and len(tokens) > 0
        is_so = {
            "a store's part": len(tokens) > 0,
            "a store's part behind a hit": len(tokens) > 0 and given.case.held > 0,
            "nothing but windows to pull": tokens.stop == given.case.boundary,
            "rows that are lost": is_lost,
            "rows that are lost and reads that were planned": is_lost and given.plans_first,
            "other blocks of the lender": given.lender.groups[0].block_tokens
            != given.case.reader.groups[0].block_tokens,
        }
        seen.update(name for name, found in is_so.items() if found)

    count()
    assert len(seen) == 6
    assert min(seen.values()) >= 5, seen


# What the law notices


class Overlaps(Sources):
    """Pulls what the store fills, too."""

    def rest(self, need: Need, part: Need) -> Need:
        del part
        return need


class LeavesLostRows(Sources):
    """Takes what the store has begun for filled."""

    def left(self, part: Need, filled: Need) -> Need:
        del filled
        return cover.left_of(part, part)


class FillsALostBlock(Sources):
    """Loads the block in which the first lost row begins."""

    def filled(self, part: Need, groups: Sequence[KVCacheGroupReference]) -> Need:
        found = super().filled(part, groups)
        return cover.left_of(part, found) if any(found.tokens) else found


class ZeroesBehindItsPart(Sources):
    """Zeroes all of a request's blocks that rows leave."""

    def filled(self, part: Need, groups: Sequence[KVCacheGroupReference]) -> Need:
        return Need(super().filled(part, groups).tokens, part.blocks)


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize("broken", [Overlaps, LeavesLostRows, FillsALostBlock, ZeroesBehindItsPart])
def test_the_law_notices(broken: type[Sources]) -> None:
    """Negative control."""
    find(
        covers(),
        lambda given: _is_caught(broken(given)),
        settings=settings(
            max_examples=1000, database=None, derandomize=True, phases=(Phase.generate,)
        ),
    )


def _is_caught(sources: Sources) -> bool:
    try:
        for rank in range(min(4, len(sources.cover.case.reader.ranks))):
            check(sources, rank)
    except AssertionError:
        return True
    except (PlanningError, KeyError):
        return False
    return False
