"""The router's view of the engines' prefix caches: KV events in, hits of a prompt out.

Each data-parallel rank of an engine is a pod of the index: rank 0 under the engine's name, the
others as ``name#rank``.  Unless configured, an engine's hash scheme is detected from the first
blocks that it stores, since these events carry the tokens; a prompt is hashed once per scheme.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile

from pdconn.router.events.subscriber import EventSource, Status
from pdconn.router.prefix.block_index import Index
from pdconn.router.prefix.chains import Chains, finish
from pdconn.router.prefix.detect import can_tell, detect
from pdconn.router.prefix.hashing import Extras, HashScheme
from pdconn.router.prefix.kv_events import Batch, Cleared, Stored
from pdconn.router.prefix.score import DEFAULT_WEIGHTS, NO_HIT, Hit, Prompt, Scorer

log = logging.getLogger(__name__)

REMEMBERED_TOKENS = 4_000_000
"""Tokens of recent prompts whose hashes are kept, so that only appended tokens are hashed."""
TRIES = 64
"""Stored events of one pod that are tried for detection before a warning is logged."""


@dataclass(frozen=True, slots=True)
class RankHit:
    """The hit of one data-parallel rank of an engine."""

    hit: Hit = NO_HIT
    rank: int = 0


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """The hits of a prompt.

    Attributes:
        prompts: the block hashes of the prompt, by hash scheme.
        pods: the hit of each pod.
        ranks: the ranks of each engine, longest hit first.
    """

    prompts: Mapping[HashScheme, Prompt]
    pods: Mapping[str, Hit]
    ranks: Mapping[str, tuple[RankHit, ...]]

    def best(self, engine: str | None) -> RankHit | None:
        """An engine's best hit; None if its cache is unknown."""
        ranks = self.ranks.get(engine or "")
        return ranks[0] if ranks else None


@dataclass(slots=True)
class Feed:
    """One pod's events: the source, the pod's hash scheme, and the subscriber's status."""

    source: EventSource
    scheme: HashScheme | None
    status: Status | None = None
    tries: int = field(default=0)


class PrefixCaches:
    """The index of cached blocks, kept up to date by KV events.

    Args:
        scheme: the hash scheme of every engine; None to detect it.
        seed: ``PYTHONHASHSEED`` of the engines, if set.
        weights: weight of a block by medium.
        eagle_groups, counts_copies: as for ``Index``.
    """

    def __init__(
        self,
        *,
        scheme: HashScheme | None = None,
        seed: str | None = None,
        weights: Mapping[str, float] = DEFAULT_WEIGHTS,
        eagle_groups: frozenset[int] = frozenset(),
        counts_copies: bool = True,
    ) -> None:
        self.index = Index(eagle_groups=eagle_groups, counts_copies=counts_copies)
        self.weights = weights
        self.feeds: dict[str, Feed] = {}
        self._scorer = Scorer(self.index, weights)
        self._scheme = scheme
        self._seed = seed
        self._chains: dict[HashScheme, Chains] = {}
        self._shared = 0

    # The sink of subscribers.

    def apply_batch(self, source: EventSource, batch: Batch) -> None:
        """Apply a pod's events."""
        name = pod_name(source)
        feed = self._feed(source)
        # To clear takes time for each block of the index, and what it clears need not be stored.
        cleared = [row for row, event in enumerate(batch.events) if isinstance(event, Cleared)]
        begin = cleared[-1] if cleared else 0
        for row, event in enumerate(batch.events):
            if feed.scheme is None and isinstance(event, Stored):
                self._detect(name, feed, event)
            if row >= begin:
                self.index.apply_event(name, event)
            elif isinstance(event, Stored):
                self.index.learn_from(name, event)
        if self.index.version != self._shared:
            self._share_groups()

    def drop_pod(self, source: EventSource, why: str) -> None:
        """Drop a pod's blocks and groups: the address may belong to another engine now."""
        name = pod_name(source)
        log.info("pdconn: prefix cache dropped from the index pod=%s why=%r", name, why)
        self.index.drop_pod(name)
        self.index.add_pod(name)
        feed = self._feed(source)
        feed.scheme, feed.tries = self._scheme, 0
        self._forget_chains()

    def status_changed(self, source: EventSource, status: Status) -> None:
        """Store the status of a pod's subscriber."""
        self._feed(source).status = status

    def forget_source(self, source: EventSource) -> None:
        """Remove the pod of an engine that left the fleet."""
        self.index.drop_pod(pod_name(source))
        self.feeds.pop(pod_name(source), None)
        self._forget_chains()

    def _forget_chains(self) -> None:
        """Drop the chains of schemes that are no longer in use."""
        known = self.schemes
        self._chains = {scheme: one for scheme, one in self._chains.items() if scheme in known}

    # Look-ups

    @property
    def schemes(self) -> list[HashScheme]:
        """The known hash schemes of the engines."""
        return list({feed.scheme: None for feed in self.feeds.values() if feed.scheme is not None})

    def has_several_ranks(self, engine: str) -> bool:
        """Whether an engine has data-parallel ranks beside rank 0."""
        return _pod_name(engine, 1) in self.feeds

    def ranks_of(self, engine: str) -> Sequence[int | None]:
        """The data-parallel ranks of an engine; None alone, which names none, for one of one."""
        if not self.has_several_ranks(engine):
            return (None,)
        return list(takewhile(lambda rank: _pod_name(engine, rank) in self.feeds, count()))

    def pods_by(self, scheme: HashScheme) -> list[str]:
        """The pods that use a scheme."""
        return [name for name, feed in self.feeds.items() if feed.scheme == scheme]

    def lookup(self, tokens: Sequence[int], extras: Extras) -> PrefixLookup:
        """The hits of a prompt."""
        return finish(self._lookup(tokens, extras))

    async def lookup_in_turns(self, tokens: Sequence[int], extras: Extras) -> PrefixLookup:
        """The hits of a prompt; hashing a long one yields to the event loop in between."""
        steps = self._lookup(tokens, extras)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found: PrefixLookup = end.value
                return found
            await asyncio.sleep(0)

    def _lookup(self, tokens: Sequence[int], extras: Extras) -> Generator[None, None, PrefixLookup]:
        prompts: dict[HashScheme, Prompt] = {}
        pods: dict[str, Hit] = {}
        for scheme in self.schemes:
            chains = self._chains.get(scheme)
            if chains is None:
                chains = self._chains[scheme] = Chains(scheme, max_tokens=REMEMBERED_TOKENS)
            hashes = yield from chains.hash_in_steps(tokens, extras)
            prompt = Prompt(hashes, len(tokens), scheme.block_tokens)
            prompts[scheme] = prompt
            for name, hit in self._scorer.score(prompt).items():
                if name in self.feeds and self.feeds[name].scheme == scheme:
                    pods[name] = hit
        return PrefixLookup(prompts, pods, self._ranks(pods))

    def _ranks(self, pods: Mapping[str, Hit]) -> dict[str, tuple[RankHit, ...]]:
        ranks: dict[str, list[RankHit]] = {}
        for name, hit in pods.items():
            source = self.feeds[name].source
            ranks.setdefault(source.engine, []).append(RankHit(hit, source.rank))
        return {
            engine: tuple(sorted(found, key=lambda one: (-one.hit.weighed_tokens, -one.hit.tokens)))
            for engine, found in ranks.items()
        }

    def _feed(self, source: EventSource) -> Feed:
        name = pod_name(source)
        feed = self.feeds.get(name)
        if feed is None:
            self.index.add_pod(name)
            feed = self.feeds[name] = Feed(source, self._scheme)
        return feed

    def _share_groups(self) -> None:
        """Copy group descriptions between pods with equal hashes, which therefore serve one model.

        An engine that has only pulled prompts may describe full attention alone in its events, as
        if it had no windows.  Pods with contradicting descriptions share nothing.
        """
        for scheme in self.schemes:
            names = self.pods_by(scheme)
            fullest = max((self.index.pods[name].groups for name in names), key=len)
            for name in names:
                known = self.index.pods[name].groups
                if known.items() <= fullest.items():
                    for group in fullest.keys() - known.keys():
                        self.index.learn_group(name, group, fullest[group])
        self._shared = self.index.version

    def _detect(self, name: str, feed: Feed, event: Stored) -> None:
        if feed.tries >= TRIES or not can_tell(event):
            return
        feed.scheme = detect(event, self._seed)
        if feed.scheme is not None:
            log.info("pdconn: detected the block hashes pod=%s scheme=%s", name, feed.scheme)
            return
        feed.tries += 1
        if feed.tries == TRIES:
            log.warning(
                "pdconn: no hash algorithm explains the blocks of this pod, so its prefix cache "
                "is ignored; do the engines run with PYTHONHASHSEED (--hash-seed), or with "
                "--prefix-caching-hash-algo xxhash? (warned once) pod=%s stores_tried=%d",
                name,
                TRIES,
            )


def pod_name(source: EventSource) -> str:
    """The name of an engine's rank in the index."""
    return _pod_name(source.engine, source.rank)


def _pod_name(engine: str, rank: int) -> str:
    return engine if rank == 0 else f"{engine}#{rank}"
