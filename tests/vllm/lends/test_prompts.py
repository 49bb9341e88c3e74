"""Parameters that are no object are ignored, and prompts of models with states are shortened."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.protocol.ticket import parse_ticket
from pdconn.vllm.lends.lending import Lending
from pdconn.vllm.patches.request_writes import drop_wrong_params
from pdconn.vllm.prompt import prompt_digest
from tests.fakes.simulated.block_pool import CountedPool
from tests.fakes.simulated.hooks import finished
from tests.vllm.lends.scheduler import request, with_states


@pytest.mark.parametrize("params", ["text", 7, 10**5000, [], True], ids=lambda p: type(p).__name__)
def test_a_prefill_engine_ignores_parameters_that_are_no_dict(
    params: object, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM asks them next: ``'str' object has no attribute 'get'`` ended the engine."""
    asked = SimpleNamespace(request_id="r", kv_transfer_params=params)
    with caplog.at_level(logging.WARNING, logger="pdconn"):
        drop_wrong_params(asked)
    assert asked.kv_transfer_params is None
    [line] = caplog.messages
    assert "kv_transfer_params: expected an object, got" in line


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}])
def test_a_prefill_engine_leaves_other_parameters_alone(
    params: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    asked = SimpleNamespace(request_id="r", kv_transfer_params=params)
    drop_wrong_params(asked)
    assert asked.kv_transfer_params == params
    assert not caplog.messages


# Prompts of models with states


def state_request(*prompt: int, **changes: Any) -> Any:
    """As vLLM's, of which prefill is asked for."""
    made = request("r", prompt)
    made._all_token_ids = list(prompt)
    made.kv_transfer_params = {"do_remote_decode": True}
    made.max_tokens, made.skip_reading_prefix_cache = 9, False
    made.prompt_embeds, made.resumable = None, False
    return SimpleNamespace(**{**vars(made), **changes})


def test_a_model_with_states_leaves_the_last_token_to_decode(
    pool: CountedPool, lending: Lending, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ticket names the whole prompt, and the tokens that were computed."""
    monkeypatch.setattr(lending.tickets, "has_states", True)
    whole, made = prompt_digest(state_request(7, 8, 9)), state_request(7, 8, 9)
    lending.on_new_request(made)
    lending.on_new_request(made)  # as a request that was preempted might
    assert (made.prompt_token_ids, made._all_token_ids) == ([7, 8], [7, 8])
    assert (made.num_prompt_tokens, made.max_tokens) == (2, 1)
    made.num_computed_tokens = 2
    params = lending.lend_request(made, ([1],))
    assert params is not None
    ticket = parse_ticket(params, 8)
    assert (ticket.num_tokens, ticket.prompt) == (2, whole)
    finished(lending, made)
    assert lending.tickets._shortened == {}


@pytest.mark.parametrize(
    "made",
    [
        state_request(7),
        state_request(7, 8, 9, skip_reading_prefix_cache=True),
        state_request(7, 8, 9, kv_transfer_params=None),
        state_request(7, 8, 9, kv_transfer_params={"do_remote_prefill": True}),
        state_request(7, 8, 9, prompt_token_ids=None),
        state_request(7, 8, 9, prompt_embeds=[[0.0]] * 3),
        state_request(7, 8, 9, resumable=True),
    ],
    ids=["one token", "by decode", "no hand-over", "decode", "embeddings", "mixed", "session"],
)
def test_other_prompts_are_computed_whole(made: Any) -> None:
    before = made._all_token_ids[:]
    with_states().on_new_request(made)
    assert made._all_token_ids == before
    assert made.max_tokens == 9


def test_a_model_without_states_computes_the_whole_prompt(lending: Lending) -> None:
    made = state_request(7, 8, 9)
    lending.on_new_request(made)
    assert made.prompt_token_ids == [7, 8, 9]
