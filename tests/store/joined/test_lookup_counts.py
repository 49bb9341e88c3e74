"""Counts of look-ups: each prompt that asks for a hit once, however often it is looked for."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pdconn.store.format.row import RowKind, RowName
from pdconn.store.shelf.interface import Buffer
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.joined.rig import FakeEngine, Model, Shape
from tests.store.joined.test_joined import SETTINGS, engine, prompt


def pulled(made: FakeEngine, tokens: list[int]) -> None:
    """A prompt that comes from a peer: the store is not asked for it, and saves it."""
    made.store.on_new_request(
        "pulled", tokens, len(tokens), lambda: (), may_load=True, reads_files=False
    )
    ids = made._allocate(len(tokens))
    made._write(tokens, range(len(tokens)), ids)
    made.store.save_pass("pulled", len(tokens) - 1, len(tokens), lambda: tuple(map(list, ids)))
    made.store.request_finished("pulled")


def test_a_pulled_prompt_is_hashed_and_no_look_up_that_misses() -> None:
    with engine(MemoryRows(), Model(), Shape()) as made:
        pulled(made, prompt(1, 300))
        made.run(prompt(2, 300))
        counts = made.store.take_store_counts()
    assert counts["store_lookups"] == counts["store_misses"] == 1


def test_a_hit_that_is_looked_for_again_is_one_look_up() -> None:
    """Rows that are gone when they are read: the second look-up finds a shorter prefix."""
    rows = MemoryRows()
    tokens = prompt(3, 300)
    with engine(rows, Model(), Shape(), window_every="all") as made:
        made.run(tokens)
        made.settle()
        made.store.take_store_counts()
        for namespace, name in list(rows.rows):
            if name.kind is RowKind.FA and name.index == 3:
                del rows.rows[namespace, name]
        assert made.run(tokens).loaded == 192
        counts = made.store.take_store_counts()
    assert counts["store_lookups"] == counts["store_hits"] == 1


def test_a_shelf_that_does_not_answer_is_counted() -> None:
    gone_on = threading.Event()
    now = [0.0]

    class Stuck(MemoryShelf):
        def has(self, namespace: str, name: RowName) -> bool:
            gone_on.wait(20.0)
            return super().has(namespace, name)

        def read(self, namespace: str, name: RowName, ranges: Sequence[tuple[int, Buffer]]) -> None:
            raise AssertionError

    rows = MemoryRows()
    made = FakeEngine(SETTINGS, Model(), Shape(), shelf=lambda: Stuck(rows), clock=lambda: now[0])
    try:

        def later() -> None:
            now[0] += 1.0

        tokens = prompt(4, 300)
        made.store.on_new_request(
            "waits", tokens, len(tokens), lambda: (), may_load=True, reads_files=False
        )
        assert made._ask("waits", len(tokens), 0, later) == 0
        counts = made.store.take_store_counts()
    finally:
        gone_on.set()
        made.close()
    assert counts["store_lookups"] == counts["store_late"] == 1
