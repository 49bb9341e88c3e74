"""An engine's whole store over real memory: what was saved is loaded, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from pdconn.store.format.row import RowKind
from pdconn.store.settings import StoreSettings
from registration.references import AttentionKind
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.joined.rig import FakeEngine, Model, Shape

SETTINGS = StoreSettings(root="", capacity=1 << 30, staging=8 << 20, block_tokens=64, min_tokens=1)

MODELS = {
    "window within a block": Model(window=40),
    "window of several blocks": Model(window=150),
    "chunks": Model(kind=AttentionKind.CHUNKED_LOCAL, window=128),
    "one kind": Model(windowed=()),
    "compressors, half of the window": Model(window=32, compress_ratio=16),
    "compressors, nothing": Model(window=64, compress_ratio=64),
    "compressors, past the boundary before": Model(window=150, compress_ratio=32),
}
SHAPES = {
    "LBHNC": Shape(),
    "BHLNC, two ranks": Shape(tp=2, layout="BHLNC", block_tokens=32, num_blocks=80),
    "packed": Shape(opaque=True),
    "packed, four ranks": Shape(tp=4, opaque=True),
}


def prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(10, 50_000, length)]


@contextmanager
def engine(
    rows: MemoryRows, model: Model, shape: Shape, writer: str = "writer", **settings: object
) -> Iterator[FakeEngine]:
    changed = replace(SETTINGS, **settings)  # type: ignore[arg-type]
    made = FakeEngine(changed, model, shape, writer=writer, shelf=lambda: MemoryShelf(rows))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_prompt_computed_once_is_loaded_up_to_its_last_boundary(
    model: Model, shape: Shape
) -> None:
    with engine(MemoryRows(), model, shape) as store:
        for length in (63, 64, 65, 300, 448):
            tokens = prompt(length, length)
            assert store.run(tokens).loaded == 0
            store.settle()
            again = store.run(tokens)
            assert (again.loaded, again.wrong) == ((length - 1) // 64 * 64, 0)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_engines_of_other_sizes_and_layouts_share_rows(model: Model) -> None:
    rows, tokens = MemoryRows(), prompt(1, 400)
    shapes = [
        Shape(), Shape(tp=2, layout="BHLNC"), Shape(tp=4, layout="BLHNC", block_tokens=32),
        Shape(tp=1, layout="BLHNC", block_tokens=8, num_blocks=320),
    ]  # fmt: skip
    for number, shape in enumerate(shapes):
        with engine(rows, model, shape, f"writer-{number}") as store:
            outcome = store.run(tokens)
            assert (outcome.loaded, outcome.wrong) == (384 if number else 0, 0)
            store.settle()


def test_a_longer_prompt_resumes_at_the_shorter_ones_end_and_one_that_parts_at_its_junction() -> (
    None
):
    with engine(MemoryRows(), Model(window=150), Shape(), window_every="last") as store:
        first = prompt(2, 320)
        store.run(first)
        store.settle()
        longer = store.run(first + prompt(3, 100))
        assert (longer.loaded, longer.wrong) == (320, 0)
        parting = first[:192] + prompt(4, 150)
        assert store.run(parting).loaded == 0  # no window was saved there
        store.settle()
        again = store.run(first[:192] + prompt(5, 150))
        assert (again.loaded, again.wrong) == (192, 0)


def test_a_local_hit_is_not_loaded_again() -> None:
    with engine(MemoryRows(), Model(), Shape()) as store:
        tokens = prompt(6, 300)
        store.run(tokens)
        store.settle()
        outcome = store.run(tokens, num_local=80)
        assert (outcome.loaded, outcome.wrong) == (256 - 80, 0)


def test_short_hits_are_not_worth_it() -> None:
    with engine(MemoryRows(), Model(), Shape(), min_tokens=100) as store:
        tokens = prompt(7, 300)
        store.run(tokens)
        store.settle()
        assert store.run(tokens, num_local=160).loaded == 0
        assert store.run(tokens, num_local=144).loaded == 112


def test_a_row_that_is_gone_is_a_miss_and_a_shorter_hit_is_taken() -> None:
    rows = MemoryRows()
    with engine(rows, Model(), Shape(), window_every="all") as store:
        tokens = prompt(8, 300)
        store.run(tokens)
        store.settle()
        _lose(rows, lambda name: name.kind is RowKind.FA and name.index == 2)
        outcome = store.run(tokens)
        assert (outcome.loaded, outcome.wrong) == (128, 0)


def test_damaged_bytes_are_never_loaded() -> None:
    rows = MemoryRows()
    with engine(rows, Model(), Shape(tp=2), window_every="all") as store:
        tokens = prompt(9, 300)
        store.run(tokens)
        store.settle()
        for (_, name), row in rows.rows.items():
            if name.index == 3:
                row.data[5] ^= 0x40
        outcome = store.run(tokens)
        assert (outcome.loaded, outcome.wrong) == (192, 0)
        store.settle()
        again = store.run(tokens)  # it was saved anew
        assert (again.loaded, again.wrong) == (256, 0)


def test_after_a_reset_nothing_saved_before_is_loaded() -> None:
    with engine(MemoryRows(), Model(), Shape()) as store:
        tokens = prompt(10, 300)
        store.run(tokens)
        store.settle()
        store.store.clear_rows("other")
        assert store.run(tokens).loaded == 0
        store.settle()
        again = store.run(tokens)
        assert (again.loaded, again.wrong) == (256, 0)


def test_a_store_that_is_only_read_saves_nothing() -> None:
    rows = MemoryRows()
    with engine(rows, Model(), Shape(), read_only=True) as store:
        assert store.run(prompt(11, 300)).saves == 0
    assert not rows.rows
    assert not rows.parts


def _lose(rows: MemoryRows, which: Callable[..., bool]) -> None:
    for key in [key for key in rows.rows if which(key[1])]:
        del rows.rows[key]
