"""Cross-origin requests from browsers, for the origins of ``--cors-origin``.

Before a page of another origin sends a JSON body or a key, a browser sends a preflight
(``OPTIONS``); it shows an answer to the page only if the answer's headers allow that.  Headers
of this kind that engines set are replaced, so that one place decides.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from pdconn.router.router_errors import BadSetting

ANY = "*"
_ORIGIN = re.compile(r"https?://[^/?#@\s]+")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9-]{1,64}(\s*,\s*[A-Za-z0-9-]{1,64}){0,63}")
_SHOWN = (
    "X-Request-Id, Retry-After, X-Pdconn-Engine, X-Session-Kept, X-Session-Broken, X-Session-Cut"
)
"""Response headers that pages may read beside the CORS-safelisted ones."""
_REMEMBERED_S = 600
_PREFIX = "access-control-"


def check_origin(origin: str) -> None:
    """Check a word of ``--cors-origin``.

    Raises:
        BadSetting: it is not an origin in the form that browsers send, which they compare
            literally.
    """
    if origin != ANY and (_ORIGIN.fullmatch(origin) is None or origin != origin.lower()):
        expected = "* or scheme://host[:port] in lower case, without a path"
        raise BadSetting("--cors-origin", expected, origin)


def allowing(app: web.Application, origins: Collection[str]) -> Middleware:
    """A middleware that answers preflights; ``app`` adds the allowed origin to every answer."""

    def allowed(http: web.Request) -> str | None:
        origin = http.headers.get("Origin")
        if origin is None:
            return None
        return ANY if ANY in origins else origin if origin in origins else None

    async def sign(http: web.Request, response: web.StreamResponse) -> None:
        for name in [name for name in response.headers if name.lower().startswith(_PREFIX)]:
            if not isinstance(response, _Preflight):
                response.headers.popall(name, None)
        if ANY not in origins:
            response.headers.add("Vary", "Origin")
        origin = allowed(http)
        if origin is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _SHOWN

    app.on_response_prepare.append(sign)

    @web.middleware
    async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        method = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or method is None:
            return await handler(request)
        response = _Preflight(status=204)
        if allowed(request) is not None:
            response.headers["Access-Control-Allow-Methods"] = "GET, POST"
            response.headers["Access-Control-Max-Age"] = str(_REMEMBERED_S)
            asked = request.headers.get("Access-Control-Request-Headers", "")
            if _HEADER_NAMES.fullmatch(asked):
                response.headers["Access-Control-Allow-Headers"] = asked
        return response

    return preflight


class _Preflight(web.Response):
    """The answer to a preflight; the router sets its headers."""
