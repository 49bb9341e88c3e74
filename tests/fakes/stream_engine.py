"""A light engine for ``proxy_cost``: streams tokens at a fixed pace, in a process of its own.

    python -m tests.fakes.stream_engine HTTP_PORT [EVENTS_PORT REPLAY_PORT]

A prompt takes no time: with ``do_remote_decode`` the ticket comes at once, and otherwise the
first token does.  Token n is due n steps after the first, whatever became of those before.
With events it has stored the blocks of ``KNOWN`` when it starts, and ``POST /publish`` makes it
store others, at a pace, each batch stamped with this machine's clock as it is sent.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from pdconn.router.prefix.hashing import HashScheme, chain, external

STEP_S = 1 / 50
SCHEME = HashScheme("sha256_cbor", 16)
KNOWN = [(7919 * i) % 50_000 for i in range(512)]
"""What the prompts of ``proxy_cost`` begin with."""

_TOKEN = b'data: {"id":"cmpl-0","choices":[{"index":0,"text":" token","finish_reason":null}]}\n\n'
_DONE = b"data: [DONE]\n\n"
_TICKET = (
    b'{"choices":[{"index":0,"text":" t"}],"kv_transfer_params":{"do_remote_prefill":true,'
    b'"remote_block_ids":[[1,2,3]]},"usage":{"prompt_tokens":1,"completion_tokens":1}}'
)
_LOAD = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
_END = (-1).to_bytes(8, "big", signed=True)


class Events:
    """PUB and ROUTER as vLLM's publisher has them."""

    def __init__(self, events_port: int, replay_port: int) -> None:
        context = zmq.asyncio.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self._pub.bind(f"tcp://127.0.0.1:{events_port}")
        self._replay = context.socket(zmq.ROUTER)
        self._replay.bind(f"tcp://127.0.0.1:{replay_port}")
        self._sent: list[bytes] = []

    async def store(self, hashes: Sequence[int], tokens: Sequence[int]) -> None:
        """Say that these blocks were stored."""
        event = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": tokens,
            "block_size": SCHEME.block_tokens,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        payload = msgspec.msgpack.encode([time.time(), [event], 0])
        number = len(self._sent)
        self._sent.append(payload)
        await self._pub.send_multipart([b"", number.to_bytes(8, "big"), payload])

    async def replay(self) -> None:
        """Answer requests for a replay of the sent batches."""
        while True:
            asker, _, start = await self._replay.recv_multipart()
            first = int.from_bytes(start, "big")
            for number, payload in enumerate(self._sent[first:], first):
                frames = [asker, b"", b"", number.to_bytes(8, "big"), payload]
                await self._replay.send_multipart(frames)
            await self._replay.send_multipart([asker, b"", b"", _END, b""])


class _Ask(msgspec.Struct):
    max_tokens: int = 16
    kv_transfer_params: dict[str, object] | None = None


class _Pace(msgspec.Struct):
    per_s: float
    for_s: float


async def _complete(http: web.Request) -> web.StreamResponse:
    asked = msgspec.json.decode(await http.read(), type=_Ask)
    if (asked.kv_transfer_params or {}).get("do_remote_decode"):
        return web.Response(body=_TICKET, content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)
    began = time.monotonic()
    for number in range(asked.max_tokens):
        await asyncio.sleep(max(0.0, began + number * STEP_S - time.monotonic()))
        await response.write(_TOKEN)
    await response.write(_DONE)
    await response.write_eof()
    return response


async def serve(http_port: int, events: Events | None) -> None:
    """Until the process ends."""
    rng = random.Random(http_port)

    async def publish(http: web.Request) -> web.Response:
        assert events is not None
        pace = msgspec.json.decode(await http.read(), type=_Pace)
        for _ in range(int(pace.per_s * pace.for_s)):
            hashes = [rng.randrange(2**64) for _ in range(8)]
            await events.store(hashes, list(range(8 * SCHEME.block_tokens)))
            await asyncio.sleep(rng.expovariate(pace.per_s))
        return web.Response()

    async def health(http: web.Request) -> web.Response:
        return web.Response(text=_LOAD if http.path == "/metrics" else "")

    async def models(http: web.Request) -> web.Response:
        del http
        return web.json_response({"data": [{"id": "m", "root": "m", "parent": None}]})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/completions", _complete)
    app.router.add_post("/publish", publish)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", health)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    if events is not None:
        await events.store([external(full) for full in chain(SCHEME, KNOWN)], KNOWN)
    await web.TCPSite(runner, "127.0.0.1", http_port, backlog=1024).start()
    await (asyncio.Event().wait() if events is None else events.replay())


async def main(ports: Sequence[int]) -> None:
    """Serve on these ports."""
    await serve(ports[0], Events(*ports[1:]) if len(ports) > 1 else None)


if __name__ == "__main__":
    asyncio.run(main([int(word) for word in sys.argv[1:]]))
