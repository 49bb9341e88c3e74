"""A prefix cache that is cleared after hand-overs: by hand, at a pause, for new weights.

What was lent before must not be handed over after it, since it may be of old weights.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from pdconn.lab.client import Client, prefill_only, prefill_then_decode
from pdconn.lab.compare import make_prompts
from pdconn.lab.errors import RequestRefused
from tests.vllm.engines.engines import LEASE_S, MAX_TOKENS, Expected, PdPair, Prompt

pytestmark = pytest.mark.only(layout="BHLNC", prefix_caching=True)

PROMPTS: tuple[Prompt, ...] = tuple(tuple(range(300 + n, 700 + 2 * n)) for n in range(6))


@pytest.fixture(autouse=True)
def running_again(pair: PdPair) -> Iterator[None]:
    """The engine serves after the test, whatever became of it."""
    yield
    post(pair.prefill, "/resume")


def post(client: Client, path: str, body: dict[str, object] | None = None) -> dict[str, object]:
    return client.post(path, body or {})


def cached(client: Client, prompt: Prompt) -> bool:
    """Whether ``client`` answers ``prompt`` from its prefix cache."""
    before = client.metrics()["vllm:prefix_cache_hits_total"]
    client.complete(prompt, 1)
    return client.metrics()["vllm:prefix_cache_hits_total"] > before


def test_an_idle_engine_clears_its_cache_after_hand_overs(pair: PdPair, expected: Expected) -> None:
    answers = {
        prompt: prefill_then_decode(pair.prefill, pair.decode, prompt, MAX_TOKENS)
        for prompt in PROMPTS
    }
    assert expected.mismatches(answers) == []
    assert cached(pair.prefill, PROMPTS[0])
    assert post(pair.prefill, "/reset_prefix_cache") == {"success": True}
    assert not cached(pair.prefill, PROMPTS[0])


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/pause?clear_cache=true"])
def test_what_was_lent_before_a_reset_is_not_handed_over_after_it(
    pair: PdPair, expected: Expected, path: str
) -> None:
    """This decode engine fails what it cannot pull; one that recomputes answers rightly."""
    prompts = make_prompts([300 + 40 * n for n in range(5)], seed=900 + len(path))
    tickets = [prefill_only(pair.prefill, prompt) for prompt in prompts]
    began = time.monotonic()
    assert post(pair.prefill, path) in ({"success": True}, {"status": "paused"})
    assert time.monotonic() - began < LEASE_S / 2
    before = refused_as_aborted(pair.decode)
    for prompt, ticket in zip(prompts, tickets, strict=True):
        with pytest.raises(RequestRefused):
            pair.decode.complete(prompt, 1, kv_transfer_params=ticket)
    pair.decode.complete((5, 6, 7), 1)  # counts are exported when a step runs
    assert refused_as_aborted(pair.decode) - before >= len(prompts)
    post(pair.prefill, "/resume")
    again = {
        prompt: prefill_then_decode(pair.prefill, pair.decode, prompt, MAX_TOKENS)
        for prompt in prompts[:2]
    }
    assert expected.mismatches(again) == []


def refused_as_aborted(decode: Client) -> float:
    return decode.metrics().get("pdconn:pulls_refused_aborted_total", 0.0)


def test_weights_are_reloaded_after_hand_overs(pair: PdPair, expected: Expected) -> None:
    prefill_only(pair.prefill, PROMPTS[1])  # lent, and never read
    assert post(pair.prefill, "/pause?clear_cache=true") == {"status": "paused"}
    reloaded = post(pair.prefill, "/collective_rpc", {"method": "reload_weights"})
    assert json.dumps(reloaded)
    assert post(pair.prefill, "/reset_prefix_cache") == {"success": True}
    post(pair.prefill, "/resume")
    answers = {
        prompt: prefill_then_decode(pair.prefill, pair.decode, prompt, MAX_TOKENS)
        for prompt in PROMPTS[1:3]
    }
    assert expected.mismatches(answers) == []
