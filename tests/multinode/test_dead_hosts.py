"""The router's connections to a host that is gone, and to one that is busy, over a real cable."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from multidict import CIMultiDict

from pdconn.router.fleet.engine_client import ConnectionLost, EngineClient
from tests.multinode.namespaces import Machine, Network, why_not

_WHY_NOT = why_not()
pytestmark = [
    pytest.mark.multinode,
    pytest.mark.timeout(120),
    pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)),
]

PORT = 8100
LIMIT_S = 2.0
BODY_NBYTES = 8 << 20
SERVER = f"""
import socket, threading
listening = socket.create_server(("0.0.0.0", {PORT}))
print("ready", flush=True)

go_on = threading.Event()
ok = b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok"

def serve(sock):
    while head := sock.recv(65536):
        if b"/busy" in head:  # it has read the head, and reads no more for a while
            go_on.wait()
            left = {BODY_NBYTES} + head.index(b"\\r\\n\\r\\n") + 4 - len(head)
            while left > 0:
                left -= len(sock.recv(65536))
        go_on.set()
        sock.sendall(ok)

while True:
    threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()
"""


@contextmanager
def serving(machine: Machine) -> Iterator[None]:
    words = [*machine.within, sys.executable, "-c", SERVER]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            yield
        finally:
            server.kill()


def client() -> EngineClient:
    made = EngineClient(connect_timeout_s=1.0)
    made._sockets._limit_s, made._sockets._sweep_s = LIMIT_S, 0.2
    return made


async def post(made: EngineClient, url: str, path: str, body: bytes = b"{}") -> bytes:
    async with await made.post_body(url, path, body, CIMultiDict()) as answer:
        return await answer.read_rest()


def test_a_host_that_is_gone_is_told_from_one_that_is_busy() -> None:
    """``TCP_USER_TIMEOUT`` broke off both; without it a dead host takes a quarter of an hour."""

    async def ask(network: Network, url: str) -> tuple[bool, float]:
        made = client()
        try:
            asking = asyncio.create_task(post(made, url, "/busy", b"x" * BODY_NBYTES))
            await asyncio.sleep(4 * LIMIT_S)
            is_waiting = not asking.done()
            assert await post(made, url, "/") == b"ok"
            assert await asking == b"ok"
            network.part("router", "engine")
            began = time.monotonic()
            with pytest.raises(ConnectionLost):
                await post(made, url, "/")  # on the connection of before, which is kept
            return is_waiting, time.monotonic() - began
        finally:
            await made.close()

    network = Network({"router": 2, "engine": 11})
    try:
        with serving(network["engine"]), network["router"].inside():
            url = f"http://{network['engine'].address}:{PORT}"
            is_waiting, took_s = asyncio.run(ask(network, url))
    finally:
        network.close()
    assert is_waiting, "a full window is no dead host"
    assert LIMIT_S <= took_s < 10 * LIMIT_S
