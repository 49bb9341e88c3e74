"""Engines with an encrypted store, on every shelf, and what lies in their roots."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from pdconn.store.format.prompt_rows import Chain
from pdconn.store.settings import StoreSettings
from tests.store.joined.rig import FakeEngine, Model, Shape, until_ready
from tests.store.joined.test_joined import SETTINGS, prompt

MODEL = Model(token_nbytes=96)
NAMESPACE = "0123456789abcdef0123456789abcdef"
SALT = "tenant-of-a-test"
TOKENS = prompt(41, 300)
LOADED = 256


@contextmanager
def engine(
    given: StoreSettings,
    writer: str,
    shape: Shape | None = None,
    namespace: str = NAMESPACE,
) -> Iterator[FakeEngine]:
    """An engine with accounts."""
    made = FakeEngine(
        given, MODEL, shape or Shape(tp=2), namespace=namespace, writer=writer, budget=None
    )
    try:
        until_ready(made)
        yield made
    finally:
        made.close()


def on_files(root: Path, key_file: str | None, **changes: object) -> StoreSettings:
    """Settings of a store of files."""
    return replace(SETTINGS, root=str(root), key_file=key_file, **changes)  # type: ignore[arg-type]


def saved(given: StoreSettings, writer: str = "a", salt: str | None = SALT) -> None:
    """Save the prompt."""
    with engine(given, writer) as ours:
        assert ours.run(TOKENS, salt=salt).wrong == 0
        ours.settle()


def found(
    given: StoreSettings, writer: str = "b", salt: str | None = SALT, shape: Shape | None = None
) -> int:
    """Tokens of the prompt that an engine loads, none of which is wrong."""
    with engine(given, writer, shape or Shape(layout="BHLNC")) as theirs:
        outcome = theirs.run(TOKENS, salt=salt)
        assert outcome.wrong == 0
        assert outcome.loaded + outcome.computed == len(TOKENS)
        theirs.settle()
        return outcome.loaded


def rows_of(root: Path) -> list[Path]:
    """Files of rows."""
    return sorted(root.glob("rows/*/*a/*/*"))


def everything(root: Path) -> bytes:
    """Paths and bytes of all files below a root."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return b"\n".join(f"{one.relative_to(root)}\n".encode() + one.read_bytes() for one in files)


def secrets_of(made: FakeEngine) -> dict[str, list[bytes]]:
    """What nobody may find: what the prompt and its tenant are, and the KV itself."""
    plain = Chain(64).extended(TOKENS, extras=[SALT.encode()])
    unsalted = Chain(64).extended(TOKENS)
    label = hashlib.sha256(b"pdconn store: tenant\0" + SALT.encode()).digest()
    kv = []
    for group in range(len(made.groups)):
        for layer in range(2):
            lines = made._labels(TOKENS, range(192, 250, 7), group, layer, 0)
            kv += [bytes(head) for line in lines for head in line]
    return {
        "row keys": [*plain.keys, *unsalted.keys],
        "tokens": [np.array(TOKENS[at : at + 6], "<u4").tobytes() for at in (0, 77)],
        "tenant": [SALT.encode(), label[:8]],
        "namespace": [NAMESPACE.encode()],
        "KV": kv,
    }


def leaked(data: bytes, secrets: dict[str, list[bytes]]) -> set[str]:
    """Which of the secrets are in ``data``, as they are or in hexadecimal digits."""
    lower = data.lower()
    return {
        what
        for what, values in secrets.items()
        for value in values
        if value in data or value.hex().encode() in lower
    }
