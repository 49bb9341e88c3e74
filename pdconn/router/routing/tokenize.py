"""The tokens of a request's prompt, from which its block hashes are computed.

A prompt of token ids holds them.  Text and chats are tokenized by an engine
(``POST /tokenize``), since only it knows its model's tokenizer and chat template.  These are
routed without a prefix lookup: images and the like (only the engine knows where their tokens
go), several prompts in one body, and what an engine refuses to tokenize.

Two more inputs of block hashes: the request's ``cache_salt``, and the adapter that its
``model`` names, by the path under which ``GET /v1/models`` lists it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec
from msgspec import Raw
from multidict import CIMultiDict

from pdconn.router.fleet.client import ConnectFailed, ConnectionLost, EngineClient
from pdconn.router.fleet.registry import EngineRegistry
from pdconn.router.openai.requests import ParsedBody, Route, kind_of
from pdconn.router.prefix.hashing import BadInput, Extras
from pdconn.router.routing.policy import Role
from pdconn.router.routing.routed_request import RoutedRequest

MOST_TOKENS = 1 << 20
"""Bound of a prompt that is looked up: hashing blocks the event loop."""
MAX_NBYTES = 8 * MOST_TOKENS
"""Bound of an encoded list of token ids."""
TIMEOUT_S = 2.0
"""After this long a request is routed without its tokens."""
MAX_SALT = 1024
"""Bound of a ``cache_salt`` that is hashed, in characters: remembered chains keep it."""
MODELS_FOR_S = 30.0
"""How long a list of adapters is used."""

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_SHAPES_PROMPT = {
    Route.COMPLETIONS: ("model", "prompt", "add_special_tokens"),
    Route.CHAT: (
        "model",
        "messages",
        "add_special_tokens",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "tools",
    ),
}
"""Fields of a request that ``/tokenize`` takes too."""


@dataclass(frozen=True, slots=True)
class Tokenised:
    """A prompt's tokens, and the other inputs of its block hashes."""

    tokens: list[int]
    extras: Extras


class _Answer(msgspec.Struct):
    tokens: list[int]


class _ListedModel(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _ListedModels(msgspec.Struct):
    data: list[_ListedModel]


class _Part(msgspec.Struct):
    type: str = "a part without a type"


class _Message(msgspec.Struct):
    content: str | list[_Part | str] | None = None


class CannotTokenise(Exception):
    """The prompt cannot be tokenized here; the text says why."""


class Tokeniser:
    """Tokenizes prompts, with the help of an engine.

    Args:
        engines: those to ask.
        client: how to ask them.
        timeout_s, most_tokens, max_nbytes: bounds; see the constants.
    """

    def __init__(
        self,
        engines: EngineRegistry,
        client: EngineClient,
        *,
        timeout_s: float = TIMEOUT_S,
        most_tokens: int = MOST_TOKENS,
        max_nbytes: int = MAX_NBYTES,
    ) -> None:
        self._engines = engines
        self._client = client
        self._timeout_s = timeout_s
        self._most_tokens = most_tokens
        self._max_nbytes = max_nbytes
        self._turn = 0
        self._adapters: dict[str, str] = {}
        self._adapters_until = 0.0

    async def tokenise(self, request: RoutedRequest) -> Tokenised:
        """The tokens of a request's prompt.

        Raises:
            CannotTokenise: they cannot be known here, or not in time.
        """
        body = request.body
        if kind_of(body.fields.get(body.route.prompt) or Raw(b"null")) == "null":
            raise CannotTokenise(f"the request has no {body.route.prompt}")
        headers = CIMultiDict({"Content-Type": "application/json", "Accept-Encoding": "identity"})
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        try:
            async with asyncio.timeout(self._timeout_s):
                tokens = self._token_ids(body) or await self._tokens_of(body, headers)
                if len(tokens) > self._most_tokens:
                    raise CannotTokenise(f"more than {self._most_tokens} tokens: {len(tokens)}")
                return Tokenised(tokens, await self._extras(body, headers))
        except TimeoutError as error:
            why = f"no engine tokenized it within {self._timeout_s:g} s"
            raise CannotTokenise(why) from error
        except (ConnectFailed, ConnectionLost, BadInput) as error:
            raise CannotTokenise(str(error)) from error

    def _token_ids(self, body: ParsedBody) -> list[int] | None:
        """The token ids in the body, if it holds any; an empty list is no prompt."""
        if body.route is not Route.COMPLETIONS:
            return None
        prompt = body.fields["prompt"]
        if kind_of(prompt) != "a list":
            return None
        if len(memoryview(prompt)) > self._max_nbytes:
            raise CannotTokenise(f"the prompt is a list of more than {self._max_nbytes} bytes")
        try:
            return msgspec.json.decode(prompt, type=list[int])
        except msgspec.DecodeError:
            pass
        try:
            (only,) = msgspec.json.decode(prompt, type=list[list[int]])
        except (msgspec.DecodeError, ValueError) as error:
            raise CannotTokenise("the prompt is not a single list of token ids") from error
        return only

    async def _tokens_of(self, body: ParsedBody, headers: CIMultiDict[str]) -> list[int]:
        if body.route is Route.CHAT:
            _refuse_media(body.fields["messages"])
        fields = {
            name: body.fields[name] for name in _SHAPES_PROMPT[body.route] if name in body.fields
        }
        raw = await self._ask("/tokenize", headers, msgspec.json.encode(fields))
        try:
            return msgspec.json.decode(raw, type=_Answer).tokens
        except _UNREADABLE as error:
            raise CannotTokenise(f"/tokenize answered without tokens: {error}") from error

    async def _extras(self, body: ParsedBody, headers: CIMultiDict[str]) -> Extras:
        salt, model = _text(body.fields.get("cache_salt")), _text(body.fields.get("model"))
        if salt is not None and len(salt) > MAX_SALT:
            raise CannotTokenise(f"its cache_salt is longer than {MAX_SALT} characters")
        path = None if model is None else (await self._known_adapters(headers)).get(model)
        lora = None if model is None or path is None else (model, path)
        return Extras(lora=lora, cache_salt=salt)

    async def _known_adapters(self, headers: CIMultiDict[str]) -> dict[str, str]:
        """Paths of adapters by name; requested again after ``MODELS_FOR_S``."""
        now = asyncio.get_running_loop().time()
        if now >= self._adapters_until:
            self._adapters_until = now + self._timeout_s  # no second request meanwhile
            try:
                listed = await self._ask("/v1/models", headers)
                models = msgspec.json.decode(listed, type=_ListedModels)
            except (*_UNREADABLE, CannotTokenise, ConnectFailed, ConnectionLost):
                return self._adapters
            self._adapters_until = now + MODELS_FOR_S
            self._adapters = {
                model.id: model.root for model in models.data if model.parent and model.root
            }
        return self._adapters

    async def _ask(self, path: str, headers: CIMultiDict[str], body: bytes | None = None) -> bytes:
        live = self._engines.live(Role.DECODE) or self._engines.live(Role.PREFILL)
        if not live:
            raise CannotTokenise("no engine is up")
        self._turn += 1
        engine = live[self._turn % len(live)]
        if body is None:
            answer = await self._client.get(engine, path, headers)
        else:
            answer = await self._client.post(engine, path, body, headers)
        async with answer:
            raw = bytearray()
            while piece := await answer.next():
                raw += piece
                if len(raw) > self._max_nbytes:
                    raise CannotTokenise(
                        f"{engine}{path} answered more than {self._max_nbytes} bytes"
                    )
        if answer.status != 200:
            raise CannotTokenise(f"{engine}{path} answered {answer.status}")
        return bytes(raw)


def _refuse_media(messages: Raw) -> None:
    """Only the engine knows where an image's tokens go, and by which name it is hashed."""
    try:
        parsed = msgspec.json.decode(messages, type=list[_Message])
    except _UNREADABLE as error:
        raise CannotTokenise(f"messages: {error}") from error
    for message in parsed:
        parts = message.content if isinstance(message.content, list) else []
        other = next((p.type for p in parts if isinstance(p, _Part) and p.type != "text"), None)
        if other is not None:
            raise CannotTokenise(f"it contains more than text: {other[:40]}")


def _text(value: Raw | None) -> str | None:
    if value is None or kind_of(value) != "a string":
        return None
    try:
        return msgspec.json.decode(value, type=str)
    except _UNREADABLE:
        return None
