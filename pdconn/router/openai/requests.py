"""A client's request: its headers and body, and whether it can use a ticket.  Pure.

A body is split into its top-level fields and no further: the value of a field stays the client's
bytes (``msgspec.Raw``), so a prompt of a megabyte is never built as Python objects nor encoded
again.  The router checks only what it needs; the engines check the rest.

Some requests cannot use a ticket.  They go to decode alone, which computes the prompt itself:
slower, never wrong.  ``Direct`` lists the reasons.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn

import msgspec
from msgspec import Raw
from multidict import CIMultiDict, CIMultiDictProxy

from pdconn.router.labels import LabelValue
from pdconn.router.router_errors import BadBody
from transport.errors import did_you_mean, shown

#: Hop-by-hop headers, and headers that HTTP libraries write.
_PER_HOP = frozenset(
    {
        "connection",
        "content-encoding",
        "content-length",
        "date",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "server",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)

REQUEST_ID_HEADER = "X-Request-Id"
KEY_HEADER = "X-Api-Key"
"""The header in which Anthropic's clients send the key; others use ``Authorization``."""
RANK_HEADER = "X-data-parallel-rank"

#: Headers that the router sets for engines; values from clients are dropped.
_ROUTERS_OWN = (RANK_HEADER,)

MAX_REQUEST_ID = 128
"""Maximum characters of a client's request id; engines derive theirs from it, and so do tickets."""

#: Headers about an answer's bytes, which are passed on unchanged.
OF_THE_ANSWER = frozenset({"content-encoding", "content-length"})


def keep_end_to_end(
    headers: CIMultiDictProxy[str] | CIMultiDict[str], also: frozenset[str] = frozenset()
) -> CIMultiDict[str]:
    """The end-to-end headers, repeated ones included.

    ``also``: further headers to keep, which HTTP libraries usually write.
    """
    dropped = _PER_HOP
    if "Connection" in headers:
        named = ",".join(headers.getall("Connection")).lower().split(",")
        dropped |= {name.strip() for name in named}
    if also:
        dropped -= also
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() not in dropped:
            kept.add(name, value)
    return kept


def from_client(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """The headers for engines, from a client's, with a request id.

    A client may choose the id, in printable ASCII; any other is replaced.  It cannot choose the
    data-parallel rank.
    """
    kept = keep_end_to_end(headers)
    for name in _ROUTERS_OWN:
        kept.popall(name, None)
    ids = kept.getall(REQUEST_ID_HEADER, [])
    if len(ids) != 1 or not is_request_id(ids[0]):
        kept[REQUEST_ID_HEADER] = uuid.uuid4().hex
    # The body was parsed as JSON, and vLLM refuses JSON under any other content type.
    kept["Content-Type"] = "application/json"
    return kept


def to_rank(headers: CIMultiDict[str], rank: int | None) -> CIMultiDict[str]:
    """The headers for one data-parallel rank of an engine; None for any rank."""
    headers = headers.copy()
    if rank is not None:
        headers[RANK_HEADER] = str(rank)
    return headers


def asking(client: CIMultiDict[str]) -> CIMultiDict[str]:
    """The headers of the router's own question to an engine on behalf of ``client``."""
    headers = CIMultiDict({"Content-Type": "application/json", "Accept-Encoding": "identity"})
    if "Authorization" in client:
        headers["Authorization"] = client["Authorization"]
    return headers


def is_request_id(text: str) -> bool:
    """Whether a client's request id is acceptable.

    >>> is_request_id("chat-7"), is_request_id("chat\u200b7"), is_request_id("x" * 600)
    (True, False, False)
    """
    return 0 < len(text) <= MAX_REQUEST_ID and text.isascii() and text.isprintable()


Fields = Mapping[str, Raw]

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes that are not JSON, or not of the requested type."""


class Route(Enum):
    """A generating route: its path, and the field that holds the prompt."""

    COMPLETIONS = ("/v1/completions", "prompt", "a string, token ids, or a list of either")
    CHAT = ("/v1/chat/completions", "messages", "a list of messages")
    RESPONSES = ("/v1/responses", "input", "a string, or a list of items")
    MESSAGES = ("/v1/messages", "messages", "a list of messages")

    def __init__(self, path: str, prompt: str, expected: str) -> None:
        self.path = path
        self.prompt = prompt
        self.expected = expected
        self.may_be_text = expected.startswith("a string")


class Direct(LabelValue):
    """Why a request went to decode without a ticket: the label ``reason`` of a metric."""

    SEVERAL_PROMPTS = (
        "several_prompts",
        "Several prompts in one body: a response carries one ticket.",
    )
    # vLLM makes n requests of it, and each would pull with the same ticket: the first to finish
    # frees blocks that the others still read.
    SEVERAL_CHOICES = ("several_choices", "`n` above 1: each of them would use the same ticket.")
    BEAM_SEARCH = (
        "beam_search",
        "Beam search makes requests of its own and leaves the ticket out of them.",
    )
    PROMPT_LOGPROBS = (
        "prompt_logprobs",
        "`echo` or `prompt_logprobs`: vLLM computes the whole prompt to score it.",
    )
    PROMPT_EMBEDS = (
        "prompt_embeds",
        "A prompt of embeddings: connectors count token ids, and there are none.",
    )
    # The position of a truncation can depend on max_tokens, which differs between the two bodies:
    # the blocks would belong to two different prompts.
    TRUNCATED_PROMPT = (
        "truncated_prompt",
        "A prompt that vLLM truncates: prefill and decode could cut it at two places.",
    )
    # Prefill would have to keep the response too.
    STORED_RESPONSE = (
        "stored_response",
        "A response that one engine keeps, or one that goes on from it.",
    )
    SERVER_TOOLS = (
        "server_tools",
        "Tools that the engine calls itself: it generates again, with another prompt.",
    )
    NO_TICKET = (
        "no_ticket",
        "Prefill answered without a ticket: it runs without a connector, or with another one.",
    )
    PREFIX_HELD = (
        "prefix_held",
        "Decode lacks so little of the prompt that a hand-over would cost more.",
    )
    NO_PREFILL = ("no_prefill", "No prefill engine answers.")
    NO_PREFILL_IN_TIME = (
        "no_prefill_in_time",
        "No prefill engine answered within `--prefill-timeout`.",
    )
    PREFILL_ERROR = (
        "prefill_error",
        "The last prefill engine that was asked answered 429, 500, 502, 503 or 504.",
    )
    PREFILL_TOO_SHORT = (
        "prefill_too_short",
        "The prompt is longer than prefill's `max_model_len`, though not than that of others.",
    )
    TICKET_SPENT = (
        "ticket_spent",
        "A decode engine failed or refused while it had the ticket, which may be used up.",
    )


#: field -> (values that disable it, reason).  Any other value enables it, also "yes" and 1.0: vLLM
#: accepts many forms of true, and a request that goes direct unnecessarily is merely slower.
_GOES_DIRECT: dict[str, tuple[frozenset[bytes], Direct]] = {
    "n": (frozenset({b"1", b"null"}), Direct.SEVERAL_CHOICES),
    "use_beam_search": (frozenset({b"false", b"null"}), Direct.BEAM_SEARCH),
    "echo": (frozenset({b"false", b"null"}), Direct.PROMPT_LOGPROBS),
    "prompt_logprobs": (frozenset({b"null"}), Direct.PROMPT_LOGPROBS),
    "prompt_embeds": (frozenset({b"null"}), Direct.PROMPT_EMBEDS),
    "truncate_prompt_tokens": (frozenset({b"null"}), Direct.TRUNCATED_PROMPT),
}

_RESPONSE_GOES_DIRECT: dict[str, tuple[frozenset[bytes], Direct]] = {
    "background": (frozenset({b"false", b"null"}), Direct.STORED_RESPONSE),
    "previous_response_id": (frozenset({b"null"}), Direct.STORED_RESPONSE),
    "truncation": (frozenset({b'"disabled"', b"null"}), Direct.TRUNCATED_PROMPT),
}
"""Further rows for ``/v1/responses``."""

TICKET_FIELD = "kv_transfer_params"
#: Both name engine memory.  vLLM also reads them from ``vllm_xargs``.
NAMES_MEMORY = (TICKET_FIELD, "ec_transfer_params")

REPORT_MODE = "kv_cache_report_mode"
XARGS = ("ngram_size", "session_id", "whitelist_token_ids", "window_size")
"""Names in ``vllm_xargs`` that clients may use: those that vLLM's own models read.  vLLM passes
all others to the scheduler too, where ``kv_cache_report_mode`` changes what caches report."""

MAX_FIELDS = 256
"""Fields of one JSON object.  A request with every field of vLLM has a third as many."""
_FIRST_ELEMENT = re.compile(rb"\[\s*+(.)", re.DOTALL)
_EMPTY_OBJECT = re.compile(rb"\{\s*+\}")


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A client's body that passed the checks.

    Attributes:
        route: the route that received it.
        raw: the bytes.
        fields: the top-level fields.
        direct: why decode has to serve it alone; None if it can use a ticket.
    """

    route: Route
    raw: bytes
    fields: Fields
    direct: Direct | None

    @property
    def goes_on(self) -> bool:
        """Whether it continues a response that one engine keeps."""
        return self.direct is Direct.STORED_RESPONSE and "previous_response_id" in self.fields

    def emptied(self) -> ParsedBody:
        """The body without its bytes, for a request that no longer needs them."""
        return ParsedBody(self.route, b"", {}, self.direct)


def parse_body(route: Route, raw: bytes, xargs: Collection[str] = XARGS) -> ParsedBody:
    """Split and check a client's body.

    Args:
        route: the route that received it.
        raw: its bytes.
        xargs: names that clients may use in ``vllm_xargs``.

    Raises:
        BadBody: not a JSON object, too many fields, no prompt, a prompt that names memory, or a
            name in ``vllm_xargs`` that is not allowed.

    >>> parse_body(Route.COMPLETIONS, b'{"prompt": ["a", "b"]}').direct
    <Direct.SEVERAL_PROMPTS: 'several_prompts'>
    """
    fields = checked_fields(raw, xargs)
    direct = _why_direct(route, fields)
    if direct is not Direct.PROMPT_EMBEDS:
        _check_prompt(route, fields)
        if direct is None and route is Route.COMPLETIONS and _holds_several(fields["prompt"]):
            direct = Direct.SEVERAL_PROMPTS
    return ParsedBody(route=route, raw=raw, fields=fields, direct=direct)


def parse_any_body(raw: bytes, xargs: Collection[str] = XARGS) -> ParsedBody:
    """Split and check the body of any generating route, told by the field that holds its prompt.

    Raises:
        BadBody: as for ``parse_body``.

    >>> parse_any_body(b'{"prompt": [1]}').route.path, parse_any_body(b'{"input": "a"}').route.path
    ('/v1/completions', '/v1/responses')
    """
    fields = checked_fields(raw, xargs)
    by_prompt = {route.prompt: route for route in (Route.RESPONSES, Route.CHAT, Route.COMPLETIONS)}
    route = next((by_prompt[name] for name in by_prompt if name in fields), Route.COMPLETIONS)
    return parse_body(route, raw, xargs)


def checked_fields(raw: bytes, xargs: Collection[str]) -> dict[str, Raw]:
    """The top-level fields of a body that names no memory, on any route.

    Raises:
        BadBody: as for ``parse_body``, but without the check of the prompt.
    """
    fields = _split(raw)
    _refuse_named_memory(fields)
    _check_xargs(fields.get("vllm_xargs"), xargs)
    return fields


class _Name(str):
    """A field name, in a type whose construction msgspec delegates to us."""

    __slots__ = ()


def _split(raw: bytes | Raw, field: str = "body") -> dict[str, Raw]:
    """The fields of an object, at most ``MAX_FIELDS``."""
    names: list[str] = []

    def named(kind: type, name: str) -> _Name:
        # Called for each field before its value is kept, so that an object of a million fields
        # costs no more than one of MAX_FIELDS.
        names.append(name)
        if len(names) > MAX_FIELDS:
            raise BadBody(field, f"at most {MAX_FIELDS} fields", "more")
        return _Name(name)

    try:
        fields = msgspec.json.decode(raw, type=dict[_Name, Raw], dec_hook=named)
    except msgspec.ValidationError as error:
        raise BadBody(field, "a JSON object", str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        seen = f"{len(memoryview(raw))} bytes that are not JSON ({error})"
        raise BadBody(field, "a JSON object", seen) from error
    return {str(name): value for name, value in fields.items()}


def _refuse_named_memory(fields: Fields) -> None:
    """Refuse fields that name blocks: a client could read another client's prompt with them."""
    for name in NAMES_MEMORY:
        if name in fields and not is_empty(fields[name]):
            _refuse(name, fields[name])


def _check_xargs(given: Raw | None, known: Collection[str]) -> None:
    if given is None or kind_of(given) != "an object":
        return
    for name, value in _split(given, "vllm_xargs").items():
        if name in NAMES_MEMORY:
            _refuse(f"vllm_xargs.{name}", value)
        if name not in known:
            expected = f"one of {', '.join(sorted(known)) or 'no names'}"
            hint = did_you_mean(name[:80], known) if known else ""
            raise BadBody("vllm_xargs", f"{expected} (--allow-xargs adds more)", shown(name), hint)


def _refuse(field: str, seen: Raw) -> NoReturn:
    raise BadBody(field, "no value (engines name blocks, clients may not)", kind_of(seen))


def _check_prompt(route: Route, fields: Fields) -> None:
    prompt = fields.get(route.prompt)
    fits = ("a list", "a string") if route.may_be_text else ("a list",)
    if prompt is None:
        raise BadBody(route.prompt, route.expected, "nothing")
    if kind_of(prompt) not in fits:
        raise BadBody(route.prompt, route.expected, kind_of(prompt))


def _why_direct(route: Route, fields: Fields) -> Direct | None:
    if route is Route.RESPONSES:
        reason = _first_on(_RESPONSE_GOES_DIRECT, fields)
        if reason is not None:
            return reason
        if "tools" in fields and _engine_calls(fields["tools"]):
            return Direct.SERVER_TOOLS
    return _first_on(_GOES_DIRECT, fields)


def _first_on(rows: Mapping[str, tuple[frozenset[bytes], Direct]], fields: Fields) -> Direct | None:
    for name, (off, reason) in rows.items():
        if name in fields and bytes(fields[name]) not in off:
            return reason
    return None


class _Tool(msgspec.Struct):
    type: str


def _engine_calls(tools: Raw) -> bool:
    """Whether any tool is of another kind than a function, which the client calls."""
    try:
        found = msgspec.json.decode(tools, type=list[_Tool] | None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True  # the engine reports the error
    return any(tool.type != "function" for tool in found or ())


def _holds_several(prompt: Raw) -> bool:
    """Whether a prompt field holds more than one prompt.

    A list of numbers is one prompt.  At most two elements are decoded, because a long prompt has a
    hundred thousand; the engine checks the rest.
    """
    if kind_of(prompt) != "a list":
        return False
    first = _FIRST_ELEMENT.match(memoryview(prompt))
    if first is not None and first[1] not in b'"[':
        return False
    try:
        msgspec.json.decode(prompt, type=tuple[Raw])  # fails at a second element
    except msgspec.ValidationError:
        return True
    return False


_OF_IDS = b"0123456789,[] \t\r\n"


def count_ids(prompt: memoryview) -> int | None:
    """Token ids in a prompt, or in a list of prompts; None where it holds anything else.

    >>> count_ids(memoryview(b"[[1, 2], [3]]")), count_ids(memoryview(b'["text"]'))
    (3, None)
    """
    text = bytes(prompt)
    if not text.startswith(b"[") or text.translate(None, _OF_IDS):
        return None
    if text.count(b"[") == 1 and text.strip(b"[ \t\r\n]"):
        return text.count(b",") + 1  # one non-empty list: three times as fast
    return len(text.translate(_ONLY_DIGITS).split())


_ONLY_DIGITS = bytes(one if one in b"0123456789" else ord(" ") for one in range(256))

_KINDS = {b"{": "an object", b"[": "a list", b'"': "a string", b"t": "true", b"f": "false"}


def kind_of(value: Raw) -> str:
    """The kind of a JSON value, in words.

    >>> kind_of(Raw(b"[1, 2]"))
    'a list'
    """
    first = bytes(memoryview(value)[:1])
    return "null" if first == b"n" else _KINDS.get(first, "a number")


def is_empty(value: Raw) -> bool:
    """Null or ``{}``, which some clients send for every unused field."""
    return kind_of(value) == "null" or _EMPTY_OBJECT.fullmatch(memoryview(value)) is not None


def text(value: Raw | None) -> str | None:
    """The value of a JSON string; None for any other value."""
    if value is None or kind_of(value) != "a string":
        return None
    try:
        return msgspec.json.decode(value, type=str)
    except UNREADABLE:
        return None
