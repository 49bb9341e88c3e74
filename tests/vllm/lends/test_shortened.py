"""Prompts that prefill shortens by a token, as vLLM's own requests."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from pdconn.protocol.ticket import parse_ticket
from pdconn.vllm.lends.lending import Lending
from pdconn.vllm.prompt import prompt_digest
from tests.vllm.lends.scheduler import with_states

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import vllm.config  # noqa: F401 - before its parts, which import each other
    from vllm.sampling_params import SamplingParams
    from vllm.utils import length_from_prompt_token_ids_or_embeds as lengths
    from vllm.v1.request import Request

PROMPT = [7, 8, 9, 10]
PREFILL = {"kv_transfer_params": {"do_remote_decode": True}}


def request(name: str, tokens: list[int], **changes: Any) -> Request:
    params = SamplingParams(max_tokens=9, extra_args=PREFILL)
    return Request(name, tokens, params, None, **changes)


def test_the_frontends_tokens_stay_and_every_sibling_is_shortened_once(
    lending: Lending,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a process of its own the engine gets the frontend's list, each child the same."""
    monkeypatch.setattr(lending.tickets, "has_states", True)
    tokens = PROMPT.copy()
    whole = prompt_digest(request("r", PROMPT))
    for name in ("0_r", "1_r"):
        child = request(name, tokens)
        lending.on_new_request(child)
        assert child.prompt_token_ids == list(child.all_token_ids) == PROMPT[:-1]
        assert (child.num_prompt_tokens, child.max_tokens) == (len(PROMPT) - 1, 1)
        child.num_computed_tokens = child.num_prompt_tokens
        params = lending.lend_request(child, ([1],))
        assert params is not None
        ticket = parse_ticket(params, 8)
        assert (ticket.num_tokens, ticket.prompt) == (len(PROMPT) - 1, whole)
    assert tokens == PROMPT


def test_a_prompt_of_tokens_and_embeddings_is_one_that_the_worker_takes() -> None:
    """It is not handed over, and the worker refuses tokens and embeddings of unequal number."""
    embeds = torch.zeros(len(PROMPT), 2)
    mixed = request("r", PROMPT.copy(), prompt_embeds=embeds, prompt_is_token_ids=[True] * 4)
    with_states().on_new_request(mixed)
    # As the worker does; unequal numbers raise there, which ends the engine.
    assert lengths(mixed.prompt_token_ids, mixed.prompt_embeds) == len(PROMPT)


def test_a_session_goes_on_after_its_whole_first_prompt() -> None:
    session = request("r", PROMPT.copy(), resumable=True)
    with_states().on_new_request(session)
    assert list(session.all_token_ids) == PROMPT
    assert session.max_tokens == 9
