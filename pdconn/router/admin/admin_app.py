"""The admin pages, for operators and Prometheus, on a listener of their own.

They show engines, request ids and hit lengths of all clients, so they are bound to loopback
unless ``--admin-host`` says otherwise, and API keys do not apply.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware

from pdconn.router.access.access_log import PROBES
from pdconn.router.access.middlewares import checking_heads, refusing
from pdconn.router.admin.debug_page import DebugPage
from pdconn.router.admin.history import History
from pdconn.router.admin.probes import Probes
from pdconn.router.router_errors import BadQuery
from pdconn.router.router_metrics import RouterMetrics
from transport.errors import shown

_SERVED = ("/", "/debug/state", "/debug/history", "/debug/route/ID", "/metrics", *PROBES)
_PAGE = Path(__file__).with_name("page.html")
#: Answers contain text from clients: browsers must not sniff another content type.
_NOSNIFF = {"X-Content-Type-Options": "nosniff"}

_MOST_DIGITS = 15


class AdminApp:
    """Answers operators."""

    def __init__(self, debug_page: DebugPage, metrics: RouterMetrics, probes: Probes) -> None:
        self._debug_page = debug_page
        self._history = History(debug_page.router, metrics)
        self._metrics = metrics
        self._probes = probes
        self._page_body = _PAGE.read_bytes()
        self._page_headers = _page_headers(self._page_body)

    def app(self, *middlewares: Middleware) -> web.Application:
        """The routes, as an aiohttp application; ``middlewares`` are the outermost."""
        refusals = refusing(_SERVED, name_engines=True)
        app = web.Application(middlewares=[*middlewares, refusals, checking_heads])
        app.router.add_get("/", self._page)
        app.router.add_get("/debug/state", self._state)
        app.router.add_get("/debug/history", self._samples)
        app.router.add_get("/debug/route/{request_id:.+}", self._route)
        app.router.add_get("/metrics", self._report_metrics)
        self._probes.add_to(app, name_engines=True)
        app.cleanup_ctx.append(self._history.running)
        return app

    async def _page(self, http: web.Request) -> web.StreamResponse:
        del http
        return web.Response(body=self._page_body, headers=self._page_headers)

    async def _state(self, http: web.Request) -> web.StreamResponse:
        del http
        return _json(self._debug_page.state())

    async def _samples(self, http: web.Request) -> web.StreamResponse:
        since = http.query.get("since", "0")
        if not (since.isascii() and since.isdigit() and len(since) <= _MOST_DIGITS):
            raise BadQuery("since", "the number of a sample", shown(since))
        return _json(self._history.since(int(since)))

    async def _route(self, http: web.Request) -> web.StreamResponse:
        request_id = http.match_info["request_id"]
        if http.query.get("snapshot"):
            return _json(self._debug_page.snapshot(request_id))
        return _json(self._debug_page.route(request_id))

    async def _report_metrics(self, http: web.Request) -> web.StreamResponse:
        del http
        return web.Response(
            body=self._metrics.render(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )


def _page_headers(page: bytes) -> dict[str, str]:
    """A content security policy: only the page's own script and style, and requests to this router.

    The page shows text from clients.  Text that was injected as a script would not have a digest
    in the policy.
    """
    digests = {}
    for tag in ("script", "style"):
        inside = re.search(rf"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL)
        digest = hashlib.sha256(inside[1] if inside else b"").digest()
        digests[tag] = base64.b64encode(digest).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digests['script']}'; "
        f"style-src 'sha256-{digests['style']}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        **_NOSNIFF,
    }


def _json(body: bytes) -> web.Response:
    return web.json_response(body=body, headers={"Cache-Control": "no-store", **_NOSNIFF})
