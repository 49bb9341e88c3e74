"""The tokens of a request's prompt, which its block hashes are made of.

A prompt of token ids brings them.  Text and chats are put into tokens by an engine
(``POST /tokenize``), since only it knows its model's tokenizer and chat template.  What
cannot be put into tokens here is routed without its prefix: images and the like (where an
engine puts them is known to the engine alone), several prompts in one body, and whatever an
engine refuses; the engine that serves the request will say why.

What else goes into block hashes: the request's ``cache_salt``, and the adapter that its
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
from pdconn.router.openai.requests import Exchange, GenerateRequest, Route, kind_of
from pdconn.router.prefix.hashing import BadInput, Extras
from pdconn.router.routing.policy import Role

MOST_TOKENS = 1 << 20
"""Of a prompt that is looked for: hashing more holds up everybody."""
MAX_NBYTES = 8 * MOST_TOKENS
"""Of a list of token ids that is read."""
TIMEOUT_S = 2.0
"""An engine that takes longer to tokenize than this is better asked to generate at once."""
MAX_SALT = 1024
"""Of a ``cache_salt`` that is hashed: remembered chains keep it."""
MODELS_FOR_S = 30.0
"""How long a list of adapters is believed."""

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
"""Fields of a request that ``/tokenize`` knows too."""


@dataclass(frozen=True, slots=True)
class Tokenised:
    """A prompt's tokens, and what else its blocks' hashes are made of."""

    tokens: list[int]
    extras: Extras


class _Answer(msgspec.Struct):
    tokens: list[int]


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Part(msgspec.Struct):
    type: str = "a part of unnamed type"


class _Message(msgspec.Struct):
    content: str | list[_Part | str] | None = None


class CannotTokenise(Exception):
    """The prompt's tokens are not known: says why."""


class Tokeniser:
    """Finds out the tokens of prompts."""

    def __init__(self, engines: EngineRegistry, upstream: EngineClient) -> None:
        self._engines = engines
        self._upstream = upstream
        self._turn = 0
        self._adapters: dict[str, str] = {}
        self._adapters_until = 0.0

    async def tokenise(self, exchange: Exchange) -> Tokenised:
        """The tokens of a request's prompt.

        Raises:
            CannotTokenise: they cannot be known here, or not in time.
        """
        request = exchange.request
        if kind_of(request.fields.get(request.route.prompt) or Raw(b"null")) == "null":
            raise CannotTokenise(f"it brings no {request.route.prompt}")
        headers = CIMultiDict({"Content-Type": "application/json", "Accept-Encoding": "identity"})
        if "Authorization" in exchange.headers:
            headers["Authorization"] = exchange.headers["Authorization"]
        try:
            async with asyncio.timeout(TIMEOUT_S):
                tokens = self._given(request) or await self._asked(request, headers)
                if len(tokens) > MOST_TOKENS:
                    raise CannotTokenise(f"more than {MOST_TOKENS} tokens: {len(tokens)}")
                return Tokenised(tokens, await self._extras(request, headers))
        except TimeoutError as error:
            raise CannotTokenise(f"no engine tokenized it within {TIMEOUT_S:g} s") from error
        except (ConnectFailed, ConnectionLost, BadInput) as error:
            raise CannotTokenise(str(error)) from error

    def _given(self, request: GenerateRequest) -> list[int] | None:
        """Token ids that the body holds itself; an empty list is no prompt."""
        if request.route is not Route.COMPLETIONS:
            return None
        prompt = request.fields["prompt"]
        if kind_of(prompt) != "a list":
            return None
        if len(memoryview(prompt)) > MAX_NBYTES:
            raise CannotTokenise(f"the prompt is a list of more than {MAX_NBYTES} bytes")
        try:
            return msgspec.json.decode(prompt, type=list[int])
        except msgspec.DecodeError:
            pass
        try:
            (only,) = msgspec.json.decode(prompt, type=list[list[int]])
        except (msgspec.DecodeError, ValueError) as error:
            raise CannotTokenise("the prompt is no single list of token ids") from error
        return only

    async def _asked(self, request: GenerateRequest, headers: CIMultiDict[str]) -> list[int]:
        if request.route is Route.CHAT:
            _refuse_media(request.fields["messages"])
        fields = {
            name: request.fields[name]
            for name in _SHAPES_PROMPT[request.route]
            if name in request.fields
        }
        raw = await self._ask("/tokenize", headers, msgspec.json.encode(fields))
        try:
            return msgspec.json.decode(raw, type=_Answer).tokens
        except _UNREADABLE as error:
            raise CannotTokenise(f"/tokenize answers no tokens: {error}") from error

    async def _extras(self, request: GenerateRequest, headers: CIMultiDict[str]) -> Extras:
        salt, model = _text(request.fields.get("cache_salt")), _text(request.fields.get("model"))
        if salt is not None and len(salt) > MAX_SALT:
            raise CannotTokenise(f"its cache_salt is longer than {MAX_SALT} characters")
        path = None if model is None else (await self._known_adapters(headers)).get(model)
        lora = None if model is None or path is None else (model, path)
        return Extras(lora=lora, cache_salt=salt)

    async def _known_adapters(self, headers: CIMultiDict[str]) -> dict[str, str]:
        """Paths of adapters by name; asked for anew now and then."""
        now = asyncio.get_running_loop().time()
        if now >= self._adapters_until:
            self._adapters_until = now + TIMEOUT_S  # until the answer is here, or again if none is
            try:
                listed = await self._ask("/v1/models", headers)
                models = msgspec.json.decode(listed, type=_Models)
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
            answer = await self._upstream.get(engine, path, headers)
        else:
            answer = await self._upstream.post(engine, path, body, headers)
        async with answer:
            raw = bytearray()
            while piece := await answer.next():
                raw += piece
                if len(raw) > MAX_NBYTES:
                    raise CannotTokenise(f"{engine}{path} says more than {MAX_NBYTES} bytes")
        if answer.status != 200:
            raise CannotTokenise(f"{engine}{path} says {answer.status}")
        return bytes(raw)


def _refuse_media(messages: Raw) -> None:
    """Nobody but the engine knows where an image is put, and by what name it is hashed."""
    try:
        parsed = msgspec.json.decode(messages, type=list[_Message])
    except _UNREADABLE as error:
        raise CannotTokenise(f"messages: {error}") from error
    for message in parsed:
        parts = message.content if isinstance(message.content, list) else []
        other = next((p.type for p in parts if isinstance(p, _Part) and p.type != "text"), None)
        if other is not None:
            raise CannotTokenise(f"it holds more than text: {other[:40]}")


def _text(value: Raw | None) -> str | None:
    if value is None or kind_of(value) != "a string":
        return None
    try:
        return msgspec.json.decode(value, type=str)
    except _UNREADABLE:
        return None
