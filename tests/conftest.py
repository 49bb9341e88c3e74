"""What tests of every room share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def only_one_ucx() -> None:
    """Skip where NIXL has loaded a UCX of its own: two of them may be in each other's way."""
    maps = Path("/proc/self/maps").read_text()
    if any("libucp" in line and "nixl" in line for line in maps.splitlines()):
        pytest.skip("NIXL's UCX is in this process: run these with -m ucx, as make test does")
