"""Ways to secure a connection, as fixtures."""

from __future__ import annotations

import pytest

from pdconn.sidechannel.security import Security
from tests.sidechannel.worlds import Worlds


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["plain", "secret", "tls", "both"])
def security(request: pytest.FixtureRequest, worlds: Worlds) -> Security:
    return worlds.by_name[request.param]


@pytest.fixture(params=["secret", "tls", "both"])
def secured(request: pytest.FixtureRequest, worlds: Worlds) -> Security:
    return worlds.by_name[request.param]
