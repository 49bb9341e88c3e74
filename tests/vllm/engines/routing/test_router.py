"""The router's word against the engines': what it predicts is what they find cached.

Two real engines with prefix caching and a hybrid model, in caches so small that every few
prompts push others out, one hashing by pickle and one by CBOR.  Before each request the
router's own index is asked, fed by the engines' events over real sockets; then the engine
says how many tokens it had.  They must be equal, each time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from pdconn.router.events.caches import PrefixCaches, PrefixLookup
from pdconn.router.events.feeds import EventFeeds
from pdconn.router.fleet.member import Member, Role
from pdconn.router.prefix.block_index import Pod
from pdconn.router.prefix.groups import GroupSpec, Needs
from pdconn.router.prefix.hashing import Extras, HashScheme
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.lab.spec import SERVED_NAME, EngineSpec
from tests.forked.engines import running
from tests.vllm.engines.engines import cache_beside

BLOCK = 32
NUM_BLOCKS = 100
LONGEST = 700
NUM_REQUESTS = 80
END = (-1).to_bytes(8, "big", signed=True)
ALGORITHMS = ("sha256", "sha256_cbor")


@dataclass(frozen=True)
class Publisher:
    """An engine's ports."""

    engine: Engine
    member: Member


@pytest.fixture(scope="module")
def publishers(model: Path, work: Path) -> Iterator[list[Publisher]]:
    """Two engines that tell what they cache."""
    ports = free_ports(6)
    specs, members = [], []
    for number, algorithm in enumerate(ALGORITHMS):
        http, events, replay = ports[3 * number : 3 * number + 3]
        publishing = (
            '{"enable_kv_cache_events": true, "publisher": "zmq", '
            f'"endpoint": "tcp://*:{events}", "replay_endpoint": "tcp://*:{replay}"}}'
        )
        specs.append(
            EngineSpec(
                name=f"routed-{algorithm}",
                model=model,
                port=http,
                one_process=True,
                prefix_caching=True,
                num_blocks=NUM_BLOCKS,
                block_tokens=BLOCK,
                max_model_len=LONGEST + 68,
                args=(
                    "--enable-prompt-tokens-details",
                    "--prefix-caching-hash-algo",
                    algorithm,
                    "--kv-events-config",
                    publishing,
                ),
            )
        )
        members.append(
            Member(
                f"http://127.0.0.1:{http}",
                frozenset(Role),
                f"tcp://127.0.0.1:{events}",
                f"tcp://127.0.0.1:{replay}",
            )
        )
    with running(specs, work, cache=cache_beside(model)) as engines:
        yield [Publisher(engine, member) for engine, member in zip(engines, members, strict=True)]


@dataclass
class Asked:
    """One request, what was predicted of it and what came."""

    engine: str
    num_tokens: int
    predicted: int
    by_full_attention: int
    cached: int


@dataclass
class Conversations:
    """Requests that share, grow, repeat and differ."""

    rng: random.Random
    histories: list[list[int]] = field(default_factory=list)

    def next(self) -> tuple[list[int], str | None]:
        """Token ids, and a cache salt."""
        kind = self.rng.random()
        salt = "pepper" if self.rng.random() < 0.1 else None
        if not self.histories or kind < 0.25:
            length = self.rng.choice((31, 64, 100, 256, 333, LONGEST // 2, LONGEST))
            self.histories.append(self._words(length))
            return self.histories[-1], salt
        history = self.rng.choice(self.histories[-12:])
        if kind < 0.45:
            return history, salt
        if kind < 0.6:  # begins alike and goes on otherwise
            kept = history[: self.rng.randrange(len(history) + 1)]
            return [*kept, *self._words(self.rng.randint(1, 80))][:LONGEST], salt
        grown = [*history, *self._words(self.rng.choice((1, 17, 32, 90)))][:LONGEST]
        self.histories.append(grown)
        return grown, salt

    def _words(self, count: int) -> list[int]:
        return [self.rng.randrange(10, 2000) for _ in range(count)]


@dataclass(frozen=True)
class Answers:
    """Every request, and what the router knew of the engines in the end."""

    asked: list[Asked]
    schemes: dict[str, HashScheme | None]
    pods: dict[str, Pod]


async def ask_all(publishers: list[Publisher]) -> Answers:
    caches: PrefixCaches = PrefixCaches()
    feeding = EventFeeds(caches)
    feeding.fleet_changed([one.member for one in publishers])
    rng = random.Random(12)
    talking = Conversations(rng)
    asked: list[Asked] = []
    try:
        await _subscribed(feeding, publishers)
        for _ in range(NUM_REQUESTS // len(publishers)):  # of each, at the same time
            asked += await asyncio.gather(
                *(
                    _ask(caches, feeding, one, talking.next(), rng.randint(1, 40))
                    for one in publishers
                )
            )
        return Answers(
            asked,
            {name: feed.scheme for name, feed in caches.feeds.items()},
            {name: replace(pod) for name, pod in caches.index.pods.items()},
        )
    finally:
        await feeding.close()


async def _ask(
    caches: PrefixCaches,
    feeding: EventFeeds,
    one: Publisher,
    prompt: tuple[list[int], str | None],
    length: int,
) -> Asked:
    """Predict, ask, and wait for what the engine tells of it."""
    tokens, salt = prompt
    looked = caches.lookup(tokens, Extras(cache_salt=salt))
    cached = await asyncio.to_thread(_complete, one.engine, tokens, salt, length)
    made = Asked(
        one.engine.url,
        len(tokens),
        _hit(looked, one.engine.url),
        _by_full_attention(caches, looked, one.engine.url, len(tokens)),
        cached,
    )
    await _caught_up(feeding, one)
    return made


async def _subscribed(feeding: EventFeeds, publishers: list[Publisher]) -> None:
    """Wait until each engine's events arrive; a first prompt shows how it hashes."""
    for one in publishers:
        await asyncio.to_thread(_complete, one.engine, list(range(10, 110)), None, 1)
    async with asyncio.timeout(60):
        while not all(status.batches for status in feeding.statuses().values()):
            await asyncio.sleep(0.05)
    for one in publishers:
        await _caught_up(feeding, one)


async def _caught_up(feeding: EventFeeds, one: Publisher) -> None:
    """Wait until all events that an engine had published are applied."""

    def num_batches() -> int:
        return feeding.statuses()[one.engine.url].batches

    async with asyncio.timeout(60):
        published = await _published(one, num_batches())
        while num_batches() < published:
            await asyncio.sleep(0.01)


async def _published(one: Publisher, known: int) -> int:
    """How many batches an engine has published, of which so many are known.

    vLLM's publisher answers one question and sends one batch in turn, so once a second
    question brings nothing new there is no batch left that waits to be sent.
    """
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.linger = 0
        asking.connect(one.member.replay)
        alike = 0
        while alike < 2:
            before = known
            await asking.send_multipart((b"", known.to_bytes(8, "big")))
            while (number := (await asking.recv_multipart())[2]) != END:
                known = int.from_bytes(number, "big") + 1
            alike = alike + 1 if known == before else 1
        return known


def _complete(engine: Engine, tokens: list[int], salt: str | None, num_tokens: int) -> int:
    body: dict[str, Any] = {
        "model": SERVED_NAME,
        "prompt": tokens,
        "max_tokens": num_tokens,
        "ignore_eos": True,
    }
    if salt is not None:
        body["cache_salt"] = salt
    usage = Client(engine.url).post_json("/v1/completions", body)["usage"]
    return (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def _hit(looked: PrefixLookup, engine: str) -> int:
    best = looked.best(engine)
    return 0 if best is None else best.hit.tokens


def _by_full_attention(
    caches: PrefixCaches, looked: PrefixLookup, engine: str, num_tokens: int
) -> int:
    """What a router that knows no windows would predict: the prefix of group 0 alone."""
    scheme = caches.feeds[engine].scheme
    assert scheme is not None
    prompt = looked.prompts[scheme]
    (full,) = (
        group
        for group, spec in caches.index.pods[engine].groups.items()
        if spec.needs is Needs.WHOLE
    )
    held = set(caches.index.held_by(engine, prompt.hashes).get((full, "gpu"), []))
    prefix = next(
        (i for i, block in enumerate(prompt.hashes) if block not in held), len(prompt.hashes)
    )
    return min(prefix, (num_tokens - 1) // BLOCK) * BLOCK


@pytest.fixture(scope="module")
def answers(publishers: list[Publisher]) -> Answers:
    return asyncio.run(ask_all(publishers))


def test_what_is_predicted_is_what_the_engine_finds(answers: Answers) -> None:
    assert len(answers.asked) == NUM_REQUESTS
    assert [one for one in answers.asked if one.predicted != one.cached] == []


def test_the_requests_hit_and_miss_and_are_pushed_out(answers: Answers) -> None:
    """The law above is worth what happened below it."""
    assert sum(one.cached > 0 for one in answers.asked) > 20
    assert sum(one.cached == 0 and one.num_tokens > BLOCK for one in answers.asked) > 20
    assert len(answers.pods) == 2
    for name, pod in answers.pods.items():
        mine = [one for one in answers.asked if one.engine == name]
        stored = sum(one.num_tokens - one.cached for one in mine) // BLOCK
        assert stored > 2 * NUM_BLOCKS  # in the full group alone, so blocks were pushed out
        assert 0 < pod.num_blocks < NUM_BLOCKS
        assert pod.unknown_removals == 0


def test_a_router_that_knows_full_attention_only_is_wrong(answers: Answers) -> None:
    assert any(one.by_full_attention > one.cached for one in answers.asked)


def test_how_engines_hash_and_what_groups_they_have_is_found_out(
    publishers: list[Publisher], answers: Answers
) -> None:
    schemes = [answers.schemes[one.engine.url] for one in publishers]
    assert [scheme and scheme.algorithm for scheme in schemes] == list(ALGORITHMS)
    assert len(answers.pods) == len(publishers)
    for pod in answers.pods.values():
        kinds = [spec.kind for spec in pod.groups.values()]
        assert kinds.count("full_attention") == 1
        assert set(kinds) == {"full_attention", "sliding_window"}
        assert GroupSpec("sliding_window", 64, BLOCK) in pod.groups.values()
