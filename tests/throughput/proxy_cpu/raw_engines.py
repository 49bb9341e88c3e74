"""Engines that cost little: a prefill that answers a ticket, a decode that streams 64 chunks.

    python -m tests.throughput.proxy_cpu.raw_engines PREFILL_PORT DECODE_PORT EVENTS REPLAY

They are bare protocols of asyncio, so that what is measured on the same machine is the router.
Each chunk is a write of its own, ``STEP_S`` after the one before, as vLLM's server sends a token.
Prefill has stored the blocks of ``KNOWN`` and publishes that.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from typing import cast

from pdconn.router.prefix.hashing import chain, external
from tests.fakes.stream_engine import SCHEME, Events
from tests.throughput.proxy_cpu.wire import take_message

CHUNKS, STEP_S = 64, 0.01
KNOWN = [(7919 * i) % 50_000 for i in range(16_000)]
"""The first half of every prompt is a beginning of it."""

_EVENT = b'data: {"id":"cmpl-0","object":"text_completion","model":"m","choices":[{"index":0,'
_EVENT += b'"text":" token","logprobs":null,"finish_reason":null}]}\n\n'
_HEAD = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ndate: Sun, 29 Nov 2026 13:00:00 GMT\r\n"
_STREAM_HEAD = _HEAD + b"content-type: text/event-stream; charset=utf-8\r\n"
_STREAM_HEAD += b"transfer-encoding: chunked\r\n\r\n"
_TICKET = (
    b'{"id":"cmpl-0","choices":[{"index":0,"text":" t"}],"kv_transfer_params":'
    b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3]],'
    b'"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":5600,'
    b'"tp_size":1,"pdconn":{"v":1}},"usage":{"prompt_tokens":1,"completion_tokens":1}}'
)
_ANSWER = (
    b'{"id":"cmpl-0","object":"text_completion","model":"m","choices":[{"index":0,'
    b'"text":" an answer","finish_reason":"length"}],"usage":{"prompt_tokens":1,'
    b'"completion_tokens":64}}'
)
_LOAD = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
_MODELS = b'{"object":"list","data":[{"id":"m","object":"model","root":"m","parent":null}]}'


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _with_length(body: bytes, kind: bytes = b"application/json") -> bytes:
    return _HEAD + b"content-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (kind, len(body), body)


class RawEngine(asyncio.Protocol):
    """One connection of a router; ``writes``: chunks of which each write consists."""

    def __init__(self, writes: int) -> None:
        self._received = bytearray()
        self._writes = writes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (message := take_message(self._received)) is not None:
            self._answer(*message)

    def _answer(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"post"):
            page = _MODELS if b"/v1/models" in head else _LOAD
            self._transport.write(_with_length(page))
            return
        tail = body[-4096:].replace(b" ", b"") + body[:4096].replace(b" ", b"")
        if b'"do_remote_decode":true' in tail:
            self._transport.write(_with_length(_TICKET))
        elif b'"stream":true' in tail:
            self._transport.write(_STREAM_HEAD)
            loop = asyncio.get_running_loop()
            self._began_s = loop.time()
            self._send_chunk(loop, 0)
        else:
            self._transport.write(_with_length(_ANSWER))

    def _send_chunk(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        if number >= CHUNKS:
            self._transport.write(_chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            return
        self._transport.write(_chunked(_EVENT) * self._writes)
        number += self._writes
        due_s = self._began_s + number * STEP_S
        loop.call_at(due_s, self._send_chunk, loop, number)


async def serve(ports: Sequence[int], writes: int) -> None:
    """Prefill and decode, until the process ends."""
    loop = asyncio.get_running_loop()
    prefill, decode, *publishing = ports
    events = Events(*publishing)
    await events.store([external(full) for full in chain(SCHEME, KNOWN)], KNOWN)
    for port in (prefill, decode):
        await loop.create_server(partial(RawEngine, writes), "127.0.0.1", port, backlog=1024)
    await events.replay()


if __name__ == "__main__":
    asyncio.run(serve([int(word) for word in sys.argv[1:5]], int(sys.argv[5])))
