"""``save: all`` with draft tokens: what the engine rejects is never in a row.

The engine runs ahead: it schedules a pass before it knows which drafts of the last one were
accepted, and counts all of them as computed until then::

    pass 1    x d d d      computed, as the engine counts: 4
    pass 2          ...    scheduled now; pass 1 reports: one draft was accepted, 2 tokens
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pdconn.protocol.ticket import BlockList
from tests.fakes.memory_shelf import MemoryRows
from tests.store.joined.rig import FakeEngine, Model, Shape
from tests.store.joined.test_joined import engine, prompt

DRAFTS = 4
WRONG_TOKEN = 7
"""A draft that is rejected; no prompt has it."""


def generate(
    made: FakeEngine,
    asked: list[int],
    answer: list[int],
    rng: np.random.Generator,
    given: Callable[[list[int], list[int]], list[int]],
) -> None:
    """Answer a prompt with drafts, and save; ``given`` picks the tokens that the store gets."""
    known = list(asked)
    whole = [*asked, *answer]
    made.store.on_new_request(
        "drafted", given(known, whole), len(asked), lambda: (), may_load=False, reads_files=False
    )
    ids = made._allocate(len(whole) + 2 * DRAFTS + 2)
    made.store.update_state_after_alloc(
        "drafted", tuple(BlockList(0, tuple(group)) for group in ids), 0
    )
    made._write(asked, range(len(asked) - 1), ids)
    before, accepted = len(asked) - 1, 0
    while len(known) < len(whole):
        saved = made.store.save_pass(
            "drafted", before, before + 1 + DRAFTS, lambda: tuple(map(list, ids))
        )
        if saved is not None:
            made.pinned[saved.number] = saved.blocks
            for group, held in enumerate(saved.blocks):
                for block in held.ids:
                    made.refs[group, block] += bool(block)
        if accepted:  # the pass before reports now
            known += whole[len(known) : len(known) + accepted]
            before = len(known) - 1
        right = int(rng.integers(0, DRAFTS + 1))
        drafts = whole[len(known) : len(known) + right] + [WRONG_TOKEN] * (DRAFTS - right)
        passed = known + drafts
        made._write(passed, range(len(known) - 1, len(passed)), ids)
        made.step(passed=True)
        made._until(lambda: not made.pinned, lambda: None)  # read as this pass left them
        before, accepted = before + 1 + DRAFTS, right + 1
    made.settle()
    made.store.request_finished("drafted")


def wrong_bytes(given: Callable[[list[int], list[int]], list[int]]) -> tuple[int, int]:
    """Of prompts and answers loaded by another engine: wrong bytes, and tokens loaded."""
    wrong = loaded = 0
    for seed in range(6):
        rows = MemoryRows()
        asked, answer = prompt(seed, 90), prompt(100 + seed, 230)
        with engine(rows, Model(), Shape(), save="all", window_every="all") as made:
            generate(made, asked, answer, np.random.default_rng(seed), given)
        with engine(rows, Model(), Shape(tp=2), writer="reader") as made:
            outcome = made.run([*asked, *answer, *prompt(200, 30)])
            wrong += outcome.wrong
            loaded += outcome.loaded
    return wrong, loaded


@pytest.mark.parametrize("is_early", [False, True], ids=["accepted tokens", "mutant: given early"])
def test_rejected_drafts_are_in_no_row(is_early: bool) -> None:
    """The mutant gives the store tokens that passes under way have yet to confirm."""
    wrong, loaded = wrong_bytes(lambda known, whole: whole if is_early else known)
    assert loaded >= 6 * 192
    assert bool(wrong) == is_early
