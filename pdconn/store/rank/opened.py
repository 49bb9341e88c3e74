"""What a rank knows once its store is open: its share of rows, how they pair with its KV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdconn.planning.gaps import Gaps
from pdconn.planning.plan import Need, Pairing
from pdconn.store.commands import OpenStore
from pdconn.store.format.layout import RowLayout, share_layout
from pdconn.store.format.names import RowKind
from pdconn.store.rank.pairing import RowPairing, unsaved_layers
from pdconn.store.rank.shares import RowShare
from registration.references import KVCacheReferences


@dataclass(frozen=True, slots=True, eq=False)
class OwnRows:
    """Rows of one kind as this rank sees them."""

    share: RowShare
    pairing: RowPairing


@dataclass(frozen=True, slots=True, eq=False)
class OpenedRank:
    """One rank's part of an open store.  A kind is absent where the model has none of it.

    Attributes:
        unsaved: layers that are in rows of no kind.
    """

    rank: int
    writer: str
    kinds: dict[RowKind, OwnRows]
    unsaved: Pairing | None

    @classmethod
    def of(cls, opening: OpenStore, references: KVCacheReferences, rank: int) -> OpenedRank:
        """Match this rank's memory with the engine's rows.

        Raises:
            FormatError: they do not fit.
            Incompatible: the share is of other memory.
        """
        ours = share_layout([references], opening.layout.block_tokens)
        kinds = {}
        for kind, whole in ((RowKind.FA, opening.layout.fa), (RowKind.WA, opening.layout.wa)):
            if whole is None:
                continue
            has_some = kind is RowKind.FA or ours.wa is not None
            layout = ours.of(kind) if has_some else RowLayout(kind, whole.block_tokens, ())
            share = RowShare.of(whole, layout, opening.replicas[rank])
            kinds[kind] = OwnRows(share, RowPairing(references, layout))
        unsaved = unsaved_layers(references, (ours.fa, *filter(None, (ours.wa,))))
        return cls(rank, opening.writer, kinds, unsaved)

    def gaps(self, need: Need) -> Iterator[Gaps]:
        """What rows leave of the blocks of a load: vLLM zeroes no block that a connector loads.

        Raises:
            BlockOutOfRange: a block id beyond the cache.
        """
        for own in self.kinds.values():
            yield from own.pairing.gaps(need)
        if self.unsaved is not None:
            yield self.unsaved.whole_blocks(need)

    @property
    def most_nbytes(self) -> int:
        """Bytes of a share of the larger kind."""
        return max(rows.share.nbytes for rows in self.kinds.values())

    @property
    def most_footer_nbytes(self) -> int:
        """Bytes of a footer of the larger kind."""
        return max(rows.share.footer_nbytes for rows in self.kinds.values())
