"""One run: engines, requests drawn at random, faults drawn at random, laws checked."""

from __future__ import annotations

from collections import Counter

from pdconn.protocol.ticket import Ticket
from tests.simulation.decode import Decode
from tests.simulation.following import FollowingDecode
from tests.simulation.laws import Laws
from tests.simulation.prefill import Prefill, altered
from tests.simulation.world import Chances, World

MAX_BLOCKS = 5


def simulate(
    seed: int,
    requests: int,
    chances: Chances,
    warms: bool = False,
    kind: type[Decode] = Decode,
) -> Counter[str]:
    """Run ``requests`` requests over three prefill and three decode engines.

    With ``warms`` every decode rank keeps all prefill engines warm; ``kind`` are its engines.

    Returns:
        What happened, counted.  Equal seeds count the same.

    Raises:
        LawBroken: naming the law, the request, the seed and the virtual time.
    """
    world = World(seed, chances)
    prefills = [Prefill(world, number) for number in range(3)]
    lenders = {prefill.port: prefill for prefill in prefills}
    decodes = [kind(world, number, 1 + number % 2, lenders, warms) for number in range(3)]
    laws = Laws(world, prefills, decodes)
    world.check = laws.hold
    for number in range(requests):
        start = number * 0.03 + world.rng.random()
        world.at(start, lambda number=number: _ask(world, number, prefills, decodes))
    world.run()
    laws.hold_at_the_end()
    warm = [len(rank.pulls.warmup.warm) for decode in decodes for rank in decode.ranks]
    world.counts["warm"] = sum(warm)
    return world.counts


def _ask(world: World, number: int, prefills: list[Prefill], decodes: list[Decode]) -> None:
    rng, chances = world.rng, world.chances
    prefill, decode = rng.choice(prefills), rng.choice(decodes)
    if prefill.machine.is_paused or decode.machine.is_paused:
        world.counts["stood still"] += 1
        return
    if chances.stream and world.chance(chances.stream):
        _stream(world, number, prefill, decode)
        return
    lent = _lend(world, number, prefill)
    if lent is None:
        world.counts["no room"] += 1
        return
    number, ticket = lent
    world.counts["asked"] += 1
    decode.arrive(number, altered(ticket) if world.chance(chances.replay / 2) else ticket)
    if world.chance(chances.replay):
        again = rng.choice(decodes)
        world.at(rng.expovariate(1.0), lambda: again.arrive(number, ticket))
    _befall(world, prefill, decode, ticket.request_id)


def _stream(world: World, number: int, prefill: Prefill, decode: Decode) -> None:
    """Ask both engines at about the same time."""
    rng, chances = world.rng, world.chances
    assert isinstance(decode, FollowingDecode)
    early = prefill.stream(number, rng.randint(1, MAX_BLOCKS), rng.choice(chances.ttl_s))
    if early is None:
        world.counts["no room"] += 1
        return
    world.counts["asked"] += 1
    world.counts["streams"] += 1
    world.at(rng.expovariate(1 / chances.chunk_s), lambda: decode.arrive_early(number, early))
    _befall(world, prefill, decode, f"r{number}")


def _befall(world: World, prefill: Prefill, decode: Decode, request: str) -> None:
    """Draw what happens to a request and to its engines."""
    rng, chances = world.rng, world.chances
    if world.chance(chances.abort):
        world.at(rng.expovariate(5.0), lambda: prefill.abort(request))
    if world.chance(chances.crash):
        world.at(rng.expovariate(5.0), prefill.crash)
    if world.chance(chances.pause):
        pause_s = rng.expovariate(1 / chances.pause_s)
        world.at(rng.expovariate(5.0), lambda: decode.machine.pause(pause_s))
    if world.chance(chances.reset):
        world.at(rng.expovariate(5.0), prefill.reset)
    for machine in (prefill.machine, decode.machine):
        if world.chance(chances.freeze):
            freeze_s = rng.expovariate(1 / chances.pause_s)
            world.at(rng.expovariate(5.0), lambda m=machine, s=freeze_s: m.freeze(s))
        if world.chance(chances.slew):
            world.at(rng.expovariate(5.0), machine.slew)


def _lend(world: World, number: int, prefill: Prefill) -> tuple[int, Ticket] | None:
    """A ticket, and the request of whose content it is: this one, or one before it."""
    rng, chances = world.rng, world.chances
    if chances.borrow and world.chance(chances.borrow):
        lent = prefill.lend_prefix(number, rng.randrange, rng.choice(chances.ttl_s))
        if lent is not None:
            world.counts["prefixes"] += 1
            return lent
    ticket = prefill.lend(number, rng.randint(1, MAX_BLOCKS), rng.choice(chances.ttl_s))
    return None if ticket is None else (number, ticket)
