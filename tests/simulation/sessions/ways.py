"""The ways in which a fleet serves agents, and what each of them shows."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from tests.simulation.sessions.fleet import Fleet, Load, Shape

WITHOUT, KEEP, PREFETCH, NO_PAUSE = "without", "keep", "prefetch", "no pause"
BOTH, ALONE, ROOMY = "keep, prefetch", "alone", "hits anyway"
WAYS = (WITHOUT, KEEP, PREFETCH, BOTH, NO_PAUSE, ALONE, ROOMY)
ROOMY_TIMES = 10
"""Of a cache so large that sessions hit though nothing is kept."""


@dataclass(frozen=True)
class Row:
    """One way.

    Attributes:
        turns: later turns.
        hit, least_hit: the share of earlier tokens that no engine computed again; of one turn.
        first_ms, first_p90_ms: to the first token of later turns.
        flood_per_s: prompts of the flood, from when all sessions had begun; None if too short.
        flood_worst_s: the longest that one of them took.
        flood_caches: how often the flood fills prefill's caches between two turns of a session.
        broken: promises that were broken or refused; told: later turns whose answers say so.
        moved: later turns whose prefill engine was not asked to keep the session.
    """

    way: str
    turns: int
    hit: float | None
    least_hit: float | None
    first_ms: float | None
    first_p90_ms: float | None
    flood_per_s: float | None
    flood_worst_s: float
    flood_caches: float | None
    broken: int
    told: int
    moved: int
    preempted: int


def run_way(way: str, shape: Shape, load: Load, lead_s: float, seed: int = 0) -> Row:
    """One way over new engines."""
    if way == ROOMY:
        sizes = (shape.prefill_cache, shape.decode_cache)
        large = [replace(one, num_blocks=ROOMY_TIMES * one.num_blocks) for one in sizes]
        shape = replace(shape, prefill_cache=large[0], decode_cache=large[1])
    changed = {
        KEEP: {"keeps": True},
        PREFETCH: {"lead_s": lead_s},
        BOTH: {"keeps": True, "lead_s": lead_s},
        NO_PAUSE: {"pause_s": (0.0, 0.0)},
        ALONE: {"sessions": 0, "least_s": load.spread_s + load.turns * sum(load.pause_s) / 2},
    }
    fleet = Fleet(shape, replace(load, **changed.get(way, {})), seed)  # type: ignore[arg-type]
    try:
        fleet.run()
        return row_of(way, fleet)
    finally:
        fleet.close()


def row_of(way: str, fleet: Fleet) -> Row:
    """What a run has shown."""
    turns, load, shape = fleet.turns, fleet.load, fleet.shape
    since = fleet.began_s + load.spread_s
    seconds = fleet.ended_s - since
    flooded = sum(at > since for at in fleet.flooded)
    # Without pauses sessions ask more in a second, and are soon over: no load to compare.
    per_s = flooded / seconds if seconds > 0 and way != NO_PAUSE else None
    firsts = sorted(one.first_s for one in turns)
    first_s = statistics.median(firsts) if firsts else 0.0
    cycle_s = sum(load.pause_s) / 2 + first_s + load.answer * shape.speed.step_s
    caches = shape.prefill * shape.prefill_cache.tokens
    one_off = shape.prefill_cache.held_tokens(load.one_off)
    earlier = sum(one.earlier for one in turns)
    broken = [fleet.count(f"promises_broken_{why}") for why in ("room", "share", "reset")]
    return Row(
        way,
        len(turns),
        1 - sum(one.again for one in turns) / earlier if turns else None,
        min(one.hit for one in turns) if turns else None,
        1e3 * first_s if turns else None,
        1e3 * firsts[int(0.9 * len(firsts))] if turns else None,
        per_s,
        max(fleet.waits, default=0.0),
        None if per_s is None else per_s * one_off * cycle_s / caches,
        sum(broken) + fleet.count("promises_refused"),
        sum(one.broken for one in turns),
        sum(one.moved for one in turns),
        fleet.count("preempted"),
    )
