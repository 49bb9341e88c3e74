"""One cluster for the tests of this folder that need engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdconn.tools.lab.model import write_model
from tests.multinode.namespaces import why_not
from tests.multinode.topology import Cluster, cluster


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two prefill and two decode engines, the router, and one engine alone."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    work: Path = tmp_path_factory.mktemp("multinode")
    with cluster(write_model(work), work) as started:
        yield started
