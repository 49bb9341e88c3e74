"""A configuration that makes no sense stops the engine at its start, saying why."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdconn.lab.engine import running
from pdconn.lab.errors import EngineDied
from tests.vllm.engines import Configuration, cache_beside, engine


def test_an_unknown_key_stops_the_engine_and_names_the_nearest(model: Path, work: Path) -> None:
    configuration = Configuration("LBHNC", False, one_process=True, policy="fail")
    wrong = engine("wrong", model, configuration, "kv_consumer", 0, side_channel_prot=1)
    with pytest.raises(EngineDied), running([wrong], work, cache=cache_beside(model)):
        pass
    log = (work / "wrong.log").read_text()
    assert "unknown key 'side_channel_prot'; did you mean 'side_channel_port'?" in log
