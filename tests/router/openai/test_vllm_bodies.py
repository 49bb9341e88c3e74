"""What engines get on ``/v1/responses`` and ``/v1/messages`` is what vLLM's own models take."""

from __future__ import annotations

import json
import warnings
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's and others', about each other
    from vllm.entrypoints.anthropic.protocol import (
        AnthropicMessagesRequest,
        AnthropicMessagesResponse,
    )
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse

from pdconn.router.openai.bodies import decode_body, find_ticket, prefill_body, return_body
from pdconn.router.openai.requests import Route, parse_body

MODELS = {Route.RESPONSES: ResponsesRequest, Route.MESSAGES: AnthropicMessagesRequest}
TICKET = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1]]}
SENT: dict[Route, dict[str, Any]] = {
    Route.RESPONSES: {
        "model": "m",
        "input": [{"role": "user", "content": "hi"}],
        "instructions": "be brief",
        "max_output_tokens": 64,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 3,
        "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": False}],
        "text": {"format": {"type": "json_object"}},
        "stream": True,
        "cache_salt": "s",
    },
    Route.MESSAGES: {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "system": "be brief",
        "max_tokens": 2048,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "stop_sequences": ["x"],
        "stream": True,
        "cache_salt": "s",
    },
}
ANSWER_BOUND = {Route.RESPONSES: "max_output_tokens", Route.MESSAGES: "max_tokens"}
SHAPES_PROMPT = {
    Route.RESPONSES: ("input", "instructions", "tools", "text", "cache_salt"),
    Route.MESSAGES: ("messages", "system", "thinking", "tools", "cache_salt"),
}


def taken(route: Route, raw: bytes) -> Any:
    """A body as vLLM reads it; an error if it refuses it."""
    return MODELS[route].model_validate(json.loads(raw))


@pytest.mark.parametrize("route", MODELS)
def test_prefill_takes_the_same_prompt_for_one_token_and_a_ticket(route: Route) -> None:
    raw = json.dumps(SENT[route]).encode()
    ours, theirs = taken(route, prefill_body(parse_body(route, raw))), taken(route, raw)
    assert getattr(ours, ANSWER_BOUND[route]) == 1
    assert ours.kv_transfer_params["do_remote_decode"] is True
    assert not ours.stream
    for name in SHAPES_PROMPT[route]:
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize("route", MODELS)
def test_decode_takes_the_ticket_beside_what_the_client_sent(route: Route) -> None:
    raw = json.dumps(SENT[route]).encode()
    ticket = msgspec.Raw(json.dumps(TICKET).encode())
    ours, theirs = taken(route, decode_body(parse_body(route, raw), ticket)), taken(route, raw)
    assert ours.kv_transfer_params == TICKET
    same = theirs.model_dump(exclude={"kv_transfer_params", "request_id"})
    assert ours.model_dump(exclude={"kv_transfer_params", "request_id"}) == same


@pytest.mark.parametrize("route", MODELS)
def test_a_ticket_comes_back_in_a_body_that_is_read_as_far_as_the_models_name(
    route: Route,
) -> None:
    """Refused earlier, by the model of the request, the lender would get no report."""
    body = parse_body(route, json.dumps(SENT[route]).encode())
    ticket = msgspec.Raw(json.dumps(TICKET).encode())
    ours = taken(route, return_body(body, ticket))
    assert ours.kv_transfer_params == TICKET
    assert getattr(ours, ANSWER_BOUND[route]) == 1


def test_with_its_thinking_a_returned_ticket_would_be_refused_too_early() -> None:
    """The control of the test above, and why ``return_body`` leaves it out."""
    body = parse_body(Route.MESSAGES, json.dumps(SENT[Route.MESSAGES]).encode())
    ticket = msgspec.Raw(json.dumps(TICKET).encode())
    careless = {
        **json.loads(return_body(body, ticket)),
        "thinking": SENT[Route.MESSAGES]["thinking"],
    }
    with pytest.raises(ValueError, match="budget_tokens must be less than max_tokens"):
        taken(Route.MESSAGES, json.dumps(careless).encode())


@pytest.mark.parametrize("kind", [ResponsesResponse, AnthropicMessagesResponse])
def test_answers_have_a_field_for_the_ticket_where_it_is_looked_for(kind: Any) -> None:
    assert "kv_transfer_params" in kind.model_fields
    written = json.dumps({"id": "x", "kv_transfer_params": TICKET}).encode()
    found = find_ticket(written)
    assert found is not None
    assert json.loads(bytes(found)) == TICKET
