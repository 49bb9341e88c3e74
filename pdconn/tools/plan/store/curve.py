"""How large a store should be: what it saves at several capacities, of the requests of a trace.

Each request goes to a simulated engine cache, and then to a simulated store of every capacity, in
one pass over the trace::

    trace ─► names of rows ─► engine's cache ─► held ─┬─► store of 100 GiB
                                                      ├─► store of 200 GiB
                                                      └─► ...

One simulation for all capacities, as for a stack algorithm (Mattson's), would be wrong.  Were every
row of a prompt used by every request for it, the rows of a store would be among those of each
larger one.  They are not: a larger store hits a later boundary and uses its windows instead of
those that a smaller store uses; a row at the end of a prompt, whose last token is computed anyway,
is new in a store that has lost it and old in one that has it; and junctions are saved where a
prompt parts from what *this* store has.

An engine's own cache follows the same rule: the leaf that was used longest ago goes first, and
windows and states are kept at the ends of prompts and where prompts part, as vLLM does
(``prefix_cache_retention_interval`` 0).  So it is simulated as a store of its size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pdconn.store.format.prompt_rows import Spacing
from pdconn.store.format.row import NO_KEY, RowKind, RowName
from pdconn.tools.plan.plan_errors import ShapeError
from pdconn.tools.plan.store.cost import LoadSizes
from pdconn.tools.plan.store.simulated_store import (
    NamedChain,
    SimulatedSettings,
    SimulatedStore,
    StoreCounts,
    TracedPrompt,
)

FIXED_S = 0.005
"""Seconds that each load takes besides reading: two or three steps of the engine."""
_MOST_NAMES = 1 << 20
_KEY = struct.Struct("<qq")
_PROGRESS = 512


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request of a trace.

    Attributes:
        num_tokens: tokens of the prompt.
        answer_tokens: tokens of the answer; 0 if the trace does not have them.
        ids: of the prompt's blocks, in order, the last perhaps of a part; behind them ids of the
            answer's blocks, if they are known.  Equal ids after equal ids mean equal tokens.
        block_tokens: tokens of a block.
        at_s: when it came, in seconds; only differences count.
        held: tokens that the engine's own cache held, if the trace says so.
    """

    num_tokens: int
    answer_tokens: int
    ids: Sequence[int]
    block_tokens: int
    at_s: float = 0.0
    held: int | None = None


class TracedNames:
    """Makes names of rows from a trace's ids.

    Names are made once as long as they are remembered: a name that is the same object is compared
    faster.  At most two million of the latest are remembered.
    """

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._young: dict[bytes, tuple[RowName, RowName]] = {}
        self._old: dict[bytes, tuple[RowName, RowName]] = {}
        self._number = 0

    def prompt(self, request: TracedRequest, *, with_answer: bool) -> TracedPrompt:
        """The request as a store sees it; of an answer without ids nothing is found again."""
        self._number += 1
        size, ids = self._size, request.ids
        until = request.num_tokens + (request.answer_tokens if with_answer else 0)
        keys, full, windows = [], [], []
        digest, seen, parent = 0, 0, NO_KEY
        for index in range(until // size):
            at = ((index + 1) * size - 1) // request.block_tokens
            for block in range(seen, at + 1):
                # An id stands for its block alone, or for the prompt up to it: both are served.
                digest = hash((digest, ids[block] if block < len(ids) else -self._number))
            seen = at + 1
            key = _KEY.pack(digest, index)
            names = self._young.get(key) or self._names(key, parent, index)
            keys.append(key)
            full.append(names[0])
            windows.append(names[1])
            parent = key
        chain = NamedChain(size, tuple(keys), full=tuple(full), windows=tuple(windows))
        answer = request.answer_tokens if with_answer else 0
        return TracedPrompt(chain, request.num_tokens, answer, request.at_s)

    def _names(self, key: bytes, parent: bytes, index: int) -> tuple[RowName, RowName]:
        names = self._old.get(key)
        if names is None:
            full = RowName(RowKind.FA, key, parent, index)
            names = full, RowName(RowKind.WA, key, parent, index)
        self._young[key] = names
        if len(self._young) > _MOST_NAMES:
            self._old, self._young = self._young, {}
        return names


@dataclass(frozen=True, slots=True)
class Rates:
    """What time is predicted from.

    Attributes:
        load: bytes that all ranks read of a row.
        store: bytes per second of the store, for all ranks together.
        prefill: tokens per second that prefill computes; None if unknown.
        fixed_s: seconds of each load besides reading.
    """

    load: LoadSizes
    store: float
    prefill: float | None
    fixed_s: float = FIXED_S

    def saved_s(self, counts: StoreCounts) -> float | None:
        """Seconds of computing that hits saved, less those of loading; None if unknown."""
        if self.prefill is None:
            return None
        nbytes = self.load.fa * counts.loaded[RowKind.FA] + self.load.wa * counts.loaded[RowKind.WA]
        return counts.hit_tokens / self.prefill - nbytes / self.store - self.fixed_s * counts.hits


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A store of one capacity over the whole trace.

    Attributes:
        most_nbytes: the most bytes of rows that were there at once.
        saved_s: as :meth:`Rates.saved_s`.
    """

    capacity: int
    counts: StoreCounts
    most_nbytes: int
    saved_s: float | None


@dataclass(frozen=True, slots=True)
class Curve:
    """What stores of several capacities save of a trace.

    Attributes:
        requests: that were simulated.
        prompt_tokens: of all these requests.
        held_tokens: of these, tokens that the engine's own cache held.
        points: by capacity; what they count is of the simulated requests.
        part: of the trace's prompt tokens, those of the simulated requests.
    """

    requests: int
    prompt_tokens: int
    held_tokens: int
    points: tuple[CurvePoint, ...]
    part: float = 1.0

    def hit_share(self, point: CurvePoint) -> float:
        """The share of prompt tokens that a store loads."""
        return point.counts.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def held_share(self) -> float:
        """The share of prompt tokens that the engine's own cache held."""
        return self.held_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def simulate(
    requests: Iterable[TracedRequest],
    settings: SimulatedSettings,
    capacities: Sequence[int],
    rates: Rates,
    *,
    engine_nbytes: int = 0,
    part: float = 1.0,
    on_progress: Callable[[int], None] = lambda number: None,
) -> Curve:
    """Replay a trace on stores of several capacities.

    Args:
        engine_nbytes: of the engine's own cache, in front of the store; 0 for none.
        part: of a longer trace's prompt tokens, those of ``requests``; the stores and the engine's
            cache are smaller in proportion.
        on_progress: called with the number of requests so far, every few hundred.
    """
    check_capacities(capacities)
    names = TracedNames(settings.layout.block_tokens)
    stores = [SimulatedStore(settings, max(1, int(part * capacity))) for capacity in capacities]
    engine_nbytes = int(part * engine_nbytes)
    engine = _engine_cache(settings, engine_nbytes) if engine_nbytes else None
    number = prompt_tokens = held_tokens = 0
    for number, request in enumerate(requests, 1):
        prompt = names.prompt(request, with_answer=settings.saves_answers)
        held = request.held
        if held is None:
            held = 0 if engine is None else engine.serve(prompt, 0)
        for store in stores:
            store.serve(prompt, held)
        prompt_tokens += prompt.num_tokens
        held_tokens += held
        if number % _PROGRESS == 0:
            on_progress(number)
    points = tuple(
        CurvePoint(capacity, store.counts, store.root.most_nbytes, rates.saved_s(store.counts))
        for capacity, store in zip(capacities, stores, strict=True)
    )
    return Curve(number, prompt_tokens, held_tokens, points, part)


def joined_curves(curves: Sequence[Curve]) -> Curve:
    """One curve of the points of several, which are of the same trace."""
    points = sorted((p for curve in curves for p in curve.points), key=lambda p: p.capacity)
    return replace(curves[0], points=tuple(points))


def check_capacities(capacities: Sequence[int]) -> None:
    """Check that there are some, each larger than the one before.

    Raises:
        ShapeError: there are none, or they do not rise.
    """
    rise = all(a < b for a, b in pairwise(capacities))
    if not capacities or capacities[0] < 1 or not rise:
        raise ShapeError("capacities", "some, each larger than the one before", list(capacities))


def _engine_cache(settings: SimulatedSettings, nbytes: int) -> SimulatedStore:
    """An engine's own cache as a store: in memory, so that all of it fits into staging."""
    mine = replace(settings, spacing=Spacing(None), staging=1 << 62, min_tokens=1, wa_share=None)
    # An eighth of a store is headroom and allowance; an engine fills its cache.
    return SimulatedStore(mine, nbytes * 8 // 7)


def usual_capacities(distinct_nbytes: int, smallest: int, number: int = 8) -> list[int]:
    """So many capacities, by equal factors, up to twice what the whole trace takes.

    The least is a 4096th of that, but not less than ``smallest``.
    """
    most = max(2 * distinct_nbytes, 2 * smallest)
    least = max(most // 4096, smallest)
    steps = [int(least * (most / least) ** (step / (number - 1))) for step in range(number)]
    return list(dict.fromkeys(steps))
