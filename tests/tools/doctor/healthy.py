"""A healthy pair for the doctor: real HTTP, real side channels, real event sockets; made-up tokens.

``Healthy`` has all that a test may spoil before it asks the doctor, and the words to ask it with.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from pdconn.lender.server import Lender
from pdconn.protocol.messages import Described, RankGeometry, Welcome
from pdconn.sidechannel.security import Security
from pdconn.tools.cli.main import main
from pdconn.tools.lab.ports import free_ports
from tests.fakes.credentials import SHARED
from tests.fakes.fake_engine import FakeEngine, Leases, Seen, error
from tests.fakes.pair import Cache
from tests.router.events.publisher import Publisher

MODEL = {"id": "m", "max_model_len": 4096}


def tokens_of(prompt: object, count: int) -> list[int]:
    """What a right engine says to a prompt."""
    start = sum(str(prompt).encode())
    return [(start * 7 + 31 * position) % 5000 for position in range(count)]


class GoldenEngine(FakeEngine):
    """Computes tokens, gives tickets that name ``advertised``, and counts its pulls.

    ``wrong``: pulled KV gives another third token; ``ignores``: it does not use tickets;
    ``cannot``: its pulls fail, and it computes.
    """

    def __init__(self) -> None:
        super().__init__(Leases())
        self.version = "0.32.0"
        self.models = [MODEL]
        self.advertised = ("127.0.0.1", 0)
        self.pulls = self.failed = self.lent = 0
        self.wrong = self.ignores = self.cannot = False
        self.engine_id: str | None = "prefill"
        self.gap = 2.0
        self.takes_text = True
        self.key: str | None = None
        self.has_connector = True
        self.count()

    def count(self) -> None:
        """Write its metrics."""
        names = {
            "pdconn:pulls_total": self.pulls,
            "pdconn:leases_granted_total": self.lent,
            "vllm:nixl_num_failed_transfers_total": self.failed,
        }
        page = "".join(f'{name}{{engine="0"}} {value}.0\n' for name, value in names.items())
        self.metrics_page = page if self.has_connector else "vllm:num_requests_running 0.0\n"

    async def answer(self, seen: Seen, http: web.Request) -> web.StreamResponse:
        body, params = seen.body, seen.params
        if self.key is not None and http.headers.get("Authorization") != f"Bearer {self.key}":
            return error(401, "Unauthorized")
        if not self.takes_text and isinstance(body["prompt"], str):
            return error(400, "Unable to use text input when skip_tokenizer_init=True")
        tokens = tokens_of(body["prompt"], body["max_tokens"])
        ticket = None
        if params.get("do_remote_decode") and self.has_connector:
            self.lent += 1
            host, port = self.advertised
            ticket = {"do_remote_prefill": True, "remote_host": host, "remote_port": port}
            ticket["remote_engine_id"] = self.engine_id
        elif params.get("do_remote_prefill") and self.cannot:
            self.failed += 1
        elif params.get("do_remote_prefill") and not self.ignores:
            self.pulls += 1
            if self.wrong:
                tokens[2] += 1
        self.count()
        tops = [{"a": -0.1, "b": -0.1 - self.gap} for _ in tokens]
        choice = {"token_ids": tokens, "text": "t", "logprobs": {"top_logprobs": tops}}
        return web.json_response({"choices": [choice], "kv_transfer_params": ticket})


def welcome(engine_id: str, cache: Cache, traits: dict[str, str]) -> Welcome:
    """What an engine says of itself."""
    return Welcome.in_our_version(
        engine_id, "boot", traits, (RankGeometry(0, 0, b"", cache.references),)
    )


@contextlib.contextmanager
def lending(cache: Cache, security: Security | None, **traits: str) -> Iterator[int]:
    """A real side channel; its port."""
    said = welcome("prefill", cache, {"model": "tiny", **traits})
    lender = Lender(said, "127.0.0.1", 0, security=security)
    try:
        yield lender.port
    finally:
        lender.close()


@dataclass
class Healthy:
    """A pair; ``words`` is the command that finds nothing."""

    folder: Path
    prefill: GoldenEngine
    decode: GoldenEngine
    channel: str
    description: Path
    events: tuple[int, int]
    more: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        at = "tcp://127.0.0.1:"
        published = f"{self.prefill.url},events={at}{self.events[0]},replay={at}{self.events[1]}"
        return [
            "doctor", "--no-local", "--json", "--timeout", "2", "--golden",
            "--prefill", published, "--decode", self.decode.url,
            "--prefill-channel", self.channel, "--decode-channel", str(self.description),
            *self.more,
        ]  # fmt: skip

    def describe_decode(self, **traits: str) -> None:
        """Write decode's description."""
        cache = Cache("BHLNC", filled=False)
        said = Described.from_welcome(welcome("decode", cache, {"model": "tiny", **traits}))
        self.description.write_bytes(msgspec.json.encode(said))

    async def ask(self, capsys: Any) -> tuple[int, dict[str, Any]]:
        """Run the command; its exit code and what it printed."""
        code = await asyncio.to_thread(main, self.words)
        return code, json.loads(capsys.readouterr().out)


@contextlib.asynccontextmanager
async def healthy(folder: Path, security: Security | None = None) -> AsyncIterator[Healthy]:
    """A healthy pair, gone at the end."""
    cache, ports = Cache("BHLNC", filled=True), free_ports(2)
    async with contextlib.AsyncExitStack() as stack:
        port = stack.enter_context(lending(cache, security))
        engines = GoldenEngine(), GoldenEngine()
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        publisher = Publisher((ports[0], ports[1]))
        stack.push_async_callback(publisher.die)
        engines[0].advertised = ("127.0.0.1", port)
        made = Healthy(
            folder, *engines, f"127.0.0.1:{port}", folder / "decode.json", (ports[0], ports[1])
        )
        made.describe_decode()
        yield made


def ids(document: dict[str, Any]) -> list[str]:
    """Of the findings, worst first."""
    return [finding["id"] for finding in document["findings"]]


__all__ = ["SHARED", "GoldenEngine", "Healthy", "healthy", "ids", "lending", "tokens_of"]
