"""Routes that go to one engine as they are, and what a form may hold.  Pure.

The table holds all of them: a path that is neither here nor in ``Route`` is answered 404, so that
what operates an engine (``/sleep``, ``/reset_prefix_cache``, ``/v1/load_lora_adapter``, ...) cannot
be reached through the router, and no more can what a later vLLM adds.  Left out on purpose:

- ``/inference/v1/generate``: it takes the names of an engine's memory inside ``sampling_params``;
- ``/invocations``: it is any other route, by the fields of its body;
- ``/v1/realtime``: a WebSocket.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from pdconn.router.errors import BadBody
from pdconn.router.openai.requests import NAMES_MEMORY
from transport.errors import shown


class Asks(Enum):
    """The engines that a route may go to."""

    #: It computes on the processor only, or in one pass: the least busy of all engines.
    ANY = "any engine"
    #: It generates: a decode engine, and prefill only where none is up.
    DECODE = "decode"
    #: It is about a response that one decode engine keeps: each in turn, until one knows it.
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
        """The path for people and labels, without the pattern of its id."""
        return self.path.replace(_ID, "{id}")


_ID = "{id:[A-Za-z0-9_-]+}"

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

#: No further parameter: under a charset such as punycode ``name="vllm_xargs-"`` is ``vllm_xargs``.
_FORM = re.compile(
    r"\s*multipart/form-data\s*(?:;\s*charset=\"?utf-8\"?\s*)?;\s*boundary="
    r"(?:[^\s\";=,]+|\"[^\"\\]+\")\s*(?:;\s*charset=\"?utf-8\"?\s*)?",
    re.IGNORECASE,
)
_DISPOSITION = re.compile(rb"content-disposition", re.IGNORECASE)
#: As clients write it.  Any other form of it (folded, quoted or encoded in another way) could be
#: read as another name by the engine.
_PLAIN_PART = re.compile(
    rb'content-disposition: form-data; name="([A-Za-z0-9_.\[\]-]{1,64})"'
    rb'(?:; filename="[^"\\\r\n]*")?(?:; filename\*=[^;"\\\r\n]*)?\r\n',
    re.IGNORECASE,
)
_NOT_IN_FORMS = frozenset({*NAMES_MEMORY, "vllm_xargs"})
_MODEL = re.compile(
    rb'content-disposition: form-data; name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,512})\r\n',
    re.IGNORECASE,
)


def check_form(content_type: str, raw: bytes) -> None:
    """Check that a form names no memory of engines.

    Raises:
        BadBody: it is no form, a part's head is written oddly, or a part may not be there.
    """
    if _FORM.fullmatch(content_type) is None:
        expected = "multipart/form-data with a boundary, in UTF-8"
        raise BadBody("Content-Type", expected, shown(content_type))
    for found in _DISPOSITION.finditer(raw):
        part = _PLAIN_PART.match(raw, found.start())
        if part is None:
            expected = 'parts with Content-Disposition: form-data; name="a plain name"'
            raise BadBody("body", expected, shown(raw[found.start() :][:80].decode("latin-1")))
        name = part[1].decode()
        if name in _NOT_IN_FORMS:
            raise BadBody(name, "no value (engines name blocks, clients may not)", "a part")


def model_of_form(raw: bytes) -> str | None:
    """What a form's part ``model`` holds."""
    found = _MODEL.search(raw)
    return None if found is None else found[1].decode("utf-8", "replace")
