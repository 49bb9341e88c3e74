"""Every recorded leg of every router through our code: what prefill lends, decode claims."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from pdconn.protocol.ticket import parse_ticket
from pdconn.puller.commands import ReadBlocks
from tests.contracts.engines import CHAT, COMPLETIONS, Decoded, Engine, claim, engines
from tests.contracts.recorded import (
    MODES,
    ROUTERS,
    Mode,
    request_id,
    struct_of,
    without,
)

HANDED_OVER = [mode for mode in MODES if mode.outcome == "handed over"]
PROMPT = list(range(100, 141))
CLIENTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {
        "model": "m",
        "prompt": PROMPT,
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "cache_salt": "salt",
    },
    CHAT: {
        "model": "m",
        "messages": [{"role": "user", "content": "Is this the prompt that prefill computed?"}],
        "max_completion_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
}

#: What decode cannot do without: every field of a ticket but the flags and the sizes.
NEEDED = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
    "remote_num_tokens",
    "pdconn",
    "pdconn.version",
    "pdconn.incarnation",
    "pdconn.prompt",
    "pdconn.first_blocks",
)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Engine, Engine]]:
    with engines() as made:
        yield made


def hand_over(pair: tuple[Engine, Engine], mode: Mode, path: str) -> tuple[dict[str, Any], Any]:
    """A request by way of the router: what decode was sent, and what prefill had answered."""
    prefill, _ = pair
    answer = prefill.prefill(path, mode.prefill_body(CLIENTS[path]))
    return mode.decode_body(CLIENTS[path], answer, "localhost"), answer


@pytest.mark.parametrize("path", CLIENTS)
@pytest.mark.parametrize("mode", HANDED_OVER, ids=str)
def test_what_prefill_lends_is_claimed_by_decode(
    pair: tuple[Engine, Engine], mode: Mode, path: str
) -> None:
    body, answer = hand_over(pair, mode, path)
    lent = parse_ticket(answer["kv_transfer_params"])
    found: Decoded = pair[1].decode(path, body)
    assert found.matched == len(found.tokens) - 1
    assert found.ticket.digest() == lent.digest(), "nothing that the lender promised was changed"
    assert [type(one) for one in found.commands][-1] is ReadBlocks
    assert socket.gethostbyname(found.ticket.host) == "127.0.0.1"
    claim(found.ticket)


@pytest.mark.parametrize("field", NEEDED)
@pytest.mark.parametrize("mode", HANDED_OVER, ids=str)
def test_a_field_that_a_ticket_needs_is_missed_by_its_name(
    pair: tuple[Engine, Engine], mode: Mode, field: str
) -> None:
    """Control: were the router to drop it, decode would not pull, and say why."""
    body, _ = hand_over(pair, mode, COMPLETIONS)
    found = pair[1].decode(COMPLETIONS, without(body, f"kv_transfer_params.{field}"))
    assert found.failure.startswith(f"{field}: expected ")
    assert not [one for one in found.commands if isinstance(one, ReadBlocks)]


@pytest.mark.parametrize("path", CLIENTS)
@pytest.mark.parametrize(
    "mode", [mode for mode in MODES if mode.outcome == "computed by decode"], ids=str
)
def test_a_mode_that_asks_for_no_ticket_lends_nothing_and_pulls_nothing(
    pair: tuple[Engine, Engine], mode: Mode, path: str
) -> None:
    assert mode.why
    pinned = pair[0].pool.pinned()
    body, answer = hand_over(pair, mode, path)
    assert answer["kv_transfer_params"] is None
    assert pair[0].pool.pinned() == pinned
    found = pair[1].decode(path, body)
    assert (found.matched, found.commands) == (0, [])


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.outcome == "refused"], ids=str)
def test_parameters_that_the_router_made_up_are_refused_by_name(
    pair: tuple[Engine, Engine], mode: Mode
) -> None:
    body, _ = hand_over(pair, mode, COMPLETIONS)
    field = mode.why.rpartition(": ")[2]
    assert pair[1].decode(COMPLETIONS, body).failure.startswith(f"{field}: expected ")


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.refused], ids=str)
def test_what_a_router_breaks_by_itself_vllm_refuses(
    pair: tuple[Engine, Engine], mode: Mode
) -> None:
    """It is no fault of the connector's: the page says what clients cannot send."""
    for case in mode.refused:
        assert case["leg"] == "prefill"
        body = mode.prefill_body({**CLIENTS[COMPLETIONS], **case["client"]})
        with pytest.raises(Exception, match=case["message"]):
            pair[0].prefill(COMPLETIONS, body)


@pytest.mark.parametrize("mode", [mode for mode in HANDED_OVER if not mode.refused], ids=str)
def test_the_other_routers_take_a_least_number_of_tokens(
    pair: tuple[Engine, Engine], mode: Mode
) -> None:
    """Control of the law above."""
    body = mode.prefill_body({**CLIENTS[COMPLETIONS], "min_tokens": 8})
    if "min_tokens" in body and body["min_tokens"] > 1:
        pytest.fail("the record misses a refusal")
    assert pair[0].prefill(COMPLETIONS, body)["kv_transfer_params"] is not None


@pytest.mark.parametrize("mode", HANDED_OVER, ids=str)
def test_a_ticket_survives_a_router_that_keeps_it_in_doubles(
    pair: tuple[Engine, Engine], mode: Mode
) -> None:
    """As a protobuf ``Struct`` does: 5600 comes back as 5600.0."""
    body, answer = hand_over(pair, mode, COMPLETIONS)
    body["kv_transfer_params"] = struct_of(body["kv_transfer_params"])
    assert type(body["kv_transfer_params"]["remote_port"]) is float
    found = pair[1].decode(COMPLETIONS, body)
    assert found.ticket.digest() == parse_ticket(answer["kv_transfer_params"]).digest()
    claim(found.ticket)


def test_with_prefills_tokens_a_chat_is_pulled_even_where_decode_would_render_it_otherwise(
    pair: tuple[Engine, Engine],
) -> None:
    [mode] = [
        one for one in HANDED_OVER if "kv_transfer_params.prompt_token_ids" in one.decode["takes"]
    ]
    body, answer = hand_over(pair, mode, CHAT)
    body["messages"] = [{"role": "user", "content": "as another template would have it"}]
    found = pair[1].decode(CHAT, body)
    assert found.tokens == answer["prompt_token_ids"]
    assert [type(one) for one in found.commands][-1] is ReadBlocks
    claim(found.ticket)


def test_without_them_such_a_chat_is_refused_by_the_digest_of_the_prompt_and_computed(
    pair: tuple[Engine, Engine],
) -> None:
    """Control."""
    mode = HANDED_OVER[0]
    body, _ = hand_over(pair, mode, CHAT)
    body["messages"] = [{"role": "user", "content": "Is this the prompt that prefill computes?"}]
    found = pair[1].decode(CHAT, body)
    assert found.matched == 0
    assert not any(type(one) is ReadBlocks for one in found.commands)


@pytest.mark.parametrize("name", ROUTERS)
def test_the_name_that_a_router_gives_a_request_fits_a_ticket(
    pair: tuple[Engine, Engine], name: str
) -> None:
    """vllm-router writes both engines' addresses into it: names of pods, in a long namespace."""
    host = "decode-0.decode-headless.a-namespace-with-a-long-name.svc.cluster.local:8000"
    made = request_id(ROUTERS[name], host.replace("decode", "prefill"), host)
    mode = next(mode for mode in HANDED_OVER if mode.router == name)
    answer = pair[0].prefill(COMPLETIONS, mode.prefill_body(CLIENTS[COMPLETIONS]), made)
    assert parse_ticket(answer["kv_transfer_params"]).request_id == made


def test_a_router_that_changed_the_blocks_would_be_refused_by_the_lender(
    pair: tuple[Engine, Engine],
) -> None:
    """Control: the digest covers what no router may touch, and the claim fails by it."""
    mode = HANDED_OVER[0]
    body, _ = hand_over(pair, mode, COMPLETIONS)
    body["kv_transfer_params"]["remote_block_ids"][0][0] += 1
    found = pair[1].decode(COMPLETIONS, body)
    with pytest.raises(AssertionError, match="Refused"):
        claim(found.ticket)
