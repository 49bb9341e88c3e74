"""A decode engine with a store and a ticket: it loads what is stored, and pulls the rest.

The store is encrypted.  The engines have no prefix cache of their own, and vLLM's default failure
policy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdconn.tools.lab.lab_client import Client, prefill_only
from tests.forked.engines import running
from tests.store.encryption.key_files import KEYS, key_file
from tests.vllm.engines.engines import Configuration, Expected, Prompt, cache_beside, engine
from tests.vllm.engines.store.stores import (
    NUM_TOKENS,
    TOKENS,
    asked,
    hangs,
    num_rows,
    prompts,
    rows,
    store_engine,
    wait_for_rows,
)

LENGTH = 12 * TOKENS + 1
PULLED = "pdconn:full_attention_bytes_total"
LOADED = "pdconn:store_beside_tokens_total"
MISSED = "pdconn:store_beside_missed_tokens_total"
FAILED = "vllm:nixl_num_failed_transfers_total"


@dataclass
class Sources:
    """A prefill engine, and a decode engine with a store."""

    prefill: Client
    decode: Client
    root: Path

    def store(self, prompt: Prompt) -> list[Path]:
        """Have decode compute a prompt, and save it; returns its rows, in order."""
        before = set(rows(self.root, "fa"))
        asked(self.decode, [prompt])
        wait_for_rows(self.root, len(before) + num_rows([prompt]))
        new = set(rows(self.root, "fa")) - before
        return sorted(new, key=lambda path: path.stat().st_mtime_ns)

    def hand_over(self, prompt: Prompt, expected: Expected) -> dict[str, float]:
        """Decode answers rightly with a ticket for all of a prompt; returns what has counted."""
        names = (PULLED, LOADED, MISSED, FAILED)
        before = self.decode.metrics()
        ticket = prefill_only(self.prefill, prompt)
        answer = self.decode.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)
        assert not expected.mismatches({prompt: answer})
        after = self.decode.metrics()
        return {name: after[name] - before[name] for name in names}


@pytest.fixture(scope="module")
def sources(model: Path, work: Path, expected: Expected) -> Iterator[Sources]:
    del expected  # its engine starts first
    root = work / "beside"
    keys = key_file(work / "beside-keys", KEYS[0])
    settings = {"beside": "always", "key_file": keys}
    alone = Configuration("LBHNC", False, one_process=True, policy="fail")
    specs = [
        engine("lends", model, alone, "kv_producer", 0),
        store_engine("loads", model, root, connector="HangingReads", **settings),
    ]
    with running(specs, work / "besides", cache=cache_beside(model)) as (prefill, decode):
        yield Sources(Client(prefill.url), Client(decode.url), root)


def test_what_is_stored_is_not_pulled(sources: Sources, expected: Expected) -> None:
    whole, *wanted = prompts(51, (LENGTH,) * 4)
    alone = sources.hand_over(whole, expected)
    assert (alone[LOADED], alone[FAILED]) == (0, 0)
    each = alone[PULLED] / (LENGTH - 1)
    for prompt, count in zip(wanted, (3, 6, 11), strict=True):
        sources.store(prompt[: count * TOKENS])
        seen = sources.hand_over(prompt, expected)
        assert seen[LOADED] == count * TOKENS
        assert seen[PULLED] == pytest.approx(each * (LENGTH - 1 - count * TOKENS), rel=0.01)
        assert (seen[MISSED], seen[FAILED]) == (0, 0)


def test_rows_that_are_gone_are_pulled_and_those_before_are_kept(
    sources: Sources, expected: Expected
) -> None:
    gone, damaged = prompts(52, (LENGTH, LENGTH))
    found = sources.store(gone[: 6 * TOKENS])
    found[2].unlink()
    seen = sources.hand_over(gone, expected)
    assert (seen[LOADED], seen[MISSED], seen[FAILED]) == (6 * TOKENS, 4 * TOKENS, 0)
    found = sources.store(damaged[: 6 * TOKENS])
    with found[4].open("r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 0xFF]))
    seen = sources.hand_over(damaged, expected)
    assert (seen[LOADED], seen[MISSED], seen[FAILED]) == (6 * TOKENS, 2 * TOKENS, 0)


def test_a_shelf_that_hangs_is_not_waited_for(sources: Sources, expected: Expected) -> None:
    [prompt] = prompts(53, (LENGTH,))
    sources.store(prompt[: 6 * TOKENS])
    hangs(sources.root).write_text("3")
    missed = sources.decode.metrics()[MISSED]
    seen = sources.hand_over(prompt, expected)
    assert (seen[LOADED], seen[MISSED], seen[FAILED]) == (6 * TOKENS, 0, 0), "it still hangs"
    hangs(sources.root).unlink()
    give_up = time.monotonic() + 20
    while sources.decode.metrics()[MISSED] == missed:
        assert time.monotonic() < give_up
        asked(sources.decode, [prompt[:4]])  # an engine counts in its steps
    assert sources.decode.metrics()[MISSED] - missed == 3 * TOKENS
