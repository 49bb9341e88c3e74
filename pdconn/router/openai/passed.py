"""Routes that one engine serves, without prefill and decode.  Pure.

The table is complete: a path that is neither here nor in ``Route`` is answered 404, so that
operational routes of engines (``/sleep``, ``/reset_prefix_cache``, ``/v1/load_lora_adapter``, ...)
cannot be reached through the router, nor routes that a later vLLM adds.  Left out on purpose:

- ``/inference/v1/generate``: accepts names of engine memory inside ``sampling_params``;
- ``/invocations``: acts as any other route, depending on its body;
- ``/v1/realtime``: a WebSocket.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Asks(Enum):
    """The engines that a route may go to."""

    #: It computes on the CPU only, or in one pass: the least busy of all engines.
    ANY = "any engine"
    #: It generates: a decode engine, and prefill only if none is up.
    DECODE = "decode"
    #: It refers to a response that one decode engine keeps: each in turn, until one knows it.
    HOLDER = "the engine that keeps the response"


@dataclass(frozen=True, slots=True)
class PassedRoute:
    """A row of ``PASSED``; ``is_form``: its body is a form with a file, not JSON."""

    path: str
    asks: Asks = Asks.ANY
    is_form: bool = False
    method: str = "POST"

    @property
    def name(self) -> str:
        """The path for logs and labels, without the pattern of its id."""
        return self.path.replace(_ID, "{id}")


RESPONSE_ID = "[A-Za-z0-9_-]+"
"""The pattern of a response's id: nothing else becomes a part of a path."""
_ID = f"{{id:{RESPONSE_ID}}}"

PASSED = (
    PassedRoute("/tokenize"),
    PassedRoute("/detokenize"),
    PassedRoute("/v1/messages/count_tokens"),
    PassedRoute("/v1/completions/render"),
    PassedRoute("/v1/completions/derender"),
    PassedRoute("/v1/chat/completions/render"),
    PassedRoute("/v1/chat/completions/derender"),
    PassedRoute("/v1/messages/render"),
    PassedRoute("/v1/responses/render"),
    PassedRoute("/v1/embeddings"),
    PassedRoute("/v2/embed"),
    PassedRoute("/pooling"),
    PassedRoute("/classify"),
    PassedRoute("/score"),
    PassedRoute("/v1/score"),
    PassedRoute("/rerank"),
    PassedRoute("/v1/rerank"),
    PassedRoute("/v2/rerank"),
    PassedRoute("/generative_scoring"),
    PassedRoute("/v1/systemone"),
    PassedRoute("/v1/chat/completions/batch", Asks.DECODE),
    PassedRoute("/v1/audio/transcriptions", Asks.DECODE, is_form=True),
    PassedRoute("/v1/audio/translations", Asks.DECODE, is_form=True),
    PassedRoute(f"/v1/responses/{_ID}", Asks.HOLDER, method="GET"),
    PassedRoute(f"/v1/responses/{_ID}/cancel", Asks.HOLDER),
)
