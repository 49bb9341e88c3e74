"""Which prefixes are pulled, from whom, and what was learned from it.  Pure.

request ──► choose ──► lending ──► pulled ──► what pulls take
               ▲                  rests  ──► who is not asked for a while
               └── computed, loaded ──────► what these take
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from pdconn.router.pulls.choose import Chooser, Holder, PullChoice
from pdconn.router.pulls.rates import Lines

COMPUTING = (0.01, 1 / 20_000)
"""Seconds of a prompt, and of each token, until an engine was seen: a large GPU's."""
COMPUTING_STALE_S = 600.0
"""An engine computes as fast as before, so what was seen of it counts long."""
PULLING = (0.02, 1 / 200_000)
"""The same of a pull: a fast network's, so that a slow one is tried, and then known."""
LOADING = (0.01, 1 / 40_000)
"""The same of loading from a store: half of computing, as its blocks weigh until it was seen."""
MOST_HOLDERS = 4
"""Holders that are compared for one prompt: those that hold most."""
RESTS_S = 60.0
"""An engine that answered without a ticket is not asked for so long, and one whose ticket was of no
use not for the same prefill engine."""

NEW = 4
"""An engine that was seen computing less often is new: what is known of it changes much,"""
MOST_EARLY = 32
"""so that this many pulls by it are kept, to work out anew what of them was pulling."""


@dataclass(frozen=True, slots=True)
class _PullSeen:
    """A pull that was seen, of ``saved`` tokens; ``seconds`` are with computing the ``rest``."""

    pair: tuple[str, str]
    saved: int
    rest: int
    seconds: float
    now: float


@dataclass(slots=True)
class PullPlanner:
    """Plans pulls of prefixes.

    Attributes:
        chooser: what pulls and computing take.
    """

    chooser: Chooser
    _lent: Counter[str] = field(default_factory=Counter)
    _rests: dict[str | tuple[str, str], float] = field(default_factory=dict)
    _early: dict[str, deque[_PullSeen]] = field(default_factory=dict)

    @classmethod
    def of(cls, floor: int) -> PullPlanner:
        """One that has seen nothing yet; ``floor``: a pull saves at least so many tokens."""
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
        """See :meth:`Chooser.choose`; ``holders`` need not know what they lend."""
        awake = (one for one in holders if not self._is_resting(one.engine, engine, now))
        most = sorted(awake, key=lambda one: -one.tokens)[:MOST_HOLDERS]
        asked = [replace(one, num_lent=self._lent[one.engine]) for one in most]
        return self.chooser.choose(engine, num_tokens, held, asked, now, stored=stored)

    def lending(self, holder: str) -> Callable[[], None]:
        """A pull from ``holder`` begins; call what this returns, once, when it is over."""
        self._lent[holder] += 1

        def over() -> None:
            self._lent[holder] -= 1
            if not self._lent[holder]:
                del self._lent[holder]

        return over

    def rests(self, holder: str, now: float) -> bool:
        """It lends nothing now; whether that is new."""
        known = self._rests.get(holder, 0.0) > now
        self._rests[holder] = now + RESTS_S
        return not known

    def wasted(self, engine: str, choice: PullChoice, now: float) -> None:
        """An engine could make nothing of a ticket, perhaps as it does not reach its holder."""
        if choice.holder is not None:
            self._rests[choice.holder.engine, engine] = now + RESTS_S

    def _is_resting(self, holder: str, engine: str, now: float) -> bool:
        keys = (holder, (holder, engine))
        return any(self._rests.get(key, 0.0) > now for key in keys)

    def computed(self, engine: str, tokens: int, seconds: float, now: float) -> None:
        """An engine without other work computed ``tokens`` tokens in ``seconds``."""
        self.chooser.computing.see(engine, tokens, seconds, now)
        early = self._early.get(engine, ())
        for pair in {pull.pair for pull in early}:
            self.chooser.pulling.forget(pair)
        for pull in early:
            self._see(engine, pull)
        if not self._is_new(engine, now):
            self._early.pop(engine, None)

    def loaded(self, engine: str, stored: int, rest: int, seconds: float, now: float) -> None:
        """An engine without other work loaded ``stored`` tokens and computed the ``rest``."""
        rest_s = self.chooser.computing.of(engine, now).at(rest)
        if not self._is_new(engine, now):
            self.chooser.loading.see(engine, stored, max(0.0, seconds - rest_s), now)

    def pulled(
        self, engine: str, choice: PullChoice, rest: int, seconds: float, now: float
    ) -> None:
        """An engine without other work pulled as chosen and computed the ``rest`` of the tokens."""
        if choice.holder is None:
            return
        pull = _PullSeen((choice.holder.engine, engine), choice.saved, rest, seconds, now)
        if self._is_new(engine, now):
            self._early.setdefault(engine, deque(maxlen=MOST_EARLY)).append(pull)
        self._see(engine, pull)

    def _is_new(self, engine: str, now: float) -> bool:
        return self.chooser.computing.of(engine, now).num_seen < NEW

    def _see(self, engine: str, pull: _PullSeen) -> None:
        rest_s = self.chooser.computing.of(engine, pull.now).at(pull.rest)
        seconds = max(0.0, pull.seconds - rest_s)
        self.chooser.pulling.see(pull.pair, pull.saved, seconds, pull.now)

    def keep(self, engines: Iterable[str]) -> None:
        """Drop all other engines."""
        known = set(engines)
        self._rests = {
            key: until
            for key, until in self._rests.items()
            if known.issuperset((key,) if isinstance(key, str) else key)
        }
        self._early = {name: pulls for name, pulls in self._early.items() if name in known}
