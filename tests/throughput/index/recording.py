"""Mooncake's trace as the event batches of engines, and the look-ups between them.

An id of the trace is a block of 512 tokens with all before it, so it stands for ``512 / 16``
blocks whose hashes follow from it.  Each pod has two caches, one for each KV cache group, whose
least recently used blocks are evicted::

    full attention   the blocks of the prompt after the pod's hit are stored
    window           the same blocks, and those of the hit's last window that are evicted already;
                     a cache of a quarter

An engine would compute such a window again with its full attention, and store second copies of
those blocks, which only our index counts.  They are left out, so that all indexes hold the same.

A request goes to the pod that got its longest known prefix, one of four to any.  Answers have no
ids in the trace and are left out.  A batch is a step of at most ``STEP_BLOCKS`` blocks, encoded as
vLLM does: evictions first, one event for each block.  Dynamo's index takes JSON, of full attention
only; evictions that follow on one another are one event, which is cheaper for it.
"""

from __future__ import annotations

import json
import pickle
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdconn.tools.plan.store.curve import TracedRequest

BLOCK_TOKENS = 16
TRACE_TOKENS = 512
STEP_BLOCKS = 512
"""Blocks of a step: vLLM's 8192 batched tokens."""
WINDOW = 1024
VOCABULARY = 128_000
FULL, WINDOWED = 0, 1
"""The groups."""


@dataclass(frozen=True)
class Fleet:
    """The engines: ``num_blocks`` are of one pod's full attention, ``seed`` of their choice."""

    pods: int = 16
    num_blocks: int = 20_000
    seed: int = 1

    @property
    def window_blocks(self) -> int:
        """Blocks of one pod's window group."""
        return self.num_blocks // 4


@dataclass(frozen=True)
class Step:
    """What happens in order: a look-up, then what its prefill publishes.

    Attributes:
        pod: the number of the pod that computes the prompt.
        num_tokens: of the prompt.
        hashes, local: of the prompt's blocks: with all blocks before, and of each by itself.
        batches: vLLM's payloads of both groups, and of full attention alone.
        events: Dynamo's events of full attention.
        stored, removed: blocks by group.
        matches: leading blocks of full attention by pod before the request, without pods that
            hold none.
    """

    pod: int
    num_tokens: int
    hashes: list[int]
    local: list[int]
    batches: tuple[list[bytes], list[bytes]]
    events: list[bytes]
    stored: tuple[int, int]
    removed: tuple[int, int]
    matches: dict[int, int]


class _Cache:
    """The blocks of one group of a pod, the least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def add_blocks(self, hashes: Iterable[int]) -> list[int]:
        """Stores new blocks; returns those that are evicted for them."""
        for one in hashes:
            self.blocks[one] = None
        more = len(self.blocks) - self._num_blocks
        return [self.blocks.popitem(last=False)[0] for _ in range(more)]

    def touch_blocks(self, hashes: Sequence[int]) -> None:
        """As vLLM frees a request: its last block is evicted before its first."""
        for one in reversed(hashes):
            if one in self.blocks:
                self.blocks.move_to_end(one)

    def num_leading(self, hashes: Sequence[int]) -> int:
        """Leading blocks that are held."""
        for number, one in enumerate(hashes):
            if one not in self.blocks:
                return number
        return len(hashes)


def steps(requests: Iterable[TracedRequest], fleet: Fleet) -> Iterator[Step]:
    """The requests of a trace in order, as they come to the fleet."""
    rng = random.Random(fleet.seed)
    tokens = np.random.default_rng(fleet.seed)
    caches = [(_Cache(fleet.num_blocks), _Cache(fleet.window_blocks)) for _ in range(fleet.pods)]
    last_pod: dict[int, int] = {}
    for request in requests:
        keys = _keys(request)
        if not len(keys):
            continue
        hashes, local = _mixed(keys, 1), _mixed(keys, 2)
        pod = _pod_for(request, last_pod, rng, fleet.pods)
        last_pod.update(dict.fromkeys(request.ids[1:], pod))
        leading = {place: full.num_leading(hashes) for place, (full, _) in enumerate(caches)}
        writer = _Writer(hashes, local, tokens)
        full, window = caches[pod]
        full.touch_blocks(hashes)
        window.touch_blocks(hashes)
        begin = leading[pod]
        tail = hashes[max(0, begin - WINDOW // BLOCK_TOKENS) : begin]
        again = [one for one in tail if one not in window.blocks]
        while begin < len(hashes) or again:
            fresh = hashes[begin : begin + STEP_BLOCKS]
            gone = (full.add_blocks(fresh), window.add_blocks(again + fresh))
            writer.add_step(begin, fresh, again, gone)
            begin, again = begin + len(fresh), []
        full.touch_blocks(hashes)
        window.touch_blocks(hashes[-(WINDOW // BLOCK_TOKENS) :])
        matches = {place: number for place, number in leading.items() if number}
        yield writer.step(pod, request.num_tokens, matches)


def save(recorded: Iterable[Step], path: Path) -> None:
    """Write steps as plain tuples, which need no package to be read."""
    rows = [
        (
            one.pod, one.num_tokens, one.hashes, one.local, one.batches, one.events,
            tuple(map(sum, zip(one.stored, one.removed, strict=True))), one.matches,
        )
        for one in recorded
    ]  # fmt: skip
    path.write_bytes(pickle.dumps(rows))


class _Writer:
    """Collects the events of one request in both forms."""

    def __init__(self, hashes: list[int], local: list[int], rng: np.random.Generator) -> None:
        self._hashes, self._local = hashes, local
        self._rng = rng
        self._batches: tuple[list[bytes], list[bytes]] = ([], [])
        self._events: list[bytes] = []
        self._stored, self._removed = [0, 0], [0, 0]

    def add_step(
        self, first: int, fresh: list[int], again: list[int], gone: tuple[list[int], list[int]]
    ) -> None:
        """Blocks from ``first`` on are stored in both groups, ``again`` in the window group."""
        upto = first + len(fresh)
        parent = self._hashes[first - 1] if first else None
        number = len(fresh) * BLOCK_TOKENS
        tokens = self._rng.integers(VOCABULARY, size=number).tolist()
        by_group: list[list[object]] = []
        for group, evicted in enumerate(gone):
            events = [_removed(one, group) for one in evicted]
            if group == WINDOWED and again:
                events.append(_stored(again, None, tokens[: len(again) * BLOCK_TOKENS], group))
            if fresh:
                events.append(_stored(fresh, parent, tokens, group))
            by_group.append(events)
            self._stored[group] += len(fresh)
            self._removed[group] += len(evicted)
        self._stored[WINDOWED] += len(again)
        both, alone = self._batches
        both.append(msgspec.msgpack.encode([1.0, by_group[FULL] + by_group[WINDOWED], 0]))
        if by_group[FULL]:
            alone.append(msgspec.msgpack.encode([1.0, by_group[FULL], 0]))
        if gone[FULL]:
            self._add_event({"removed": {"block_hashes": gone[FULL]}})
        if fresh:
            pairs = zip(fresh, self._local[first:upto], strict=True)
            blocks = [{"block_hash": one, "tokens_hash": local} for one, local in pairs]
            self._add_event({"stored": {"parent_hash": parent, "blocks": blocks}})

    def step(self, pod: int, num_tokens: int, matches: dict[int, int]) -> Step:
        """The request as recorded."""
        return Step(
            pod, num_tokens, self._hashes, self._local, self._batches, self._events,
            (self._stored[FULL], self._stored[WINDOWED]),
            (self._removed[FULL], self._removed[WINDOWED]), matches,
        )  # fmt: skip

    def _add_event(self, data: object) -> None:
        event = {"event_id": len(self._events), "data": data, "dp_rank": 0}
        self._events.append(json.dumps(event, separators=(",", ":")).encode())


def _stored(hashes: list[int], parent: int | None, tokens: list[int], group: int) -> object:
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
        "token_ids": tokens, "block_size": BLOCK_TOKENS, "lora_id": None, "medium": "GPU",
        "lora_name": None, "group_idx": group,
        "kv_cache_spec_kind": "sliding_window" if group == WINDOWED else "full_attention",
        "kv_cache_spec_sliding_window": WINDOW if group == WINDOWED else None,
    }  # fmt: skip


def _removed(block: int, group: int) -> object:
    return {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": group}


def _keys(request: TracedRequest) -> NDArray[np.uint64]:
    """A number for each whole block of the prompt; equal ones are equal prefixes."""
    each = TRACE_TOKENS // BLOCK_TOKENS
    ids = np.asarray(request.ids, np.uint64)
    keys = (ids[:, None] * np.uint64(each) + np.arange(each, dtype=np.uint64)).reshape(-1)
    return keys[: request.num_tokens // BLOCK_TOKENS]


def _mixed(keys: NDArray[np.uint64], salt: int) -> list[int]:
    """Splitmix64 of each key: a bijection, so that different keys have different hashes."""
    mixed = keys * np.uint64(4) + np.uint64(salt)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: list[int] = (mixed ^ (mixed >> np.uint64(31))).tolist()
    return found


def _pod_for(
    request: TracedRequest, last_pod: dict[int, int], rng: random.Random, pods: int
) -> int:
    if rng.random() >= 0.25:
        for one in reversed(request.ids[1:]):
            if one in last_pod:
                return last_pod[one]
    return rng.randrange(pods)
