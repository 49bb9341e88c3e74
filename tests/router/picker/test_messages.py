"""What is read from a gateway's messages."""

from __future__ import annotations

import asyncio

import pytest
from multidict import CIMultiDict

from pdconn.router.picker import picker_service
from pdconn.router.picker.messages import repeated_in_one
from tests.fakes.deployment import Deployment, deployment
from tests.fakes.event_loop import in_loop
from tests.router.picker.gateway import Filter, behind_envoy


@pytest.mark.parametrize(
    ("name", "value", "is_repeated"),
    [
        ("Authorization", "Bearer a", False),
        ("Authorization", "Bearer a,b", False),  # a key may have a comma
        ("Authorization", "Bearer a,Bearer b", True),
        ("Authorization", "Bearer a, Basic b", True),
        ("Authorization", 'Digest realm="a", nonce="b"', False),
        ("Authorization", 'Digest realm="a, Bearer b", nonce = "c"', False),
        ("Authorization", 'Digest realm="a\\", x y",Bearer b', True),
        ("Content-Type", "application/json", False),
        ("Content-Type", "application/json,text/plain", True),
        ("Content-Type", 'multipart/form-data; boundary="a,b"', False),
        ("Accept", "a/b, c/d", False),
        ("Authorization", ',"' + '\\"' * 30_000 + "\\", False),
        ("Authorization", ", a" * 20_000, False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_headers_that_a_gateway_has_joined_are_noticed(
    name: str, value: str, is_repeated: bool
) -> None:
    assert (repeated_in_one(CIMultiDict({name: value})) == name) is is_repeated


async def asked_with(d: Deployment, *headers: str) -> int:
    """The status for a request with headers as they are."""
    port = int(d.proxy.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    text = "\r\n".join(("POST /v1/completions HTTP/1.1", "Host: x", *headers))
    writer.write(f'{text}\r\nContent-Length: 15\r\n\r\n{{"prompt": "x"}}'.encode())
    async with asyncio.timeout(20):
        status = int((await reader.readline()).split()[1])
    writer.close()
    await writer.wait_closed()
    return status


TWO = (
    ("Authorization: Bearer a", "Authorization: Bearer b"),
    ("Authorization: Bearer a", "authorization: Bearer a"),
    ("Content-Type: application/json", "Content-Type: text/plain"),
    ("X-Api-Key: a", "X-Api-Key: b"),
)


@in_loop
async def test_two_headers_where_one_belongs_are_refused_as_by_the_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        deployment() as by_proxy,
        deployment(running=behind_envoy(Filter())) as by_picker,
    ):
        for headers in TWO:
            for d in (by_proxy, by_picker):
                assert (headers, await asked_with(d, *headers)) == (headers, 400)
                assert await asked_with(d, headers[0]) == 200
        # The control: Envoy joins them.
        monkeypatch.setattr(picker_service, "repeated_in_one", lambda headers: None)
        assert await asked_with(by_picker, *TWO[0]) == 200
