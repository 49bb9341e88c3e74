"""What to load for which request: look-ups, room in the staging areas, offers to the engine.

Each try is a :class:`~pdconn.lifecycle.load.StoreLoad`; a request has three at most, since rows
may be missing or damaged.  All on the engine's thread, without system calls; look-ups have a
thread of their own (:mod:`~pdconn.store.engine.lookups`).
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdconn.lifecycle.load import (
    AnsweredInTime,
    CopyRows,
    DistrustRows,
    DropRows,
    Effect,
    FailRequest,
    FreeRoom,
    LoadState,
    StoreLoad,
)
from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList
from pdconn.store.breaker import Breaker
from pdconn.store.commands import (
    DropFetch,
    FailLoad,
    Fetch,
    FetchResult,
    LoadRows,
    StoreCommand,
)
from pdconn.store.engine.keeper import Keeper
from pdconn.store.engine.lookups import Extras, Lookup, LookupAnswer, Lookups
from pdconn.store.engine.saves import Saving
from pdconn.store.format.row import RowName, aligned

log = logging.getLogger(__name__)

_TRIES = 3
"""Look-ups for one request."""

_PAUSE_S, _LONGEST_S = 5.0, 60.0
"""How long no request is looked up after one waited in vain, doubled each time."""


@dataclass(slots=True, eq=False)
class StoredRequest:
    """A request that the store may serve.

    Attributes:
        tokens: ids of the prompt and, later, of the answer; the list grows.
        extras: what else its rows depend on.
        may_load: whether it may be given rows.
        reads_files: ``extras`` does, and so is asked for by look-ups alone, on their thread.
        saving: what is saved of it.
        load: the present try, or the last one.
        lookup: the last one that was posted.
        known_extras: what ``extras`` gave.
    """

    request: str
    tokens: Sequence[int]
    num_prompt_tokens: int
    extras: Extras
    may_load: bool
    reads_files: bool
    saving: Saving
    load: StoreLoad[RowName] = field(default_factory=StoreLoad)
    lookup: Lookup | None = None
    tries: int = 0
    is_cut: bool = False
    known_extras: Sequence[bytes] | None = None

    def learn_keys(self, answer: LookupAnswer) -> None:
        """Take over keys, and where the prompt parts from those saved, from a look-up done."""
        self.known_extras = answer.known_extras
        if len(answer.chain.keys) > len(self.saving.chain.keys):
            self.saving.chain = answer.chain
        if answer.full and self.saving.junction is None:
            self.saving.junction = answer.full - 1

    def extend_keys(self, until: int) -> bool:
        """Hash as far as ``until`` tokens, of the answer too; whether the request has keys at all.

        What else keys depend on was found by the look-up, which may read files for it.
        """
        if self.known_extras is None:
            return False
        if until // self.saving.chain.block_tokens <= len(self.saving.chain.keys):
            return True
        self.saving.chain = self.saving.chain.extended(self.tokens, until, self.known_extras)
        return True

    def is_first_cut(self, answer: LookupAnswer) -> bool:
        """Whether staging held less than a look-up found, for the first time of this request."""
        is_first = answer.cut_nbytes > 0 and not self.is_cut
        self.is_cut = self.is_cut or is_first
        return is_first

    def needs_keys(self) -> bool:
        """Whether it is computed, as what was pulled is, without a look-up that saving needs."""
        is_new = self.load.state is LoadState.NEW and self.may_load
        return self.lookup is None and (is_new or self.reads_files)

    def awaits_keys(self) -> bool:
        """Whether it is being computed and what its keys depend on is not known yet."""
        is_asked = self.lookup is not None and self.lookup.answer is None
        if self.load.is_looking and self.lookup is not None:
            if self.lookup.answer is None:
                return True
            self.learn_keys(self.lookup.answer)
            self.load.leave()
        if self.known_extras is None and not self.reads_files:
            self.known_extras = self.extras()
        return self.known_extras is None and self.reads_files and (is_asked or not self.lookup)


class StagingSpace:
    """The staging areas of all ranks: which bytes of them belong to which load.

    Every rank has an area of the same size and gets the same offsets, so that no rank can run out
    of room that the scheduler believes to have.  First fit, in whole pages.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._taken: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return len(self._taken)

    def take_room(self, number: int, nbytes: int) -> int | None:
        """The offset of ``nbytes`` for load ``number``, or None when there is no such room now."""
        nbytes, at = aligned(max(nbytes, 1)), 0
        for offset, end, _ in self._taken:
            if offset - at >= nbytes:
                break
            at = end
        if at + nbytes > self.nbytes:
            return None
        insort(self._taken, (at, at + nbytes, number))
        return at

    def free_room(self, number: int) -> None:
        """The bytes of load ``number`` may be taken again."""
        self._taken = [entry for entry in self._taken if entry[2] != number]


class LoadPatience:
    """How long requests wait for the shelf: one of them while it hangs, the others not at all.

    Its thread only; times are of one clock.
    """

    def __init__(self) -> None:
        self._breaker = Breaker(_PAUSE_S, _LONGEST_S)
        self._trying = ""

    @property
    def is_hung(self) -> bool:
        """Whether the shelf did not answer the last time."""
        return self._breaker.is_open

    def admits(self, request: str, now: float) -> bool:
        """Whether a request may be looked up: while the shelf hangs one may, after each pause."""
        was_open = self._breaker.is_open
        if not self._breaker.allows(now):
            return False
        self._trying = request if was_open else ""
        return True

    def is_over(self, request: str, waited_s: float, most_s: float, now: float) -> bool:
        """Whether a request that waits for the shelf gives up, so that it is computed."""
        if waited_s <= most_s:
            return self._breaker.is_open and request != self._trying
        if not self._breaker.is_open or request == self._trying:
            self._trying = ""
            self._breaker.failed(now)
            log.warning(
                "pdconn: store: the shelf does not answer, prompts are computed for %.0f s: "
                "request=%s waited=%.1f",
                self._breaker.left_s(now),
                request,
                waited_s,
            )
        return True

    def note_answer(self) -> None:
        """The shelf answered in time."""
        if self._breaker.is_open:
            log.info("pdconn: store: the shelf answers again")
            self._breaker.succeeded()


class Loads:
    """Loads of one engine.

    Args:
        staging: bytes of a rank's staging area.
        least: tokens that are worth a load.
        num_ranks: that fetch.
        lookups, keeper: the threads.
        commands: for the ranks; those of loads are added.
        clock: seconds that never go back.

    Attributes:
        patience: whether the shelf answers.
        counts: for metrics.
    """

    def __init__(
        self,
        *,
        staging: int,
        least: int,
        num_ranks: int,
        lookups: Lookups,
        keeper: Keeper,
        commands: list[StoreCommand],
        clock: Callable[[], float],
    ) -> None:
        self._least, self._num_ranks = least, num_ranks
        self._lookups, self._keeper, self._clock = lookups, keeper, clock
        self._commands = commands
        self._space, self.patience = StagingSpace(staging), LoadPatience()
        self._placed: dict[int, StoreLoad[RowName]] = {}
        self._awaited: dict[str, StoreLoad[RowName]] = {}
        self._number = 0
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        """Loads that have bytes of the staging areas."""
        return len(self._placed)

    def get_num_new_matched_tokens(
        self, stored: StoredRequest, num_tokens: int, num_local: int
    ) -> int | None:
        """Tokens after the local hit that can be loaded; None to ask again at a later step.

        ``num_tokens`` are those of the request now; the last of them is never loaded.
        """
        load, now = stored.load, self._clock()
        # 1. It is not to be looked up, waits for its report, or has had its tries: one for a
        #    prompt, and further ones for one that was preempted with an answer.
        if not stored.may_load or load.state in (LoadState.LOADING, LoadState.FAILING):
            return 0
        has_answer = num_tokens > stored.num_prompt_tokens and stored.tries < _TRIES
        if load.is_over and not has_answer:
            return 0
        # 2. Its look-up is under way, or there is no room yet for what was found.
        if load.is_looking:
            return self._look_at(stored, num_local, now)
        # 3. Ranks fetch its rows, or have fetched them.
        if load.state in (LoadState.FETCHING, LoadState.FETCHED):
            return self._offer(stored, num_local, now)
        # 4. So little is left that it is not worth a load, or the shelf hangs, and it is not this
        #    request that tries whether it still does.
        if num_tokens - 1 - num_local < self._least or not self._may_try(stored, now):
            return self._leave(stored)
        # 5. It is looked up.
        self.counts["store_lookups"] += 1
        self.look_up(stored, num_tokens - 1, num_local)
        return None

    def look_up(self, stored: StoredRequest, limit: int, held: int) -> None:
        """Look a prompt up, for a load or for the keys of what is to be saved of it."""
        stored.load = StoreLoad()
        stored.load.ask(self._clock())
        stored.tries += 1
        chain = stored.saving.chain
        stored.lookup = self._lookups.look_up(stored.tokens, stored.extras, limit, held, chain)

    def _look_at(self, stored: StoredRequest, num_local: int, now: float) -> int | None:
        lookup, load = stored.lookup, stored.load
        assert lookup is not None
        self._lookups.take_answers()
        answer, held = lookup.answer, lookup.question.held
        if answer is None:
            return None if self._waits(stored, now) else self._late(stored)
        if answer.has_asked:
            self.patience.note_answer()
        stored.learn_keys(answer)
        stored.may_load = answer.is_storable
        if stored.is_first_cut(answer):
            self.counts["store_cut"] += 1
        if answer.boundary - num_local < self._least:
            self.counts["store_misses"] += 1
            return self._leave(stored)
        if held != num_local:  # blocks of the local hit came or went meanwhile
            return self._look_up_again(stored, num_local)
        load.found(answer.boundary, held, answer.rows)
        return self._place(stored, now)

    def _look_up_again(self, stored: StoredRequest, num_local: int) -> int | None:
        if stored.tries >= _TRIES or stored.lookup is None:
            self.counts["store_misses"] += 1
            return self._leave(stored)
        self._perform(stored.request, stored.load, stored.load.leave())
        self.look_up(stored, stored.lookup.question.limit, num_local)
        return None

    def _place(self, stored: StoredRequest, now: float) -> int | None:
        load, number = stored.load, self._number + 1
        offset = self._space.take_room(number, self._keeper.sizes.of_rows(load.rows))
        if offset is None:
            if load.waited_s(now) > load.most_s:
                self.counts["store_no_room"] += 1
                return self._leave(stored)
            return None
        self._number = number
        load.place(number, self._num_ranks, now)
        self._placed[number] = load
        self._commands.append(Fetch(number, offset, load.rows))
        return None

    def _offer(self, stored: StoredRequest, num_local: int, now: float) -> int | None:
        load = stored.load
        if load.state is LoadState.FETCHING:
            return None if self._waits(stored, now) else self._late(stored)
        offered = load.offer(num_local)
        if offered is None:
            return self._look_up_again(stored, num_local)
        return self._leave(stored) if offered < self._least else offered

    def _may_try(self, stored: StoredRequest, now: float) -> bool:
        is_admitted = self.patience.admits(stored.request, now)
        if not is_admitted:
            self.counts["store_late"] += 1
        return is_admitted

    def _waits(self, stored: StoredRequest, now: float) -> bool:
        load = stored.load
        waited_s = load.waited_s(now)
        return not self.patience.is_over(stored.request, waited_s, load.most_s, now)

    def _late(self, stored: StoredRequest) -> int:
        self.counts["store_late"] += 1
        return self._leave(stored)

    def _leave(self, stored: StoredRequest) -> int:
        self.leave_load(stored)
        return 0

    def leave_load(self, stored: StoredRequest) -> None:
        """The request is computed.  A load of it that the engine waits for ends by itself."""
        self._perform(stored.request, stored.load, stored.load.leave())

    def update_state_after_alloc(
        self, stored: StoredRequest, blocks: tuple[BlockList, ...], num_external: int
    ) -> bool:
        """The request has ``blocks``; ``num_external`` tokens after its local hit are to be loaded.

        Returns:
            Whether they are loaded: they are what was offered.
        """
        load = stored.load
        effects = load.take(num_external)
        self._perform(stored.request, load, effects, blocks)
        if not any(isinstance(one, CopyRows) for one in effects):
            return False
        self._awaited[stored.request] = load
        self.counts["store_hits"] += 1
        self.counts["store_hit_tokens"] += num_external
        self._keeper.rows_used(load.rows)
        return True

    def fail_load(self, request: str) -> None:
        """What was offered is gone, and the engine waits for it: every rank reports a failure."""
        failing = self._awaited[request] = StoreLoad[RowName]()
        self._perform(request, failing, failing.fail())

    def is_loading(self, request: str) -> bool:
        """Whether the engine waits for every rank to report the request, loaded or failed."""
        return request in self._awaited

    def end_load(self, request: str) -> None:
        """All ranks reported the request; one that does not wait for the store is left out."""
        load = self._awaited.pop(request, None)
        if load is not None:
            self._perform(request, load, load.reported())

    def note_fetch(self, result: FetchResult) -> None:
        """A rank has answered."""
        load = self._placed.get(result.number)
        if load is not None:
            self._perform("", load, load.answered(result.missing, result.damaged))

    def _perform(
        self,
        request: str,
        load: StoreLoad[RowName],
        effects: Sequence[Effect[RowName]],
        blocks: tuple[BlockList, ...] = (),
    ) -> None:
        for effect in effects:
            match effect:
                case DropRows():
                    self._commands.append(DropFetch(load.number))
                case FreeRoom():
                    del self._placed[load.number]
                    self._space.free_room(load.number)
                case CopyRows(tokens):
                    need = Need.of(tokens.start, tokens.stop, blocks)
                    self._commands.append(LoadRows(load.number, request, need))
                case FailRequest():
                    self._commands.append(FailLoad(request))
                case AnsweredInTime():
                    self.patience.note_answer()
                case DistrustRows(missing, damaged):
                    self._keeper.rows_failed(missing, damaged)
