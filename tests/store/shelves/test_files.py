"""The shelf of files."""

from pathlib import Path
from typing import Any

import pytest

from pdconn.store.shelf.files_shelf import FilesShelf
from tests.store.shelves.contract import ShelfContract
from tests.store.shelves.plain_rows import PAGE, OpenShelf, load, payload, row_name, save


@pytest.fixture(params=["auto", True, False])
def open_shelf(request: Any, tmp_path: Path) -> OpenShelf:
    return lambda: FilesShelf(tmp_path / "root", request.param)


class TestFilesShelf(ShelfContract):
    """The contract."""


def test_no_empty_folders_stay_behind(tmp_path: Path) -> None:
    """Every reset of a prefix cache begins a namespace of up to 512 folders."""
    names = [row_name(number) for number in range(40)]
    with FilesShelf(tmp_path) as shelf:
        for name in names:
            save(shelf, name, payload(1))
        for name in names[1:]:
            shelf.remove_row("ns", name)
        assert len(list((tmp_path / "rows" / "ns").rglob("*"))) == 3, "fa, a prefix, a row"
        shelf.remove_row("ns", names[0])
        assert list((tmp_path / "rows" / "ns").rglob("*")) == []
        assert save(shelf, names[5], payload(5)), "and are made again"
        assert load(shelf, names[5], 4 * PAGE) == payload(5)
