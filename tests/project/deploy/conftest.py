"""The examples with secrets, once, and every overlay of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project.deploy.manifests import Cluster, built, checkout


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of ``examples/kubernetes`` that can be built."""
    return checkout(tmp_path_factory.mktemp("examples"))


@pytest.fixture(scope="session")
def default(examples: Path) -> Cluster:
    return built(examples, "default")
