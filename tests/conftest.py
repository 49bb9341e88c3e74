"""What tests of every room share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture.providers import Constants, HypothesisProvider

from tests import selection
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

# Hypothesis also draws constants that it finds in modules imported so far, so the examples would
# depend on the tests before, and each process would parse all our files for them.
if not ASKED:
    HypothesisProvider._local_constants = Constants()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Our options."""
    about = "engines' tests ask prefill and decode at once, where they now ask one after the other"
    parser.addoption("--streams", action="store_true", help=about)


def pytest_configure(config: pytest.Config) -> None:
    """Apply them."""
    if config.option.streams:
        from pdconn.tools.lab import lab_client

        lab_client.tickets_seen = {}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file or folder of which ``-m`` selects no test is not imported."""
    expression = str(config.option.markexpr)
    is_needed = not expression or selection.may_run(expression, collection_path)
    return None if is_needed else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each test's file names its marks, or the above would leave it out."""
    tests = ((item.path, [mark.name for mark in item.iter_markers()]) for item in items)
    if faults := selection.unnamed(tests):
        raise pytest.UsageError("\n".join(faults))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays until the end, and is not looked through for garbage.

    That took a third of the collection, and a second of each test that collects garbage before it
    measures.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def only_one_ucx() -> None:
    """Skip where NIXL has loaded a UCX of its own: two of them may be in each other's way."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    if any("libucp" in line and "nixl" in line for line in maps.splitlines()):
        pytest.skip("NIXL's UCX is in this process: run these with -m ucx, as make test does")
