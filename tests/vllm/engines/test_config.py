"""A configuration that makes no sense stops the engine at its start, saying why."""

from __future__ import annotations

import re

import pytest

from pdconn.tools.lab.engine import Engine, wait_ready
from pdconn.tools.lab.lab_errors import EngineDied


def test_an_unknown_key_stops_the_engine_and_names_the_nearest(misconfigured: Engine) -> None:
    with pytest.raises(EngineDied):
        wait_ready([misconfigured])
    log = misconfigured.log.read_text(encoding="utf-8")
    assert re.search("(?i)load.*(model|weights)", log) is None, "it is read before"
    assert "expected a known key, got 'side_channel_prot'; did you mean 'side_channel_port'?" in log
