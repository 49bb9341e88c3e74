"""A store behind real engines: what one has computed, another loads, and answers the same.

The engines have no prefix cache of their own, so that every hit is the store's, and vLLM's
default failure policy, under which a load that fails would fail its request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdconn.lab.client import Client
from pdconn.lab.engine import Engine, running
from tests.vllm.engines.engines import BLOCK, Expected, cache_beside
from tests.vllm.engines.store.stores import (
    NUM_TOKENS,
    TOKENS,
    asked,
    hit_tokens,
    num_rows,
    prompts,
    resumable,
    rows,
    store_engine,
    wait_for_rows,
)

LENGTHS = (40, TOKENS - 1, TOKENS, TOKENS + 1, 3 * TOKENS, 700, 5 * BLOCK + 3, 1500)


@dataclass
class Rooted:
    """An engine and the root of its store."""

    engine: Engine
    root: Path

    @property
    def client(self) -> Client:
        return Client(self.engine.url)


@pytest.fixture(scope="module")
def first(model: Path, work: Path, expected: Expected) -> Iterator[Rooted]:
    """An engine over an empty root."""
    del expected  # its engine starts first
    root = work / "store"
    spec = store_engine("first", model, root, layout="BHLNC")
    with running([spec], work / "first", cache=cache_beside(model)) as (engine,):
        yield Rooted(engine, root)


def test_what_was_computed_once_is_loaded_and_answers_the_same(
    first: Rooted, expected: Expected
) -> None:
    wanted = prompts(31, LENGTHS)
    assert not expected.mismatches(asked(first.client, wanted))
    assert hit_tokens(first.client) == 0
    wait_for_rows(first.root, num_rows(wanted))
    assert not expected.mismatches(asked(first.client, wanted))
    assert hit_tokens(first.client) == sum(map(resumable, wanted))


def test_a_longer_prompt_resumes_where_the_shorter_one_ended(
    first: Rooted, expected: Expected
) -> None:
    short, tail = prompts(32, (4 * TOKENS + 5, 90))
    saved = len(rows(first.root, "fa"))
    asked(first.client, [short])
    wait_for_rows(first.root, saved + 4)
    before = hit_tokens(first.client)
    assert not expected.mismatches(asked(first.client, [short + tail]))
    assert hit_tokens(first.client) - before == 4 * TOKENS


def test_a_killed_engine_leaves_what_it_committed_to_one_of_another_layout(
    first: Rooted, expected: Expected, model: Path, work: Path
) -> None:
    kept, lost = prompts(33, (1000, 1200))
    saved = len(rows(first.root, "fa"))
    asked(first.client, [kept])
    wait_for_rows(first.root, saved + num_rows([kept]))
    asked(first.client, [lost])
    first.engine.kill()
    whole = set(rows(first.root, "fa"))
    spec = store_engine("second", model, first.root, layout="LBHNC")
    with running([spec], work / "second", cache=cache_beside(model)) as (engine,):
        client = Client(engine.url)
        answers = asked(client, [kept])
        assert not expected.mismatches(answers)
        assert hit_tokens(client) == resumable(kept)
        assert not expected.mismatches(asked(client, [lost]))
        assert whole <= set(rows(first.root, "fa"))
        _damage(first.root)
        before = hit_tokens(client)
        assert not expected.mismatches(asked(client, [kept, lost]))
        assert hit_tokens(client) == before
        assert client.metrics()["pdconn:store_rows_damaged_total"] > 0


def _damage(root: Path) -> None:
    """Flip a byte in the middle of every row: in bytes that a checksum covers."""
    for path in rows(root, "fa") + rows(root, "wa"):
        with path.open("r+b") as file:
            file.seek(NUM_TOKENS)
            byte = file.read(1)[0]
            file.seek(NUM_TOKENS)
            file.write(bytes([byte ^ 0xFF]))
