"""Puts the scheduler's part of a store together, once every rank's memory is known."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from pdconn.store.budget.root_budget import HEADROOM, RootBudget
from pdconn.store.engine.keeper_thread import (
    Budget,
    Committer,
    KeeperCommand,
    KeeperLoop,
    KeeperReport,
)
from pdconn.store.engine.lookups import (
    Catalogue,
    Finder,
    Learnt,
    LookupAnswer,
    LookupLoop,
    LookupQuestion,
    Lookups,
    ShareSizes,
)
from pdconn.store.engine.row_uses import RowUses
from pdconn.store.engine.saves import Keeper, NoteRows, RowBlocks
from pdconn.store.engine.store_scheduler import StoreScheduler
from pdconn.store.format.footer import largest_row_sizes, row_nbytes
from pdconn.store.format.prompt_rows import Spacing, pieces
from pdconn.store.format.row import (
    Packing,
    RowKind,
    Section,
    StoreLayout,
    as_kept,
    share_layout,
)
from pdconn.store.format.row_names import SEALED, RowNames
from pdconn.store.rank_commands import OpenStore
from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.folders import keep_layout, namespaces_of
from pdconn.store.shelf.interface import Shelf
from pdconn.store.shelf.open import open_shelf
from pdconn.store.store_errors import FormatError, StoreSettingError
from pdconn.store.store_keys import load_keys
from pdconn.threads import Box, ThreadDied, Worker
from registration.references import KVCacheGroupReference, KVCacheReferences

log = logging.getLogger(__name__)


def build_scheduler(
    settings: StoreSettings,
    layout: StoreLayout,
    ranks: Sequence[KVCacheReferences],
    *,
    namespace: str,
    writer: str,
    clock: Callable[[], float],
    shelf: Callable[[], Shelf] | None = None,
    budget: Budget | None = None,
    note_rows: NoteRows | None = None,
) -> StoreScheduler:
    """A scheduler with its threads started.

    Args:
        layout: of whole rows as they are read, made of ``ranks``.
        namespace: where the engine's rows are; the store may have another name for it.
        writer: this boot's name.
        shelf, budget: other ones than the settings say, for tests.
        note_rows: called with rows committed and gone, on the engine's thread.

    Raises:
        StoreError: the root cannot be opened.
        StoreSettingError: the key file cannot be used, or these ranks cannot compress rows.
    """
    keys = load_keys(settings.key_file)
    namespace = keys.names.in_store(namespace)
    layout = layout if keys.rows is None else layout.sealed()
    open_it = shelf or partial(open_shelf, settings)
    open_it().close()  # a root that cannot be used is an error at the start, not a silent miss
    if budget is None and not settings.read_only:
        budget = RootBudget(
            settings, writer, sum(largest_row_sizes(layout).values()), clock, time.time
        )
    shares = [share_layout([rank], layout.block_tokens) for rank in ranks]
    _check_whole_heads(layout, shares)
    sizes = ShareSizes.from_shares(shares)
    _warn_of_little_room(settings, layout, sizes)
    _warn_of_others(settings, keys.names)
    keeper, lookups = _start_threads(
        settings, layout, sizes, num_ranks=len(ranks), namespace=namespace, writer=writer,
        shelf=open_it, budget=budget, clock=clock, note_rows=note_rows,
    )  # fmt: skip
    return StoreScheduler(
        settings,
        opening=OpenStore(layout, namespace, writer, replicas_of(ranks)),
        names=keys.names,
        spacing=Spacing.from_setting(layout, settings.window_every),
        blocks=RowBlocks(
            layout.block_tokens,
            tuple(as_kept(group, layout.block_tokens) for group in groups_of(ranks)),
        ),
        lookups=lookups,
        keeper=keeper,
        clock=clock,
    )


def _check_whole_heads(layout: StoreLayout, shares: Sequence[StoreLayout]) -> None:
    """Check that each rank can pack its heads, all layers of a section together."""
    if layout.fa.packing is Packing.NONE:
        return
    whole = {section.layers for section in _sections(layout)}
    for rank, share in enumerate(shares):
        if any(section.layers not in whole for section in _sections(share)):
            expected = "'none' where ranks hold some layers each, as with pipeline parallelism"
            raise StoreSettingError("store.compression", expected, f"'exponents' (rank {rank})")


def _sections(layout: StoreLayout) -> tuple[Section, ...]:
    return layout.fa.sections + (() if layout.wa is None else layout.wa.sections)


def _start_threads(
    settings: StoreSettings,
    layout: StoreLayout,
    sizes: ShareSizes,
    *,
    num_ranks: int,
    namespace: str,
    writer: str,
    shelf: Callable[[], Shelf],
    budget: Budget | None,
    clock: Callable[[], float],
    note_rows: NoteRows | None,
) -> tuple[Keeper, Lookups]:
    """Both threads, each with the other's inbox: they learn together which rows are there."""
    to_keeper: Box[KeeperCommand] = Box()
    to_lookups: Box[LookupQuestion | Learnt] = Box()
    reports: Box[KeeperReport | ThreadDied] = Box()
    answers: Box[LookupAnswer | ThreadDied] = Box()
    catalogue = Catalogue(namespace)
    keeping = KeeperLoop(
        to_keeper,
        reports,
        to_lookups,
        catalogue=catalogue,
        shelf=shelf,
        budget=budget,
        uses=RowUses(layout, largest_row_sizes(layout), budget, clock, time.time),
        committer=partial(
            Committer, layout, writer=writer, num_ranks=num_ranks, catalogue=catalogue,
            budget=budget,
        ),
        clock=clock,
        describe=partial(keep_layout, settings.root, layout=layout),
    )  # fmt: skip
    finder = Finder(layout, Catalogue(namespace), sizes, settings.staging, clock)
    looking = LookupLoop(to_lookups, answers, to_keeper, finder, shelf)
    keeper = Keeper(
        Worker("pdconn-store-keeper", keeping.run_keeper, to_keeper, reports),
        sizes=sizes,
        row_nbytes=largest_row_sizes(layout),
        room=None if budget is None else budget.room,
        lookups=to_lookups,
        namespace=namespace,
        clock=clock,
        note_rows=note_rows,
    )
    worker = Worker("pdconn-store-lookup", looking.run_lookups, to_lookups, answers)
    return keeper, Lookups(worker, keeper.note_lookup)


def _warn_of_little_room(settings: StoreSettings, layout: StoreLayout, sizes: ShareSizes) -> None:
    """Warn where nothing fits, which would otherwise show as misses and skipped rows alone."""
    # So far from the start every window is whole: such a boundary needs the most rows.
    far = layout.block_tokens << 20
    num_wa = len(pieces(layout.wa, far))
    least = sizes.staging_nbytes([(RowKind.FA, 0)] + [(RowKind.WA, 0)] * num_wa)
    if settings.staging < least:
        log.warning(
            "pdconn: store: staging has no room for a boundary, long prefixes are not loaded: "
            "needed=%d staging=%d",
            least,
            settings.staging,
        )
    each = row_nbytes(layout.fa) + (0 if layout.wa is None else num_wa * row_nbytes(layout.wa))
    if settings.capacity < each * HEADROOM and not settings.read_only:
        log.warning(
            "pdconn: store: capacity is less than %d boundaries with their windows, little or "
            "nothing is kept: bytes_of_one=%d capacity=%d",
            HEADROOM,
            each,
            settings.capacity,
        )


def _warn_of_others(settings: StoreSettings, names: RowNames) -> None:
    """Warn of rows in the root that are misses here by their encryption, whatever their model."""
    found = namespaces_of(settings.root)
    sealed = [one for one in found if one.startswith(SEALED)]
    strange = [one for one in sealed if not (names.prefix and one.startswith(names.prefix))]
    if strange:
        log.warning(
            "pdconn: store: the root has rows that %s does not open, which are misses here: "
            "root=%s namespaces=%d",
            "store.key_file (of another names)" if names.secret else "an engine without key_file",
            settings.root,
            len(strange),
        )
    if names.secret and len(sealed) < len(found):
        log.warning(
            "pdconn: store: the root has rows that are not encrypted, which are misses here "
            "(pdconn store drop removes them): root=%s namespaces=%d",
            settings.root,
            len(found) - len(sealed),
        )


def replicas_of(
    ranks: Sequence[KVCacheReferences],
) -> tuple[dict[tuple[str, int], tuple[int, int]], ...]:
    """For each rank and chunk: its number among the ranks with the same heads, and their count.

    Raises:
        FormatError: ranks whose heads overlap without being the same.
    """
    holders: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for references in ranks:
        for group in references.groups:
            for ref in group.data:
                holders[ref.layer, ref.chunk].append((ref.first_head, ref.num_heads))
    for (layer, _), heads in holders.items():
        distinct = sorted(set(heads))
        for (first, count), (after, _) in pairwise(distinct):
            if first + count > after:
                raise FormatError(f"{layer}: heads of the ranks", "the same or apart", distinct)
    counts = {key: Counter(heads) for key, heads in holders.items()}
    seen: dict[tuple[str, int], Counter[tuple[int, int]]] = defaultdict(Counter)
    found = []
    for references in ranks:
        mine = {}
        for group in references.groups:
            for ref in group.data:
                key, heads_here = (ref.layer, ref.chunk), (ref.first_head, ref.num_heads)
                mine[key] = seen[key][heads_here], counts[key][heads_here]
                seen[key][heads_here] += 1
        found.append(mine)
    return tuple(found)


def groups_of(ranks: Sequence[KVCacheReferences]) -> tuple[KVCacheGroupReference, ...]:
    """Each KV cache group of the engine, as a rank describes it that holds layers of it."""
    found = []
    for number in range(len(ranks[0].groups)):
        alike = [rank.groups[number] for rank in ranks]
        found.append(next((group for group in alike if group.data), alike[0]))
    return tuple(found)
