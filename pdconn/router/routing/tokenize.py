"""The tokens of a request's prompt, from which its block hashes are computed.

A prompt of token ids contains them.  Text is tokenized by an engine (``/tokenize``), since only the
engine has its model's tokenizer, and prompts that a chat template makes are rendered there
(``/render`` below the route).  ``/tokenize`` accepts chats too, but not all fields that shape their
prompts (``documents``, ``reasoning_effort``, ``tool_choice``, ``response_format``): it would return
the tokens of another prompt.  Routed without a prefix lookup: images and other media (only the
engine knows the position of their tokens), several prompts in one body, and prompts that an engine
refuses to tokenize.

Block hashes have two further inputs: the request's ``cache_salt``, and the adapter that its
``model`` names, by the path in ``GET /v1/models``.

A prompt longer than the model's length is refused before it is parsed or hashed, as the engine
would refuse it later.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from msgspec import Raw
from multidict import CIMultiDict

from pdconn.router.fleet.engine_client import (
    Authorization,
    ConnectFailed,
    ConnectionLost,
    EngineClient,
)
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.member import Role
from pdconn.router.openai.requests import (
    UNREADABLE,
    Direct,
    ParsedBody,
    Route,
    asking,
    kind_of,
    text,
)
from pdconn.router.prefix.hashing import BadInput, Extras, read_token_ids
from pdconn.router.router_errors import BadBody
from pdconn.router.routing.models import CannotTokenise, KeyRefused, ModelCatalog, ModelView
from pdconn.router.routing.routed_request import RoutedRequest

MOST_TOKENS = 1 << 20
"""Maximum tokens of a prompt that is looked up: hashing blocks the event loop."""
MAX_NBYTES = 8 * MOST_TOKENS
"""Maximum bytes of an encoded list of token ids."""
TIMEOUT_S = 2.0
"""Seconds after which a request is routed without its tokens."""
MAX_SALT = 1024
"""Maximum characters of a ``cache_salt`` that is hashed: kept chains contain it."""
CHARS_A_TOKEN = 512
"""Maximum characters of a token in any vocabulary; the longest are some hundred spaces."""
CHAT_NBYTES_A_TOKEN = 32
"""Bytes per token of the model's length, above which a chat is not parsed for its text."""

_SHAPES_TEXT = ("model", "prompt", "add_special_tokens")
"""Fields of a completion that ``/tokenize`` accepts too: all that shape its prompt."""


@dataclass(frozen=True, slots=True)
class Tokenised:
    """A prompt's tokens, and the other inputs of its block hashes."""

    tokens: Sequence[int]
    extras: Extras


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _RenderAnswer(msgspec.Struct):
    token_ids: list[int]
    features: Raw = Raw(b"null")


class _Part(msgspec.Struct):
    type: str = "a part without a type"


class _Message(msgspec.Struct):
    content: str | list[_Part | str] | None = None


class Tokeniser:
    """Tokenizes prompts, using an engine where necessary.

    Args:
        engines: the engines to ask.
        client: the HTTP client.
        timeout_s, most_tokens, max_nbytes: bounds; the module's constants by default.
        authorization, shows_models: as for ``ModelCatalog``.
    """

    def __init__(
        self,
        engines: EngineRegistry,
        client: EngineClient,
        *,
        timeout_s: float = TIMEOUT_S,
        most_tokens: int = MOST_TOKENS,
        max_nbytes: int = MAX_NBYTES,
        authorization: Authorization = lambda: None,
        shows_models: bool = True,
    ) -> None:
        self._engines = engines
        self._client = client
        self._timeout_s = timeout_s
        self._most_tokens = most_tokens
        self._max_nbytes = max_nbytes
        self._turn = 0
        self.models = ModelCatalog(
            engines, self._ask, timeout_s, authorization, is_shown=shows_models
        )

    async def tokenise(self, request: RoutedRequest) -> Tokenised:
        """The tokens of a request's prompt.

        Raises:
            CannotTokenise: the tokens cannot be determined, or not in time.
            BadBody: the prompt is longer than the model's length.
        """
        body = request.body
        if kind_of(body.fields.get(body.route.prompt) or Raw(b"null")) == "null":
            raise CannotTokenise(f"the request has no {body.route.prompt}")
        if body.direct is Direct.SEVERAL_PROMPTS:
            raise CannotTokenise("the request has several prompts")
        if body.direct is Direct.STORED_RESPONSE:
            raise CannotTokenise("an engine keeps a part of it")
        headers = asking(request.headers)
        try:
            async with asyncio.timeout(self._timeout_s):
                models = await self.models.view_for(headers)
                bound = _LengthBound(body, models.max_tokens(text(body.fields.get("model"))))
                tokens = self._token_ids(body, bound)
                if not tokens:
                    tokens = await self._tokens_of(request, headers, bound)
                bound.check_length("tokens", len(tokens), 1)
                self._check_most(len(tokens))
                return Tokenised(tokens, _extras(body, models))
        except TimeoutError as error:
            why = f"no engine tokenized it within {self._timeout_s:g} s"
            raise CannotTokenise(why) from error
        except (ConnectFailed, ConnectionLost, BadInput) as error:
            raise CannotTokenise(str(error)) from error

    def _check_most(self, num_tokens: int) -> None:
        if num_tokens > self._most_tokens:
            raise CannotTokenise(f"more than {self._most_tokens} tokens: {num_tokens}")

    def _token_ids(self, body: ParsedBody, bound: _LengthBound) -> Sequence[int] | None:
        """The token ids in the body, if any; an empty list is no prompt."""
        if body.route is not Route.COMPLETIONS:
            return None
        prompt = body.fields["prompt"]
        if kind_of(prompt) == "a string":
            bound.check_text(prompt)
            return None
        if _BEGINS_WITH_AN_ID.match(memoryview(prompt)):
            num_ids = 1 + np.count_nonzero(np.frombuffer(prompt, np.uint8) == ord(","))
            bound.check_length("tokens", int(num_ids), 1)
            self._check_most(int(num_ids))
        if len(memoryview(prompt)) > self._max_nbytes:
            raise CannotTokenise(f"the prompt is a list of more than {self._max_nbytes} bytes")
        try:
            return read_token_ids(prompt)
        except msgspec.DecodeError:
            pass
        try:
            (only,) = msgspec.json.decode(prompt, type=list[list[int]])
        except (msgspec.DecodeError, ValueError) as error:
            raise CannotTokenise("the prompt is not a single list of token ids") from error
        return only

    async def _tokens_of(
        self, request: RoutedRequest, headers: CIMultiDict[str], bound: _LengthBound
    ) -> Sequence[int]:
        body = request.body
        if body.route is not Route.COMPLETIONS:
            messages = body.fields[body.route.prompt]
            most_nbytes = bound.chat_nbytes(self._max_nbytes)
            if len(memoryview(messages)) > most_nbytes:
                raise CannotTokenise(f"its {body.route.prompt} is more than {most_nbytes} bytes")
            return await self._rendered(request, headers)
        fields = {name: body.fields[name] for name in _SHAPES_TEXT if name in body.fields}
        raw = await self._ask_any(request, "/tokenize", headers, msgspec.json.encode(fields))
        try:
            return msgspec.json.decode(raw, type=_Tokens).tokens
        except UNREADABLE as error:
            raise CannotTokenise(f"/tokenize answered without tokens: {error}") from error

    async def _rendered(self, request: RoutedRequest, headers: CIMultiDict[str]) -> list[int]:
        """The tokens of a prompt that ``/tokenize`` does not accept."""
        body = request.body
        prompt = memoryview(body.fields[body.route.prompt])
        if body.route is Route.CHAT:
            _refuse_media(body.fields[body.route.prompt])
        elif _MAY_HOLD_AN_IMAGE.search(prompt):
            raise CannotTokenise("it may contain an image")  # the engine would load it
        fields = {**body.fields, "mm_payload": "none"}
        path = f"{body.route.path}/render"
        raw = await self._ask_any(request, path, headers, msgspec.json.encode(fields))
        try:
            answer = msgspec.json.decode(raw, type=_RenderAnswer)
        except UNREADABLE as error:
            raise CannotTokenise(f"{path} answered without tokens: {error}") from error
        if kind_of(answer.features) != "null":
            raise CannotTokenise("it contains more than text")
        return answer.token_ids

    async def _ask_any(
        self, request: RoutedRequest, path: str, headers: CIMultiDict[str], body: bytes
    ) -> bytes:
        among = request.serving
        live = self._engines.live(Role.DECODE, among) or self._engines.live(Role.PREFILL, among)
        if not live:
            raise CannotTokenise("no engine is up")
        self._turn += 1
        return await self._ask(live[self._turn % len(live)], path, headers, body)

    async def _ask(
        self, engine: str, path: str, headers: CIMultiDict[str], body: bytes | None = None
    ) -> bytes:
        if body is None:
            answer = await self._client.get_page(engine, path, headers)
        else:
            answer = await self._client.post_body(engine, path, body, headers)
        async with answer:
            raw = bytearray()
            while piece := await answer.next_chunk():
                raw += piece
                if len(raw) > self._max_nbytes:
                    raise CannotTokenise(
                        f"{engine}{path} answered more than {self._max_nbytes} bytes"
                    )
        if answer.status != 200:
            kind = KeyRefused if answer.status in _WANT_A_KEY else CannotTokenise
            raise kind(f"{engine}{path} answered {answer.status}")
        return bytes(raw)


def _extras(body: ParsedBody, models: ModelView) -> Extras:
    salt, model = text(body.fields.get("cache_salt")), text(body.fields.get("model"))
    if salt is not None and len(salt) > MAX_SALT:
        raise CannotTokenise(f"its cache_salt is longer than {MAX_SALT} characters")
    path = models.adapter_path(model)
    return Extras(lora=None if model is None or path is None else (model, path), cache_salt=salt)


_WANT_A_KEY = (401, 403)
_MAY_HOLD_AN_IMAGE = re.compile(rb'"(input_)?(image|file|document|audio)')
_BEGINS_WITH_AN_ID = re.compile(rb"\[\s*+(\[\s*+)?-?[0-9]")


@dataclass(frozen=True, slots=True)
class _LengthBound:
    """The length limit of a prompt, as its model's engines report it; unlimited if they do not."""

    body: ParsedBody
    max_tokens: int | None

    def check_length(self, unit: str, seen: int, per_token: int) -> None:
        """Refuse a prompt of ``seen`` units, of which a token has at most ``per_token``.

        Raises:
            BadBody: the prompt is too long.
            CannotTokenise: the prompt is too long, and the engine will truncate it.
        """
        if self.max_tokens is None or seen <= self.max_tokens * per_token:
            return
        if self.body.direct is Direct.TRUNCATED_PROMPT:
            raise CannotTokenise("the engine truncates it")
        most = f"at most {self.max_tokens * per_token} {unit}"
        raise BadBody(
            self.body.route.prompt,
            f"{most} (the model's length is {self.max_tokens} tokens)",
            f"{seen} {unit}",
        )

    def check_text(self, prompt: Raw) -> None:
        """Refuse a text that is too long in any tokenizer."""
        nbytes = len(memoryview(prompt))
        if self.max_tokens is not None and nbytes > self.max_tokens * CHARS_A_TOKEN:
            self.check_length("characters", len(text(prompt) or ""), CHARS_A_TOKEN)

    def chat_nbytes(self, otherwise: int) -> int:
        """Maximum bytes of the list of messages that is parsed."""
        if self.max_tokens is None:
            return otherwise
        return min(otherwise, self.max_tokens * CHAT_NBYTES_A_TOKEN)


def _refuse_media(messages: Raw) -> None:
    """Refuse media: only the engine knows the position and the hash of an image's tokens."""
    try:
        parsed = msgspec.json.decode(messages, type=list[_Message])
    except UNREADABLE as error:
        raise CannotTokenise(f"messages: {error}") from error
    for message in parsed:
        parts = message.content if isinstance(message.content, list) else []
        other = next((p.type for p in parts if isinstance(p, _Part) and p.type != "text"), None)
        if other is not None:
            raise CannotTokenise(f"it contains more than text: {other[:40]}")
