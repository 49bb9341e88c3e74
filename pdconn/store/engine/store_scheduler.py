"""The scheduler's part of a store, without an engine: requests, and what is loaded of them.

::

    on_new_request ─► Loads        which rows are looked up, fetched, offered, loaded
                   ─► LoadsBeside  which are loaded beside a pull of the rest
                   ─► Saves        which rows are saved, from which blocks
    note_results   ─► all; clear_rows ends what is under way of any

All on the engine's thread, without system calls.  Look-ups, commits and the byte budget have
threads of their own: :mod:`~pdconn.store.engine.lookups`,
:mod:`~pdconn.store.engine.keeper_thread`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from pdconn.lifecycle.promises import BreakReason
from pdconn.planning.plan import Need
from pdconn.protocol.keep import KeepOrder, SessionKey
from pdconn.protocol.ticket import BlockList
from pdconn.store.engine.beside import BesideOffer, LoadsBeside, PullOutlook
from pdconn.store.engine.loads import Loads, StoredRequest
from pdconn.store.engine.lookups import Extras, Lookups
from pdconn.store.engine.row_uses import SessionReleased, TurnCame, TurnEnded
from pdconn.store.engine.saves import Keeper, RowBlocks, Save, Saves, Saving
from pdconn.store.format.prompt_rows import Spacing, pieces, rows_at_end
from pdconn.store.format.row import RowKind, RowName
from pdconn.store.format.row_names import RowNames
from pdconn.store.rank_commands import (
    BesideEnded,
    FetchResult,
    OpenStore,
    StoreCommand,
    StoreResult,
)
from pdconn.store.settings import StoreSettings


class StoreScheduler:
    """Loads and saves of one engine.

    Args:
        opening: sent to every rank first.
        names: of rows and namespaces.
        spacing, blocks: where windows are saved, and which blocks rows are made of.
        lookups, keeper: the threads.
        clock: seconds that never go back.

    Attributes:
        loads: what is loaded; ``beside``: what of it is loaded beside pulls.
        saves: what is saved.
    """

    def __init__(
        self,
        settings: StoreSettings,
        *,
        opening: OpenStore,
        names: RowNames,
        spacing: Spacing,
        blocks: RowBlocks,
        lookups: Lookups,
        keeper: Keeper,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._opening, self._names = settings, opening, names
        self._lookups, self._keeper, self._clock = lookups, keeper, clock
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
        row_tokens = opening.layout.block_tokens
        self.beside = LoadsBeside(
            self.loads, self._commands, blocks.groups, row_tokens, settings.beside
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
        cache_salt: str | None = None,
        may_load: bool,
        reads_files: bool,
        is_prefetch: bool = False,
    ) -> None:
        """Add a request; it is looked up when the engine first asks.

        Args:
            is_prefetch: whether nobody waits for it.
        """
        chain = self._names.chain(self._opening.layout.block_tokens, cache_salt)
        saving = Saving(chain, num_prompt_tokens)
        self._requests[request] = StoredRequest(
            request, tokens, num_prompt_tokens, extras, may_load, reads_files, saving, is_prefetch
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
        is_loaded = self.loads.update_state_after_alloc(stored, blocks, num_external)
        if is_loaded:
            self._note_use_of_end(stored)
        return is_loaded

    def _note_use_of_end(self, stored: StoredRequest) -> None:
        """Note that a hit has used the rows at the prompt's end, of which it stops short."""
        chain, layout = stored.saving.chain, self._opening.layout
        rows = rows_at_end(layout, stored.load.boundary, stored.num_prompt_tokens)
        if rows and len(chain.keys) * layout.block_tokens >= stored.num_prompt_tokens:
            self._keeper.rows_used([chain.name(kind, index) for kind, index in rows])

    def offer_beside(self, request: str, pull: PullOutlook) -> BesideOffer | None:
        """What can be loaded beside a pull; None to ask again at a later step."""
        stored = self._requests.get(request)
        if stored is None:
            return BesideOffer(pull.tokens.start)
        return self.beside.offer(stored, pull, self._clock())

    def join_pull(self, request: str, need: Need, pull: PullOutlook) -> Need | None:
        """Load what was offered of ``need`` beside the request's pull.  Returns what is loaded."""
        stored = self._requests.get(request)
        return None if stored is None else self.beside.join_pull(stored, need, pull, self._clock())

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
        full = range(-(-boundary // layout.block_tokens))
        rows = [chain.name(RowKind.FA, index) for index in full]
        if stored.load.is_beside:
            return rows
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

    # Sessions

    def turn_came(self, key: SessionKey) -> None:
        """Note that a later turn of a session has come."""
        self._keeper.note_use(TurnCame(key))

    def keep_turn(self, request: str, order: KeepOrder, num_tokens: int) -> bool:
        """Keep the rows of a request that has ended, of ``num_tokens`` tokens that are computed.

        Returns:
            Whether they will be, as far as they are there and within the bounds.
        """
        stored = self._requests.get(request)
        if stored is None or self._settings.read_only or self._settings.keep is None:
            return False
        known = stored.known_extras
        turn = TurnEnded(
            order.key,
            order.seconds,
            self._opening.namespace,
            stored.saving.chain,
            stored.tokens,
            stored.extras if known is None else lambda: known,
            min(num_tokens, len(stored.tokens)),
        )
        return self._keeper.note_use(turn)

    def keep_cut_to_s(self, order: KeepOrder) -> float | None:
        """The seconds for which rows are kept; None if for as long as is asked, or not at all."""
        shares = self._settings.keep
        return None if shares is None else shares.cut_to_s(order.seconds)

    def release_session(self, key: SessionKey) -> None:
        """Keep nothing for a session any more."""
        self._keeper.note_use(SessionReleased(key))

    def take_broken(self, key: SessionKey) -> BreakReason | None:
        """Why rows that were kept for a session are gone; None if it needs not be told."""
        return self._keeper.take_broken(key)

    def take_unreported(self, most: int) -> list[tuple[SessionKey, BreakReason]]:
        """Sessions that lost rows which were kept, and why, for a router; each is taken once."""
        return self._keeper.take_unreported(most)

    # A step

    def take_commands(self) -> list[StoreCommand]:
        """This step's commands for the ranks, in order."""
        self._keeper.take_reports()
        if len(self.beside):
            self.beside.give_up_overdue(self._clock())
        commands = self._commands[:]
        self._commands.clear()
        return commands

    def note_results(self, results: Sequence[StoreResult]) -> list[int]:
        """Apply results of ranks.  Returns the saves whose blocks all ranks have read."""
        saved = []
        for result in results:
            if isinstance(result, FetchResult):
                self.loads.note_fetch(result)
            elif isinstance(result, BesideEnded):
                self.beside.note_ended(result)
            elif (number := self.saves.note_save(result)) is not None:
                saved.append(number)
        return saved

    def clear_rows(self, namespace: str) -> None:
        """Load nothing that was saved before: the prefix cache was reset.

        Rows are saved to ``namespace`` from now on; loads that are not promised yet are dropped.
        """
        for stored in self._requests.values():
            self.loads.leave_load(stored)
        namespace = self._names.in_store(namespace)
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
        kept, loaded = self._keeper.take_keeper_counts(), self.loads.take_counts()
        return dict(loaded + Counter(kept)) if loaded else kept

    def close(self) -> None:
        """Stop the threads."""
        self._lookups.close()
        self._keeper.close()
