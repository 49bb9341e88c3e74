"""Single requests that do not go the straight way: wrong tickets, several answers, clients
that leave.  The engine goes on serving others after each."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from pdconn.protocol.auth import Secret
from pdconn.router.openai.bodies import lend_params
from pdconn.sidechannel.connection import SideChannelLost
from pdconn.sidechannel.credentials import load_secret
from pdconn.sidechannel.describe import describe
from pdconn.sidechannel.security import Security
from pdconn.tools.lab.compare_answers import compare
from pdconn.tools.lab.lab_client import Client, prefill_only, prefill_then_decode
from pdconn.tools.lab.lab_errors import RequestRefused
from tests.vllm.engines.engines import (
    LEASE_S,
    MAX_TOKENS,
    Expected,
    PdPair,
    Prompt,
    one_after_another,
    secret_beside,
    whole_blocks,
)

FAILING = pytest.mark.only(layout="BHLNC", prefix_caching=True)
RECOMPUTING = pytest.mark.only(layout="BLHNC", prefix_caching=False)


def prompt_of(number: int, longer_than: int = 200) -> Prompt:
    return [prompt for prompt in one_after_another() if len(prompt) > longer_than][number]


def ours(params: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**params, "pdconn": {**params["pdconn"], **changes}}


def without(params: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != key}


WRONG: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "a missing field": (
        lambda p: without(p, "remote_port"),
        "remote_port: expected a whole number from 1 to 65535, got 'nothing'",
    ),
    "no pdconn ticket": (
        lambda p: without(p, "pdconn"),
        "pdconn: expected a ticket made by pdconn",
    ),
    "a wrong type": (
        lambda p: {**p, "remote_block_ids": "all"},
        "remote_block_ids: expected a list of block ids per group, got 'all'",
    ),
    "another group count": (
        lambda p: ours({**p, "remote_block_ids": [[1]]}, first_blocks=[0]),
        "remote_block_ids: expected 3 lists, one per KV cache group of prefill, got 1",
    ),
    "a block out of range": (
        lambda p: {**p, "remote_block_ids": [[2**30] * len(g) for g in p["remote_block_ids"]]},
        "remote_block_ids[0][0]: expected 0 to ",
    ),
    "another prompt's blocks": (
        lambda p: {**p, "remote_block_ids": [[1] * len(g) for g in p["remote_block_ids"]]},
        "refused, altered",
    ),
    "a foreign engine": (
        lambda p: {**p, "remote_engine_id": "another"},
        "engine_id: expected another, got",
    ),
    "an earlier boot": (
        lambda p: ours(p, incarnation="0123456789abcdef"),
        "incarnation: theirs",
    ),
    "a prompt that was never prefilled": (
        lambda p: {**p, "remote_request_id": "cmpl-unheard-of"},
        "refused, unknown: nothing is lent under this request",
    ),
}


@FAILING
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_ticket_fails_its_request_and_no_other(
    pair: PdPair, expected: Expected, wrong: str
) -> None:
    change, message = WRONG[wrong]
    prompt = tuple(reversed(prompt_of(list(WRONG).index(wrong))))
    ticket = dict(prefill_only(pair.prefill, prompt) or {})
    with pytest.raises(RequestRefused) as caught:
        pair.decode.complete(prompt, MAX_TOKENS, kv_transfer_params=change(ticket))
    assert caught.value.status == 500
    assert pair.has_logged(message)
    other = prompt_of(3)
    assert compare(expected[other], through(pair, other)) is None
    with suppress(RequestRefused):  # or a later test waits until the lease ends by itself
        pair.decode.complete(prompt, 1, kv_transfer_params=ticket)


@RECOMPUTING
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_ticket_is_recomputed_when_the_policy_says_so(
    pair: PdPair, expected: Expected, wrong: str
) -> None:
    change, message = WRONG[wrong]
    prompt = prompt_of(list(WRONG).index(wrong))
    ticket = dict(prefill_only(pair.prefill, prompt) or {})
    for used in (change(ticket), ticket):  # the second ends the lease
        answer = pair.decode.complete(prompt, MAX_TOKENS, kv_transfer_params=used)
        assert compare(expected[prompt], answer) is None
    assert pair.has_logged(message)


@FAILING
def test_a_consumed_ticket_is_refused(pair: PdPair) -> None:
    prompt = tuple(range(900, 1400))
    ticket = prefill_only(pair.prefill, prompt)
    pair.decode.complete(prompt, MAX_TOKENS, kv_transfer_params=ticket)
    # Another prompt's worth of cache between them would hide nothing: the salt does.
    with pytest.raises(RequestRefused):
        pair.decode.complete(prompt, 1, kv_transfer_params=ticket, cache_salt="other")
    assert pair.has_logged("refused, consumed")


@pytest.fixture
def quiet(pair: PdPair) -> PdPair:
    """The pair, when no lease of an earlier test is left: they end by themselves."""
    assert pair.lent_after_one_more(seconds=2 * LEASE_S) == 0.0
    return pair


def test_a_ticket_for_another_prompt_is_left_out_under_either_policy(
    quiet: PdPair, expected: Expected
) -> None:
    """A chat template that asks the clock writes two prompts: each chat was 500 under ``fail``."""
    pair, lent, asked = quiet, prompt_of(4), prompt_of(5)
    before = pair.decode.metrics().get("pdconn:tickets_mistaken_total", 0.0)
    for prompt in (asked, lent[:-1], (*lent, 7)):
        ticket = prefill_only(pair.prefill, lent)
        answer = pair.decode.complete(prompt, MAX_TOKENS, kv_transfer_params=ticket)
        assert compare(expected[prompt], answer) is None
    assert pair.has_logged("pdconn.prompt: expected")
    assert pair.decode.metrics()["pdconn:tickets_mistaken_total"] == before + 3
    assert pair.lent_after_one_more() == 0.0, "the tickets were given up"


@pytest.mark.only(layout="BHLNC")
def test_several_answers_from_one_ticket(quiet: PdPair, expected: Expected) -> None:
    """Best-of-n: vLLM makes one request per answer, all with the same ticket."""
    prompt = prompt_of(1)
    ticket = prefill_only(quiet.prefill, prompt)
    body = {
        "model": quiet.decode.model,
        "prompt": list(prompt),
        "max_tokens": MAX_TOKENS,
        "temperature": 0.001,  # vLLM wants one answer when it is greedy; this is as good as
        "ignore_eos": True,
        "n": 3,
        "return_token_ids": True,
        "kv_transfer_params": ticket,
    }
    choices = quiet.decode.post_json("/v1/completions", body)["choices"]
    assert [tuple(choice["token_ids"]) for choice in choices] == [expected[prompt].tokens] * 3
    assert quiet.lent_after_one_more() == 0.0


@pytest.mark.only(layout="BHLNC", prefix_caching=True)
def test_several_answers_asked_of_prefill_are_one_lease(quiet: PdPair, expected: Expected) -> None:
    """As proxies do that send ``n`` on: two leases of three were pinned until they expired."""
    prompt = prompt_of(5)
    lent = quiet.prefill.metrics().get("pdconn:leases_granted_total", 0.0)
    body = {
        "model": quiet.prefill.model,
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 1.0,
        "n": 3,
        "kv_transfer_params": lend_params(),
    }
    ticket = quiet.prefill.post_json("/v1/completions", body)["kv_transfer_params"]
    answer = quiet.decode.complete(prompt, MAX_TOKENS, kv_transfer_params=ticket)
    assert compare(expected[prompt], answer) is None
    assert quiet.lent_after_one_more() == 0.0
    assert quiet.prefill.metrics()["pdconn:leases_granted_total"] == lent + 1


@FAILING
def test_a_request_of_a_name_that_no_ticket_may_have_is_not_lent(quiet: PdPair) -> None:
    """Decode refused its ticket, and its blocks were pinned for a whole lease."""
    prompt = prompt_of(6)
    text = json.dumps(
        {
            "model": quiet.prefill.model,
            "prompt": list(prompt),
            "max_tokens": 1,
            "kv_transfer_params": lend_params(),
        }
    )
    parts = urlsplit(quiet.prefill.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port or 80)
    headers = {"Content-Type": "application/json", "X-Request-Id": "r" * 600}
    connection.request("POST", "/v1/completions", text, headers)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    assert answer["choices"], "it is computed all the same"
    assert answer["kv_transfer_params"] is None
    assert quiet.lent_after_one_more() == 0.0


@pytest.mark.only(layout="BHLNC")
def test_prompt_logprobs_are_computed_by_decode_itself(quiet: PdPair, expected: Expected) -> None:
    """vLLM recomputes a prompt whose log-probabilities are asked; the claim is given up."""
    prompt = prompt_of(2)
    ticket = prefill_only(quiet.prefill, prompt)
    answer = quiet.decode.complete(prompt, MAX_TOKENS, kv_transfer_params=ticket, prompt_logprobs=1)
    assert answer.tokens == expected[prompt].tokens
    assert quiet.lent_after_one_more() == 0.0


@FAILING
def test_a_rejected_request_gives_its_ticket_back(quiet: PdPair) -> None:
    """The frontend refuses it, so it never runs; prefill's blocks come back at once."""
    prompt = prompt_of(4)
    ticket = prefill_only(quiet.prefill, prompt)
    with pytest.raises(RequestRefused) as caught:
        quiet.decode.complete(prompt, 100_000, kv_transfer_params=ticket)
    assert caught.value.status == 400
    assert quiet.lent_after_one_more() == 0.0


@pytest.mark.only(layout="BHLNC")
def test_clients_that_leave_strand_nothing(quiet: PdPair, expected: Expected) -> None:
    """Gone at every stage: before prefill began, while pulling, queueing, generating."""
    with quiet.proxy() as url:
        for number, wait_s in enumerate((0.0, 0.005, 0.02, 0.05, 0.1, 0.3)):
            leave(Client(url), tuple(reversed(prompt_of(number + 5))), wait_s)
        # The proxy lets decode learn of a request before it closes it.
        time.sleep(3)
        lent = quiet.lent_after_one_more(seconds=LEASE_S - 6)
        assert lent == 0.0, pdconn_metrics(quiet.prefill) | pdconn_metrics(quiet.decode)
    other = prompt_of(0)
    assert compare(expected[other], through(quiet, other)) is None


def pdconn_metrics(client: Client) -> dict[str, float]:
    """An engine's figures of ours that are not 0, to tell what was stranded and where."""
    found = client.metrics()
    return {f"{client.url} {k}": v for k, v in found.items() if k.startswith("pdconn:") and v}


def leave(client: Client, prompt: Prompt, wait_s: float) -> None:
    """Ask for a long answer and close the connection after ``wait_s`` seconds."""
    parts = urlsplit(client.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port or 80)
    body = {
        "model": client.model,
        "prompt": list(prompt),
        "max_tokens": 500,
        "ignore_eos": True,
        "stream": True,
    }
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    time.sleep(wait_s)
    connection.close()


@pytest.mark.only(layout="BHLNC")
def test_a_peer_without_the_secret_learns_nothing(pair: PdPair, model: Path) -> None:
    spec = pair.prefill_engine.spec
    assert spec.side_channel_port is not None
    before = pair.prefill.metrics().get("pdconn:connections_unauthenticated_total", 0.0)
    foreign = Security(Secret(b"known to no peer of ours"))
    for security in (foreign, None):
        with pytest.raises(SideChannelLost):
            describe(spec.host, spec.side_channel_port, security=security)
    known = Security(load_secret(str(secret_beside(model))))
    assert describe(spec.host, spec.side_channel_port, security=known).traits
    give_up, refused = time.monotonic() + 20.0, 0.0
    while refused < 2 and time.monotonic() < give_up:
        pair.prefill.complete((5, 6, 7), 1)  # counts are reported with a step
        refused = (
            pair.prefill.metrics().get("pdconn:connections_unauthenticated_total", 0.0) - before
        )
    assert refused == 2


@FAILING
def test_chat_through_the_proxy(pair: PdPair) -> None:
    """Chat, streamed and not, says what decode alone says."""
    body = {
        "model": pair.decode.model,
        "messages": [{"role": "user", "content": " ".join(f"w{n}" for n in range(40, 140))}],
        "max_tokens": 8,
        "temperature": 0.0,
    }
    alone = pair.decode.post_json("/v1/chat/completions", {**body, "cache_salt": "alone"})
    with pair.proxy() as url:
        through_proxy = Client(url).post_json("/v1/chat/completions", body)
    assert (
        through_proxy["choices"][0]["message"]["content"]
        == alone["choices"][0]["message"]["content"]
    )


@pytest.mark.only(layout="BLHNC", prefix_caching=False)
def test_one_flipped_byte_is_noticed(pair: PdPair, expected: Expected) -> None:
    """Negative control of every comparison above, and what ``verify`` is for."""
    trusting, verifying = (Client(pair.others[name].url) for name in ("trusting", "verifying"))
    for prompt in whole_blocks():
        wrong = prefill_then_decode(pair.prefill, trusting, prompt, MAX_TOKENS)
        assert compare(expected[prompt], wrong) is not None
        for decode in (pair.decode, verifying):
            right = prefill_then_decode(pair.prefill, decode, prompt, MAX_TOKENS)
            assert compare(expected[prompt], right) is None
    counts = verifying.metrics()
    assert counts["pdconn:pulls_corrupted_total"] == len(whole_blocks())
    assert counts.get("pdconn:pulls_verified_total", 0.0) == 0


def through(pair: PdPair, prompt: Prompt) -> Any:
    ticket = pair.prefill.complete(prompt, 1, kv_transfer_params=lend_params())
    return pair.decode.complete(prompt, MAX_TOKENS, kv_transfer_params=ticket.kv_transfer_params)
