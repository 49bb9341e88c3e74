"""Commands of the store's scheduler to the ranks, and their results.

All ranks get the same commands, with a step's metadata; each does its share of them::

    OpenStore ─► Fetch ─► FetchResult ─► LoadRows ─► (vLLM: received)      or  DropFetch
                       │                 FailLoad ─► (vLLM: failed)
                       └► JoinPull ─► (the puller: ended) ─► BesideEnded
              ─► SaveRows ─► SaveResult (blocks may be reused), notes beside the parts
                         ─► SaveFailed, for each part without a note
"""

from __future__ import annotations

from dataclasses import dataclass

from pdconn.lifecycle.turns import Urgency
from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList
from pdconn.store.format.row import RowName, StoreLayout


@dataclass(frozen=True, slots=True)
class OpenStore:
    """The first command, sent again when the namespace changes.

    Attributes:
        layout: the layout of whole rows.
        namespace: the namespace of the engine's rows.
        writer: the name of this boot in the names of parts.
        replicas: by rank: for each (layer, chunk) it holds, its number among the ranks that
            hold the same heads, and how many these are: rank writes row ``index`` if
            ``index % count == number``.
    """

    layout: StoreLayout
    namespace: str
    writer: str
    replicas: tuple[dict[tuple[str, int], tuple[int, int]], ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read rows into the staging area at byte ``offset`` and verify them.

    Rows lie one after another in the order given, each as large as the rank's share of it,
    rounded up to pages; no other fetch has these bytes until this one is loaded or dropped.

    Attributes:
        urgency: PULL if a pull waits for it, PREFETCH if no request does.
    """

    number: int
    offset: int
    rows: tuple[RowName, ...]
    urgency: Urgency = Urgency.LOAD


@dataclass(frozen=True, slots=True)
class FetchResult:
    """A rank's answer to Fetch: rows that are gone or cannot be read now, and damaged ones."""

    number: int
    missing: tuple[RowName, ...] = ()
    damaged: tuple[RowName, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadRows:
    """Copy a fetch's rows to the blocks of ``request``, and report the request received.

    ``need`` ends at the boundary; the fetch's bytes may be used again after it.
    """

    number: int
    request: str
    need: Need


@dataclass(frozen=True, slots=True)
class JoinPull:
    """Copy a fetch's rows to the blocks of ``request``, beside the pull of the rest.

    The fetch may still be under way.  Each rank copies the rows before the first that is missing,
    and its pull is told up to which token: it reads those of ``need`` behind it.
    """

    number: int
    request: str
    need: Need


@dataclass(frozen=True, slots=True)
class BesideEnded:
    """A rank's answer to JoinPull, after its FetchResult: it has copied the rows of ``num_tokens``.

    The fetch's bytes may be used again.
    """

    number: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class FailLoad:
    """Report ``request`` as failed: the rows that it waits for will not be loaded."""

    request: str


@dataclass(frozen=True, slots=True)
class DropFetch:
    """Cancels a fetch: reads that have not begun may be skipped.

    A Fetch without a FetchResult still gets one, when its last read has ended: only then are its
    bytes free.
    """

    number: int


@dataclass(frozen=True, slots=True)
class SaveRows:
    """Save rows of one request once this step's forward pass has ended.

    ``blocks`` has one list per KV cache group, which holds every block that ``rows`` need;
    the part of a row is named ``part``.
    """

    number: int
    blocks: tuple[BlockList, ...]
    rows: tuple[SaveRow, ...]


@dataclass(frozen=True, slots=True)
class SaveRow:
    """One row to save: its name and its part."""

    name: RowName
    part: str


@dataclass(frozen=True, slots=True)
class SaveResult:
    """A rank has read all blocks of a SaveRows: they may be freed.  Its notes may follow later."""

    number: int


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """A rank failed to write its note beside ``part``, as on a full disk."""

    part: str


StoreCommand = OpenStore | Fetch | LoadRows | JoinPull | FailLoad | DropFetch | SaveRows
StoreResult = FetchResult | BesideEnded | SaveResult | SaveFailed
