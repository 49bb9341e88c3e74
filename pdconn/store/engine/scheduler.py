"""The scheduler's part of a store: what to load for which request, and what to save.

A request passes through these stages; every one of them may end in "compute it"::

    Looking ──boundary──► Fetching ──all ranks verified──► Fetched ──blocks──► Loading ──► over
       ▲                     │ rows missing or damaged
       └─────────────────────┘ (three times at most)

The engine is told of a hit when the bytes are in the ranks' staging areas and verified, so that
neither an eviction nor damage can fail a request.  Until then it is told to ask again.

All on the engine's thread, without system calls; look-ups, commits and the byte budget have
threads of their own (:mod:`lookups`, :mod:`keeper`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList
from pdconn.store.commands import (
    DropFetch,
    FailLoad,
    Fetch,
    FetchResult,
    LoadRows,
    OpenStore,
    SaveFailed,
    SaveRow,
    SaveRows,
    StoreCommand,
    StoreResult,
)
from pdconn.store.engine.commits import SaveBatch
from pdconn.store.engine.keeper import Keeper
from pdconn.store.engine.lookups import Extras, Lookup, LookupThread
from pdconn.store.engine.patience import FETCH_S, LOOKUP_S, LoadPatience
from pdconn.store.engine.requests import LoadStage, RequestFetch, Save, StoredRequest
from pdconn.store.engine.saves import RowBlocks, Saving, block_lists, rows_to_save
from pdconn.store.engine.space import StagingSpace
from pdconn.store.format.boundaries import Spacing, pieces
from pdconn.store.format.names import Chain, RowKind, RowName
from pdconn.store.settings import StoreSettings

log = logging.getLogger(__name__)

_TRIES = 3


class StoreScheduler:
    """Loads and saves of one engine.

    Args:
        opening: sent to every rank first.
        spacing, blocks: where windows are saved, and which blocks rows are made of.
        lookups, keeper: the threads.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        settings: StoreSettings,
        *,
        opening: OpenStore,
        spacing: Spacing,
        blocks: RowBlocks,
        lookups: LookupThread,
        keeper: Keeper,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._layout = settings, opening.layout
        self._num_ranks = len(opening.replicas)
        self._spacing, self._blocks = spacing, blocks
        self._lookups, self._keeper, self._clock = lookups, keeper, clock
        self._space, self._patience = StagingSpace(settings.staging), LoadPatience()
        self._tracked: dict[str, StoredRequest] = {}
        self._fetches: dict[int, RequestFetch] = {}
        self._saves: dict[int, int] = {}
        self._commands: list[StoreCommand] = [opening]
        self._opening = opening
        self._number = 0
        self.counts: Counter[str] = Counter()

    # Loads

    def arrived(
        self,
        request: str,
        tokens: Sequence[int],
        num_prompt_tokens: int,
        extras: Extras,
        *,
        may_load: bool,
        reads_files: bool,
    ) -> None:
        """A request entered the engine; its look-up begins when the engine first asks."""
        chain = Chain(self._layout.block_tokens)
        saving = Saving(chain, num_prompt_tokens)
        self._tracked[request] = StoredRequest(
            request, tokens, num_prompt_tokens, extras, may_load, reads_files, saving, self._clock()
        )

    def matched(self, request: str, num_tokens: int, num_local: int) -> int | None:
        """Tokens after the local hit that can be loaded; None to ask again at a later step.

        ``num_tokens`` are those of the request now; the last of them is never loaded.
        """
        stored = self._tracked.get(request)
        if stored is None or not stored.may_load or not self._is_open(stored, num_tokens):
            return 0
        stored.num_local = num_local
        now = self._clock()
        if stored.stage is LoadStage.LOOKING:
            return self._looking(stored, num_local, now)
        if stored.stage is LoadStage.FETCHING:
            return self._fetching(stored, num_local, now)
        if num_tokens - 1 - num_local < self._least():
            return self._over(stored)
        if not self._patience.admits(request, now):
            self.counts["store_late"] += 1
            return self._over(stored)
        self.counts["store_lookups"] += 1
        self._look_up(stored, num_tokens - 1, num_local, now)
        return None

    def allocated(self, request: str, blocks: tuple[BlockList, ...], num_external: int) -> bool:
        """The request has ``blocks``; ``num_external`` tokens after its local hit are to be loaded.

        Returns:
            Whether the store loads them: it had offered them.
        """
        stored = self._tracked.get(request)
        if stored is None or stored.stage is not LoadStage.FETCHING:
            return False
        fetch, held = self._fetches[stored.fetch], stored.num_local
        if not num_external or fetch.left or held + num_external != fetch.boundary:
            self._drop(stored)
            return False
        need = range(held, fetch.boundary)
        stored.stage = LoadStage.LOADING
        fetch.is_loading = True
        self._commands.append(
            LoadRows(stored.fetch, request, Need.of(need.start, need.stop, blocks))
        )
        self.counts["store_hits"] += 1
        self.counts["store_hit_tokens"] += len(need)
        self._keeper.touch(fetch.rows)
        return True

    def fail(self, request: str) -> None:
        """What was offered is gone, and the engine waits for it: every rank reports a failure."""
        self._commands.append(FailLoad(request))

    def junction(self, request: str) -> int:
        """Tokens after which the prompt parts from those saved before; 0 if it is not known."""
        stored = self._tracked.get(request)
        at = None if stored is None else stored.saving.junction
        return 0 if at is None else (at + 1) * self._layout.block_tokens

    def served(self, request: str) -> list[RowName]:
        """All rows that the request's hit stands on, those that it held already among them."""
        stored = self._tracked[request]
        boundary, chain = self._fetches[stored.fetch].boundary, stored.saving.chain
        full = range(boundary // self._layout.block_tokens)
        rows = [chain.name(RowKind.FA, index) for index in full]
        return rows + [chain.name(RowKind.WA, at) for at in pieces(self._layout.wa, boundary)]

    def loaded(self, request: str) -> None:
        """All ranks reported the request received."""
        stored = self._tracked.get(request)
        for number, fetch in list(self._fetches.items()):
            if fetch.request == request and fetch.is_loading:
                self._forget(number)
        if stored is not None and stored.stage is LoadStage.LOADING:
            stored.stage = LoadStage.OVER

    def finished(self, request: str) -> None:
        """The request left the engine.  A load under way ends by itself."""
        stored = self._tracked.pop(request, None)
        if stored is not None and stored.stage is LoadStage.FETCHING:
            self._drop(stored)

    # Saves

    def computed(
        self, request: str, before: int, after: int, ids: Callable[[], tuple[list[int], ...]]
    ) -> Save | None:
        """This step's pass computes tokens ``[before, after)``: save the rows that it completes.

        Args:
            ids: gives the request's blocks by group, holes and all.

        Returns:
            What is saved: the caller pins its blocks until :meth:`note` names its number.
        """
        stored = self._tracked.get(request)
        if stored is None or self._settings.read_only:
            return None
        most = stored.num_prompt_tokens
        if self._settings.save == "all":
            most = max(most, min(before, len(stored.tokens)))
        after = min(after, most)
        if after // self._layout.block_tokens <= stored.saving.next_block:
            return None
        now = self._clock()
        if stored.is_unasked() and not self._patience.is_hung:
            self._look_up(stored, stored.num_prompt_tokens - 1, 0, now)
        if stored.awaits_keys():
            return None
        if not stored.extend(after):
            del self._tracked[request]
            return None
        names = rows_to_save(
            stored.saving, self._layout, self._spacing, after, self._keeper.is_wanted
        )
        return self._save(names, ids) if names else None

    def take_commands(self) -> list[StoreCommand]:
        """This step's commands for the ranks, in order."""
        commands, self._commands = self._commands, []
        return commands

    def note(self, results: Sequence[StoreResult]) -> list[int]:
        """Ranks have answered; returns the saves all of whose blocks may be freed now."""
        saved = []
        for result in results:
            if isinstance(result, FetchResult):
                self._fetched(result)
            elif isinstance(result, SaveFailed):
                self._keeper.not_saved(result.part)
            elif (left := self._saves.get(result.number, 0) - 1) > 0:
                self._saves[result.number] = left
            elif self._saves.pop(result.number, None) is not None:
                saved.append(result.number)
        return saved

    def cleared(self, namespace: str) -> None:
        """The prefix cache was reset: nothing saved before may be loaded after it.

        Rows go to another ``namespace`` from now on; fetches under way are dropped.
        """
        for stored in self._tracked.values():
            if stored.stage is LoadStage.FETCHING:
                self._drop(stored)
            if stored.stage is not LoadStage.LOADING:
                stored.stage = LoadStage.OVER
        self._keeper.cleared(namespace)
        opening = self._opening
        self._opening = OpenStore(opening.layout, namespace, opening.writer, opening.replicas)
        self._commands.append(self._opening)

    def has_fetches(self) -> bool:
        """Whether bytes of the staging area are taken."""
        return bool(self._fetches)

    def is_settled(self) -> bool:
        """Whether nothing is being fetched, saved or committed."""
        return not (self._saves or self._fetches or self._keeper.is_saving())

    def usage(self) -> dict[str, int]:
        """Gauges of the byte budget, as last seen."""
        return self._keeper.usage()

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        kept = self._keeper.take_counts()
        if self.counts:
            kept, self.counts = dict(self.counts + Counter(kept)), Counter()
        return kept

    def close(self) -> None:
        """Stop the threads."""
        self._lookups.close()
        self._keeper.close()

    def _is_open(self, stored: StoredRequest, num_tokens: int) -> bool:
        """Whether the store may serve it; a preempted request with an answer is looked up anew."""
        if stored.stage is LoadStage.OVER:
            return num_tokens > stored.num_prompt_tokens and stored.tries < _TRIES
        return stored.stage is not LoadStage.LOADING

    def _least(self) -> int:
        return max(self._settings.min_tokens, 1)

    def _over(self, stored: StoredRequest) -> int:
        stored.stage = LoadStage.OVER
        return 0

    def _look_up(self, stored: StoredRequest, limit: int, held: int, now: float) -> None:
        stored.stage, stored.since = LoadStage.LOOKING, now
        stored.tries += 1
        stored.lookup = Lookup(stored.tokens, stored.extras, limit, held, stored.saving.chain)
        self._lookups.post(stored.lookup)

    def _looking(self, stored: StoredRequest, num_local: int, now: float) -> int | None:
        lookup = stored.lookup
        assert lookup is not None
        if not lookup.done.is_set():
            if not self._patience.is_over(stored.request, now - stored.since, LOOKUP_S, now):
                return None
            self.counts["store_late"] += 1
            return self._over(stored)
        if lookup.has_asked:
            self._patience.answered()
        stored.learn(lookup)
        stored.may_load = lookup.is_storable
        if stored.is_first_cut(lookup):
            self.counts["store_cut"] += 1
        if lookup.boundary - num_local < self._least():
            self.counts["store_misses"] += 1
            return self._over(stored)
        if lookup.held != num_local:  # blocks of the local hit came or went meanwhile
            return self._again(stored, num_local, now)
        return self._fetch(stored, lookup, now)

    def _again(self, stored: StoredRequest, num_local: int, now: float) -> int | None:
        if stored.tries >= _TRIES or stored.lookup is None:
            self.counts["store_misses"] += 1
            return self._over(stored)
        self._look_up(stored, stored.lookup.limit, num_local, now)
        return None

    def _fetch(self, stored: StoredRequest, lookup: Lookup, now: float) -> int | None:
        number = self._number + 1
        offset = self._space.take(number, self._keeper.sizes.of_rows(lookup.rows))
        if offset is None:
            if now - stored.since > LOOKUP_S:
                self.counts["store_no_room"] += 1
                return self._over(stored)
            return None
        self._number = number
        stored.stage, stored.fetch, stored.since = LoadStage.FETCHING, number, now
        self._fetches[number] = RequestFetch(
            stored.request, lookup.boundary, lookup.held, lookup.rows, self._num_ranks, now
        )
        self._commands.append(Fetch(number, offset, lookup.rows))
        return None

    def _fetching(self, stored: StoredRequest, num_local: int, now: float) -> int | None:
        fetch = self._fetches[stored.fetch]
        if fetch.left:
            if not self._patience.is_over(stored.request, now - fetch.since, FETCH_S, now):
                return None
            self.counts["store_late"] += 1
            self._drop(stored)
            return self._over(stored)
        if fetch.missing or fetch.damaged or num_local < fetch.held:
            self._drop(stored)
            return self._again(stored, num_local, now)
        if fetch.boundary - num_local < self._least():
            self._drop(stored)
            return self._over(stored)
        return fetch.boundary - num_local

    def _fetched(self, result: FetchResult) -> None:
        fetch = self._fetches.get(result.number)
        if fetch is None:
            return
        fetch.missing.update(result.missing)
        fetch.damaged.update(result.damaged)
        fetch.left -= 1
        if fetch.left:
            return
        if not fetch.is_dropped:
            self._patience.answered()
        if fetch.missing or fetch.damaged:
            self._keeper.failed(fetch.missing - fetch.damaged, fetch.damaged)
        if fetch.is_dropped:
            self._forget(result.number)

    def _drop(self, stored: StoredRequest) -> None:
        """Give the offer up; its staging is free when every rank has answered."""
        fetch = self._fetches[stored.fetch]
        fetch.is_dropped = True
        self._commands.append(DropFetch(stored.fetch))
        if not fetch.left:
            self._forget(stored.fetch)
        stored.stage = LoadStage.OVER

    def _forget(self, number: int) -> None:
        del self._fetches[number]
        self._space.free(number)

    def _save(self, names: list[RowName], ids: Callable[[], tuple[list[int], ...]]) -> Save | None:
        by_group = ids()
        names = [name for name in names if self._blocks.has_all(name, by_group)]
        names = self._keeper.admitted(names)
        if not names:
            return None
        self._number += 1
        rows = tuple(SaveRow(name, f"{self._number}-{at}") for at, name in enumerate(names))
        blocks = block_lists(self._blocks, names, by_group)
        self._saves[self._number] = self._num_ranks
        self._commands.append(SaveRows(self._number, blocks, rows))
        self._keeper.add(SaveBatch(self._opening.namespace, rows))
        return Save(self._number, blocks, tuple(names))
