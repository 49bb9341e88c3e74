"""Footers with sound checksums that say what no engine writes: a damaged row, and no more."""

from __future__ import annotations

import resource
import struct
from pathlib import Path

import numpy as np
import pytest

from pdconn.store.format.footer import Footer, encode_footer
from pdconn.store.format.row import RowName
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.store_errors import RowDamaged
from pdconn.store.verify import RowState, check_row, footer_of
from tests.tools.cli.stored_rows import BLOCK, NAMESPACE, file_of, full, prompt, save

NAME: RowName = full(prompt(1, 3), [2])[0]


def put(root: Path, tokens: range) -> Path:
    """A row whose footer names these tokens, and is whole else."""
    save(root, [NAME], leave_layout=False)
    path = file_of(root, NAME)
    footer = Footer(NAMESPACE, NAME, tokens, 4096, np.zeros(1, np.uint64))
    path.write_bytes(bytes(4096) + encode_footer(footer))
    return path


@pytest.mark.parametrize(
    "tokens",
    [range(2**64 - 1), range(2 * BLOCK, 2**64 - 1), range(5, 5), range(9, 3), range(3 * BLOCK)],
    ids=["all", "to the end", "none", "backwards", "not of the block"],
)
def test_tokens_that_are_not_those_of_the_block_are_damage(tmp_path: Path, tokens: range) -> None:
    put(tmp_path, tokens)
    with FilesShelf(tmp_path) as shelf:
        (row,) = shelf.rows()
        assert check_row(shelf, row, None).state is RowState.DAMAGED


def test_tokens_of_the_block_are_none(tmp_path: Path) -> None:
    put(tmp_path, range(2 * BLOCK, 3 * BLOCK))
    with FilesShelf(tmp_path) as shelf:
        (row,) = shelf.rows()
        assert len(footer_of(shelf, row).tokens) == BLOCK


def test_a_footer_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    """A file with a hole may be as long as it says."""
    path = put(tmp_path, range(BLOCK))
    with path.open("r+b") as file:
        file.truncate(40 << 30)
        file.seek(-32, 2)
        file.write(struct.pack("<8sIIQQ", b"pdconnS1", 2**32 - 1, 100, 0, 0))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with FilesShelf(tmp_path) as shelf:
        (row,) = shelf.rows()
        with pytest.raises(RowDamaged, match="at most"):
            footer_of(shelf, row)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
