"""Loads beside pulls: what the store has of a prompt is loaded, the rest is pulled from a lender.

::

    tokens     held           split                          end
               ├── full attention: rows ──┼─ pulled ──────────┤
               │                          │ windows, states   │     of the lender, which ends last

The lender has all of the prompt, so nothing of the rows is promised: they are read and copied while
the pull reads, and what one rank cannot load that rank's pull reads, too.  The pull counts as
received when both have ended.

The pull waits for the rows for a second, or for as long as it would take to pull everything: what
a rank has read by then it loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdconn.lifecycle.load import LoadBeside, LoadState, StoreLoad
from pdconn.lifecycle.sources import is_store_enough, split_at
from pdconn.planning import cover
from pdconn.planning.plan import Need
from pdconn.store.engine.loads import Loads, StoredRequest
from pdconn.store.engine.lookups import LookupAnswer
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.rank_commands import BesideEnded, DropFetch, JoinPull, StoreCommand
from registration.references import KVCacheGroupReference

LEAST_WAIT_S = 1.0
"""How long a pull waits for a look-up, and at least for rows."""


@dataclass(frozen=True, slots=True)
class BesideOffer:
    """What the store has of a prompt.

    Attributes:
        split: tokens up to which it loads full attention beside a pull; those held if it does not.
        is_enough: whether it loads the prompt alone, and nothing is to be pulled.
    """

    split: int
    is_enough: bool = False


@dataclass(frozen=True, slots=True)
class PullOutlook:
    """A pull that may be made.

    Attributes:
        tokens: those of the prompt that it has to bring.
        bytes_per_s: of pulls from its lender by one rank; None if that is unknown.
        may_yield: whether the store may load the prompt alone: the lender has a prefix of it.
    """

    tokens: range
    bytes_per_s: float | None = None
    may_yield: bool = False


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A load beside the pull of a request.

    Attributes:
        until: when the pull does not wait for more rows.
        num_tokens: that were offered; ``least_tokens``: that every rank has loaded so far.
    """

    request: str
    load: StoreLoad[RowName]
    until: float
    num_tokens: int
    least_tokens: int


class LoadsBeside:
    """Loads beside the pulls of one engine.

    Args:
        loads: its other loads, with whose rooms and look-ups it works.
        commands: for the ranks.
        groups: of the engine's KV cache.
        row_tokens: tokens of a row.
        when: the setting ``beside``.
    """

    def __init__(
        self,
        loads: Loads,
        commands: list[StoreCommand],
        groups: Sequence[KVCacheGroupReference],
        row_tokens: int,
        when: str,
    ) -> None:
        self._loads, self._commands, self._row_tokens = loads, commands, row_tokens
        self._when = when
        self._groups = groups
        self._open: dict[int, _UnderWay] = {}

    def __len__(self) -> int:
        """Loads that have joined a pull and have not ended."""
        return len(self._open)

    def tokens_of(self, request: str) -> int:
        """Tokens that are being loaded beside the pull of a request."""
        return next((one.num_tokens for one in self._open.values() if one.request == request), 0)

    def offer(self, stored: StoredRequest, pull: PullOutlook, now: float) -> BesideOffer | None:
        """What can be loaded beside ``pull``; None to ask again at a later step."""
        loads, load, held = self._loads, stored.load, pull.tokens.start
        # 1. Its rows are on their way.
        if load.offers_beside(held):
            return BesideOffer(load.boundary)
        # 2. Its look-up is under way.
        if load.state is LoadState.LOOKING:
            return self._look_at(stored, pull, now)
        # 3. It was looked up before, so little is left that it is not worth a load, or the shelf
        #    hangs.
        is_new = load.state is LoadState.NEW and stored.may_load and self._when != "never"
        if not is_new or len(pull.tokens) < loads.least or not loads.may_try(stored, now):
            return BesideOffer(held)
        # 4. It is looked up, for all of the prompt: the pull may fail, or yield.
        loads.counts["store_lookups"] += 1
        loads.look_up(stored, stored.num_prompt_tokens - 1, held)
        return None

    def _look_at(self, stored: StoredRequest, pull: PullOutlook, now: float) -> BesideOffer | None:
        loads, load, held = self._loads, stored.load, pull.tokens.start
        answer = loads.take_answer(stored)
        if answer is None:
            waited_s = load.seconds_waited(now)
            if not loads.patience.is_over(stored.request, waited_s, LEAST_WAIT_S, now):
                return None
            loads.counts["store_late"] += 1
            loads.leave_load(stored)
            return BesideOffer(held)
        loads.note_answer(stored, answer)
        # The load stays as it is: it is the store that is asked next.
        speeds = self._load_speed(now), pull.bytes_per_s
        if pull.may_yield and is_store_enough(pull.tokens, answer.boundary, loads.least, *speeds):
            return BesideOffer(held, is_enough=True)
        rows = self._rows(answer, pull, now)
        split = (rows[-1].index + 1) * self._row_tokens if rows else held
        if split - held < loads.least:
            loads.counts["store_misses"] += 1
            loads.leave_load(stored)
            return BesideOffer(held)
        load.found(split, held, rows, is_beside=True)
        if not loads.place(stored, now):
            loads.counts["store_no_room"] += 1
            loads.leave_load(stored)
            return BesideOffer(held)
        return BesideOffer(split)

    def _rows(self, answer: LookupAnswer, pull: PullOutlook, now: float) -> tuple[RowName, ...]:
        """Rows of full attention that are there, fit into staging, and take less time to load."""
        loads, size, first = self._loads, self._row_tokens, pull.tokens.start // self._row_tokens
        each = loads.keeper.sizes.staging_nbytes([(RowKind.FA, 0)])
        most = loads.staging.nbytes // each if each else answer.full
        stored = min(answer.full, first + most) * size
        split = split_at(pull.tokens, stored, self._load_speed(now), pull.bytes_per_s)
        return tuple(answer.chain.name(RowKind.FA, index) for index in range(first, split // size))

    def _load_speed(self, now: float) -> float | None:
        """Bytes per second, as far as it decides: what is known of it, unless "always" is set."""
        return None if self._when == "always" else self._loads.bandwidth.bytes_per_s(now)

    def join_pull(
        self, stored: StoredRequest, need: Need, pull: PullOutlook, now: float
    ) -> Need | None:
        """Load what was offered into the blocks of ``need``, which the request pulls otherwise.

        Returns:
            What is loaded, a part of ``need``; None if nothing is.
        """
        load = stored.load
        if not load.is_beside:
            return None
        effects = load.join_pull(pull.tokens.start, now)
        joined = next((one for one in effects if isinstance(one, LoadBeside)), None)
        self._loads.perform(stored.request, load, effects)
        if joined is None:
            return None
        # A group that holds less than the others is pulled, but for what the rows reach.
        first = load.held // self._row_tokens * self._row_tokens
        loaded = cover.first_part(need, self._groups, range(first, joined.tokens.stop))
        until, count = now + max(LEAST_WAIT_S, self._pull_s(pull)), len(joined.tokens)
        self._open[load.number] = _UnderWay(stored.request, load, until, count, count)
        self._commands.append(JoinPull(load.number, stored.request, loaded))
        self._loads.counts["store_beside"] += 1
        self._loads.counts["store_beside_tokens"] += count
        self._loads.keeper.rows_used(load.rows)
        return loaded

    def _pull_s(self, pull: PullOutlook) -> float:
        """Seconds that pulling everything would take; 0 if that is unknown."""
        if pull.bytes_per_s is None:
            return 0.0
        row_nbytes = self._loads.keeper.sizes.staging_nbytes([(RowKind.FA, 0)])
        return row_nbytes / self._row_tokens * len(pull.tokens) / pull.bytes_per_s

    def give_up_overdue(self, now: float) -> None:
        """Have ranks read no more rows for pulls that have waited long enough."""
        for number, one in self._open.items():
            waited_s = one.load.seconds_waited(now)
            if now < one.until:
                continue
            one.until = float("inf")
            if one.load.give_up_beside():
                self._loads.patience.is_over(one.request, waited_s, 0.0, now)
                self._loads.counts["store_late"] += 1
                self._commands.append(DropFetch(number))

    def note_ended(self, result: BesideEnded) -> None:
        """Apply a rank's answer to JoinPull."""
        one = self._open.get(result.number)
        if one is None:
            return
        one.least_tokens = min(one.least_tokens, result.num_tokens)
        effects = one.load.ended_beside()
        if effects:
            del self._open[result.number]
            missed = one.num_tokens - one.least_tokens
            self._loads.counts["store_beside_missed_tokens"] += missed
            self._loads.perform(one.request, one.load, effects)
