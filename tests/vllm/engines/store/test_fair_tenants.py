"""One tenant floods a store that has little room, and another's rows are saved and found."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from pdconn.tools.lab.lab_client import Client
from tests.forked.engines import running
from tests.vllm.engines.engines import cache_beside
from tests.vllm.engines.store.stores import (
    TOKENS,
    hit_tokens,
    prompts,
    resumable,
    store_engine,
)

OURS, THEIRS = "ours", "theirs"
CAPACITY, QUOTA = "8MiB", "3MiB"
"""A row has 132 KiB: room for all of ours, and for some of what a pass of the engine computes."""
FLOODING = 4
"""Prompts of the other tenant that are asked at the same time, again and again."""


@contextmanager
def flooded(client: Client, floods: int, seed: int) -> Iterator[None]:
    """Others ask prompts of several rows, which nobody asks again."""
    ends, numbers = threading.Event(), count(seed)

    def flood() -> None:
        while not ends.is_set():
            [prompt] = prompts(next(numbers), (8 * TOKENS + 1,))
            client.complete(prompt, 1, cache_salt=THEIRS)

    threads = [threading.Thread(target=flood) for _ in range(floods)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def await_saves(client: Client) -> None:
    """Wait until no row was committed for a second."""
    committed, since = -1.0, 0.0
    while time.monotonic() - since < 1.0:
        time.sleep(0.1)
        seen = client.metrics().get("pdconn:store_rows_committed_total", 0.0)
        if seen != committed:
            committed, since = seen, time.monotonic()


def hit_share(
    model: Path, work: Path, name: str, *, floods: int, connector: str | None = None
) -> float:
    """Share of our prompts' tokens that are loaded when they are asked again."""
    root = work / f"store-{name}"
    spec = store_engine(
        name, model, root, capacity=CAPACITY, tenant_quota=QUOTA, connector=connector
    )
    with running([spec], work / name, cache=cache_beside(model)) as (engine,):
        client = Client(engine.url)
        known, *wanted = prompts(81, (2 * TOKENS + 1,) * 5)
        client.complete(known, 1, cache_salt=OURS)
        with flooded(client, floods, seed=1000):
            for prompt in wanted:
                client.complete(prompt, 1, cache_salt=OURS)
        await_saves(client)
        before = hit_tokens(client)
        for prompt in wanted:
            client.complete(prompt, 1, cache_salt=OURS)
        found = hit_tokens(client) - before
    return found / sum(map(resumable, wanted))


def test_a_flood_costs_another_tenant_none_of_its_hits(model: Path, work: Path) -> None:
    assert hit_share(model, work, "fair", floods=FLOODING) >= 0.98


@pytest.mark.matrix
def test_without_fair_shares_it_costs_some(model: Path, work: Path) -> None:
    """Negative control.  Whether there is room when ours are saved is chance, so it has tries."""
    shares = (
        hit_share(model, work, f"first-{floods}", floods=floods, connector="FirstComeSaves")
        for floods in (2 * FLOODING, 4 * FLOODING, 6 * FLOODING)
    )
    assert any(share < 0.9 for share in shares)
