"""Fleets of whole engines under load, and the law that nothing waits in a circle."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from pdconn.vllm.lends.waits import FIRST_S, ROUND_S
from tests.simulation.laws import LawBroken
from tests.simulation.whole.clients import Clients
from tests.simulation.whole.engine import IDLE_S, Engine
from tests.simulation.world import NO_FAULTS, World

CLIENTS = 16
LIMIT_S = 30.0
"""Virtual seconds after which what is not answered never will be."""


@dataclass(frozen=True)
class Shape:
    """A load on a fleet.

    Attributes:
        ways: pairs of prefill and decode, by number, that requests take in turns.
        blocks: of two tokens each, in every engine.
        tokens: shortest and longest prompt.
        turns: each prompt is gone on with, and prefill pulls what decode holds of it.
    """

    ways: tuple[tuple[int, int], ...]
    blocks: int = 48
    tokens: tuple[int, int] = (4, 18)
    turns: bool = False
    requests: int = 40
    policy: str = "recompute"


ONE_WAY, BOTH = ((0, 1),), ((0, 1), (1, 0))
RING = ((0, 1), (1, 2), (2, 0))
ITSELF = ((0, 0),)
ANY = ((0, 0), (0, 1), (1, 1), (1, 0))


class Fleet:
    """Engines and clients of one run."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.world = World(seed, NO_FAULTS)
        ports: dict[int, Engine] = {}
        count = 1 + max(number for way in shape.ways for number in way)
        self.engines = [
            Engine(self.world, number, ports, num_blocks=shape.blocks, policy=shape.policy)
            for number in range(count)
        ]
        self.clients = Clients(self.world)
        self._asked = 0
        self._still: dict[Engine, tuple[float, int]] = {}

    def run(self) -> None:
        """Until all is answered and given back, or :data:`LIMIT_S` are over."""
        self.world.check = self._nothing_that_stands_still_holds_claims
        for _ in range(CLIENTS):
            self._next()
        self.world.run(self.world.now + LIMIT_S)

    @property
    def slowest_s(self) -> float:
        """Of all answers; infinity if one is missing."""
        clients = self.clients
        return math.inf if clients.num_open else max(clients.took_s)

    def wrong(self) -> list[object]:
        """Answers, and tokens read by engines, that are not their prompt's."""
        return [*self.clients.wrong, *(at for engine in self.engines for at in engine.wrong)]

    def left(self) -> dict[str, int]:
        """What engines still hold once the fleet is quiet; empty if nothing."""
        found: dict[str, int] = {}
        for engine in self.engines:
            parts = engine.connector.parts
            assert parts.lending is not None
            assert parts.pulling is not None
            parts.lending.unpin_freed()
            held = {
                "pins": len(parts.lending.pins),
                "tickets": len(parts.pulling),
                "blocks": engine.pool.num_gpu_blocks - 1 - engine.pool.get_num_free_blocks(),
                "pulls": engine.rank.pulls.num_open,
                "waits": 0 if parts.waits is None else len(parts.waits),
            }
            found |= {f"{engine.name} {what}": count for what, count in held.items() if count}
        return found

    def count(self, what: str) -> int:
        """A count of the connectors, all engines together."""
        return sum(engine.counts[what] for engine in self.engines)

    def _next(self) -> None:
        shape, rng = self.shape, self.world.rng
        if self._asked == shape.requests:
            return
        self._asked += 1
        number = self._asked
        first, second = shape.ways[number % len(shape.ways)]
        way = self.engines[first], self.engines[second]
        num_tokens = rng.randint(*shape.tokens)
        then = partial(self._go_on, number, num_tokens, way)
        then = then if shape.turns else self._next
        self.clients.hand_over(number, num_tokens, way, then)

    def _go_on(self, number: int, num_tokens: int, way: tuple[Engine, Engine]) -> None:
        more = num_tokens + self.world.rng.randint(4, 12)

        def lent(ticket: dict[str, Any] | None) -> None:
            self.clients.hand_over(number, more, way, self._next, source=ticket)

        self.clients.borrow(number, num_tokens, way[1], lent)

    def _nothing_that_stands_still_holds_claims(self) -> None:
        """The law: an engine that lends and computes nothing holds no claim for long."""
        for engine in self.engines:
            waiting = engine.waiting_claims()
            if not (waiting and engine.stands_still()):
                self._still.pop(engine, None)
                continue
            since, most = self._still.get(engine, (self.world.now, 0))
            most = max(most, waiting)
            self._still[engine] = since, most
            rounds = 1 + math.floor(math.log2(most)) + 1
            if self.world.now - since > FIRST_S + rounds * ROUND_S + 3 * IDLE_S:
                raise LawBroken(
                    f"law 17: {engine.name} stands still since {self.world.now - since:.2f} s, "
                    f"lends, and holds {waiting} claims"
                )
