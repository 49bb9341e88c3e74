"""An engine's whole store over real memory: what was saved is loaded, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdconn.store.engine.saves import Save
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


FULL, WINDOW = RowKind.FA, RowKind.WA


@pytest.mark.parametrize("reader", ["the engine that saved the window", "another engine"])
@pytest.mark.parametrize(
    ("lost", "loaded"),
    [(None, 192), (FULL, 128), (WINDOW, 128)],
    ids=["control: neither is lost", "full attention is lost", "the window is lost"],
)
def test_a_window_behind_another_engines_full_attention_is_loaded_with_it_or_not_at_all(
    reader: str, lost: RowKind | None, loaded: int
) -> None:
    """One engine saves FA rows, another one a window at the block where its own prompt parts."""
    rows, model, first = MemoryRows(), Model(window=150), prompt(2, 448)
    with engine(rows, model, Shape(), "first", window_every="last") as store:
        store.run(first)
        store.settle()
    full, window = (_row(rows, kind, 2) for kind in (FULL, WINDOW))
    assert (full is not None, window) == (True, None)
    with engine(rows, model, Shape(tp=2), "second", window_every="last") as second:
        assert second.run(first[:192] + prompt(4, 150)).loaded == 0
        second.settle()
        assert _row(rows, FULL, 2) is full, "it is still the first engine's"
        assert _row(rows, WINDOW, 2) is not None
        _lose(rows, lambda name: name.index == 2 and name.kind is lost)
        with engine(rows, model, Shape(), "third", window_every="last") as third:
            store = second if reader == "the engine that saved the window" else third
            outcome = store.run(first[:192] + prompt(5, 150))
            assert (outcome.loaded, outcome.wrong) == (loaded, 0)
            store.settle()
            again = store.run(first[:192] + prompt(6, 150))  # what was lost is saved anew
            assert (again.loaded, again.wrong) == (192, 0)


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "control: kept"])
def test_a_window_committed_after_its_full_attention_was_evicted_is_not_loaded_alone(
    is_lost: bool,
) -> None:
    """The engine knows the other one's row from its look-up, and does not save it itself."""
    rows, model, first = MemoryRows(), Model(window=150), prompt(2, 448)
    with engine(rows, model, Shape(), "first", window_every="last") as store:
        store.run(first)
        store.settle()
    assert [_row(rows, kind, 2) is not None for kind in (FULL, WINDOW)] == [True, False]
    with engine(rows, model, Shape(), "second", window_every="last") as store:
        save_pass = store.store.save_pass

        def save_later(*args: Any) -> Save | None:
            if is_lost:
                _lose(rows, lambda name: name.kind is FULL and name.index == 2)
            return save_pass(*args)

        store.store.save_pass = save_later  # type: ignore[method-assign]
        store.run(first[:192] + prompt(4, 150))
        store.settle()
        store.store.save_pass = save_pass  # type: ignore[method-assign]
        kept = [_row(rows, kind, 2) is not None for kind in (FULL, WINDOW)]
        assert kept == [not is_lost, True]
        outcome = store.run(first[:192] + prompt(5, 150))
        assert (outcome.loaded, outcome.wrong) == (128 if is_lost else 192, 0)


def _row(rows: MemoryRows, kind: RowKind, index: int) -> object | None:
    """The row of a block that the prompts of a test share; there is one at most."""
    found = [
        row for (_, name), row in rows.rows.items() if (name.kind, name.index) == (kind, index)
    ]
    assert len(found) <= 1
    return found[0] if found else None


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
