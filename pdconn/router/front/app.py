"""The HTTP listener of ``pdconn proxy``: reads clients' requests, and relays engines' answers."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler

from pdconn.router.access.access_log import Served, current
from pdconn.router.access.api_keys import requiring
from pdconn.router.access.cors import allowing
from pdconn.router.access.middlewares import checking_heads, logging_access, refusing
from pdconn.router.admin.probes import Probes
from pdconn.router.admission.connections import ClientAdmission
from pdconn.router.admission.places import BodyReader
from pdconn.router.fleet.engine_client import EngineAnswer
from pdconn.router.front.client_api import (
    Answered,
    ApiRoute,
    ClientApi,
    ClientRequest,
    told_headers,
)
from pdconn.router.handover.listing import Listing
from pdconn.router.handover.stream import ENGINE_HEADER, StreamEnd, relay
from pdconn.router.handover.tries import end_of
from pdconn.router.labels import RequestEnd
from pdconn.router.openai.bodies import AnswerReader
from pdconn.router.openai.requests import REQUEST_ID_HEADER
from pdconn.router.routing.request_events import FirstToken

log = logging.getLogger(__name__)

_PROBED = ("/health", "/livez", "/readyz", "/ready")

_ENDS = {
    StreamEnd.ENGINE_FAILED: RequestEnd.BROKEN_STREAM,
    StreamEnd.CLIENT_LEFT: RequestEnd.CLIENT_LEFT,
    StreamEnd.TIMED_OUT: RequestEnd.TIMED_OUT,
}


class RouterApp:
    """Answers clients over HTTP.

    Attributes:
        api: what it answers.
    """

    def __init__(self, api: ClientApi[EngineAnswer], probes: Probes, bodies: BodyReader) -> None:
        self.api = api
        self._probes = probes
        self._bodies = bodies

    @property
    def admission(self) -> ClientAdmission:
        """The admission of the connections that requests arrive on."""
        return self._bodies.admission

    def app(self) -> web.Application:
        """The routes, as an aiohttp application."""
        api, listen = self.api, self.api.config.listen
        routes = tuple(api.routes())
        served = (*(route.name for route in routes), *_PROBED)
        middlewares = [
            self.admission.observing,
            logging_access(api.request_ended, with_blocks=api.config.traces.log_blocks),
            refusing(served, name_engines=listen.show_engines),
            checking_heads,
            *([] if api.keys is None else [requiring(api.keys)]),
        ]
        app = web.Application()
        if listen.cors_origins:
            middlewares.insert(2, allowing(app, listen.cors_origins))
        app.middlewares.extend(middlewares)
        for route in routes:
            handler = self._handler(route)
            app.router.add_route(route.method, route.path, handler, expect_handler=_continue)
        self._probes.add_to(app, name_engines=listen.show_engines)
        return app

    def _handler(self, route: ApiRoute[EngineAnswer]) -> Handler:
        """A handler that relays what the route answers."""

        async def handle(http: web.Request) -> web.StreamResponse:
            served = current()
            client = ClientRequest(
                served,
                http.rel_url.raw_path_qs,
                http.headers,
                http.match_info,
                partial(self._bodies.read_body, http),
            )
            with self.api.counting(route.name, client) as counted:
                try:
                    async with self.api.answering(client, route.answer) as (answered, until_s):
                        response, counted.end = await self._relay(http, answered, until_s)
                except asyncio.CancelledError:
                    if served.answer is not None and served.answer.is_whole:
                        # The client has the whole answer.
                        counted.end = self._whole(served, served.answer)
                    raise
                counted.status = response.status
            return response

        return handle

    async def _relay(
        self, http: web.Request, answered: Answered[EngineAnswer], deadline_s: float | None
    ) -> tuple[web.StreamResponse, RequestEnd]:
        answer, request_id = answered
        name_engine, served = self.api.config.listen.show_engines, current()
        reader = served.answer = AnswerReader(answer.status, answer.headers)
        if isinstance(answer, Listing):
            reader.read_chunk(answer.body)
            listed = _listed(answer, request_id, name_engine=name_engine)
            return listed, self._whole(served, reader)
        began = partial(self._stream_began, served) if reader.is_stream else None
        response, end = await relay(
            http,
            answer,
            request_id,
            name_engine=name_engine,
            reader=reader,
            deadline_s=deadline_s,
            began=began,
            more=told_headers(served.routed, self.api.handover.router.sessions),
        )
        if end is StreamEnd.ENGINE_FAILED:
            why = "failed in the middle of an answer"
            self.api.handover.tries.health.suspect(answer.engine, why, request_id)
            log.error("pdconn: stream broken engine=%s request=%s", answer.engine, request_id)
        return response, _ENDS.get(end) or self._whole(served, reader)

    def _stream_began(self, served: Served) -> None:
        if served.routed is not None:
            served.routed.note(FirstToken())

    def _whole(self, served: Served, answer: AnswerReader) -> RequestEnd:
        """The outcome of a request whose whole answer the client has received."""
        return end_of(
            answer,
            generates=served.routed is not None,
            is_clients_key=self.api.config.listen.passes_authorization,
        )


def _listed(listing: Listing, request_id: str, *, name_engine: bool) -> web.Response:
    headers = listing.headers.copy()
    if name_engine and listing.engine is not None:
        headers[ENGINE_HEADER] = listing.engine
    headers[REQUEST_ID_HEADER] = request_id
    return web.Response(status=listing.status, headers=headers, body=listing.body)


async def _continue(http: web.Request) -> None:
    """Send ``100 Continue`` to a client that waits for it; other expectations are ignored.

    RFC 9110, section 10.1.1.  aiohttp's own handler refuses them before any middleware runs, so
    that the request would be in neither the access log nor the metrics.
    """
    if http.version >= HttpVersion11 and http.headers["Expect"].lower() == "100-continue":
        await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        http.writer.output_size = 0  # bytes of the answer, which begins after this
