"""Engines whose rows are packed, of which heads fit or do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdconn.store.settings import StoreSettings
from tests.store.joined.rig import FakeEngine, Model, Shape, until_ready
from tests.store.joined.test_joined import SETTINGS, prompt

TOKENS = prompt(41, 300)
LOADED = 256
ALL, SOME, NONE = (0, 1, 2, 3), (0, 2, 3), ()
"""Heads that fit when they are packed."""


def model(fitting: tuple[int, ...] = ALL, **more: Any) -> Model:
    """Four heads, of which some look like bfloat16; large enough for pages to be saved."""
    return replace(Model(token_nbytes=256), like_bfloat16=fitting, **more)


def settings(root: Path, **more: Any) -> StoreSettings:
    """A store of files with packed rows."""
    return replace(SETTINGS, **{"root": str(root), "compression": "exponents", **more})


@contextmanager
def engine(
    given: StoreSettings,
    of: Model | None = None,
    shape: Shape | None = None,
    *,
    writer: str = "a",
    namespace: str = "ns",
) -> Iterator[FakeEngine]:
    """An engine with accounts."""
    made = FakeEngine(
        given, of or model(), shape or Shape(tp=2), namespace=namespace, writer=writer, budget=None
    )
    try:
        until_ready(made)
        yield made
    finally:
        made.close()


def saved(given: StoreSettings, of: Model | None = None, shape: Shape | None = None) -> None:
    """Save the prompt."""
    with engine(given, of, shape) as ours:
        assert ours.run(TOKENS).wrong == 0
        ours.settle()


def found(given: StoreSettings, of: Model | None = None, shape: Shape | None = None) -> int:
    """Tokens of the prompt that another engine loads, none of which is wrong."""
    with engine(given, of, shape or Shape(layout="BHLNC"), writer="b") as theirs:
        outcome = theirs.run(TOKENS)
        assert outcome.wrong == 0
        assert outcome.loaded + outcome.computed == len(TOKENS)
        theirs.settle()
        return outcome.loaded


def rows_of(root: Path) -> list[Path]:
    """Files of rows."""
    return sorted(root.glob("rows/*/*a/*/*"))
