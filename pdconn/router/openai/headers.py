"""The headers that a proxy passes on.  Pure."""

from __future__ import annotations

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

#: Headers that describe an answer's bytes, which are passed on as they are.
OF_THE_ANSWER = frozenset({"content-encoding", "content-length"})


def keep_end_to_end(
    headers: CIMultiDictProxy[str], also: frozenset[str] = frozenset()
) -> CIMultiDict[str]:
    """The headers that a proxy passes on, repeated ones included.

    ``also`` names headers that are kept although HTTP libraries usually write them.
    """
    named = headers.get("Connection", "").lower().split(",")
    dropped = (_PER_HOP | {name.strip() for name in named}) - also
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() not in dropped:
            kept.add(name, value)
    return kept
