"""Why an engine cannot be reached, in words that help: the reason of ``ConnectFailed``."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from multidict import CIMultiDict

from pdconn.router.fleet.engine_client import ConnectFailed, EngineClient
from tests.fakes.credentials import Authority


async def reason(url: str) -> str:
    client = EngineClient(connect_timeout_s=5.0)
    try:
        with pytest.raises(ConnectFailed) as failed:
            await client.get_page(url, "/health", CIMultiDict())
    finally:
        await client.close()
    return str(failed.value)


async def reason_at(scheme: str, context: ssl.SSLContext | None = None) -> str:
    """The reason at a server of plain HTTP, or of TLS with ``context``."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await reason(f"{scheme}://localhost:{port}")


def test_https_at_a_plain_port_says_so() -> None:
    """Without the fix: ``Operation not permitted``, as if the router lacked a right."""
    found = asyncio.run(reason_at("https"))
    assert found == "TLS: WRONG_VERSION_NUMBER; is it an http:// server?"


def test_a_certificate_that_is_not_trusted_says_so(tmp_path: Path) -> None:
    files = Authority(tmp_path).sign("engine", "localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    found = asyncio.run(reason_at("https", context))
    assert found.startswith("TLS: ")
    assert "certificate" in found


def test_a_port_without_a_server_is_refused() -> None:
    """The control: errors of the system keep its words."""
    assert asyncio.run(reason("http://127.0.0.1:1")) == "Connection refused"


def test_a_name_that_does_not_resolve_says_so() -> None:
    """Without the fix: ``Unknown error -2``."""
    found = asyncio.run(reason("http://nowhere.invalid:8100"))
    assert "Unknown error" not in found
    assert "name" in found.lower()
