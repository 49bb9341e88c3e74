"""The other side of one real engine: memory of the same geometry, over sockets and NIXL.

An engine writes a description of its KV to a file (``description_file``).  From that a
process without a model makes memory of the same shape.  It lends that memory, so that a decode
engine pulls as from a prefill engine, or pulls into it, so that a prefill engine is read and
freed as by a decode engine.  It uses processor time for moving bytes only.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from pdconn.lender.server import Lender
from pdconn.planning.plan import Need
from pdconn.protocol.messages import Described, RankGeometry, Welcome
from pdconn.protocol.ticket import BlockList, Ticket, parse_ticket, prompt_digest
from pdconn.puller.commands import ClaimTicket, ReadBlocks
from pdconn.puller.peers import Rank
from pdconn.puller.thread import Puller
from pdconn.tools.bench.transfer.arena import BenchMemory
from pdconn.tools.bench.transfer.paths import PATHS
from pdconn.tools.bench.transfer.workload import extent, placed
from pdconn.tools.lab.ports import LOCALHOST

TTL_S = 60.0
_PATIENCE_S = 30.0


def described(path: Path) -> Described:
    """What an engine of one rank wrote to its ``description_file``."""
    return msgspec.json.decode(path.read_bytes(), type=Described)


class Memory:
    """Memory of an engine's geometry, and a transport to it; closes both."""

    def __init__(self, like: Described, name: str) -> None:
        [rank] = like.ranks
        self.traits = like.traits
        self._open = ExitStack()
        arena = self._open.enter_context(BenchMemory(extent(rank.references), huge_pages=True))
        _fill(arena.memory.base, arena.memory.nbytes)
        self.references = placed(rank.references, arena.memory)
        self.transport = PATHS["auto"].open_transport(name)
        self.transport.register([arena.memory])
        self._ids = np.random.default_rng(5)

    def lists(self, num_tokens: int) -> tuple[BlockList, ...]:
        """Random blocks for a prompt: all of it in full groups, the tail in windowed ones."""
        lists = []
        for index, group in enumerate(self.references.groups):
            count = -(-num_tokens // group.block_tokens)
            first = 0
            if group.window is not None:
                first = max(0, num_tokens - 1 - group.window) // group.block_tokens
            highest = self.references.num_blocks(index)
            ids = 1 + self._ids.choice(highest - 1, count - first, replace=False)
            lists.append(BlockList(first, tuple(map(int, ids))))
        return tuple(lists)

    def close(self) -> None:
        """Free the memory, after the last read."""
        self._open.close()


class LendingPartner:
    """Lends random blocks for prompts that were never computed."""

    def __init__(self, like: Described) -> None:
        self._memory = Memory(like, "partner")
        self._numbers = itertools.count()
        rank = RankGeometry(0, 0, self._memory.transport.address(), self._memory.references)
        welcome = Welcome.in_our_version("partner", "boot", self._memory.traits, (rank,))
        self._lender = Lender(welcome, LOCALHOST, 0)

    def lend(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Lend as if ``prompt`` had been computed: the ``kv_transfer_params`` for decode."""
        self._lender.take_freed()
        request, lists = f"r{next(self._numbers)}", self._memory.lists(len(prompt))
        digest = prompt_digest(prompt)
        ticket = Ticket(
            "partner", "boot", request, LOCALHOST, self._lender.port, len(prompt), digest, lists
        )
        self._lender.lend(request, ticket.digest(), TTL_S)
        return ticket.to_params(1, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lender.close()
        self._memory.transport.close()
        self._memory.close()


class PullingPartner:
    """Pulls what tickets name, for many threads at once."""

    def __init__(self, like: Described) -> None:
        self._memory = Memory(like, "partner")
        self._numbers = itertools.count()
        me = Rank("partner", 0, 1, 0, self._memory.references, self._memory.traits)
        self._puller = Puller(me, self._memory.transport)
        self._ended: dict[str, str | None] = {}
        self._news = threading.Condition()

    def hold(self, params: Mapping[str, Any]) -> tuple[str, Need]:
        """Claim what a ticket names; pass the answer to :meth:`pull`."""
        request, ticket = f"r{next(self._numbers)}", parse_ticket(params)
        self._puller.post_command(ClaimTicket(request, f"partner/{request}", ticket))
        lists = tuple(
            BlockList(lent.first, ours.ids[-len(lent.ids) :])
            for lent, ours in zip(ticket.blocks, self._memory.lists(ticket.num_tokens), strict=True)
        )
        return request, Need.for_range(0, ticket.num_tokens - 1, lists)

    def pull(self, held: tuple[str, Need]) -> None:
        """Read it; returns once it is received.

        Raises:
            RuntimeError: it was not.
        """
        request, need = held
        self._puller.post_command(ReadBlocks(request, need))
        give_up = time.monotonic() + _PATIENCE_S
        with self._news:
            while request not in self._ended:
                outcome = self._puller.take_results()
                self._ended |= dict.fromkeys(outcome.received)
                self._ended |= {failed.request: failed.reason for failed in outcome.failed}
                if time.monotonic() > give_up:
                    raise RuntimeError(f"{request} was not pulled in {_PATIENCE_S} s")
                self._news.wait(0.002)
            self._news.notify_all()
            problem = self._ended.pop(request)
        if problem is not None:
            raise RuntimeError(f"{request} was not pulled: {problem}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._puller.close()
        self._memory.close()


def _fill(base: int, nbytes: int) -> None:
    """Small numbers, so that what a model computes from them is a number too."""
    floats = np.frombuffer((ctypes.c_char * nbytes).from_address(base), np.float32, nbytes // 4)
    floats[:] = np.resize(np.random.default_rng(3).normal(0.0, 0.1, 1 << 16), len(floats))


__all__ = ["LendingPartner", "PullingPartner", "described"]
