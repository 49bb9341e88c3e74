"""The shelf whose bytes NIXL moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.shelf.nixl_posix import NixlPosixShelf
from pdconn.store.store_errors import ShelfFailure
from tests.store.shelves.contract import ShelfContract
from tests.store.shelves.plain_rows import OpenShelf, load, pages, payload, row_name, save

pytest.importorskip("nixl", reason="the shelf posix needs nixl")


@pytest.fixture
def open_shelf(tmp_path: Path) -> OpenShelf:
    return lambda: NixlPosixShelf(tmp_path / "root")


class TestNixlPosixShelf(ShelfContract):
    """The contract."""


def test_rows_of_plain_files_are_read_and_the_other_way_round(tmp_path: Path) -> None:
    data, other = payload(1, 3 << 20), payload(2, 3 << 20)
    with FilesShelf(tmp_path) as plain, NixlPosixShelf(tmp_path) as nixl:
        save(plain, row_name(1), data)
        save(nixl, row_name(2), other)
        assert load(nixl, row_name(1), len(data)) == data
        assert load(plain, row_name(2), len(other)) == other


def test_what_nixl_cannot_do_is_a_failure_of_the_shelf(tmp_path: Path) -> None:
    with NixlPosixShelf(tmp_path) as shelf:
        save(shelf, row_name(1), payload(1))
        shelf._moving._files._name = "no such agent"
        with pytest.raises(ShelfFailure):
            shelf.read("ns", row_name(1), [(0, pages(4096))])
