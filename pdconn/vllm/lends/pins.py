"""Blocks that leases pin in vLLM's block pool: one reference for each block of each lease.

Prompts are lent because a decode engine waits for them.  Prefixes and answers may never be read, so
their blocks are bounded (:class:`LentShare`), and their leases *yield*, the oldest first: to later
leases of their kind, and to requests that lack blocks.  A lease that yields is aborted: it ends at
once, or with its readers if it has claims.  The lease of a prompt yields to a request that lacks
blocks if it was not claimed in time.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pdconn.vllm.patches.pool.pinned_blocks import is_used_by_others, pin_blocks, unpin_blocks


class LeaseKind(StrEnum):
    """A lease is of a whole prompt, of a prefix, or of prompt and answer."""

    PROMPT = "prompt"
    PREFIX = "prefix"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class LentShare:
    """The bounds of leases of a kind.

    Attributes:
        share: of the engine's blocks that they may pin.
        most: their number.
    """

    share: float
    most: float = math.inf


PREFIXES = LentShare(share=0.5, most=16)
"""The bounds of prefixes.  Each is pulled as soon as its request ends."""

PREFIX_LEASE_S = 5.0
"""The longest lease of a prefix: its reader claims it at once, or has computed it by then."""

UNCLAIMED = 1 / 3
"""Share of a lease after which an unclaimed prompt yields to a request that lacks blocks."""


class LeasePins:
    """Pinned blocks, by the request that has a lease.  Only on the engine's thread.

    A request is in it until the report of its lease's end is taken, also one of which no block is
    pinned yet, so that a lease of the same name cannot be taken for it.

    Args:
        shares: bounds of the kinds that have some, and whose leases yield.
    """

    def __init__(self, shares: Mapping[LeaseKind, LentShare]) -> None:
        self._pool: Any = None
        self._shares = shares
        self._blocks: dict[str, list[Any]] = {}
        self._lent: dict[LeaseKind, dict[str, float]] = {kind: {} for kind in LeaseKind}
        self._young: deque[tuple[float, str]] = deque()
        self._leases_of: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._blocks

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self._blocks.values())

    def count_leases(self, kind: LeaseKind) -> int:
        """Leases of a kind that have not yielded."""
        return len(self._lent[kind])

    @property
    def num_blocks(self) -> int:
        """Pinned blocks; one that several leases pin counts once."""
        return len(self._leases_of)

    @property
    def num_yielding(self) -> int:
        """Blocks of leases that may yield; one that several leases pin counts for each."""
        return sum(len(self._blocks[name]) for kind in self._shares for name in self._lent[kind])

    def bind_gpu_block_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool, to pin blocks in."""
        self._pool = block_pool

    def is_pool_used_by_others(self, ours: Iterable[list[Any]]) -> bool:
        """Whether blocks have references besides leases and ``ours``; vLLM refuses resets then."""
        return is_used_by_others(self._pool, (*self, *ours))

    def may_pin(self, kind: LeaseKind, num_blocks: int) -> bool:
        """Whether a lease of ``num_blocks`` blocks is within the share of its kind."""
        share = self._shares.get(kind)
        return share is None or num_blocks <= share.share * self._pool.num_gpu_blocks

    def pin(
        self, request_id: str, block_ids: Iterable[Iterable[int]], kind: LeaseKind, now: float
    ) -> list[str]:
        """Pin the blocks of a request that is lent, by group, without holes.

        Blocks that :meth:`pin_more` has pinned for it stay pinned.

        Returns:
            Requests of earlier leases of this kind, which yield.
        """
        self.pin_more(request_id, (block for ids in block_ids for block in ids if block))
        self._lent[kind][request_id] = now
        if kind is LeaseKind.PROMPT:
            self._young.append((now, request_id))
            self._forget_ended()
        return self._over_the_share(kind)

    def pin_more(self, request_id: str, block_ids: Iterable[int]) -> None:
        """Pin further blocks of a request, which is still being computed or is lent now."""
        blocks = pin_blocks(self._pool, block_ids)
        self._blocks.setdefault(request_id, []).extend(blocks)
        self._leases_of.update(block.block_id for block in blocks)

    def unpin_lease(self, request_id: str) -> None:
        """Unpin the blocks of a freed lease: tail first, so that prefixes stay cached longest."""
        blocks = self._blocks.pop(request_id)
        for lent in self._lent.values():
            lent.pop(request_id, None)
        for block in blocks:
            self._leases_of[block.block_id] -= 1
            if not self._leases_of[block.block_id]:
                del self._leases_of[block.block_id]
        unpin_blocks(self._pool, blocks)

    def unpin_all(self) -> None:
        """Unpin the blocks of every lease."""
        for request_id in list(self._blocks):
            self.unpin_lease(request_id)

    def give_way_all(self, kind: LeaseKind) -> list[str]:
        """Let all leases of a kind yield; returns their requests."""
        ended = list(self._lent[kind])
        self._lent[kind].clear()
        return ended

    def give_way(self, num_blocks: int) -> list[str]:
        """Let the oldest leases yield until ``num_blocks`` are free; returns their requests."""
        lent = [(at, name, kind) for kind in self._shares for name, at in self._lent[kind].items()]
        ended = []
        for _, name, kind in sorted(lent):
            if num_blocks <= 0:
                break
            num_blocks -= len(self._blocks[name])
            del self._lent[kind][name]
            ended.append(name)
        return ended

    def older_than(self, seconds: float, now: float) -> list[str]:
        """Requests of prompts that were lent for longer than ``seconds``; each is returned once."""
        found = []
        while self._young and now - self._young[0][0] > seconds:
            at, name = self._young.popleft()
            if self._lent[LeaseKind.PROMPT].get(name) == at:  # else its name is used again
                found.append(name)
        return found

    def _forget_ended(self) -> None:
        while self._young and self._young[0][1] not in self._blocks:
            self._young.popleft()

    def _over_the_share(self, kind: LeaseKind) -> list[str]:
        share, lent = self._shares.get(kind), self._lent[kind]
        if share is None:
            return []
        pinned = sum(len(self._blocks[name]) for name in lent)
        ended: list[str] = []
        while pinned > share.share * self._pool.num_gpu_blocks or len(lent) > share.most:
            name = next(iter(lent))
            del lent[name]
            pinned -= len(self._blocks[name])
            ended.append(name)
        return ended
