"""A session of a real engine whose rows are kept: a flood and a restart come between two turns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdconn.tools.lab.lab_client import Client
from tests.forked.engines import running
from tests.vllm.engines.engines import Expected, Prompt, cache_beside
from tests.vllm.engines.store.stores import (
    NUM_TOKENS,
    TOKENS,
    hit_tokens,
    parts,
    prompts,
    resumable,
    rows,
    store_engine,
    wait_for_rows,
)

CAPACITY = 24 << 20
FLOOD = 1500


def asking(session: str, seconds: float) -> dict[str, Any]:
    """What a router asks of an engine."""
    return {"pdconn": {"keep": {"session": session, "seconds": seconds, "tenant": "a"}}}


@dataclass
class Kept:
    """One boot of the engine."""

    client: Client
    root: Path

    def turn(self, prompt: Prompt, **params: Any) -> int:
        """A turn; returns the tokens that were loaded from the store."""
        before = hit_tokens(self.client)
        self.client.complete(prompt, NUM_TOKENS, **params)
        return hit_tokens(self.client) - before

    def kept_files(self) -> list[Path]:
        """Files of rows that are kept for another minute."""
        every = [path for kind in ("fa", "wa") for path in rows(self.root, kind)]
        return [path for path in every if path.stat().st_mtime > time.time() + 60]

    def flood(self, seed: int) -> None:
        """One-off prompts whose rows take twice the capacity."""
        metric = "pdconn:store_evicted_bytes_total"
        before = self.client.metrics().get(metric, 0)
        while self.client.metrics().get(metric, 0) - before < 2 * CAPACITY:
            for prompt in prompts(seed, (FLOOD, FLOOD)):
                self.client.complete(prompt, 1)
            while parts(self.root):
                self.client.complete((1, 2, 3), 1)  # a step
            seed += 1


@contextmanager
def booted(name: str, model: Path, work: Path) -> Iterator[Kept]:
    root = work / "sessions"
    spec = store_engine(name, model, root, capacity=CAPACITY)
    with running([spec], work / name, cache=cache_beside(model)) as (engine,):
        yield Kept(Client(engine.url), root)


def test_a_kept_session_is_loaded_after_a_flood_and_a_restart_and_another_is_not(
    model: Path, work: Path, expected: Expected
) -> None:
    kept, control, more = prompts(91, (5 * TOKENS + 9, 5 * TOKENS + 9, 60))
    with booted("before", model, work) as engine:
        engine.turn(kept, kv_transfer_params=asking("kept", 600))
        engine.turn(control)
        wait_for_rows(engine.root, 10)
        engine.flood(1000)
        counts = engine.client.metrics()
        assert counts["pdconn:store_promises_made_total"] == 1
        assert counts["pdconn:store_promises_broken_room_total"] == 0
        assert counts["pdconn:store_kept_bytes"] > 0
    with booted("after", model, work) as engine:
        engine.flood(2000)
        found = engine.turn(kept + more, kv_transfer_params=asking("kept", 600))
        missed = engine.turn(control + more)
        print(f"kept {found} and without {missed} of {resumable(kept)} tokens")
        assert found == resumable(kept)
        assert missed == 0
        # What is loaded of kept rows answers as what is computed.
        answer = engine.client.complete(kept + more, NUM_TOKENS)
        assert not expected.mismatches({kept + more: answer})
        # A release gives the rows up.
        assert engine.kept_files()
        engine.client.complete((1, 2, 3), 1, kv_transfer_params=asking("kept", 0))
        give_up = time.monotonic() + 60
        while engine.kept_files() or engine.client.metrics()["pdconn:store_kept_bytes"]:
            assert time.monotonic() < give_up
            engine.client.complete((1, 2, 3), 1)
