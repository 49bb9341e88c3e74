"""Rows of a small model in a root, as an engine saves them."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from pdconn.store.format.footer import Footer, checksum, encode_footer, row_nbytes
from pdconn.store.format.prompt_rows import Chain
from pdconn.store.format.row import RowKind, RowName, StoreLayout, store_layout
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.model_shape import LayerSort, ModelShape
from registration.references import AttentionKind

BLOCK = 64
WINDOW = 100
NAMESPACE = "0a1b2c"
MODEL = ModelShape(
    "small",
    (
        LayerSort((0, 2), AttentionKind.FULL, None, 2, 48),
        LayerSort((1, 3), AttentionKind.SLIDING_WINDOW, WINDOW, 2, 48),
    ),
)
LAYOUT = store_layout(EngineShape(MODEL).references(1), BLOCK)
"""A boundary needs two WA rows: its own and the one before."""


def prompt(seed: int, blocks: int) -> Chain:
    """The chain of a prompt of whole blocks; prompts of one seed begin alike."""
    tokens = [random.Random(f"{seed} {at}").randrange(1000) for at in range(blocks * BLOCK)]
    return Chain(BLOCK).extended(tokens)


def save(
    root: Path,
    names: Iterable[RowName],
    *,
    namespace: str = NAMESPACE,
    layout: StoreLayout = LAYOUT,
    used_at: float | None = None,
    leave_layout: bool = True,
) -> list[Path]:
    """Commit rows of random bytes; their files."""
    paths = []
    with FilesShelf(root) as shelf:
        for name in names:
            of_kind = layout.for_kind(name.kind)
            data = random.Random(name.file_name).randbytes(of_kind.data_nbytes)
            sums = [checksum(data[one.offset : one.offset + one.nbytes]) for one in of_kind.slabs]
            tokens = range(name.index * BLOCK, (name.index + 1) * BLOCK)
            footer = Footer(namespace, name, tokens, len(data), np.array(sums, dtype=np.uint64))
            part = f"{name.kind}-{name.index}"
            nbytes = row_nbytes(of_kind)
            row = memoryview(mmap.mmap(-1, nbytes))
            row[:] = data + encode_footer(footer)
            shelf.begin("writer", part, nbytes)
            shelf.write("writer", part, [(0, row)])
            assert shelf.commit("writer", part, namespace, name)
            paths.append(file_of(root, name, namespace))
            if used_at is not None:
                os.utime(paths[-1], (used_at, used_at))
    if leave_layout:
        (root / "rows" / namespace / "layout.json").write_bytes(layout.encoded())
    return paths


def file_of(root: Path, name: RowName, namespace: str = NAMESPACE) -> Path:
    """Where a row lies."""
    return root / "rows" / namespace / name.kind / name.key[:1].hex() / name.file_name


def full(chain: Chain, blocks: Sequence[int] | range) -> list[RowName]:
    """FA rows of these blocks."""
    return [chain.name(RowKind.FA, index) for index in blocks]


def windows(chain: Chain, blocks: Sequence[int] | range) -> list[RowName]:
    """WA rows of these blocks."""
    return [chain.name(RowKind.WA, index) for index in blocks]
