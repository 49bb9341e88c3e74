"""A load into blocks that the GPU still writes begins once the GPU is done with them."""

from __future__ import annotations

import time

import numpy as np

from pdconn.store.rank_commands import LoadRows
from tests.fakes.stream_points import Point
from tests.store.rank.engines import BLANK, Shape, StoredEngine
from tests.store.rank.shelves import Rows

HELD_S = 0.1


def test_blocks_are_loaded_after_the_point_and_not_before() -> None:
    rows, point = Rows(), Point()
    with StoredEngine(Shape(heads=2), rows, filled=True).opened() as engine:
        engine.saved(engine.names())
    with StoredEngine(Shape(heads=2), rows, filled=False, seed=2).opened() as ours:
        ours.fetch(ours.names())
        (store,) = ours.stores
        store.post_command(LoadRows(ours._number, "r", ours.need()), point)
        time.sleep(HELD_S)
        assert not store.take_loaded()
        for base, labels in ours.side.labels(0, False).items():
            assert np.all(ours.bytes(base, len(labels)) == BLANK)
        point.reach()
        ours.wait(store.has_results)
        assert store.take_loaded() == ["r"]
        ours.check(ours.need())
