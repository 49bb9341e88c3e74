"""Plans pulls of prefixes, and learns from their results.  Pure.

::

    request ──► choose ──► start_lending ──► note_pulled ──► time of pulls
                  ▲                          start_rest ──► holders that are skipped for a while
                  └── note_computed, note_loaded ──► time of these
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from pdconn.router.pulls.pull_choice import Chooser, Holder, PullChoice
from pdconn.router.pulls.rates import Lines

COMPUTING = (0.01, 1 / 20_000)
"""Seconds per prompt and per token, until an engine has been measured: a large GPU's."""
COMPUTING_STALE_S = 600.0
"""Seconds after which an estimate is stale: long, since an engine's speed changes little."""
PULLING = (0.02, 1 / 200_000)
"""The same for pulls: a fast network's, so that a slow one is tried once and then known."""
LOADING = (0.01, 1 / 40_000)
"""The same for loads from a store: half of computing, the default weight of stored blocks."""
MOST_HOLDERS = 4
"""Holders that are compared for one prompt: those with the most tokens."""
RESTS_S = 60.0
"""Seconds for which an engine that answered without a ticket is not asked, and an engine whose
ticket could not be used is not asked for the same prefill engine."""

NEW = 4
"""An engine with fewer measurements of computing is new: its estimate still changes much."""
MOST_EARLY = 32
"""Pulls of a new engine that are kept, to separate pulling from computing again later."""


@dataclass(frozen=True, slots=True)
class _PullSeen:
    """A measured pull of ``saved`` tokens; ``seconds`` include computing the ``rest``."""

    pair: tuple[str, str]
    saved: int
    rest: int
    seconds: float
    now: float


@dataclass(slots=True)
class PullPlanner:
    """Plans pulls of prefixes.

    Attributes:
        chooser: the estimates of pulling, loading and computing.
    """

    chooser: Chooser
    _lent: Counter[str] = field(default_factory=Counter)
    _rests: dict[str | tuple[str, str], float] = field(default_factory=dict)
    _early: dict[str, deque[_PullSeen]] = field(default_factory=dict)

    @classmethod
    def from_floor(cls, floor: int) -> PullPlanner:
        """A planner without measurements; ``floor``: minimum tokens that a pull saves."""
        computing = Lines(*COMPUTING, stale_s=COMPUTING_STALE_S)
        loading = Lines(*LOADING, stale_s=COMPUTING_STALE_S)
        return cls(Chooser(computing, Lines(*PULLING), loading, floor))

    def choose(
        self,
        engine: str,
        num_tokens: int,
        held: int,
        holders: Iterable[Holder],
        now: float,
        *,
        stored: int = 0,
    ) -> PullChoice:
        """Choose by :class:`Chooser`; fills in how many pulls each of ``holders`` serves now."""
        awake = (one for one in holders if not self._is_resting(one.engine, engine, now))
        most = sorted(awake, key=lambda one: -one.tokens)[:MOST_HOLDERS]
        asked = [replace(one, num_lent=self._lent[one.engine]) for one in most]
        return self.chooser.choose(engine, num_tokens, held, asked, now, stored=stored)

    def start_lending(self, holder: str) -> Callable[[], None]:
        """Count a pull from ``holder``; call the returned function once, when it has ended."""
        self._lent[holder] += 1

        def over() -> None:
            self._lent[holder] -= 1
            if not self._lent[holder]:
                del self._lent[holder]

        return over

    def start_rest(self, holder: str, now: float) -> bool:
        """Skip a holder that lends nothing now; returns whether that is new."""
        known = self._rests.get(holder, 0.0) > now
        self._rests[holder] = now + RESTS_S
        return not known

    def note_wasted(self, engine: str, choice: PullChoice, now: float) -> None:
        """Note that an engine could not use a ticket, perhaps as it cannot reach the holder."""
        if choice.holder is not None:
            self._rests[choice.holder.engine, engine] = now + RESTS_S

    def _is_resting(self, holder: str, engine: str, now: float) -> bool:
        keys = (holder, (holder, engine))
        return any(self._rests.get(key, 0.0) > now for key in keys)

    def note_computed(self, engine: str, tokens: int, seconds: float, now: float) -> None:
        """Learn that an otherwise idle engine computed ``tokens`` tokens in ``seconds``."""
        self.chooser.computing.add_measurement(engine, tokens, seconds, now)
        early = self._early.get(engine, ())
        for pair in {pull.pair for pull in early}:
            self.chooser.pulling.forget_line(pair)
        for pull in early:
            self._see(engine, pull)
        if not self._is_new(engine, now):
            self._early.pop(engine, None)

    def note_loaded(self, engine: str, stored: int, rest: int, seconds: float, now: float) -> None:
        """Learn that an idle engine loaded ``stored`` tokens and computed the ``rest``."""
        rest_s = self.chooser.computing.line_of(engine, now).seconds_for(rest)
        if not self._is_new(engine, now):
            self.chooser.loading.add_measurement(engine, stored, max(0.0, seconds - rest_s), now)

    def note_pulled(
        self, engine: str, choice: PullChoice, rest: int, seconds: float, now: float
    ) -> None:
        """Learn that an otherwise idle engine pulled as chosen and computed the ``rest``."""
        if choice.holder is None:
            return
        pull = _PullSeen((choice.holder.engine, engine), choice.saved, rest, seconds, now)
        if self._is_new(engine, now):
            self._early.setdefault(engine, deque(maxlen=MOST_EARLY)).append(pull)
        self._see(engine, pull)

    def _is_new(self, engine: str, now: float) -> bool:
        return self.chooser.computing.line_of(engine, now).num_seen < NEW

    def _see(self, engine: str, pull: _PullSeen) -> None:
        rest_s = self.chooser.computing.line_of(engine, pull.now).seconds_for(pull.rest)
        seconds = max(0.0, pull.seconds - rest_s)
        self.chooser.pulling.add_measurement(pull.pair, pull.saved, seconds, pull.now)

    def keep_engines(self, engines: Collection[str]) -> None:
        """Forget all other engines."""
        known = set(engines)
        self._rests = {
            key: until
            for key, until in self._rests.items()
            if known.issuperset((key,) if isinstance(key, str) else key)
        }
        self._early = {name: pulls for name, pulls in self._early.items() if name in known}
