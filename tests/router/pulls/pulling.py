"""A fleet whose prefill engines may pull what decode holds, and what was asked of its engines."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pdconn.router.prefix.hashing import Extras
from pdconn.router.pulls.planner import PullPlanner
from pdconn.router.pulls.pull_outcome import PrefixPull
from tests.fakes.event_loop import until
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.routed import PROMPT, Fleet, fleet

HELD = len(PROMPT)


@asynccontextmanager
async def pulling(pull_above: int | None = 64, **settings: Any) -> AsyncIterator[Fleet]:
    """A fleet whose engines compute slowly and pull fast, as far as the router knows."""
    async with fleet(alone_below=0, pull_above=pull_above, **settings) as f:
        for engine in f.prefill:
            if f.router.pulls is not None:
                teach(f.router.pulls, engine)
            engine.cached_tokens = HELD
        yield f
        await until(lambda: not f.leases.held)  # however the tickets ended


def teach(planner: PullPlanner, engine: FakeEngine) -> None:
    """It takes 2 s for the prompts of these tests."""
    for tokens, seconds in ((0, 0.0), (HELD, 2.0)) * 8:
        planner.note_computed(engine.url, tokens, seconds, time.monotonic())


def num_learned(f: Fleet) -> list[int]:
    """How often each prefill engine was seen computing."""
    assert f.router.pulls is not None
    lines = f.router.pulls.chooser.computing
    return [lines.line_of(engine.url, time.monotonic()).num_seen for engine in f.prefill]


async def held_by_decode(f: Fleet, extras: Extras | None = None) -> FakeEngine:
    """The decode engine, which holds the prompt: it answered the turn before."""
    given = {} if extras is None else {"extras": extras}
    await f.pod(f.decode[0]).store(PROMPT, **given)
    await f.events_applied()
    return f.decode[0]


def pull_of(f: Fleet) -> PrefixPull:
    pull = f.routed.outcome.pull
    assert pull is not None
    return pull


def asked_for(engine: FakeEngine) -> list[Any]:
    return [seen for seen in engine.seen if "lend" in seen.ours]


def returned(f: Fleet) -> float:
    return f.metric("unused_tickets_total", outcome="returned")
