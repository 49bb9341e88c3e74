"""What fetches are served by: a prefetch's, one beside a pull, and others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pdconn.lifecycle.load import LoadState
from pdconn.lifecycle.turns import Urgency
from pdconn.store.engine.beside import PullOutlook
from pdconn.store.format.row import RowKind
from pdconn.store.rank_commands import Fetch
from tests.store.joined.rig import FakeEngine, Model
from tests.store.joined.test_joined import SETTINGS, prompt

TOKENS = prompt(1, 200)


@pytest.mark.parametrize(
    ("is_prefetch", "beside", "expected"),
    [
        (False, False, Urgency.LOAD),
        (False, True, Urgency.PULL),
        (True, False, Urgency.PREFETCH),
        (True, True, Urgency.PREFETCH),
    ],
)
def test_a_fetch_is_as_urgent_as_what_waits_for_it(
    is_prefetch: bool, beside: bool, expected: Urgency, tmp_path: Path
) -> None:
    engine = FakeEngine(replace(SETTINGS, root=str(tmp_path), beside="always"))
    try:
        engine.run(TOKENS)
        engine.settle()
        engine.store.on_new_request(
            "r", TOKENS, 200, lambda: (), may_load=True, reads_files=False, is_prefetch=is_prefetch
        )
        pull = PullOutlook(range(199), None)

        def ask() -> object:
            if beside:
                return engine.store.offer_beside("r", pull)
            return engine.store.get_num_new_matched_tokens("r", 200, 0)

        fetched = fetches(engine, ask)
    finally:
        engine.close()
    assert [fetch.urgency for fetch in fetched] == [expected]


def fetches(engine: FakeEngine, ask: Callable[[], object]) -> list[Fetch]:
    """Ask until there are fetches."""
    found: list[Fetch] = []

    def is_found() -> bool:
        ask()
        commands = engine.store.take_commands()
        found.extend(command for command in commands if isinstance(command, Fetch))
        return bool(found)

    engine._until(is_found, lambda: None)
    return found


@pytest.mark.parametrize("is_prefetch", [True, False], ids=["prefetches", "control"])
def test_prefetches_leave_half_of_the_staging_area_to_requests(
    is_prefetch: bool, tmp_path: Path
) -> None:
    """Room for four loads of 192 tokens, which the engine gives no blocks."""
    engine = FakeEngine(replace(SETTINGS, root=str(tmp_path)), Model(windowed=()))
    prompts = [prompt(seed, 200) for seed in range(4)]
    try:
        each = engine.store.loads.keeper.sizes.staging_nbytes([(RowKind.FA, 0)] * 3)
        for tokens in prompts:
            engine.run(tokens)
        engine.settle()
        space = engine.store.loads.staging
        space.nbytes = 4 * each
        for number, tokens in enumerate(prompts):
            engine.store.on_new_request(
                f"r{number}", tokens, 200, lambda: (), may_load=True, reads_files=False,
                is_prefetch=is_prefetch,
            )  # fmt: skip
            for _ in range(100):
                time.sleep(0.005)
                engine.store.get_num_new_matched_tokens(f"r{number}", 200, 0)
                engine.step()
                if engine.store._requests[f"r{number}"].load.state is LoadState.FETCHED:
                    break
        assert len(space) == (2 if is_prefetch else 4)
    finally:
        engine.close()
