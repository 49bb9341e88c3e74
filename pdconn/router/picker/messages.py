"""What a picker reads from, and writes to, Envoy's external processor.  Pure.

By the filter's body mode for requests:

========================  ====================================================================
``FULL_DUPLEX_STREAMED``  head and body come in pieces, nothing is answered before the last;
                          then the head's changes, and the new body in pieces
``BUFFERED``              the head, answered at once; then the body whole, answered by the
                          changes of both
========================  ====================================================================

Sources: https://www.envoyproxy.io/docs/envoy/latest/api-v3/service/ext_proc/v3/external_processor.proto
and, for the endpoint's name, the protocol of the Gateway API Inference Extension,
https://github.com/kubernetes-sigs/gateway-api-inference-extension/tree/main/docs/proposals/004-endpoint-picker-protocol.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from multidict import CIMultiDict

from pdconn.router.picker.endpoints import normal
from pdconn.router.picker.ext_proc import (
    APPEND,
    BUFFERED,
    FULL_DUPLEX_STREAMED,
    OVERWRITE,
    ProcessingResponse,
)
from transport.errors import shown

ENDPOINT = "x-gateway-destination-endpoint"
"""The header, and the key in the metadata, that names ``IP:port``, or several in order."""
ENDPOINT_NAMESPACE = "envoy.lb"
UPSTREAM = "upstream.address"
"""The attribute of an answer that names its endpoint (``response_attributes`` of the filter)."""
SERVED = "x-gateway-destination-endpoint-served"
"""The same in the metadata of ``ENDPOINT_NAMESPACE``, from gateways that set it."""
TIMEOUT = "x-envoy-upstream-rq-timeout-ms"
"""The header by which Envoy's router ends a request (``mutation_rules.allow_envoy``)."""

SUBSET_NAMESPACE, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
"""The metadata that lists the endpoints of which one may be picked (``forwarding_namespaces``)."""

PIECE_NBYTES = 62_000
"""Bytes of one piece of a streamed body: some gateways take no message of 64 KiB."""

#: Envoy's timers count from the beginning of a turn of its loop, and its end is to come after ours.
_MARGIN_MS = 50
#: To the end of the value if no quote ends it, so that the time does not grow with the quotes.
_QUOTED = re.compile(r'"(?:[^"\\]|\\.?)*(?:"|$)')
#: Where further credentials begin: a scheme and a value, not a parameter.
_CREDENTIALS = re.compile(r",\s*[^\s=,]+\s+[^\s=,]")
#: Where a further media type begins.
_MEDIA_TYPE = re.compile(r",")

#: Headers that only Envoy may write.
_NOT_OURS = frozenset({"connection", "host", "keep-alive", "te", "transfer-encoding", "upgrade"})


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request or of an answer.

    Attributes:
        pseudo: pseudo-headers, such as ``:path``, without their colon.
        headers: the others, repeated ones included.
        has_body: whether a body follows.
    """

    pseudo: Mapping[str, str]
    headers: CIMultiDict[str]
    has_body: bool


class BadMessage(Exception):
    """The gateway has sent what cannot be read."""


def status_of(head: Head) -> int:
    """The status of an answer.

    Raises:
        BadMessage: there is none.
    """
    status = head.pseudo.get("status", "")
    if not (len(status) == 3 and status.isascii() and status.isdigit()):
        raise BadMessage(f":status of an answer: expected three digits, got {shown(status, 40)}")
    return int(status)


def head_of(message: Any) -> Head:
    """The head in a message."""
    pseudo: dict[str, str] = {}
    headers: CIMultiDict[str] = CIMultiDict()
    for one in message.headers.headers:
        value = one.raw_value.decode(errors="surrogateescape") if one.raw_value else one.value
        if one.key.startswith(":"):
            # They are named in answers and in logs, which have to be UTF-8.
            pseudo[one.key[1:]] = value.encode(errors="surrogateescape").decode(errors="replace")
        else:
            headers.add(one.key, value)
    return Head(pseudo, headers, not message.end_of_stream)


def repeated_in_one(headers: CIMultiDict[str]) -> str | None:
    """The header that the client has sent several times, and Envoy has joined by commas.

    Neither two credentials nor two media types are one, as RFC 9110 has them, whose parameters are
    divided by commas or may contain them.

    >>> repeated_in_one(CIMultiDict(Authorization="Bearer a,Bearer b"))
    'Authorization'
    >>> repeated_in_one(CIMultiDict(Authorization='Digest realm="a, b c", nonce = "d"'))
    """
    for name, other in (("Authorization", _CREDENTIALS), ("Content-Type", _MEDIA_TYPE)):
        for value in headers.getall(name, ()):
            if "," in value and other.search(_QUOTED.sub('""', value)):
                return name
    return None


def in_time(headers: CIMultiDict[str], left_s: float) -> CIMultiDict[str]:
    """The headers, by which Envoy ends the request in ``left_s``, or sooner if they say so.

    >>> in_time(CIMultiDict({TIMEOUT: "1"}), 2.0)[TIMEOUT], in_time(CIMultiDict(), 2.0)[TIMEOUT]
    ('1', '2050')
    """
    left_ms = max(0, math.ceil(left_s * 1000)) + _MARGIN_MS
    asked = headers.get(TIMEOUT, "")
    if asked.isascii() and asked.isdigit() and 0 < int(asked[:18]) < left_ms:
        return headers
    headers = headers.copy()
    headers[TIMEOUT] = str(left_ms)
    return headers


def takes_pieces(message: Any) -> bool | None:
    """Whether a request's body comes in pieces; None in a mode that no picker can serve.

    ``message``: the first of a request, which has the filter's modes (Envoy 1.33 and later).
    """
    if not message.HasField("protocol_config"):
        return None
    mode = message.protocol_config.request_body_mode
    return {FULL_DUPLEX_STREAMED: True, BUFFERED: False}.get(mode)


def upstream_of(message: Any) -> str | None:
    """The endpoint that an answer is from; None unless attributes or metadata name it."""
    for attribute in message.attributes:
        if UPSTREAM in attribute.value.fields:
            return normal(attribute.value.fields[UPSTREAM].string_value)
    for metadata in message.metadata_context.filter_metadata:
        if metadata.key == ENDPOINT_NAMESPACE and SERVED in metadata.value.fields:
            return normal(metadata.value.fields[SERVED].string_value)
    return None


def subset_of(message: Any) -> frozenset[str] | None:
    """The endpoints of which one may be picked; None if the gateway allows all.

    A list that is not understood allows none, and of two lists both count.
    """
    subset: frozenset[str] | None = None
    for metadata in message.metadata_context.filter_metadata:
        if metadata.key == SUBSET_NAMESPACE and SUBSET in metadata.value.fields:
            listed = _endpoints_in(metadata.value.fields[SUBSET])
            subset = listed if subset is None else subset & listed
    return subset


def _endpoints_in(value: Any) -> frozenset[str]:
    """Those in a list, or in a text with commas, as versions of the protocol before 0.4 have it."""
    named = value.string_value.split(",")
    if value.WhichOneof("kind") == "list_value":
        named = [one.string_value for one in value.list_value.values]
    return frozenset(one for one in map(normal, named) if one is not None)


def echoes_answers(message: Any) -> bool:
    """Whether pieces of the answer come, each of which has to be sent back."""
    mode = message.protocol_config.response_body_mode
    return bool(mode == FULL_DUPLEX_STREAMED)


def go_on() -> Any:
    """The answer to a request's head that changes nothing."""
    answer = ProcessingResponse()
    answer.request_headers.SetInParent()
    return answer


def pick_messages(
    client: Head,
    headers: CIMultiDict[str],
    body: bytes,
    endpoints: str,
    *,
    in_pieces: bool,
    has_trailers: bool,
) -> Iterator[Any]:
    """The answers that send a request on.

    Args:
        client: the head of the client's request.
        headers: of the request for the engine.
        body: of the request for the engine.
        endpoints: ``IP:port`` of the engines to be asked, in order, with commas.
        in_pieces: as ``takes_pieces``.
        has_trailers: whether the client's body ended with trailers, which are sent on.
    """
    first = ProcessingResponse()
    first.dynamic_metadata[ENDPOINT_NAMESPACE] = {ENDPOINT: endpoints}
    whole = client.has_body and not in_pieces
    changed = first.request_body if whole else first.request_headers
    mutation = changed.response.header_mutation
    _set(mutation.set_headers, ENDPOINT, [endpoints])
    if client.has_body:
        _set(mutation.set_headers, "content-length", [str(len(body))])
    _change(mutation, client.headers, headers)
    if whole:
        changed.response.body_mutation.body = body
    yield first
    if client.has_body and in_pieces:
        for start in range(0, max(1, len(body)), PIECE_NBYTES):
            piece = ProcessingResponse()
            streamed = piece.request_body.response.body_mutation.streamed_response
            streamed.body = body[start : start + PIECE_NBYTES]
            is_last = start + PIECE_NBYTES >= len(body)
            streamed.end_of_stream = is_last and not has_trailers
            yield piece
    if has_trailers:
        last = ProcessingResponse()
        last.request_trailers.SetInParent()
        yield last


def refusal_message(status: int, headers: Mapping[str, str], body: bytes) -> Any:
    """An answer of the picker's own."""
    answer = ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = status
    for name, value in headers.items():
        if name.lower() != "content-length":  # Envoy writes its own
            _set(immediate.headers.set_headers, name, [value])
    immediate.body = body
    immediate.details = "pdconn_picker"
    return answer


def answer_message(message: Any, headers: Mapping[str, str], *, echoes: bool) -> Any:
    """The answer to a message about decode's answer, or to trailers; it sets ``headers``.

    ``echoes``: as ``echoes_answers``.
    """
    kind = message.WhichOneof("request")
    answer = ProcessingResponse()
    if kind == "response_headers":
        mutation = answer.response_headers.response.header_mutation
        for name, value in headers.items():
            _set(mutation.set_headers, name, [value])
        answer.response_headers.SetInParent()
    elif kind == "response_body":
        answer.response_body.SetInParent()
        if echoes:
            streamed = answer.response_body.response.body_mutation.streamed_response
            streamed.body = message.response_body.body
            streamed.end_of_stream = message.response_body.end_of_stream
    elif kind == "request_trailers":
        answer.request_trailers.SetInParent()
    elif kind == "response_trailers":
        answer.response_trailers.SetInParent()
    return answer


def _change(mutation: Any, old: CIMultiDict[str], new: CIMultiDict[str]) -> None:
    """Write into a mutation what turns the headers ``old`` into ``new``."""
    given, wanted = _by_name(old), _by_name(new)
    for name, values in wanted.items():
        if values != given.get(name) and name not in _NOT_OURS and name != "content-length":
            _set(mutation.set_headers, name, values)
    for name in given:
        if name not in wanted and name not in _NOT_OURS and name != "content-length":
            mutation.remove_headers.append(name)


def _by_name(headers: CIMultiDict[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in headers.items():
        found.setdefault(name.lower(), []).append(value)
    return found


def _set(options: Any, name: str, values: Iterable[str]) -> None:
    action = OVERWRITE
    for value in values:
        option = options.add(append_action=action)
        option.header.key = name.lower()
        option.header.raw_value = value.encode(errors="surrogateescape")
        action = APPEND
