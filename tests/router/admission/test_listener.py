"""The end of a listener: no client that it has accepted is left without a word."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import web

from pdconn.lifecycle.admission import AdmissionLimits
from pdconn.router.admission.connections import ClientAdmission
from pdconn.router.admission.listener import AdmittingSite
from tests.fakes.event_loop import in_loop

TURNS = 12
"""Of the event loop, within which a client is accepted, opened and answered."""


async def answer(http: web.Request) -> web.Response:
    return web.Response(text="yes")


def knock(port: int) -> socket.socket:
    """A client that the backlog has, and its request."""
    client = socket.create_connection(("127.0.0.1", port))
    client.settimeout(5.0)
    client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return client


def hear(client: socket.socket) -> bytes:
    """What the client reads until the connection ends; empty if it was reset.

    Raises:
        TimeoutError: the server neither answers nor closes.
    """
    try:
        return client.recv(1 << 16)
    except ConnectionError:
        return b""


async def heard_when_stopped_after(turns: int) -> bytes:
    """What a client hears whose listener stops so many turns of the loop after it came."""
    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    site = AdmittingSite(runner, sock, ClientAdmission(AdmissionLimits()), backlog=8)
    await site.start()
    try:
        await asyncio.sleep(0.01)  # it waits for clients
        with knock(port) as client:
            for _ in range(turns):
                await asyncio.sleep(0)
            await site.stop()
            return await asyncio.to_thread(hear, client)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("turns", range(TURNS))
@in_loop
async def test_a_client_is_answered_or_closed_whenever_the_listener_stops(turns):
    """One that was accepted in the moment of the end stayed open, and waited for ever."""
    heard = await heard_when_stopped_after(turns)
    assert heard == b"" or heard.endswith(b"yes")


@in_loop
async def test_some_of_them_are_closed_and_some_are_answered():
    """The control: the turns above reach from before the accept until after the answer."""
    heard = [await heard_when_stopped_after(turns) for turns in range(TURNS)]
    assert heard[0] == b""
    assert heard[-1].endswith(b"yes")
