"""An engine that behaves to a proxy as vLLM's HTTP server does, on a real socket.

What matters of vLLM is kept: a prefill answer carries a ticket and lends blocks;
a model of another name is refused with 404 before all else, and the lender is
notified; a client that leaves aborts its request, and the lender is notified, unless
the server had not looked at the request yet.  ``Leases`` is what all engines of a
test share: the tickets whose blocks are still lent, and the streams of requests that
are being computed.

An engine with a ``boot`` knows streams, as pdconn does: decode that has an early ticket
answers when the prefill with that stream has ended.  It computes the prompt if that lends
nothing, or another prompt; at once if the ticket names a boot that is not up, or if there is
nothing to pull; and if no such prefill comes (``parks_s``).  A ticket that was used fails its
request under ``policy`` ``fail``, vLLM's default.

``tests/router/handover/streams/stream_scenarios.py`` gives these fakes and vLLM the same requests.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aiohttp import web
from multidict import CIMultiDict

from pdconn.protocol.ticket import TICKET_VERSION
from pdconn.router.fleet.pull_counts import FAILED, PULL_CAUSES, PULLS
from pdconn.tools.lab.ports import free_ports

MODEL = "m"

NOT_BEGUN = {one.metric for one in PULL_CAUSES if one.is_apart}
"""Counters of tickets that came to no pull."""

#: Written oddly, so that a ticket which is parsed and written anew differs.
TICKET = (
    '{"do_remote_prefill":true, "remote_block_ids": [[1,2],[ 0,7 ]], "ttl": 1.50, '
    '"an unknown key": {"é": 1e2}, "big": 123456789012345678901234567890, "lease": "%s"}'
)

#: As pdconn writes it: what names the boot that lends, beside what a router does not read.
OURS = (
    '{"remote_engine_id": "%(boot)s", "remote_host": "127.0.0.1", "remote_port": 7600, '
    '"pdconn": {"version": %(version)d, "incarnation": "%(boot)s", "prompt": "x"}, '
)

PARKED_S = 5.0
"""How long decode waits for a prefill with its stream."""

MISTAKEN, GONE = "pdconn:tickets_mistaken_total", "pdconn:tickets_gone_total"
USED, UNKNOWN = "pdconn:pulls_refused_consumed_total", "pdconn:pulls_refused_unknown_total"
ABORTED, UNREACHABLE = "pdconn:pulls_refused_aborted_total", "pdconn:pulls_unreachable_total"

#: After the first event split across a UTF-8 letter and without regard to SSE's lines.
CHUNKS = (
    b'data: {"text": "a"}\n\n',
    b'data: {"text": "\xc3',
    b'\xa9"}\n\nda',
    b"ta: x\n\n",
    b"data: [DONE]\n\n",
)

ANSWER = b'{"choices": [ {"text" : "whole"} ]}'


@dataclass
class Seen:
    """A request as it arrived.

    Attributes:
        is_rejected: by an engine that drains, which tells the lender nothing.
    """

    path: str
    headers: CIMultiDict[str]
    raw: bytes
    is_rejected: bool = False

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)

    @property
    def params(self) -> dict[str, Any]:
        return self.body.get("kv_transfer_params") or {}

    @property
    def ours(self) -> dict[str, Any]:
        """What the connector's own key says."""
        return self.params.get("pdconn") or {}

    @property
    def prompt(self) -> str:
        """The prompt, of whatever form."""
        names = ("prompt", "messages", "input")
        return json.dumps([self.body.get(name) for name in names])

    @property
    def has_one_token(self) -> bool:
        """Whether its prompt is a single token, which every engine computes itself."""
        prompt = self.body.get("prompt")
        return isinstance(prompt, list) and len(prompt) == 1

    @property
    def stream(self) -> tuple[str, str] | None:
        """The boot and the name of the stream that it is to follow."""
        if not self.params.get("do_remote_prefill") or "stream" not in self.ours:
            return None
        return self.ours["incarnation"], self.ours["stream"]

    @property
    def source(self) -> dict[str, Any]:
        """The ticket for the prompt's prefix, if it has one."""
        return self.ours.get("from") or {}


@dataclass
class Leases:
    """Tickets whose blocks prefill still holds.

    Attributes:
        prompts: of each lease, the prompt that it is of, where that is known.
        boots: those that are up.
        streams: of each stream, its lease once prefill has ended; None if it has lent nothing.
        followed: streams, by the boot and the name, that decode was to follow.
        readers: requests that follow a stream.
        left: streams whose readers have all left before prefill had ended.
    """

    held: set[str] = field(default_factory=set)
    granted: int = 0
    prompts: dict[str, str] = field(default_factory=dict)
    boots: set[str] = field(default_factory=set)
    streams: dict[tuple[str, str], asyncio.Future[str | None]] = field(default_factory=dict)
    followed: list[tuple[str, str]] = field(default_factory=list)
    readers: Counter[tuple[str, str]] = field(default_factory=Counter)
    left: set[tuple[str, str]] = field(default_factory=set)

    def grant(
        self, boot: str | None = None, stream: str | None = None, prompt: str | None = None
    ) -> str:
        """The ticket of a new lease; of ``stream``, at an engine with a ``boot``."""
        self.granted += 1
        name = f"lease-{self.granted}"
        if prompt is not None:
            self.prompts[name] = prompt
        if boot is None or stream is None or (boot, stream) not in self.left:
            self.held.add(name)
        if boot is None:
            return TICKET % name
        if stream is not None:
            self.end_stream(boot, stream, name)
        return ticket_of(boot, name)

    def begin_boot(self, boot: str | None, last: str | None) -> None:
        """An engine is another boot: nothing comes of the streams of its last one."""
        self.boots -= {last}
        self.boots |= {boot} - {None}
        for of, stream in self.streams:
            if of == last:
                self.end_stream(of, stream, None)

    def end_reader(self, stream: tuple[str, str]) -> None:
        """One request less follows a stream; after the last one its lease ends, now or later."""
        if not self.readers[stream]:
            return
        self.readers[stream] -= 1
        if not self.readers[stream]:
            if self.streams[stream].done():
                self.held.discard(self.streams[stream].result() or "")
            else:
                self.left.add(stream)

    def stream_of(self, boot: str, stream: str) -> asyncio.Future[str | None]:
        """What comes of a stream; prefill's request may come after decode's."""
        return self.streams.setdefault((boot, stream), asyncio.get_running_loop().create_future())

    def end_stream(self, boot: str, stream: str, lease: str | None) -> None:
        """A prefill has ended; a second one with the same stream is not followed."""
        ended = self.stream_of(boot, stream)
        if not ended.done():
            ended.set_result(lease)


def ticket_of(boot: str, lease: str) -> str:
    """A ticket that says where it is from, as pdconn's do."""
    return OURS % {"boot": boot, "version": TICKET_VERSION} + (TICKET % lease)[1:]


#: The tokens of a prompt, or an answer of its own.
Tokenize: TypeAlias = "Callable[[Seen], list[int] | web.Response]"

Other: TypeAlias = "Callable[[Seen], web.Response]"

Script = Callable[["FakeEngine", Seen, web.Request], Awaitable[web.StreamResponse]]


class FakeEngine:
    """One engine; set its attributes to make it misbehave."""

    def __init__(self, leases: Leases) -> None:
        self.leases = leases
        self.seen: list[Seen] = []
        self.aborted: list[str] = []
        self.script: Script | None = None
        self.health_status = 200
        self.num_probes = 0
        self.version: str | None = None  # what /version says, if it answers
        self.num_listed = 0
        self.metrics_page: str | bytes | None = None  # in place of its counters
        self.pull_fails: str | None = None  # the counter of the cause, if each pull fails
        self.counts: Counter[str] = Counter({PULLS: 0, FAILED: 0})
        self.metrics_status = 200
        self.metrics_pause_s = 0.0
        self.num_polls = 0
        self.tokenize: Tokenize | None = None
        self.tokenized: list[Seen] = []
        self.tokenizes = asyncio.Event()  # while cleared it answers no /tokenize
        self.tokenizes.set()
        self.others: list[Seen] = []  # to paths that this fake knows nothing of
        self.other: Other = lambda seen: error(404, "Not Found")
        self.models: list[dict[str, Any]] | None = None
        self.keys: dict[str, list[dict[str, Any]] | None] = {}  # what it lists to each; {}: no key
        self.lists = asyncio.Event()  # while cleared it answers no question for its models
        self.lists.set()
        self.list_keys: list[str | None] = []  # of the questions for its models
        self.cached_tokens: Any = None  # what prefill reports, if it does
        self.usage: dict[str, Any] | None = None  # the same, whole
        self.lends = True
        self._boot: str | None = None
        self.parks_s = PARKED_S  # how long it waits for a prefill with the stream that it follows
        self.policy = "fail"  # kv_load_failure_policy
        self.computes = asyncio.Event()  # while cleared prefill does not end
        self.computes.set()
        self.held_tokens: int | None = None  # of a prefix that is asked for; None: all of it
        self.lent_tokens: list[int] = []  # of each prefix that was asked for
        self.checks_names = True
        self.admission_s = 0.0  # until it looks at a request
        self.admitting = asyncio.Event()  # while clear it looks at no request
        self.admitting.set()
        self.chunk_pause_s = 0.0
        self.num_chunks: int | None = None
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def boot(self) -> str | None:
        """What its tickets name, if it knows streams; another one is a restart."""
        return self._boot

    @boot.setter
    def boot(self, boot: str | None) -> None:
        self.leases.begin_boot(boot, self._boot)
        self._boot = boot

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/{kind:(chat/)?completions|responses|messages}", self._generate)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        rendered = "/v1/{kind:chat/completions|responses|messages}/render"
        app.router.add_post(rendered, self._render)
        app.router.add_route("*", "/{path:.*}", self._other)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        # One that the kernel assigns to no other while the engine is stopped.
        self.port = self.port or free_ports(1)[0]
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _health(self, http: web.Request) -> web.Response:
        self.num_probes += 1
        return web.Response(status=self.health_status)

    async def _version(self, http: web.Request) -> web.Response:
        if self.version is None:
            return error(404, "Not Found")
        return web.json_response({"version": self.version})

    async def _metrics(self, http: web.Request) -> web.Response:
        self.num_polls += 1
        await asyncio.sleep(self.metrics_pause_s)
        page = self.metrics_page
        if page is None:
            page = "".join(f"{name} {value}\n" for name, value in self.counts.items())
        body = page.encode() if isinstance(page, str) else page
        return web.Response(status=self.metrics_status, body=body, content_type="text/plain")

    async def _models(self, http: web.Request) -> web.Response:
        self.num_listed += 1
        key = http.headers.get("Authorization")
        self.list_keys.append(key)
        await self.lists.wait()
        body = b'{"data": [ {"id" : "m"} ]}'
        if self.keys and key not in self.keys:
            return error(401, "Unauthorized")
        models = self.keys.get(key or "") or self.models
        if models is not None:
            body = json.dumps({"data": models}).encode()
        return web.Response(body=body, content_type="application/json")

    async def _tokenize(self, http: web.Request) -> web.Response:
        seen = Seen(http.path, CIMultiDict(http.headers), await http.read())
        self.tokenized.append(seen)
        await self.tokenizes.wait()
        if self.tokenize is None:
            return error(404, "Not Found")
        tokens = self.tokenize(seen)
        if isinstance(tokens, web.Response):
            return tokens
        return web.json_response({"count": len(tokens), "max_model_len": 1, "tokens": tokens})

    async def _render(self, http: web.Request) -> web.Response:
        seen = Seen(http.path, CIMultiDict(http.headers), await http.read())
        self.tokenized.append(seen)
        await self.tokenizes.wait()
        if self.tokenize is None:
            return error(404, "Not Found")
        tokens = self.tokenize(seen)
        if isinstance(tokens, web.Response):
            return tokens
        return web.json_response({"request_id": "r", "token_ids": tokens, "features": None})

    async def _other(self, http: web.Request) -> web.Response:
        path = http.rel_url.raw_path_qs
        self.others.append(Seen(path, CIMultiDict(http.headers), await http.read()))
        return self.other(self.others[-1])

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        request_id = http.headers.get("X-Request-Id", "")
        admitted = False
        raw = await http.read()
        seen = Seen(http.path, CIMultiDict(http.headers), raw)
        self.seen.append(seen)
        try:
            await asyncio.sleep(self.admission_s)
            await self.admitting.wait()
            admitted = True
            if self.script is not None:
                return await self.script(self, seen, http)
            return await self.answer(seen, http)
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            raise
        finally:
            if admitted and not seen.is_rejected:
                self.tell_lender(seen)
                if self.boot is not None and "stream" in seen.ours and seen.stream is None:
                    # Prefill's, however it ended; what it has lent is known before.
                    self.leases.end_stream(self.boot, seen.ours["stream"], None)

    def tell_lender(self, seen: Seen) -> None:
        """The request is over, however it ended: its blocks are not needed."""
        params = seen.params
        if seen.stream is not None:
            self.leases.end_reader(seen.stream)
        self.leases.held.discard(params.get("lease"))
        self.leases.held.discard(seen.source.get("lease"))

    async def answer(self, seen: Seen, http: web.Request) -> web.StreamResponse:
        body = seen.body
        if self.checks_names and body.get("model", MODEL) != MODEL:
            return error(404, f"The model `{body['model']}` does not exist.")
        if "lend" in seen.ours:
            return self.prefix_answer(seen.ours["lend"])
        if seen.params.get("do_remote_prefill") and not await self.pull(seen):
            return error(500, "Internal server error")
        if seen.params.get("do_remote_decode"):
            await self.computes.wait()
            return self.prefill_answer(seen)
        if body.get("stream"):
            return await self.stream(http)
        return web.Response(body=ANSWER, content_type="application/json")

    async def pull(self, seen: Seen) -> bool:
        """What is lent, as a real engine does before it answers; False if the request fails.

        Where it does not, a prompt that was not pulled is computed.
        """
        if seen.stream is not None:
            causes = await self.follow(seen, seen.stream)
        else:
            causes = self._why_not_pulled(seen, seen.params.get("lease"))
        if seen.has_one_token:  # there is nothing to pull
            return True
        is_begun = not NOT_BEGUN.intersection(causes)
        self.counts.update(causes or (PULLS,))
        self.counts[FAILED] += bool(causes) and is_begun
        return self.policy == "recompute" or not (causes and is_begun)

    async def follow(self, seen: Seen, stream: tuple[str, str]) -> tuple[str, ...]:
        """Wait for what a stream becomes; counters of causes if the prompt is computed."""
        self.leases.followed.append(stream)
        lent = self.leases.stream_of(*stream)
        self.leases.readers[stream] += 1
        if seen.has_one_token:
            return ()
        if stream[0] not in self.leases.boots:
            return GONE, UNREACHABLE
        try:
            async with asyncio.timeout(self.parks_s):
                lease = await asyncio.shield(lent)
        except TimeoutError:
            return GONE, UNKNOWN
        return (GONE, ABORTED) if lease is None else self._why_not_pulled(seen, lease)

    def _why_not_pulled(self, seen: Seen, lease: str | None) -> tuple[str, ...]:
        """Counters of causes; none if the prompt is pulled."""
        if self.pull_fails is not None:
            return (self.pull_fails,)
        known = self.leases.prompts.get(lease or "")
        if known not in (None, seen.prompt):
            return (MISTAKEN,)
        if lease in self.leases.held:
            return ()
        return (UNKNOWN if known is None else USED,)

    def prefill_answer(self, seen: Seen | None = None) -> web.Response:
        """The ticket of a new lease; without ``seen`` it is for any prompt."""
        asked = () if seen is None else (seen.ours.get("stream"), seen.prompt)
        ticket = self.leases.grant(self.boot, *asked) if self.lends else "null"
        usage = "" if self.usage is None else f'"usage": {json.dumps(self.usage)}, '
        if self.cached_tokens is not None:
            details = json.dumps({"cached_tokens": self.cached_tokens})
            usage = f'"usage": {{"prompt_tokens_details": {details}}}, '
        choices = '"choices": [{"text": "a"}]'
        text = f'{{"id": "x", {choices}, {usage}"kv_transfer_params": {ticket}}}'
        return web.Response(text=text, content_type="application/json")

    def prefix_answer(self, num_tokens: int) -> web.Response:
        """A ticket for a prefix, or a refusal where less is held."""
        self.lent_tokens.append(num_tokens)
        if not self.lends:
            params = "null"
        elif self.held_tokens is not None and self.held_tokens < num_tokens:
            params = json.dumps({"pdconn": {"lend": num_tokens, "held": self.held_tokens}})
        else:
            params = self.leases.grant()
        text = f'{{"id": "x", "choices": [{{"text": "a"}}], "kv_transfer_params": {params}}}'
        return web.Response(text=text, content_type="application/json")

    async def stream(self, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Own": "1"})
        await response.prepare(http)
        chunks = CHUNKS if self.num_chunks is None else (b"data: t\n\n",) * self.num_chunks
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(self.chunk_pause_s)
        await response.write_eof()
        return response


def error(status: int, message: str) -> web.Response:
    """An error as vLLM writes it."""
    body = {"error": {"message": message, "type": "X", "param": None, "code": status}}
    return web.json_response(body, status=status)


async def reset(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
    """A script: the engine dies with the request in its hands."""
    http.transport.abort()
    return web.Response()


async def die_in_stream(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
    """A script: the engine dies after two chunks."""
    response = web.StreamResponse()
    await response.prepare(http)
    for chunk in CHUNKS[:2]:
        await response.write(chunk)
        await asyncio.sleep(0.02)
    http.transport.abort()
    return response


async def hang(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
    """A script: the engine computes until its client leaves."""
    await asyncio.sleep(60)
    return web.Response()


def stream_of(*events: dict[str, Any], pause_s: float = 0.0) -> Script:
    """A script: a stream of these events, as vLLM writes them, and its end."""

    async def script(engine: FakeEngine, seen: Seen, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for event in events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            await asyncio.sleep(pause_s)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    return script
