"""Requests for greedy completions, and their answers, whole or streamed.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class BrokenAnswer(Exception):
    """A server did not answer with a complete answer of vLLM's form."""


class Logprobs(msgspec.Struct):
    """Natural logarithms of probabilities by position; ``top_logprobs`` of the likeliest tokens."""

    tokens: list[str] | None = None
    token_logprobs: list[float] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class CompletionChoice(msgspec.Struct):
    """One choice of an answer, or of a chunk of a streamed one.

    Attributes:
        token_ids: None if the server does not report them.
        finish_reason: why generation stopped; None while it continues.
    """

    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class Completion(msgspec.Struct):
    """An answer, or a chunk of a streamed one; ``kv_transfer_params`` is the ticket for decode."""

    choices: list[CompletionChoice] = []
    kv_transfer_params: dict[str, Any] | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def reported_error(self) -> str | None:
        """The error that the server reports in place of an answer; None without one."""
        text = bytes(self.error)
        return None if text == b"null" else text[:500].decode(errors="replace")


def completion_request(
    model: str, prompt: str | Sequence[int], max_tokens: int, **more: object
) -> dict[str, Any]:
    """A request for exactly ``max_tokens`` tokens, greedily, with their ids."""
    return {
        "model": model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def read_completion(data: bytes) -> Completion:
    """Parse an answer, or the data of one event.

    Raises:
        BrokenAnswer: it does not parse.
    """
    try:
        return msgspec.json.decode(data, type=Completion)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenAnswer(str(error)) from error
