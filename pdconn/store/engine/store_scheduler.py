"""The scheduler's part of a store, without an engine: requests, and what is loaded of them.

::

    on_new_request ─► Loads   which rows are looked up, fetched, offered, loaded
                   ─► Saves   which rows are saved, from which blocks
    note_results   ─► both; clear_rows ends what is under way of either

Each try is a :class:`~pdconn.lifecycle.load.StoreLoad`; a request has three at most, since rows
may be missing or damaged.

All on the engine's thread, without system calls.  Look-ups, commits and the byte budget have
threads of their own: :mod:`~pdconn.store.engine.lookups`,
:mod:`~pdconn.store.engine.keeper_thread`.
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
from pdconn.store.breaker import LoadPatience
from pdconn.store.engine.lookups import Extras, Lookup, LookupAnswer, Lookups
from pdconn.store.engine.saves import Keeper, RowBlocks, Save, Saves, Saving
from pdconn.store.format.prompt_rows import Chain, Spacing, pieces
from pdconn.store.format.row import RowKind, RowName, aligned
from pdconn.store.rank_commands import (
    DropFetch,
    FailLoad,
    Fetch,
    FetchResult,
    LoadRows,
    OpenStore,
    StoreCommand,
    StoreResult,
)
from pdconn.store.settings import StoreSettings

log = logging.getLogger(__name__)

_TRIES = 3
"""Look-ups for one request."""


@dataclass(slots=True, eq=False)
class StoredRequest:
    """A request that the store may serve.

    Attributes:
        tokens: ids of the prompt and, later, of the answer; the list grows.
        extras: what else its rows depend on.
        may_load: whether it may be given rows.
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
    load: StoreLoad[RowName] = field(default_factory=StoreLoad)
    lookup: Lookup | None = None
    tries: int = 0
    is_cut: bool = False
    known_extras: Sequence[bytes] | None = None

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
        """Free the bytes of load ``number``."""
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
        stored.load.begin_lookup(self._clock())
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
            self.patience.shelf_answered()
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
        offset = self._space.take_room(number, self._keeper.sizes.staging_nbytes(load.rows))
        if offset is None:
            if load.seconds_waited(now) > load.most_s:
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
        self._perform(stored.request, stored.load, stored.load.leave())

    def update_state_after_alloc(
        self, stored: StoredRequest, blocks: tuple[BlockList, ...], num_external: int
    ) -> bool:
        """Load ``num_external`` tokens after the local hit into the request's ``blocks``.

        Returns:
            Whether they are loaded: they are what was offered.
        """
        load = stored.load
        effects = load.take_blocks(num_external)
        self._perform(stored.request, load, effects, blocks)
        if not any(isinstance(one, CopyRows) for one in effects):
            return False
        self._awaited[stored.request] = load
        self.counts["store_hits"] += 1
        self.counts["store_hit_tokens"] += num_external
        self._keeper.rows_used(load.rows)
        return True

    def fail_load(self, request: str) -> None:
        """Fail a load that the engine waits for, whose rows are gone: every rank reports it."""
        failing = self._awaited[request] = StoreLoad[RowName]()
        self._perform(request, failing, failing.fail_request())

    def is_loading(self, request: str) -> bool:
        """Whether the engine waits for every rank to report the request, loaded or failed."""
        return request in self._awaited

    def end_load(self, request: str) -> None:
        """Note that all ranks reported the request; one that is not loading is ignored."""
        load = self._awaited.pop(request, None)
        if load is not None:
            self._perform(request, load, load.reported())

    def note_fetch(self, result: FetchResult) -> None:
        """Apply a rank's answer to a fetch."""
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
                    need = Need.for_range(tokens.start, tokens.stop, blocks)
                    self._commands.append(LoadRows(load.number, request, need))
                case FailRequest():
                    self._commands.append(FailLoad(request))
                case AnsweredInTime():
                    self.patience.shelf_answered()
                case DistrustRows(missing, damaged):
                    self._keeper.rows_failed(missing, damaged)


class StoreScheduler:
    """Loads and saves of one engine.

    Args:
        opening: sent to every rank first.
        spacing, blocks: where windows are saved, and which blocks rows are made of.
        lookups, keeper: the threads.
        clock: seconds that never go back.

    Attributes:
        loads: what is loaded.
        saves: what is saved.
    """

    def __init__(
        self,
        settings: StoreSettings,
        *,
        opening: OpenStore,
        spacing: Spacing,
        blocks: RowBlocks,
        lookups: Lookups,
        keeper: Keeper,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._opening = settings, opening
        self._lookups, self._keeper = lookups, keeper
        self._requests: dict[str, StoredRequest] = {}
        # One list: after a reset ranks must drop rows of before, and then look for others.
        self._commands: list[StoreCommand] = [opening]
        num_ranks = len(opening.replicas)
        self.loads = Loads(
            staging=settings.staging,
            least=max(settings.min_tokens, 1),
            num_ranks=num_ranks,
            lookups=lookups,
            keeper=keeper,
            commands=self._commands,
            clock=clock,
        )
        self.saves = Saves(
            opening.layout,
            spacing,
            blocks,
            num_ranks=num_ranks,
            keeper=keeper,
            commands=self._commands,
        )

    # A request

    def on_new_request(
        self,
        request: str,
        tokens: Sequence[int],
        num_prompt_tokens: int,
        extras: Extras,
        *,
        may_load: bool,
        reads_files: bool,
    ) -> None:
        """Add a request; it is looked up when the engine first asks."""
        saving = Saving(Chain(self._opening.layout.block_tokens), num_prompt_tokens)
        self._requests[request] = StoredRequest(
            request, tokens, num_prompt_tokens, extras, may_load, reads_files, saving
        )

    def get_num_new_matched_tokens(
        self, request: str, num_tokens: int, num_local: int
    ) -> int | None:
        """Tokens after the local hit that can be loaded; None to ask again at a later step."""
        stored = self._requests.get(request)
        if stored is None:
            return 0
        return self.loads.get_num_new_matched_tokens(stored, num_tokens, num_local)

    def update_state_after_alloc(
        self, request: str, blocks: tuple[BlockList, ...], num_external: int
    ) -> bool:
        """Load what was offered into the request's blocks.  Returns whether it is loaded."""
        stored = self._requests.get(request)
        if stored is None:
            return False
        return self.loads.update_state_after_alloc(stored, blocks, num_external)

    def request_finished(self, request: str) -> None:
        """Drop a request that left the engine.  A load under way ends by itself."""
        stored = self._requests.pop(request, None)
        if stored is not None:
            self.loads.leave_load(stored)

    def junction_of(self, request: str) -> int:
        """Tokens after which the prompt parts from those saved before; 0 if it is not known."""
        stored = self._requests.get(request)
        at = None if stored is None else stored.saving.junction
        return 0 if at is None else (at + 1) * self._opening.layout.block_tokens

    def rows_loaded(self, request: str) -> list[RowName]:
        """All rows that the request's hit depends on, also of tokens that the engine held."""
        stored, layout = self._requests[request], self._opening.layout
        boundary, chain = stored.load.boundary, stored.saving.chain
        full = range(boundary // layout.block_tokens)
        rows = [chain.name(RowKind.FA, index) for index in full]
        return rows + [chain.name(RowKind.WA, at) for at in pieces(layout.wa, boundary)]

    def save_pass(
        self, request: str, before: int, after: int, ids: Callable[[], tuple[list[int], ...]]
    ) -> Save | None:
        """This step's pass computes tokens ``[before, after)``: save the rows that it completes.

        Args:
            ids: gives the request's blocks by group, holes and all.

        Returns:
            What is saved: the caller pins its blocks until :meth:`note_results` names its number.
        """
        stored = self._requests.get(request)
        if stored is None or self._settings.read_only:
            return None
        most = stored.num_prompt_tokens
        if self._settings.save == "all":
            most = max(most, min(before, len(stored.tokens)))
        after = min(after, most)
        # The pass completes no row.
        if after // self._opening.layout.block_tokens <= stored.saving.next_block:
            return None
        self._lookups.take_answers()
        # Its keys are hashed by a look-up, on its thread; until then nothing is saved of it.
        if stored.needs_keys() and not self.loads.patience.is_hung:
            self.loads.look_up(stored, stored.num_prompt_tokens - 1, 0)
        if stored.awaits_keys():
            return None
        if not stored.extend_keys(after):  # it has none: nothing of it is saved or loaded
            del self._requests[request]
            return None
        return self.saves.save_rows(stored.saving, after, ids, self._opening.namespace)

    # A step

    def take_commands(self) -> list[StoreCommand]:
        """This step's commands for the ranks, in order."""
        self._keeper.take_reports()
        commands = self._commands[:]
        self._commands.clear()
        return commands

    def note_results(self, results: Sequence[StoreResult]) -> list[int]:
        """Apply results of ranks.  Returns the saves whose blocks all ranks have read."""
        saved = []
        for result in results:
            if isinstance(result, FetchResult):
                self.loads.note_fetch(result)
            elif (number := self.saves.note_save(result)) is not None:
                saved.append(number)
        return saved

    def clear_rows(self, namespace: str) -> None:
        """Load nothing that was saved before: the prefix cache was reset.

        Rows are saved to ``namespace`` from now on; loads that are not promised yet are dropped.
        """
        for stored in self._requests.values():
            self.loads.leave_load(stored)
        self._keeper.change_namespace(namespace)
        opening = self._opening
        self._opening = OpenStore(opening.layout, namespace, opening.writer, opening.replicas)
        self._commands.append(self._opening)

    def is_settled(self) -> bool:
        """Whether nothing is being fetched, saved or committed."""
        return not (len(self.saves) or len(self.loads) or self._keeper.is_saving())

    def budget_gauges(self) -> dict[str, int]:
        """Gauges of the byte budget, as last seen."""
        return self._keeper.budget_gauges()

    def take_store_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        kept = self._keeper.take_keeper_counts()
        if self.loads.counts:
            kept = dict(self.loads.counts + Counter(kept))
            self.loads.counts = Counter()
        return kept

    def close(self) -> None:
        """Stop the threads."""
        self._lookups.close()
        self._keeper.close()
