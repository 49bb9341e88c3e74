"""Lists what a root holds, without an engine, for ``pdconn store``.

File names alone show which rows belong together: each holds the row's key and its parent's::

    FA   0 ── 1 ── 2 ── 3        an unbroken prefix of 4 blocks
              │
              2' ── 3'           another prompt, which differs after block 1
                        5        no prompt reaches it: its parent is gone

Only :func:`remove_rows` writes: it removes rows and nothing else.  All functions may run while
engines use the root; rows that are added or removed meanwhile may be listed or not.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from pdconn.store.budget.accounts import Accounts, Usage, recorded_usage
from pdconn.store.format.prompt_rows import can_resume, pieces
from pdconn.store.format.row import NO_KEY, RowKind, RowName, StoreLayout
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.shelf.folders import LAYOUT_FILE, is_namespace
from pdconn.store.shelf.interface import Shelf, StoredPart, StoredRow, believed_use
from pdconn.store.shelf.open import place_of
from pdconn.store.store_errors import StoreError
from pdconn.store.verify import footer_of
from transport.errors import FieldError, did_you_mean, shown

_MOST_LAYOUT_NBYTES = 1 << 24
_LAYOUTS = msgspec.json.Decoder(StoreLayout)


class InspectError(FieldError, StoreError):
    """A folder that is not the root of a store, or a namespace that the root does not have."""


def open_existing(root: str | os.PathLike[str]) -> FilesShelf:
    """Open the shelf of a root that exists; nothing is made.

    Raises:
        InspectError: the folder is not the root of a store.
        StoreError: it is of another version, or cannot be read.
    """
    path = Path(root)
    if not path.is_dir():
        seen = "a file" if path.exists() else "no such folder"
        raise InspectError("ROOT", "the folder of a store", f"{shown(str(root))}, {seen}")
    if not (path / "format").exists():
        raise InspectError(
            "ROOT", "the folder of a store", f"{shown(str(root))}, without a file 'format'"
        )
    place = place_of(path)
    if place is None:
        return FilesShelf(path)
    from pdconn.store.shelf.obj.shelf import ObjShelf

    return ObjShelf(path, place)


def read_layout(root: str | os.PathLike[str], namespace: str) -> StoreLayout | None:
    """The layout of a namespace's rows, as an engine wrote it; None if there is none.

    Raises:
        InspectError: the file cannot be read, or is no layout.
    """
    path = Path(root, "rows", namespace, LAYOUT_FILE)
    try:
        if path.is_symlink() or not path.is_file():
            return None
        if path.stat().st_size > _MOST_LAYOUT_NBYTES:
            raise InspectError(str(path), f"at most {_MOST_LAYOUT_NBYTES} bytes", "more")
        layout = _LAYOUTS.decode(path.read_bytes())
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InspectError(str(path), "the layout of rows", error) from error
    except OSError as error:
        raise InspectError(str(path), "a file that can be read", error) from error
    _check_layout(path, layout)
    return layout


def _check_layout(path: Path, layout: StoreLayout) -> None:
    """Refuse numbers that no engine writes, on which a listing would fail half-way.

    Raises:
        InspectError: naming the first one.
    """
    for kind in (layout.fa, layout.wa):
        if kind is None:
            continue
        numbers = {"block_tokens": kind.block_tokens, "sections": len(kind.sections)}
        for section in kind.sections:
            numbers |= {
                "unit_tokens": section.unit_tokens,
                "units": section.units,
                "num_heads": section.num_heads,
                "layers": len(section.layers),
                "first_head": section.first_head + 1,
                "unit_nbytes": min((layer.unit_nbytes for layer in section.layers), default=0),
            }
            for name, value in numbers.items():
                if value < 1:
                    raise InspectError(f"{path}: {name}", "a number above 0", value)
        if not kind.sections:
            raise InspectError(f"{path}: sections", "at least one", "none")


@dataclass(frozen=True, slots=True)
class RowAmount:
    """How many rows, and their bytes with footers."""

    rows: int = 0
    nbytes: int = 0

    @classmethod
    def from_rows(cls, rows: Iterable[StoredRow]) -> RowAmount:
        """All of ``rows`` together."""
        sizes = [row.nbytes for row in rows]
        return cls(len(sizes), sum(sizes))

    def __add__(self, other: RowAmount) -> RowAmount:
        return RowAmount(self.rows + other.rows, self.nbytes + other.nbytes)


@dataclass(frozen=True, slots=True)
class NamespaceSummary:
    """Rows of one namespace.

    Attributes:
        fa, wa: how much of each kind.
        kept: how much is kept for sessions: its last use lies ahead.
        oldest_use, newest_use: seconds since the epoch.
        block_tokens: of a canonical block; None if neither a layout nor a footer could be read.
        longest_prefix: canonical blocks of the longest chain of FA rows without a gap.
        longest_resumable: blocks of the longest one whose end can be resumed; None without
            a layout, which says what a window needs.
        unreached: rows that no prompt can use, since a row before them is gone, or the FA row
            of a WA row.
    """

    namespace: str
    fa: RowAmount
    wa: RowAmount
    kept: RowAmount
    oldest_use: float
    newest_use: float
    block_tokens: int | None
    longest_prefix: int
    longest_resumable: int | None
    unreached: int

    def tokens(self, blocks: int | None) -> int | None:
        """Tokens of so many canonical blocks, if that is known."""
        return None if self.block_tokens is None or blocks is None else blocks * self.block_tokens


@dataclass(frozen=True, slots=True)
class RootSummary:
    """All of a root: namespaces, parts in flight by writer, the device's free bytes, accounts."""

    namespaces: tuple[NamespaceSummary, ...]
    writers: Mapping[str, RowAmount]
    free_nbytes: int
    usage: Usage | None

    @property
    def fa(self) -> RowAmount:
        """FA rows of all namespaces."""
        return sum((one.fa for one in self.namespaces), RowAmount())

    @property
    def wa(self) -> RowAmount:
        """WA rows of all namespaces."""
        return sum((one.wa for one in self.namespaces), RowAmount())

    @property
    def kept(self) -> RowAmount:
        """Rows of all namespaces that are kept for sessions."""
        return sum((one.kept for one in self.namespaces), RowAmount())

    @property
    def parts(self) -> RowAmount:
        """Parts of all writers: rows that are being written, or were when their writer died."""
        return sum(self.writers.values(), RowAmount())

    @property
    def wa_share(self) -> float | None:
        """Bytes of WA rows among those of all rows; None without rows."""
        total = self.fa.nbytes + self.wa.nbytes
        return self.wa.nbytes / total if total else None


def summarize(root: str | os.PathLike[str], shelf: Shelf, now: float) -> RootSummary:
    """Summarize what the root holds now.

    Args:
        now: seconds since the epoch.

    Raises:
        StoreError: it cannot be listed.
    """
    by_namespace: dict[str, list[StoredRow]] = defaultdict(list)
    for row in shelf.rows():
        by_namespace[row.namespace].append(row)
    writers: dict[str, list[StoredPart]] = defaultdict(list)
    for part in shelf.parts():
        writers[part.writer].append(part)
    space = os.statvfs(root)
    return RootSummary(
        tuple(
            summary_of(name, rows, now, *_layout_of(root, shelf, rows))
            for name, rows in sorted(by_namespace.items())
        ),
        {
            writer: RowAmount(len(parts), sum(part.nbytes for part in parts))
            for writer, parts in sorted(writers.items())
        },
        space.f_bavail * space.f_frsize,
        recorded_usage(root),
    )


def summary_of(
    namespace: str,
    rows: Sequence[StoredRow],
    now: float,
    layout: StoreLayout | None = None,
    block_tokens: int | None = None,
) -> NamespaceSummary:
    """Count the rows of one namespace, at least one, and follow their chains."""
    chains = _Chains(row.name for row in rows)
    uses = [row.used_at for row in rows]
    return NamespaceSummary(
        namespace,
        RowAmount.from_rows(row for row in rows if row.name.kind is RowKind.FA),
        RowAmount.from_rows(row for row in rows if row.name.kind is RowKind.WA),
        RowAmount.from_rows(row for row in rows if believed_use(row.used_at, now) > now),
        min(uses),
        max(uses),
        block_tokens if layout is None else layout.block_tokens,
        chains.longest(),
        None if layout is None else chains.longest_resumable(layout),
        chains.num_unreached(),
    )


def _layout_of(
    root: str | os.PathLike[str], shelf: Shelf, rows: Sequence[StoredRow]
) -> tuple[StoreLayout | None, int | None]:
    """The layout and the tokens of a block, from the layout's file or else from a footer."""
    try:
        layout = read_layout(root, rows[0].namespace)
    except InspectError:
        layout = None
    if layout is not None:
        return layout, layout.block_tokens
    for row in rows[:8]:
        try:
            return None, len(footer_of(shelf, row).tokens)
        except StoreError:
            continue
    return None, None


def rows_of(shelf: Shelf, namespace: str | None) -> list[StoredRow]:
    """Rows of one namespace, or of all for None.

    Raises:
        InspectError: there is no such namespace.
        StoreError: the root cannot be listed.
    """
    if namespace is None:
        return list(shelf.rows())
    rows = list(shelf.rows(namespace)) if is_namespace(namespace) else []
    if not rows:
        known = sorted({row.namespace for row in shelf.rows()})
        hint = "the root has no rows"
        if known:
            hint = did_you_mean(namespace, known, what="namespaces")
        raise InspectError("namespace", "one that has rows", shown(namespace), hint)
    return rows


def rows_older_than(rows: Sequence[StoredRow], used_before: float) -> list[StoredRow]:
    """Rows of one namespace that no prompt has used since ``used_before`` (seconds, epoch).

    A row is as young as what depends on it, so that no row is left without those before it: an
    FA row as its children and its WA row, also where only these were read.
    """
    last = {row.name.key: row.used_at for row in rows if row.name.kind is RowKind.FA}
    for row in rows:
        if row.name.kind is RowKind.WA and row.name.key in last:
            last[row.name.key] = max(last[row.name.key], row.used_at)
    full = (row for row in rows if row.name.kind is RowKind.FA)
    for row in sorted(full, key=lambda one: -one.name.index):
        if row.name.parent in last:
            last[row.name.parent] = max(last[row.name.parent], last[row.name.key])
    return [
        row
        for row in rows
        if (last[row.name.key] if row.name.kind is RowKind.FA else row.used_at) < used_before
    ]


def remove_rows(
    root: str | os.PathLike[str],
    shelf: Shelf,
    rows: Sequence[StoredRow],
    done: Callable[[int], None] = lambda count: None,
) -> RowAmount:
    """Remove rows: WA before FA, and the ends of prompts before their beginnings.

    Where the root has accounts, its bytes are free for engines at once.

    Args:
        done: called after each row with the number of rows tried.

    Returns:
        What was removed; rows that were gone already do not count.

    Raises:
        ShelfFailure: a row cannot be removed; those before it are.
    """
    removed = RowAmount()
    in_order = sorted(rows, key=lambda row: (row.name.kind is RowKind.FA, -row.name.index))
    with _remover(root, shelf) as remove:
        for count, row in enumerate(in_order, 1):
            nbytes = remove(row.namespace, row.name)
            if nbytes or not row.nbytes:  # a file without bytes looks like one that is gone
                removed += RowAmount(1, nbytes)
            done(count)
    return removed


@contextmanager
def _remover(root: str | os.PathLike[str], shelf: Shelf) -> Iterator[Callable[[str, RowName], int]]:
    """Yields what removes a row.  Meanwhile this process is a writer that has reserved nothing."""
    if recorded_usage(root) is None:
        yield shelf.remove_row
        return
    writer = f"pdconn-store-{os.getpid()}"
    accounts = Accounts(os.fspath(root), writer, 1 << 62)
    try:
        yield partial(accounts.remove_row, shelf)
    finally:
        accounts.leave_root()


class _Chains:
    """FA rows that follow each other from a prompt's first block on, and the WA rows there."""

    def __init__(self, names: Iterable[RowName]) -> None:
        self._fa: dict[bytes, RowName] = {}
        self._wa: set[bytes] = set()
        wa: list[RowName] = []
        for name in names:
            if name.kind is RowKind.FA:
                self._fa[name.key] = name
            else:
                wa.append(name)
        self._wa = {name.key for name in wa}
        self._reached: dict[bytes, int] = {}
        for name in sorted(self._fa.values(), key=lambda one: one.index):
            first = name.index == 0 and name.parent == NO_KEY
            if first or self._reached.get(name.parent) == name.index - 1:
                self._reached[name.key] = name.index
        self._num = len(self._fa) + len(wa)

    def longest(self) -> int:
        return 1 + max(self._reached.values(), default=-1)

    def num_unreached(self) -> int:
        return self._num - len(self._reached) - sum(key in self._reached for key in self._wa)

    def longest_resumable(self, layout: StoreLayout) -> int:
        for key, index in sorted(self._reached.items(), key=lambda one: -one[1]):
            boundary = (index + 1) * layout.block_tokens
            if can_resume(layout, boundary) and self._has_pieces(layout, boundary, key):
                return index + 1
        return 0

    def _has_pieces(self, layout: StoreLayout, boundary: int, key: bytes) -> bool:
        for _ in pieces(layout.wa, boundary):
            if key not in self._wa:
                return False
            key = self._fa[key].parent
        return True
