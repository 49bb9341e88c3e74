"""The shelf of files."""

from pathlib import Path
from typing import Any

import pytest

from pdconn.store.shelf.files import FilesShelf
from tests.store.shelves.contract import OpenShelf, ShelfContract


@pytest.fixture(params=["auto", True, False])
def open_shelf(request: Any, tmp_path: Path) -> OpenShelf:
    return lambda: FilesShelf(tmp_path / "root", request.param)


class TestFilesShelf(ShelfContract):
    """The contract."""
