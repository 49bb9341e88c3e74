"""Heads of requests that two servers could read in two ways, or that say what is ignored here.

The router reads a head, and so does the engine that it is passed to.  What the parser lets through
and the router does not do is refused, rather than answered as if it had not been there.
"""

from __future__ import annotations

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.typedefs import Handler

from pdconn.router.errors import BadHead, UnsupportedEncoding
from pdconn.router.openai.headers import KEY_HEADER

_TRANSFER = "Transfer-Encoding"
_VERSIONS = (HttpVersion10, HttpVersion11)
_ONCE = ("Host", "Authorization", KEY_HEADER, "Content-Type")
"""Headers that mean one thing: of two, one server takes the first and the next one the last."""


def check_head(request: web.BaseRequest) -> None:
    """Refuse an odd head.

    Raises:
        BadHead: another version of HTTP, or a header twice.
        UnsupportedEncoding: the body was encoded for its transfer.
    """
    if request.version not in _VERSIONS:
        seen = f"HTTP/{request.version.major}.{request.version.minor}"
        raise BadHead("version", "HTTP/1.1 or HTTP/1.0", seen)
    for name in _ONCE:
        count = len(request.headers.getall(name, ()))
        if count > 1:  # its values may be keys
            raise BadHead(name, "one header of this name", f"{count} of them")
    codings = ",".join(request.headers.getall(_TRANSFER, ()))
    if codings.strip().lower() not in ("", "chunked"):
        raise UnsupportedEncoding(_TRANSFER, "chunked, once", codings[:80])
    if codings and request.version == HttpVersion10:
        raise BadHead(_TRANSFER, "none in HTTP/1.0", codings[:80])


@web.middleware
async def checking_heads(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A middleware that refuses odd heads."""
    check_head(request)
    return await handler(request)
