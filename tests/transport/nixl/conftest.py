"""A reader over a scripted NIXL, with its default options."""

from __future__ import annotations

import pytest

from tests.transport.nixl.scripted import World


@pytest.fixture
def world() -> World:
    return World()
