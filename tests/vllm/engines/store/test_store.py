"""A store behind real engines: what one has computed, another loads, and answers the same.

The engines have no prefix cache of their own, so that every hit is the store's, and vLLM's
default failure policy, under which a load that fails would fail its request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client, prefill_only
from pdconn.tools.lab.lab_errors import RequestRefused
from tests.forked.engines import running
from tests.vllm.engines.engines import (
    BLOCK,
    Configuration,
    Expected,
    Prompt,
    cache_beside,
    engine,
)
from tests.vllm.engines.store.stores import (
    NUM_TOKENS,
    TOKENS,
    asked,
    breaks,
    hit_tokens,
    load_failures,
    num_rows,
    prompts,
    resumable,
    rows,
    store_engine,
    wait_for_rows,
)
from tests.vllm.engines.tap import Ticket

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


@dataclass
class Survivors:
    """Engines started after the first was killed, and what was asked of that one before.

    Attributes:
        second: over the same root, in another layout.
        storeless: pulls, and has no store.
        kept, lost: prompts that it computed; the rows of the second may not be whole.
        tickets: of prompts that it lent, and whose rows were committed.
        whole: rows that were committed when it was killed.
    """

    second: Client
    storeless: Client
    root: Path
    kept: Prompt
    lost: Prompt
    tickets: dict[Prompt, Ticket]
    whole: set[Path]


@pytest.fixture(scope="module")
def survivors(first: Rooted, model: Path, work: Path) -> Iterator[Survivors]:
    """Both have vLLM's default failure policy."""
    kept, lost, *lent = prompts(33, (1000, 1200, 700, 300))
    saved = len(rows(first.root, "fa"))
    asked(first.client, [kept])
    tickets = {prompt: prefill_only(first.client, prompt) or {} for prompt in lent}
    assert all(tickets.values())
    wait_for_rows(first.root, saved + num_rows([kept, *lent]))
    asked(first.client, [lost])
    first.engine.kill_command()
    whole = set(rows(first.root, "fa"))
    alone = Configuration("LBHNC", False, one_process=True, policy="fail")
    specs = [
        store_engine("second", model, first.root, layout="LBHNC", connector="BreakableLoads"),
        engine("storeless", model, alone, "kv_consumer", 0),
    ]
    with running(specs, work / "second", cache=cache_beside(model)) as (second, storeless):
        clients = (Client(second.url), Client(storeless.url))
        yield Survivors(*clients, first.root, kept, lost, tickets, whole)


def test_tickets_of_a_killed_engine_are_answered_from_the_store(
    survivors: Survivors, expected: Expected
) -> None:
    """No request fails under vLLM's default policy; without a store it does."""
    for prompt, ticket in survivors.tickets.items():
        client = survivors.second
        before = hit_tokens(client)
        answer = client.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)
        assert not expected.mismatches({prompt: answer})
        assert hit_tokens(client) - before == resumable(prompt)
        with pytest.raises(RequestRefused) as refused:  # the control
            survivors.storeless.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)
        assert refused.value.status == 500
    counts = survivors.second.metrics()
    assert counts["pdconn:tickets_gone_total"] == len(survivors.tickets)
    assert counts["vllm:nixl_num_failed_transfers_total"] == 0
    assert survivors.storeless.metrics()["vllm:nixl_num_failed_transfers_total"] == len(
        survivors.tickets
    )


def test_a_load_that_fails_is_computed_and_the_next_one_is_used(
    survivors: Survivors, expected: Expected
) -> None:
    """Under vLLM's default policy, by which it was the client's error."""
    [prompt] = prompts(35, (5 * TOKENS + 1,))
    client, root = survivors.second, survivors.root
    saved = len(rows(root, "fa"))
    asked(client, [prompt])
    wait_for_rows(root, saved + num_rows([prompt]))
    failures, marker = load_failures(client), breaks(root)
    marker.touch()
    assert not expected.mismatches(asked(client, [prompt]))
    assert not marker.exists(), "a load was begun"
    assert load_failures(client) - failures == 1
    before = hit_tokens(client)
    assert not expected.mismatches(asked(client, [prompt]))
    assert hit_tokens(client) - before == resumable(prompt)
    assert load_failures(client) - failures == 1


def test_a_killed_engine_leaves_what_it_committed_to_one_of_another_layout(
    survivors: Survivors, expected: Expected
) -> None:
    client, kept, lost = survivors.second, survivors.kept, survivors.lost
    before = hit_tokens(client)
    assert not expected.mismatches(asked(client, [kept]))
    assert hit_tokens(client) - before == resumable(kept)
    assert not expected.mismatches(asked(client, [lost]))
    assert survivors.whole <= set(rows(survivors.root, "fa"))
    _damage(survivors.root)
    before = hit_tokens(client)
    assert not expected.mismatches(asked(client, [kept, lost]))
    assert hit_tokens(client) == before
    assert client.metrics()["pdconn:store_rows_damaged_total"] > 0


def test_what_is_saved_after_weights_were_changed_in_place_is_the_engines_own(
    survivors: Survivors, expected: Expected
) -> None:
    """It is paused with its caches kept, as trainers do; the weights are the same in truth."""
    [prompt] = prompts(34, (3 * TOKENS + 1,))
    client, root = survivors.second, survivors.root
    places = set(root.glob("rows/*"))
    saved = len(rows(root, "fa"))
    asked(client, [prompt])
    wait_for_rows(root, saved + num_rows([prompt]))
    before = hit_tokens(client)
    assert not expected.mismatches(asked(client, [prompt]))
    assert hit_tokens(client) - before == resumable(prompt), "the control"
    client.post_json("/pause?clear_cache=false", {})
    client.post_json("/collective_rpc", {"method": "reload_weights"})
    client.post_json("/resume", {})
    before = hit_tokens(client)
    assert not expected.mismatches(asked(client, [prompt]))
    assert hit_tokens(client) == before
    wait_for_rows(root, saved + 2 * num_rows([prompt]))
    assert len(set(root.glob("rows/*")) - places) == 1
    assert not expected.mismatches(asked(client, [prompt]))
    assert hit_tokens(client) - before == resumable(prompt)


def _damage(root: Path) -> None:
    """Flip a byte in the middle of every row: in bytes that a checksum covers."""
    for path in rows(root, "fa") + rows(root, "wa"):
        with path.open("r+b") as file:
            file.seek(NUM_TOKENS)
            byte = file.read(1)[0]
            file.seek(NUM_TOKENS)
            file.write(bytes([byte ^ 0xFF]))
