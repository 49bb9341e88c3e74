"""Weights that change under an engine are noticed at the call by which vLLM changes them."""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm
    from vllm.v1.engine.core import EngineCore

from pdconn.vllm.config import ConfigError
from pdconn.vllm.patches.engine_calls import _HARMLESS, watch_updates

CHANGING = (
    "apply_model", "finish_weight_update", "reload_weights", "reset_weights",
    "start_draft_weight_update", "start_weight_update", "update_config", "update_weights",
)  # fmt: skip


class Told:
    """Remembers what it was told of."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def weights_changed(self, method: str) -> None:
        self.calls.append(method)


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's class as it comes."""
    calling = inspect.unwrap(EngineCore.collective_rpc)
    monkeypatch.setattr(EngineCore, "collective_rpc", calling)


def core() -> Any:
    """vLLM's engine core, whose workers answer with what was asked of them."""
    made: Any = EngineCore.__new__(EngineCore)
    made.model_executor = SimpleNamespace(collective_rpc=lambda *words: [words])
    return made


@pytest.mark.usefixtures("unwatched")
def test_every_call_but_the_harmless_is_told_and_made() -> None:
    told, gone = Told(), Told()
    watch_updates(told)
    watch_updates(gone)
    calls = list(gone.calls)
    del gone
    engine = core()
    for name in (*CHANGING, "of_an_extension", *_HARMLESS):
        assert engine.collective_rpc(name, 7.0, (1,), {"a": 2}) == [(name, 7.0, (1,), {"a": 2})]
    engine.collective_rpc(test_every_call_but_the_harmless_is_told_and_made)
    engine.collective_rpc(method="update_weights", kwargs={"update_info": {}})
    mine = test_every_call_but_the_harmless_is_told_and_made.__name__
    assert told.calls == [*CHANGING, "of_an_extension", mine, "update_weights"]
    assert not calls


@pytest.mark.usefixtures("unwatched")
def test_watching_twice_tells_once() -> None:
    told = Told()
    watch_updates(told)
    watch_updates(told)
    core().collective_rpc("update_weights")
    assert told.calls == ["update_weights"]


def test_an_engine_core_that_calls_in_another_way_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(EngineCore, "collective_rpc", lambda self, call: None)
    with pytest.raises(ConfigError, match=r"EngineCore\.collective_rpc: expected self, method"):
        watch_updates(Told())


def test_every_call_that_vllm_makes_was_looked_at() -> None:
    """A new one counts as a change until someone has looked."""
    named = set(named_calls(Path(vllm.__file__).parent))
    assert {"update_weights", "reload_weights"} <= named
    assert named - _HARMLESS <= {*CHANGING, *ELSEWHERE}


ELSEWHERE = {
    "checkpoint_prepare", "checkpoint_restore",  # of a whole process: seen as a change, too
}  # fmt: skip
"""Calls that leave weights alone, as far as one can tell, and are not needed in service."""


def named_calls(package: Path) -> Iterator[str]:
    """Names in calls of ``collective_rpc`` that go through the engine core."""
    executors = ("executor", "worker", "fault_tolerance", "kv_connector")
    for path in package.rglob("*.py"):
        if any(part in path.relative_to(package).parts for part in executors):
            continue
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if ".collective_rpc(" in text else ():
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            is_past = "model_executor" in ast.unparse(node.func)
            if node.func.attr == "collective_rpc" and not is_past and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value
