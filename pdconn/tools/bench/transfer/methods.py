"""The compared methods: the same bytes, moved in several ways.

::

    pdconn    plan and read as a decode engine does: through the planner, merged, on the reader's
              thread with its pauses
    layered   the same blocks with one tensor per layer (vLLM's default, LBHNC), layer by layer;
              through the same transport
    raw       one READ of the same size in one piece per rank, polled as suits the path: the limit
              of the path
    memcpy    one memcpy of the same size within this process: the limit of the memory
    mooncake  the runs of pdconn, read by Mooncake's transfer engine over TCP
    alone     as pdconn, but a single request

``raw`` and ``memcpy`` do not depend on blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from pdconn.planning.plan import Need, Pairing
from pdconn.protocol.ticket import BlockList
from registration.references import KVCacheReferences
from transport import HOST, Memory, Spans


class Method(StrEnum):
    """A method of moving bytes."""

    PDCONN = "pdconn"
    LAYERED = "layered"
    RAW = "raw"
    MEMCPY = "memcpy"
    ALONE = "alone"
    MOONCAKE = "mooncake"


ReadsByRank = tuple[tuple[int, Spans], ...]


@dataclass(frozen=True, slots=True)
class LayeredPairings:
    """Pairings of one layer each, in the model's order."""

    pairings: tuple[Pairing, ...]

    @classmethod
    def of_layers(
        cls, ours: KVCacheReferences, theirs: Sequence[KVCacheReferences], spread: int = 0
    ) -> LayeredPairings:
        """Pair every layer of ours separately."""
        layers = sorted({layer for group in ours.groups for layer in group.layers}, key=_number_in)
        return cls(
            tuple(
                Pairing.between(
                    _only(ours, layer), [_only(their, layer) for their in theirs], spread
                )
                for layer in layers
            )
        )

    def plan(self, need: Need, lent: Sequence[BlockList]) -> ReadsByRank:
        """The reads of one request, layer by layer."""
        parts: dict[int, list[Spans]] = {}
        for pairing in self.pairings:
            for rank, spans in pairing.plan(need, lent).reads:
                parts.setdefault(rank, []).append(spans)
        return tuple((rank, _in_order(spans)) for rank, spans in sorted(parts.items()))


def raw_reads(reads: ReadsByRank, local: Memory, remote: Mapping[int, Memory]) -> ReadsByRank:
    """As many bytes from each rank as ``reads``, in one piece each, side by side."""
    made, at = [], local.base
    for rank, spans in reads:
        nbytes = spans.total_bytes
        made.append((rank, one_piece(at, remote[rank].base, nbytes)))
        at += nbytes
    return tuple(made)


def one_piece(local: int, remote: int, nbytes: int) -> Spans:
    """Spans with a single run."""
    here, there, length = np.array([[local], [remote], [nbytes]], dtype=np.uint64)
    return Spans(here, there, length)


def _only(references: KVCacheReferences, layer: str) -> KVCacheReferences:
    """The same groups, emptied except for one layer."""
    groups = tuple(
        replace(group, data=tuple(ref for ref in group.data if ref.layer == layer))
        for group in references.groups
    )
    return replace(references, groups=groups)


def _number_in(layer: str) -> tuple[int, str]:
    """Sort key: the layer's number, then its name."""
    digits = "".join(part for part in layer.split(".") if part.isdigit())
    return int(digits or 0), layer


def _in_order(parts: Sequence[Spans]) -> Spans:
    return Spans(
        np.concatenate([part.local for part in parts]),
        np.concatenate([part.remote for part in parts]),
        np.concatenate([part.nbytes for part in parts]),
        HOST,
        HOST,
    )
