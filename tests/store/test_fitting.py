"""How much of a stored prefix staging carries: against every boundary tried in turn."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from pdconn.store.engine.lookups import Fitting, ShareSizes
from pdconn.store.format.prompt_rows import rows_needed
from tests.property.scale import drawn
from tests.store.format.test_boundaries import SIZE, World, layout, section, worlds

SIZES = st.builds(ShareSizes, st.integers(1, 5), st.integers(0, 30))


def fitting(world: World, sizes: ShareSizes, staging: int, held: int) -> Fitting:
    tokens = range(held, max(held, world.limit))
    return Fitting.largest(world.layout, sizes, staging, tokens, world.has)


def needed(world: World, sizes: ShareSizes, held: int, boundary: int) -> int:
    """Bytes of staging for the rows between ``held`` and ``boundary``."""
    return sizes.staging_nbytes(rows_needed(world.layout, held, boundary))


def tried(world: World, sizes: ShareSizes, staging: int, held: int) -> tuple[int, int]:
    """The largest boundary that fits, and what the largest of all needs if that does not fit."""
    served = [b for b in range(held + 1, world.limit + 1) if world.serves(b)]
    fits = [b for b in served if needed(world, sizes, held, b) <= staging]
    most = needed(world, sizes, held, max(served)) if served else 0
    return max(fits, default=0), most if most > staging else 0


@drawn(300)
@given(worlds, SIZES, st.integers(0, 80), st.integers(0, 6 * SIZE))
def test_the_largest_boundary_that_fits_is_found_and_what_the_whole_needs_is_said(
    world: World, sizes: ShareSizes, staging: int, held: int
) -> None:
    found = fitting(world, sizes, staging, held)
    assert (found.boundary, found.cut_nbytes) == tried(world, sizes, staging, held)
    assert list(found.rows) == (
        rows_needed(world.layout, held, found.boundary) if found.boundary else []
    )


def test_rows_of_windows_forgotten_are_noticed() -> None:
    """Negative control: the law above fails where staging is reckoned without them."""

    def differs(drawn: tuple[World, ShareSizes, int]) -> bool:
        world, sizes, staging = drawn
        found = fitting(world, ShareSizes(sizes.fa, 0), staging, 0)
        return found.boundary != tried(world, sizes, staging, 0)[0]

    find(
        st.tuples(worlds, SIZES, st.integers(0, 80)),
        differs,
        settings=settings(
            max_examples=2000,
            database=None,
            derandomize=True,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_long_prompt_that_is_cut_is_not_looked_for_block_by_block() -> None:
    """Of 4096 rows staging holds 16: the rows before are asked for twice, not 4080 times."""
    asked = 0

    def has(kind: object, index: int) -> bool:
        nonlocal asked
        asked += 1
        return True

    found = Fitting.largest(layout(section()), ShareSizes(1, 0), 16, range(4096 * SIZE), has)
    assert found.boundary == 16 * SIZE
    assert asked == 4096 + 16
