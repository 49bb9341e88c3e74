"""What is loaded of an engine's requests: looked up, fetched, verified, and only then promised.

Each try is a :class:`~pdconn.lifecycle.load.StoreLoad`; a request has three at most, since rows
may be missing or damaged.  Loads beside a pull are in :mod:`~pdconn.store.engine.beside`.
"""

from __future__ import annotations

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
from pdconn.lifecycle.sources import Bandwidth
from pdconn.lifecycle.turns import Urgency
from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList
from pdconn.store.breaker import LoadPatience
from pdconn.store.budget.quotas import TenantCounts
from pdconn.store.engine.lookups import Extras, Lookup, LookupAnswer, Lookups
from pdconn.store.engine.saves import Keeper, Saving
from pdconn.store.format.row import RowName, aligned
from pdconn.store.rank_commands import (
    DropFetch,
    FailLoad,
    Fetch,
    FetchResult,
    LoadRows,
    StoreCommand,
)

_TRIES = 3
"""Look-ups for one request."""


@dataclass(slots=True, eq=False)
class StoredRequest:
    """A request that the store may serve.

    Attributes:
        tokens: ids of the prompt and, later, of the answer; the list grows.
        extras: what else its rows depend on.
        may_load: whether it may be given rows.
        is_prefetch: whether nobody waits for it.
        reads_files: whether ``extras`` does: then look-ups alone call it, on their thread.
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
    is_prefetch: bool = False
    load: StoreLoad[RowName] = field(default_factory=StoreLoad)
    lookup: Lookup | None = None
    tries: int = 0
    is_cut: bool = False
    known_extras: Sequence[bytes] | None = None

    @property
    def urgency(self) -> Urgency:
        """What its fetches are served by."""
        if self.is_prefetch:
            return Urgency.PREFETCH
        return Urgency.PULL if self.load.is_beside else Urgency.LOAD

    def learn_keys(self, answer: LookupAnswer) -> None:
        """Take keys, and where the prompt parts from those saved, from a look-up's answer."""
        self.known_extras = answer.known_extras
        if len(answer.chain.keys) > len(self.saving.chain.keys):
            self.saving.chain = answer.chain
        if answer.full and self.saving.junction is None:
            self.saving.junction = answer.full - 1

    def extend_keys(self, until: int) -> bool:
        """Hash up to ``until`` tokens, also of the answer.  Returns whether there are keys."""
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
        """Whether saving needs a look-up that loading has not made, as for a prompt pulled."""
        is_new = self.load.state is LoadState.NEW and self.may_load
        return self.lookup is None and (is_new or self.reads_files)

    def awaits_keys(self) -> bool:
        """Whether its keys cannot be made yet, since a look-up has not answered."""
        is_asked = self.lookup is not None and self.lookup.answer is None
        # 1. The request is computed although its look-up is under way: the answer has the keys.
        if self.load.is_looking and self.lookup is not None:
            if self.lookup.answer is None:
                return True
            self.learn_keys(self.lookup.answer)
            self.load.leave()
        # 2. What keys depend on besides tokens is known, or found without a file.
        if self.known_extras is None and not self.reads_files:
            self.known_extras = self.extras()
        # 3. It is read from files, by a look-up.
        return self.known_extras is None and self.reads_files and (is_asked or not self.lookup)


class StagingSpace:
    """The staging areas of all ranks: which bytes of them belong to which load.

    Every rank has an area of the same size and gets the same offsets, so that no rank can run out
    of room that the scheduler believes to have.  First fit, in whole pages.

    Attributes:
        nbytes: of a rank's area.
        placed: the loads that have bytes, by their numbers.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.placed: dict[int, StoreLoad[RowName]] = {}
        self._taken: list[tuple[int, int, int]] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._taken)

    def take_room(self, load: StoreLoad[RowName], nbytes: int) -> tuple[int, int] | None:
        """A number for a load, and the offset of its ``nbytes``; None without such room now."""
        nbytes, at = aligned(max(nbytes, 1)), 0
        for offset, end, _ in self._taken:
            if offset - at >= nbytes:
                break
            at = end
        if at + nbytes > self.nbytes:
            return None
        self._number += 1
        insort(self._taken, (at, at + nbytes, self._number))
        self.placed[self._number] = load
        return self._number, at

    @property
    def free_nbytes(self) -> int:
        """Bytes that no load has, in one piece or not."""
        return self.nbytes - sum(end - at for at, end, _ in self._taken)

    def free_room(self, number: int) -> None:
        """Free the bytes of load ``number``."""
        del self.placed[number]
        self._taken = [entry for entry in self._taken if entry[2] != number]


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
        staging: where rows are fetched to.
        patience: whether the shelf answers.
        bandwidth: of fetches by one rank.
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
        self.least, self._num_ranks = least, num_ranks
        self._lookups, self.keeper, self._clock = lookups, keeper, clock
        self._commands = commands
        self.staging, self.patience = StagingSpace(staging), LoadPatience()
        self.bandwidth = Bandwidth()
        self._awaited: dict[str, StoreLoad[RowName]] = {}
        self.counts: Counter[str] = Counter()
        self._tenants = TenantCounts()

    def __len__(self) -> int:
        """Loads that have bytes of the staging areas."""
        return len(self.staging)

    def get_num_new_matched_tokens(
        self, stored: StoredRequest, num_tokens: int, num_local: int
    ) -> int | None:
        """Tokens after the local hit that can be loaded; None to ask again at a later step.

        ``num_tokens`` are those of the request now; the last of them is never loaded.
        """
        load, now = stored.load, self._clock()
        # 0. It was to be loaded beside a pull, which has failed or was given up.
        if load.is_beside:
            self.leave_load(stored)
            load = stored.load = StoreLoad()
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
        if num_tokens - 1 - num_local < self.least or not self.may_try(stored, now):
            return self._leave(stored)
        # 5. It is looked up.
        self.counts["store_lookups"] += 1
        tenant = stored.saving.chain.tenant
        self._tenants.add_request(tenant)
        self._tenants.add("store_tenant_lookups", tenant)
        self.look_up(stored, num_tokens - 1, num_local)
        return None

    def look_up(self, stored: StoredRequest, limit: int, held: int) -> None:
        """Look a prompt up, for a load or for the keys of what is to be saved of it."""
        stored.load = StoreLoad()
        stored.load.begin_lookup(self._clock())
        stored.tries += 1
        chain = stored.saving.chain
        stored.lookup = self._lookups.look_up(stored.tokens, stored.extras, limit, held, chain)

    def _look_at(self, stored: StoredRequest, num_local: int, now: float) -> int | None:
        load, answer = stored.load, self.take_answer(stored)
        assert stored.lookup is not None
        held = stored.lookup.question.held
        if answer is None:
            return None if self._waits(stored, now) else self._late(stored)
        self.note_answer(stored, answer)
        if stored.is_first_cut(answer):
            self.counts["store_cut"] += 1
        if answer.boundary - num_local < self.least:
            self.counts["store_misses"] += 1
            return self._leave(stored)
        if held != num_local:  # blocks of the local hit came or went meanwhile
            return self._look_up_again(stored, num_local)
        load.found(answer.boundary, held, answer.rows)
        return self._place(stored, now)

    def take_answer(self, stored: StoredRequest) -> LookupAnswer | None:
        """The answer to the request's look-up, once it is there."""
        assert stored.lookup is not None
        self._lookups.take_answers()
        return stored.lookup.answer

    def note_answer(self, stored: StoredRequest, answer: LookupAnswer) -> None:
        """Learn what an answer says of the shelf, and of the request's keys."""
        if answer.has_asked:
            self.patience.shelf_answered()
        stored.learn_keys(answer)
        stored.may_load = answer.is_storable

    def _look_up_again(self, stored: StoredRequest, num_local: int) -> int | None:
        if stored.tries >= _TRIES or stored.lookup is None:
            self.counts["store_misses"] += 1
            return self._leave(stored)
        self.perform(stored.request, stored.load, stored.load.leave())
        self.look_up(stored, stored.lookup.question.limit, num_local)
        return None

    def _place(self, stored: StoredRequest, now: float) -> int | None:
        load = stored.load
        if not self.place(stored, now) and load.seconds_waited(now) > load.most_s:
            self.counts["store_no_room"] += 1
            return self._leave(stored)
        return None

    def place(self, stored: StoredRequest, now: float) -> bool:
        """Fetch the rows of a request's load, if there is room for them now."""
        load, nbytes = stored.load, self.keeper.sizes.staging_nbytes(stored.load.rows)
        # Prefetches leave half of the room to requests, but for one that has all of it to itself.
        left = self.staging.free_nbytes - nbytes
        if stored.is_prefetch and len(self.staging) and left < self.staging.nbytes // 2:
            return False
        placed = self.staging.take_room(load, nbytes)
        if placed is None:
            return False
        number, offset = placed
        load.place(number, self._num_ranks, now)
        self._commands.append(Fetch(number, offset, load.rows, stored.urgency))
        return True

    def _offer(self, stored: StoredRequest, num_local: int, now: float) -> int | None:
        load = stored.load
        if load.state is LoadState.FETCHING:
            return None if self._waits(stored, now) else self._late(stored)
        offered = load.offer(num_local)
        if offered is None:
            return self._look_up_again(stored, num_local)
        return self._leave(stored) if offered < self.least else offered

    def may_try(self, stored: StoredRequest, now: float) -> bool:
        is_admitted = self.patience.admits(stored.request, now)
        if not is_admitted:
            self.counts["store_late"] += 1
        return is_admitted

    def _waits(self, stored: StoredRequest, now: float) -> bool:
        load = stored.load
        waited_s = load.seconds_waited(now)
        return not self.patience.is_over(stored.request, waited_s, load.most_s, now)

    def _late(self, stored: StoredRequest) -> int:
        self.counts["store_late"] += 1
        return self._leave(stored)

    def _leave(self, stored: StoredRequest) -> int:
        self.leave_load(stored)
        return 0

    def leave_load(self, stored: StoredRequest) -> None:
        """Drop the request's load; one that the engine waits for ends by itself."""
        self.perform(stored.request, stored.load, stored.load.leave())

    def update_state_after_alloc(
        self, stored: StoredRequest, blocks: tuple[BlockList, ...], num_external: int
    ) -> bool:
        """Load ``num_external`` tokens after the local hit into the request's ``blocks``.

        Returns:
            Whether they are loaded: they are what was offered.
        """
        load = stored.load
        effects = load.take_blocks(num_external)
        self.perform(stored.request, load, effects, blocks)
        if not any(isinstance(one, CopyRows) for one in effects):
            return False
        self._awaited[stored.request] = load
        self.counts["store_hits"] += 1
        self.counts["store_hit_tokens"] += num_external
        tenant = stored.saving.chain.tenant
        self._tenants.add("store_tenant_hits", tenant)
        self._tenants.add("store_tenant_hit_tokens", tenant, num_external)
        self.keeper.rows_used(load.rows)
        return True

    def take_counts(self) -> Counter[str]:
        """What was counted since the last call."""
        taken = self.counts + self._tenants.counts
        if taken:
            self.counts, self._tenants.counts = Counter(), Counter()
        return taken

    def fail_load(self, request: str) -> None:
        """Fail a load that the engine waits for, whose rows are gone: every rank reports it."""
        failing = self._awaited[request] = StoreLoad[RowName]()
        self.perform(request, failing, failing.fail_request())

    def is_loading(self, request: str) -> bool:
        """Whether the engine waits for every rank to report the request, loaded or failed."""
        return request in self._awaited

    def end_load(self, request: str) -> None:
        """Note that all ranks reported the request; one that is not loading is ignored."""
        load = self._awaited.pop(request, None)
        if load is not None:
            self.perform(request, load, load.reported())

    def note_fetch(self, result: FetchResult) -> None:
        """Apply a rank's answer to a fetch."""
        load, now = self.staging.placed.get(result.number), self._clock()
        if load is None:
            return
        if not (result.missing or result.damaged):
            nbytes = self.keeper.sizes.staging_nbytes(load.rows)
            self.bandwidth.learn_read(nbytes, now - load.placed_at, now)
        self.perform("", load, load.answered(result.missing, result.damaged))

    def perform(
        self,
        request: str,
        load: StoreLoad[RowName],
        effects: Sequence[Effect[RowName]],
        blocks: tuple[BlockList, ...] = (),
    ) -> None:
        """Perform what a load asks for; ``blocks`` are those of its request, if it needs them."""
        for effect in effects:
            match effect:
                case DropRows():
                    self._commands.append(DropFetch(load.number))
                case FreeRoom():
                    self.staging.free_room(load.number)
                case CopyRows(tokens):
                    need = Need.for_range(tokens.start, tokens.stop, blocks)
                    self._commands.append(LoadRows(load.number, request, need))
                case FailRequest():
                    self._commands.append(FailLoad(request))
                case AnsweredInTime():
                    self.patience.shelf_answered()
                case DistrustRows(missing, damaged):
                    self.keeper.rows_failed(missing, damaged)
