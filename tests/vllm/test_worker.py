"""The worker's half without an engine: what it tells the engine of its transport."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.vllm.config import read_settings
from transport import BackendFailure

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from pdconn.vllm.worker import PdWorker


class Mortal:
    """A transport that answers peers by a thread, which may be dead."""

    dead = False

    def check(self) -> None:
        if self.dead:
            raise BackendFailure("its thread ended")


def test_a_lender_that_cannot_be_read_from_stops_its_engine() -> None:
    worker: Any = PdWorker(read_settings({}, "127.0.0.1", 1, 0), None, None)  # type: ignore[arg-type]
    transport = Mortal()
    worker._memory, worker._lends = SimpleNamespace(transport=transport), True
    assert not worker.results().finished_recving
    transport.dead = True
    with pytest.raises(BackendFailure, match="its thread ended"):
        worker.results()
    worker._lends = False
    assert not worker.results().finished_recving, "one that only reads recomputes"
