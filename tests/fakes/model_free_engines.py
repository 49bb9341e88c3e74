"""A prefill and a decode engine without a model: their tokens are a function of their KV.

::

    kv_of(n)      what request n's KV is, on any engine that computes it
    answer(kv)    the tokens that a model would make of it
    Prefill       a small pool of blocks, lent by a real Lender, reused at once
    Decode        a real Puller; what fails is recomputed

So a wrong token is one that ``answer(kv_of(n))`` does not have, whatever went wrong below.
Blocks of decode are blank before a pull, so that afterwards one can tell what landed in them.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Self

import numpy as np

from pdconn.lender.server import Lender
from pdconn.lifecycle.pull import Patience
from pdconn.planning.plan import Need
from pdconn.protocol.messages import RankGeometry, Welcome
from pdconn.protocol.ticket import BlockList, Ticket
from pdconn.puller.commands import ClaimTicket, ReadBlocks
from pdconn.puller.peers import Rank
from pdconn.puller.thread import Puller
from pdconn.sidechannel.security import Security
from registration.references import AttentionKind, GroupMemory, build_kv_cache_references
from tests.fakes.layouts import layout_memory
from transport.base import Transport

PER_REQUEST = 3
"""Blocks of a request."""

TRAITS = {"model": "tiny"}
_LAYERS, _HEADS, _BLOCK_TOKENS, _TOKEN_NBYTES = ("a", "b"), 2, 4, 8
ROW_NBYTES = len(_LAYERS) * _HEADS * _BLOCK_TOKENS * _TOKEN_NBYTES
NUM_TOKENS = PER_REQUEST * _BLOCK_TOKENS

Tokens = tuple[int, ...]


def kv_of(number: int) -> bytes:
    """The KV of request ``number``."""
    return hashlib.shake_128(b"%d" % number).digest(PER_REQUEST * ROW_NBYTES)


def answer(kv: bytes) -> Tokens:
    """The tokens that decode makes of ``kv``; one byte of it changes them all."""
    return struct.unpack("<8H", hashlib.blake2b(kv, digest_size=16).digest())


class Cache:
    """``num_blocks`` blocks, each in one piece; block 0 is unused."""

    def __init__(self, num_blocks: int) -> None:
        self.rows = np.zeros((num_blocks, ROW_NBYTES), dtype=np.uint8)
        layers = layout_memory(
            "BHLNC",
            base=self.rows.ctypes.data,
            num_blocks=num_blocks,
            layers=_LAYERS,
            num_heads=_HEADS,
            block_tokens=_BLOCK_TOKENS,
            token_nbytes=_TOKEN_NBYTES,
        )
        group = GroupMemory(AttentionKind.FULL, None, _BLOCK_TOKENS, layers)
        self.references = build_kv_cache_references([group])

    def write(self, blocks: Iterable[int], kv: bytes) -> None:
        rows = np.frombuffer(kv, np.uint8).reshape(-1, ROW_NBYTES)
        for block, row in zip(blocks, rows, strict=True):
            self.rows[block] = row

    def read(self, blocks: Iterable[int]) -> bytes:
        return self.rows[list(blocks)].tobytes()


class Prefill:
    """Lends ``pool`` blocks for ``ttl_s`` a time, oldest free block first.

    Args:
        transport: owned from now on.
        port: 0 picks a free one.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        pool: int = 24,
        ttl_s: float = 5.0,
        incarnation: str = "boot-1",
        port: int = 0,
        security: Security | None = None,
    ) -> None:
        self.cache = Cache(pool + 1)
        self.ended: Counter[str] = Counter()
        self.free = deque(range(1, pool + 1))
        self._ttl_s = ttl_s
        self._incarnation = incarnation
        self._lent: dict[str, tuple[int, ...]] = {}
        self._transport = transport
        transport.register(self.cache.references.memories())
        rank = RankGeometry(0, 0, transport.address(), self.cache.references)
        welcome = Welcome.in_our_version("prefill", incarnation, TRAITS, (rank,))
        self.lender = Lender(welcome, "127.0.0.1", port, security=security)

    @property
    def num_lent(self) -> int:
        """Requests whose blocks have not come back."""
        return len(self._lent)

    def compute(self, number: int, ttl_s: float | None = None) -> Ticket | None:
        """Compute request ``number`` and lend it; None when there is no room."""
        self.collect()
        if len(self.free) < PER_REQUEST:
            return None
        blocks = tuple(self.free.popleft() for _ in range(PER_REQUEST))
        self.cache.write(blocks, kv_of(number))
        request, lists = f"r{number}", (BlockList(0, blocks),)
        self._lent[request] = blocks
        ticket = Ticket(
            "prefill", self._incarnation, request, "127.0.0.1", self.lender.port,
            NUM_TOKENS, "prompt", lists,
        )  # fmt: skip
        self.lender.lend(request, ticket.digest(), ttl_s or self._ttl_s)
        return ticket

    def collect(self) -> None:
        """Take back what is free."""
        for freed in self.lender.take_freed():
            self.ended[freed.why] += 1
            self.free += self._lent.pop(freed.request)

    def close(self) -> None:
        self.lender.close()
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Decode:
    """Pulls into ``pool`` blocks; see the module for what it says of a request.

    Attributes:
        tokens: the answer to each request that ended.
        received: those whose KV was pulled and believed.
        rejected: those that were recomputed, and why.
        corrupted: of those, the ones whose blocks hold other bytes than they should: to
            believe them would have been wrong.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        pool: int = 96,
        patience: Patience | None = None,
        security: Security | None = None,
        through: Callable[[str, int], tuple[str, int]] | None = None,
    ) -> None:
        self.cache = Cache(pool + 1)
        transport.register(self.cache.references.memories())
        me = Rank("decode", 0, 1, 0, self.cache.references, TRAITS)
        self.puller = Puller(
            me, transport, patience=patience, security=security, through=through
        )  # fmt: skip
        self.free = deque(range(1, pool + 1))
        self.tokens: dict[int, Tokens] = {}
        self.received: set[int] = set()
        self.rejected: dict[int, str] = {}
        self.corrupted: set[int] = set()
        self.quarantined: set[int] = set()
        self._blocks: dict[int, tuple[int, ...]] = {}

    @property
    def num_open(self) -> int:
        """Requests that hold blocks."""
        return len(self._blocks)

    @property
    def has_room(self) -> bool:
        return len(self.free) >= PER_REQUEST

    @property
    def wrong(self) -> list[int]:
        """Requests that were answered otherwise than one engine alone would."""
        return [n for n, tokens in self.tokens.items() if tokens != answer(kv_of(n))]

    def pull(self, number: int, ticket: Ticket) -> None:
        """Request ``number`` arrives, and there is room for it."""
        blocks = tuple(self.free.popleft() for _ in range(PER_REQUEST))
        self.cache.write(blocks, bytes(PER_REQUEST * ROW_NBYTES))
        self._blocks[number] = blocks
        self.puller.post_command(ClaimTicket(str(number), f"decode/{number}", ticket))
        self.puller.post_command(
            ReadBlocks(str(number), Need.for_range(0, NUM_TOKENS, (BlockList(0, blocks),)))
        )

    def collect(self) -> None:
        """Answer what has ended."""
        outcome = self.puller.take_results()
        for name in outcome.received:
            number = int(name)
            self.received.add(number)
            self.tokens[number] = answer(self.cache.read(self._blocks[number]))
            self._give_back(number)
        for failed in outcome.failed:
            number = int(failed.request)
            self.rejected[number] = failed.reason
            self.tokens[number] = answer(kv_of(number))
            if failed.quarantined:
                self.quarantined.add(number)
            else:
                self._give_back(number)
        for name in outcome.released:
            self.quarantined.discard(int(name))
            self._give_back(int(name))

    def forget(self) -> None:
        """Drop what is known of requests that ended."""
        for known in (self.tokens, self.received, self.rejected, self.corrupted):
            known.clear()

    def _give_back(self, number: int) -> None:
        blocks = self._blocks.pop(number)
        landed = self.cache.read(blocks)
        if any(landed) and landed != kv_of(number):
            self.corrupted.add(number)
        self.free += blocks

    def close(self) -> None:
        self.puller.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def until(
    true: Callable[[], object], seconds: float = 20.0, shown: Callable[[], object] = str
) -> None:
    """Wait until ``true()`` is.

    Raises:
        AssertionError: it does not become true in time; ``shown()`` may say why.
    """
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up, f"waited {seconds} s: {shown()}"
        time.sleep(0.001)
