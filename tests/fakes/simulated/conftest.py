"""vLLM's own cache manager, imported only where a test needs it."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def sim() -> Any:
    """The module that imports vLLM."""
    from tests.fakes.simulated import sim_cache

    return sim_cache
