"""Sessions of a model with windows are kept as others are, over a fleet in virtual time.

Three groups of windows beside one of full attention.  The router learns of them by the engines'
events alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler")

from pdconn.router.prefix.groups import GroupSpec, Needs
from pdconn.vllm.keeps import keeping
from tests.simulation.sessions.engine import CacheSize, Windows
from tests.simulation.sessions.fleet import Fleet, Shape
from tests.simulation.sessions.test_sessions import (
    LARGE,
    LOAD,
    SHAPE,
    SIZE,
    SOME_MOVE,
    TIGHT,
    missed_untold,
    quiet,
    ran,
)

__all__ = ["quiet"]

WINDOWS = Windows(3, 64)


def windowed(shape: Shape, **changed: Any) -> Shape:
    """A fleet whose model has windows."""
    prefill, decode = (
        replace(one, windows=WINDOWS, **changed)
        for one in (shape.prefill_cache, shape.decode_cache)
    )
    return replace(shape, prefill_cache=prefill, decode_cache=decode)


def hits(fleet: Fleet) -> list[float]:
    assert fleet.is_over
    assert len(fleet.turns) == LOAD.sessions * (LOAD.turns - 1)
    return [turn.hit for turn in fleet.turns]


def test_a_prompt_holds_all_of_full_attention_and_the_last_blocks_of_windows() -> None:
    size = CacheSize(16, 100, windows=WINDOWS)
    assert (size.shape.num_blocks, len(size.shape.groups)) == (400, 4)
    assert size.held_tokens(320) == 16 * (20 + 3 * 4) / 4, "a window ends in 4 blocks"
    assert size.held_tokens(32) == 32, "shorter than a window"
    assert CacheSize(16, 100).held_tokens(320) == 320


def test_what_is_kept_of_full_attention_and_windows_is_hit() -> None:
    fleet = ran(windowed(SHAPE))
    assert min(hits(fleet)) >= 0.95
    assert fleet.count("promises_broken_room") + fleet.count("promises_broken_share") == 0
    assert not any(turn.moved for turn in fleet.turns)
    known = fleet.router.caches.index.pods[next(iter(fleet.engines))].groups
    assert [one.needs for one in known.values()] == [Needs.WHOLE, *[Needs.WINDOW] * 3]
    window = WINDOWS.spec(SIZE.block_tokens)
    assert window in known.values(), "as the router knows it, so are pulls and prompts counted"
    assert window == GroupSpec("sliding_window", 64, 16)


@pytest.mark.matrix
def test_where_windows_do_not_fit_each_session_that_misses_is_told() -> None:
    fleet = ran(windowed(TIGHT, num_blocks=90, chunk_tokens=256), SOME_MOVE, **LARGE)
    assert fleet.count("promises_broken_room") > 0
    missed, untold = missed_untold(fleet)
    assert missed > 0
    assert any(turn.moved for turn in fleet.turns)
    assert untold == 0
    assert max(fleet.waits) <= 2.0, "nothing starves"


def test_without_their_windows_what_is_kept_is_not_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: promises that pin the blocks of full attention alone."""

    def whole_alone(manager: Any, request: Any, limit: int) -> tuple[list[int], int]:
        found, tokens, *_ = manager.coordinator.find_longest_cache_hit(request.block_hashes, limit)
        return [one.block_id for one in found[0]], int(tokens)

    monkeypatch.setattr(keeping, "blocks_of_hit", whole_alone)
    found = hits(ran(windowed(SHAPE)))
    assert sum(found) / len(found) <= 0.5
