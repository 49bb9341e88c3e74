"""The alerts beside a router's own page: which of what clients meet makes them fire."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.deployment import Deployment, deployment
from tests.fakes.fake_engine import error, stream_of
from tests.project.deploy.test_monitoring import PROMTOOL, fired_by, promtool_says

EACH = 10


def vllm_error(code: int, message: str = "x") -> dict[str, Any]:
    return {"error": {"message": message, "type": "T", "param": None, "code": code}}


async def every_stream_fails(d: Deployment) -> None:
    """Its only event is an error, under status 200."""
    d.decode[0].script = stream_of(vllm_error(500, "Internal server error"))
    assert (await d.complete(stream=True)).status == 200


async def every_stream_fails_after_a_token(d: Deployment) -> None:
    d.decode[0].script = stream_of({"choices": [{"text": "t"}]}, vllm_error(503))
    assert (await d.complete(stream=True)).status == 200


async def every_answer_is_an_error(d: Deployment) -> None:
    async def fail(*_: object) -> Any:
        return error(500, "x")

    d.decode[0].script = fail
    assert (await d.complete()).status == 500


async def clients_err(d: Deployment) -> None:
    """A wrong model, a prompt that is too long, a temperature below 0; as engines refuse each."""
    for status, message in ((404, "no model"), (400, "too long"), (400, "temperature")):

        async def refuse(*_: object, status: int = status, message: str = message) -> Any:
            return error(status, message)

        d.prefill[0].script = refuse
        assert (await d.complete()).status == status
    d.prefill[0].script = None
    d.decode[0].script = stream_of(vllm_error(400, "grammar"))
    assert (await d.complete(stream=True)).status == 200
    d.decode[0].script = None


async def all_is_well(d: Deployment) -> None:
    assert (await d.complete(stream=True)).status == 200


FLEETS: dict[Callable[[Deployment], Awaitable[None]], set[str]] = {
    every_stream_fails: {"PdconnRequestsFail"},
    every_stream_fails_after_a_token: {"PdconnRequestsFail"},
    every_answer_is_an_error: {"PdconnRequestsFail"},
    clients_err: set(),
    all_is_well: set(),
}


@pytest.mark.parametrize("fleet", FLEETS, ids=lambda fleet: fleet.__name__)
def test_these_alerts_fire(fleet: Callable[[Deployment], Awaitable[None]], tmp_path: Path) -> None:
    series = asyncio.run(an_hour_of(fleet))
    assert fired_by(series) == FLEETS[fleet]
    if PROMTOOL is not None:
        assert promtool_says(series, FLEETS[fleet], tmp_path) == ""


async def an_hour_of(fleet: Callable[[Deployment], Awaitable[None]]) -> dict[str, str]:
    """The router's series, as if each minute brought what ``EACH`` requests did, and a good one."""
    async with deployment() as d:
        for _ in range(EACH):
            await fleet(d)
        d.prefill[0].script = d.decode[0].script = None
        await all_is_well(d)
        found = {}
        for family in d.proxy.metrics.registry.collect():
            for one in family.samples:
                if not one.name.startswith("pdconn_router_") or "_bucket" in one.name:
                    continue
                pairs = {"job": "r", "instance": "r1", **one.labels}
                labels = ", ".join(f'{name}="{value}"' for name, value in pairs.items())
                steady = f"{one.value:g}x60"
                grows = family.type == "counter"
                found[f"{one.name}{{{labels}}}"] = f"0+{steady}" if grows else steady
    return found
