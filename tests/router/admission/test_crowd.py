"""A real ``pdconn proxy`` under slow and silent connections, with few file descriptors.

Without admission these take every file descriptor.  Then no good client is accepted, and the
proxy cannot connect to its engines and takes them for dead: every request gets 503.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import zlib
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.fakes.credentials import Authority
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ANSWER, MODEL, FakeEngine, Seen
from tests.router.admission.crowd import (
    PAUSES_S,
    Served,
    crowd,
    good_clients,
    half_head,
    half_hello,
    silent,
    slow_body,
    slow_head,
)
from tests.router.admission.process import engines, proxy_process

MOST_NBYTES = 64 << 20
"""Above idle."""
ASKED = {"model": MODEL, "prompt": "hi"}


def is_good(served: Served) -> bool:
    """Whether at least eight requests were asked, and nine in ten got their answer.

    Where 64 places are crowded, one that takes 20 ms to send its request or to shake hands may
    lose it, and on a busy machine this process does: without admission all of them fail.
    """
    return 8 <= len(served.took_s) >= 10 * len(served.failed)


@pytest.mark.parametrize("files", [64, pytest.param(1024, marks=pytest.mark.matrix)])
@in_loop
async def test_good_clients_are_served_beside_200_slow_and_200_silent_ones(
    files: int, tmp_path: Path
) -> None:
    """At most 64 MiB above idle, no engine marked down.  ``-s`` shows the figures."""
    async with engines() as (prefill, decode):
        with proxy_process(prefill, decode, tmp_path, files) as proxy:
            alone = await good_clients(proxy.url, 4, 0.5)
            idle_nbytes, most_nbytes, most_files = proxy.nbytes, 0, 0
            hostile = ((silent, 100), (half_head, 100), (slow_head, 100), (slow_body, 100))
            for pause_s in PAUSES_S:
                async with crowd(proxy.port, *hostile, pause_s=pause_s) as made:
                    await until(lambda: made[0] >= 400)
                    serving = asyncio.create_task(good_clients(proxy.url, 4, 4.0))
                    while not serving.done():
                        await asyncio.sleep(0.1)
                        most_nbytes = max(most_nbytes, proxy.nbytes)
                        most_files = max(most_files, proxy.num_files)
                    served = await serving
                if is_good(served):
                    break
            assert not alone.failed
            print(
                f"\n{files} file descriptors, at most {most_files} used; "
                f"{made[0]} hostile connections; {len(served.took_s)} good requests, "
                f"{len(served.failed)} failed, median {1e3 * served.median_s:.1f} ms "
                f"(alone {1e3 * alone.median_s:.1f}), slowest {1e3 * served.slowest_s:.0f} ms "
                f"(alone {1e3 * alone.slowest_s:.0f}); memory idle {idle_nbytes / 2**20:.1f} MiB, "
                f"at most {(most_nbytes - idle_nbytes) / 2**20:.1f} MiB more"
            )
            assert is_good(served), served.failed[:3]
            assert most_nbytes - idle_nbytes < MOST_NBYTES
            assert proxy.engines_down == 0
            # The control: the same log names an engine that is down.
            await decode.stop()
            async with aiohttp.ClientSession() as session:
                await session.post(f"{proxy.url}/v1/completions", json=ASKED)
            await until(lambda: proxy.engines_down == 1)


@in_loop
async def test_handshakes_that_never_end_leave_good_clients_their_places(tmp_path: Path) -> None:
    """Else a connection that was pushed out keeps its file descriptor until the handshake's end."""
    authority = Authority(tmp_path / "ca")
    files = authority.sign("proxy", "127.0.0.1")
    tls = ssl.create_default_context(cafile=authority.file)
    options = ("--tls-cert", files.cert, "--tls-key", files.key)
    async with engines() as pair:
        with proxy_process(*pair, tmp_path, 64, *options) as proxy:
            url = f"https://127.0.0.1:{proxy.port}"
            assert not (await good_clients(url, 2, 0.2, tls)).failed
            for pause_s in PAUSES_S:
                async with crowd(proxy.port, (half_hello, 100), pause_s=pause_s) as made:
                    await until(lambda: made[0] >= 100)
                    served = await good_clients(url, 2, 4.0, tls)
                    most_files = proxy.num_files
                if is_good(served):
                    break
            print(f"\n{made[0]} handshakes; {len(served.took_s)} good requests; {most_files} files")
            assert is_good(served), served.failed[:3]
            assert "accept() failed" not in proxy.log.read_text(encoding="utf-8")
            assert proxy.engines_down == 0


@in_loop
async def test_a_client_that_reads_slowly_is_not_cut_for_others(tmp_path: Path) -> None:
    """Its request is being served; only those that owe a request make room."""
    answer = b"x" * (6 << 20)

    async def large(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
        return web.Response(body=answer)

    async with engines() as (prefill, decode):
        decode.script = large
        with proxy_process(prefill, decode, tmp_path, 64) as proxy:
            async with crowd(proxy.port, (half_head, 60)) as made:
                await until(lambda: made[0] >= 60)
                reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port, limit=4096)
                body = json.dumps(ASKED).encode()
                head = (
                    f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
                )
                writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
                nbytes = 0
                while piece := await reader.read(64 << 10):
                    nbytes += len(piece)
                    await asyncio.sleep(0.02)
                writer.transport.abort()
            assert nbytes > len(answer)


@in_loop
async def test_slow_compressed_bodies_are_not_inflated(tmp_path: Path) -> None:
    """Else 40 KB of each connection become 40 MiB, for as long as the last byte is missing."""
    text = b'{"model": "m", "prompt": "' + b"x" * (40 << 20) + b'"}'
    packed = zlib.compress(text, 9, 31)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\n"
        f"Content-Length: {len(packed)}\r\n\r\n"
    ).encode()
    async with engines() as pair:
        with proxy_process(*pair, tmp_path, 1024) as proxy:
            assert not (await good_clients(proxy.url, 1, 0.5)).failed
            idle_nbytes = proxy.nbytes
            bombs = [await asyncio.open_connection("127.0.0.1", proxy.port) for _ in range(4)]
            for _, writer in bombs:
                writer.write(head + packed[:-1])
            await asyncio.sleep(2.0)
            most_nbytes = proxy.nbytes - idle_nbytes
            print(f"\n4 x {len(packed)} bytes: {most_nbytes / 2**20:.1f} MiB above idle")
            assert most_nbytes < MOST_NBYTES
            answers = [await asyncio.wait_for(reader.read(1 << 16), 10.0) for reader, _ in bombs]
            for _, writer in bombs:
                writer.transport.abort()
            assert all(answer.startswith(b"HTTP/1.1 415 ") for answer in answers)


@in_loop
async def test_a_lack_of_file_descriptors_is_no_engines_fault(tmp_path: Path) -> None:
    """Else both engines are marked as down, and /health and the log blame them."""
    async with engines() as pair:
        with proxy_process(*pair, tmp_path, 256) as proxy:
            async with aiohttp.ClientSession() as session:

                async def ask() -> tuple[int, str | None, bytes]:
                    async with session.post(f"{proxy.url}/v1/completions", json=ASKED) as reply:
                        body = await reply.read()
                        return reply.status, reply.headers.get("Retry-After"), body

                async def ask_eight() -> list[tuple[int, str | None, bytes]]:
                    return await asyncio.gather(*(ask() for _ in range(8)))

                assert {status for status, _, _ in await ask_eight()} == {200}
                await asyncio.sleep(5.0)  # idle connections to engines are closed
                proxy.limit_files(1)  # a request takes two, one after the other
                refused = [answer for answer in await ask_eight() if answer[0] != 200]
                assert refused
                for status, retry_after, body in refused:
                    assert (status, retry_after) == (503, "1")
                    assert b"Too many open files" in body
                assert proxy.engines_down == 0
                proxy.limit_files(256)
                assert {answer[::2] for answer in await ask_eight()} == {(200, ANSWER)}
            assert proxy.engines_down == 0


@in_loop
async def test_without_a_free_file_descriptor_new_clients_wait(tmp_path: Path) -> None:
    """The proxy does not spin, says so in a line, and serves them once descriptors are free."""
    async with engines() as pair:
        with proxy_process(*pair, tmp_path, 256) as proxy:
            proxy.limit_files(3)
            serving = asyncio.create_task(good_clients(proxy.url, 1, 0.1))
            await until(lambda: "accept() failed" in proxy.log.read_text(encoding="utf-8"))
            await asyncio.sleep(2.0)
            assert proxy.log.read_text(encoding="utf-8").count("accept() failed") <= 8
            assert not serving.done()
            proxy.limit_files(256)
            assert not (await serving).failed
            assert proxy.engines_down == 0
