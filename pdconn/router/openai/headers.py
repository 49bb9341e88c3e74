"""The headers that a proxy passes on, and the id of a request.  Pure."""

from __future__ import annotations

import uuid

from multidict import CIMultiDict, CIMultiDictProxy

#: Headers of one connection, and headers that HTTP libraries write.
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
"""Where Anthropic's clients put the key that others put into ``Authorization``."""
RANK_HEADER = "X-data-parallel-rank"

#: Headers that the router sets for engines, whatever a client sent.
_ROUTERS_OWN = (RANK_HEADER,)

MAX_REQUEST_ID = 128
"""Characters of a client's request id; engines build theirs from it, and tickets contain those."""

#: Headers that describe an answer's bytes, which are passed on as they are.
OF_THE_ANSWER = frozenset({"content-encoding", "content-length"})


def keep_end_to_end(
    headers: CIMultiDictProxy[str], also: frozenset[str] = frozenset()
) -> CIMultiDict[str]:
    """The headers that a proxy passes on, repeated ones included.

    ``also`` names headers that are kept although HTTP libraries usually write them.
    """
    named = ",".join(headers.getall("Connection", ())).lower().split(",")
    dropped = (_PER_HOP | {name.strip() for name in named}) - also
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() not in dropped:
            kept.add(name, value)
    return kept


def from_client(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """A client's headers as engines get them, with a request id.

    A client may choose the id, in printable ASCII; any other is replaced by one of ours.  It
    may not choose the data-parallel rank.
    """
    kept = keep_end_to_end(headers)
    for name in _ROUTERS_OWN:
        kept.popall(name, None)
    ids = kept.getall(REQUEST_ID_HEADER, [])
    if len(ids) != 1 or not is_request_id(ids[0]):
        kept[REQUEST_ID_HEADER] = uuid.uuid4().hex
    # The body was read as JSON, and vLLM refuses JSON under any other content type.
    kept["Content-Type"] = "application/json"
    return kept


def to_rank(headers: CIMultiDict[str], rank: int | None) -> CIMultiDict[str]:
    """The headers for one data-parallel rank of an engine, or any of its ranks."""
    headers = headers.copy()
    if rank is not None:
        headers[RANK_HEADER] = str(rank)
    return headers


def is_request_id(text: str) -> bool:
    """Whether a client may name its request so.

    >>> is_request_id("chat-7"), is_request_id("chat\u200b7"), is_request_id("x" * 600)
    (True, False, False)
    """
    return 0 < len(text) <= MAX_REQUEST_ID and text.isascii() and text.isprintable()
