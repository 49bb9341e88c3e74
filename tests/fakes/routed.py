"""A router over fake engines whose events travel over real sockets, hashed as vLLM hashes."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pdconn.router.prefix.hashing import NOTHING, Extras, HashScheme, chain, external
from pdconn.router.routing.decide import RequestRouter
from pdconn.router.routing.policy import Decision, PrefixAware
from pdconn.router.routing.routed_request import Outcome
from pdconn.tools.lab.ports import free_ports
from tests.fakes.deployment import Deployment, deployment
from tests.fakes.event_loop import until
from tests.fakes.fake_engine import ANSWER, FakeEngine, error
from tests.router.events.publisher import Publisher

SCHEME = HashScheme("sha256_cbor", 16)
PROMPT = list(range(1000, 1320))
ASKED = [*PROMPT, 7]  # an engine computes the last token of a prompt, whatever it holds


def other_prompt(number: int) -> list[int]:
    return list(range(10_000 * number, 10_000 * number + 320))


@dataclass
class Pod:
    """A rank of an engine that says what it holds."""

    name: str
    ports: tuple[int, int]
    publisher: Publisher

    async def store(
        self, prompt: list[int], extras: Extras = NOTHING, group: int = 0, **fields: Any
    ) -> None:
        hashes = [external(full) for full in chain(SCHEME, prompt, extras)]
        defaults = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": prompt,
            "block_size": SCHEME.block_tokens,
            "medium": "GPU",
            "extra_keys": None if extras == NOTHING else [["a key"]] * len(hashes),
            "group_idx": group,
            "kv_cache_spec_kind": "full_attention",
        }
        await self.publisher.publish({**defaults, **fields})

    async def remove(self, prompt: list[int], blocks: slice = slice(None), group: int = 0) -> None:
        hashes = [external(full) for full in chain(SCHEME, prompt)][blocks]
        await self.publisher.publish(
            {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": group}
        )


@dataclass(frozen=True)
class Routed:
    """What was decided for a request, and how it ended."""

    decision: Decision
    outcome: Outcome

    def hit_tokens(self, engine: str) -> int:
        return self.decision.hit_tokens(engine)

    @property
    def alone(self) -> bool:
        return self.decision.ranking.alone

    @property
    def unknown(self) -> str | None:
        return self.decision.unknown

    @property
    def prefill(self) -> str | None:
        return self.outcome.prefill

    @property
    def decode(self) -> str | None:
        return self.outcome.decode

    @property
    def cached_tokens(self) -> int | None:
        return self.outcome.cached_tokens


@dataclass
class Fleet(Deployment):
    """A deployment whose engines publish."""

    pods: dict[str, Pod] = field(default_factory=dict)

    def pod(self, engine: FakeEngine, rank: int = 0) -> Pod:
        return self.pods[engine.url if rank == 0 else f"{engine.url}#{rank}"]

    def of_pod(self, what: str, pod: Pod) -> float | None:
        labels = {"pod": pod.name}
        return self.proxy.metrics.registry.get_sample_value(f"pdconn_router_pod_{what}", labels)

    def of_router(self, name: str, /, **labels: str) -> float | None:
        return self.proxy.metrics.registry.get_sample_value(f"pdconn_router_{name}", labels)

    async def events_applied(self) -> None:
        """Wait until every pod's events so far are in the index."""

        def all_of_them() -> bool:
            counts = [self.of_pod("events_total", pod) for pod in self.pods.values()]
            return counts == [pod.publisher.seq for pod in self.pods.values()]

        await until(all_of_them)

    @property
    def router(self) -> RequestRouter:
        return self.proxy.router

    @property
    def routed(self) -> Routed:
        """The newest request."""
        return Routed(*next(self.router.decisions.newest()))

    async def ask(self, prompt: Any = None, **body: Any) -> Routed:
        reply = await self.complete(prompt=ASKED if prompt is None else prompt, **body)
        assert (reply.status, reply.body) == (200, ANSWER)
        return self.routed

    async def chat(self, content: Any, **body: Any) -> Routed:
        messages = [{"role": "user", "content": content}]
        reply = await self.complete("/v1/chat/completions", messages=messages, **body)
        assert (reply.status, reply.body) == (200, ANSWER)
        return self.routed


@asynccontextmanager
async def fleet(
    num_prefill: int = 2,
    num_decode: int = 1,
    ranks: int = 1,
    publish: bool = True,
    **settings: Any,
) -> AsyncIterator[Fleet]:
    """Engines that publish (prefill ones ``ranks`` times) and a router that knows of them."""
    pods: dict[str, Pod] = {}
    order = itertools.count()

    def word(engine: FakeEngine) -> str:
        mine = ranks if next(order) < num_prefill else 1
        if not publish:
            return engine.url
        # Events of each rank, then its replays.
        ports = free_ports(2 * mine, in_a_row=True)
        for rank in range(mine):
            name = engine.url if rank == 0 else f"{engine.url}#{rank}"
            pair = ports[rank], ports[mine + rank]
            pods[name] = Pod(name, pair, Publisher(pair))
        host = "tcp://{host}:"
        return f"{engine.url},events={host}{ports[0]},replay={host}{ports[mine]},ranks={mine}"

    settings = {"policy": PrefixAware.name, **settings}
    try:
        async with deployment(num_prefill, num_decode, word, **settings) as d:
            made = Fleet(d.prefill, d.decode, d.leases, d.proxy, d.client, pods)
            for engine in (*d.prefill, *d.decode):
                engine.checks_names = False
            await until(lambda: all(made.of_pod("complete", pod) for pod in pods.values()))
            yield made
            await until(lambda: not len(made.router.loads.inflight))  # every table drains
    finally:
        for pod in pods.values():
            await pod.publisher.die()


def num_asked(engines: list[FakeEngine]) -> list[int]:
    return [len(engine.seen) for engine in engines]


def letters(seen: Any) -> list[int]:
    """A tokenizer: a letter is a token, a chat its messages' letters."""
    body = seen.body
    text = body["prompt"] if "prompt" in body else json.dumps(body["messages"])
    return [ord(letter) for letter in text]


async def refuse(engine, seen, http):
    return error(400, "the engine's own words")
