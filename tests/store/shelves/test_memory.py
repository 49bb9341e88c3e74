"""The shelf in memory."""

import pytest

from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.shelves.contract import ShelfContract
from tests.store.shelves.plain_rows import OpenShelf


@pytest.fixture
def open_shelf() -> OpenShelf:
    rows = MemoryRows()
    return lambda: MemoryShelf(rows)


class TestMemoryShelf(ShelfContract):
    """The contract."""
