"""The engines whose prompts take many steps, without and with prefix caching."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.engines.streams.chunked import Chunked, chunked


@pytest.fixture(scope="package", params=["plain", "caching"])
def engines(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Chunked]:
    work = tmp_path_factory.mktemp("chunked") / "engines"
    with chunked(model, work, caches=request.param == "caching") as made:
        yield made
