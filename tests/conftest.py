"""What tests of every room share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests.property.scale import ASKED, at_least

# Every server of a test is on this machine: a proxy that the machine has is never asked for them.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "*"

# An example may take as long as a busy machine makes it.  The same ones are drawn in every run, so
# that what lands is what passed; make property draws others, and more of them.
settings.register_profile(
    "patient",
    deadline=None,
    derandomize=not ASKED,
    max_examples=at_least(settings.default.max_examples),
)
settings.load_profile("patient")


@pytest.fixture
def only_one_ucx() -> None:
    """Skip where NIXL has loaded a UCX of its own: two of them may be in each other's way."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    if any("libucp" in line and "nixl" in line for line in maps.splitlines()):
        pytest.skip("NIXL's UCX is in this process: run these with -m ucx, as make test does")
