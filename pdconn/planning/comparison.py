"""Two engines side by side: what differs, and whether each could pull from the other.

Many differences are supported (another layout, block size or parallelism); a differing trait
is not, nor is what the planner refuses.  Both kinds are shown, separately.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pdconn.planning.plan import Pairing
from pdconn.planning.planning_errors import Incompatible
from pdconn.protocol.compat import NOTHING, Difference, trait_differences
from pdconn.protocol.messages import Described
from registration.references import KVCacheGroupReference, KVCacheReferences


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between engine ``a`` (theirs) and engine ``b`` (ours).

    ``traits`` must be equal for any exchange; ``shapes`` need not be.  ``a_pulls`` and
    ``b_pulls`` are what else keeps one from pulling from the other: geometry, and traits of a
    drafter that the other lacks.
    """

    traits: tuple[Difference, ...]
    shapes: tuple[Difference, ...]
    a_pulls: tuple[Difference, ...]
    b_pulls: tuple[Difference, ...]

    @property
    def compatible(self) -> bool:
        """Whether each can pull from the other."""
        return not (self.traits or self.a_pulls or self.b_pulls)


def compare(a: Described, b: Described) -> Comparison:
    """Compare two descriptions."""
    named = bool(a.traits and b.traits)
    by_a = trait_differences(a.traits, b.traits) if named else ()
    by_b = trait_differences(b.traits, a.traits) if named else ()
    both = {difference.field for difference in by_a} & {difference.field for difference in by_b}
    return Comparison(
        tuple(difference for difference in by_b if difference.field in both),
        trait_differences(dict(_shape(b)), dict(_shape(a))),
        (*(difference for difference in by_a if difference.field not in both), *_obstacles(a, b)),
        (*(difference for difference in by_b if difference.field not in both), *_obstacles(b, a)),
    )


def _obstacles(reader: Described, lender: Described) -> Iterator[Difference]:
    """Why any rank of the reader would refuse a pull, each reason once."""
    if reader.version != lender.version:
        yield Difference("version", str(lender.version), str(reader.version))
    if not any(group.data for rank in lender.ranks for group in rank.references.groups):
        yield Difference("KV of the lender", NOTHING, "needed")
    theirs = [rank.references for rank in lender.ranks]
    seen = set()
    for rank in reader.ranks:
        try:
            Pairing.between(rank.references, theirs, rank.tp_rank)
        except Incompatible as error:
            for difference in error.differences:
                if difference not in seen:
                    seen.add(difference)
                    yield difference


def _shape(engine: Described) -> Iterator[tuple[str, str]]:
    """An engine's geometry as named facts, by kind of layers."""
    yield "version", str(engine.version)
    yield "tensor parallel ranks", str(1 + max(rank.tp_rank for rank in engine.ranks))
    yield "pipeline stages", str(1 + max(rank.pp_rank for rank in engine.ranks))
    yield "KV cache groups", str(len(engine.ranks[0].references.groups))
    kinds: dict[str, list[tuple[KVCacheReferences, KVCacheGroupReference]]] = defaultdict(list)
    for rank in engine.ranks:
        for group in rank.references.groups:
            if group.data:
                kinds[group.kind].append((rank.references, group))
    for kind, held in sorted(kinds.items()):
        groups = [group for _, group in held]
        layers = {layer for group in groups for layer in group.layers}
        yield f"{kind}: layers", str(len(layers))
        yield f"{kind}: window", _listed(group.window or NOTHING for group in groups)
        yield f"{kind}: block_tokens", _listed({group.block_tokens for group in groups})
        yield f"{kind}: heads of a rank", _listed(r.num_heads for g in groups for r in g.data)
        yield (
            f"{kind}: bytes of a token and head",
            _listed(
                "opaque block" if ref.token_nbytes is None else ref.token_nbytes
                for group in groups
                for ref in group.data
            ),
        )
        yield f"{kind}: memory order", _listed(_order(*one) for one in held)


def _order(references: KVCacheReferences, group: KVCacheGroupReference) -> str:
    """From outer to inner, by the strides of the group's first and last layer."""
    ref, other = group.data[0], group.data[-1]
    strides = {
        "block": references.tensors[ref.tensor].block_stride,
        "head": ref.head_stride if ref.num_heads > 1 else 0,
        "token": ref.token_stride or 0,
    }
    if other.layer != ref.layer and other.tensor == ref.tensor:
        strides["layer"] = abs(other.offset - ref.offset) // (len(group.layers) - 1)
    named = sorted((name for name in strides if strides[name]), key=lambda n: -strides[n])
    return ", ".join(named) or NOTHING


def _listed(values: Iterable[object]) -> str:
    return " or ".join(sorted({str(value) for value in values}))
