"""Whether two engines interpret the bytes of a block alike.

An engine describes this in *traits*: short texts by field name (model, dtype, packing).
The fields are compared one by one, and all that differ are named, so that an operator sees
the whole difference and not its first field.  A digest of them travels along, so that a
message that was put together wrongly is found.

Weights (:data:`WEIGHTS`) are compared by what proves them: texts of which each alone is proof
enough, such as a commit and a digest of files.  One in common is enough, and where nothing proves
which weights an engine has (:data:`UNPROVEN`), they are not the same as any others.

Traits of a drafter (:data:`DRAFT`) are of layers that not every engine has.  A reader without a
drafter may read from a lender that has one; a reader with a drafter needs a lender with the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

DRAFT = "speculative_config."
"""Begins the names of a drafter's traits."""

DRAFT_METHOD = f"{DRAFT}method"
"""Every drafter has one: the only trait that is named where a lender has no drafter."""

WEIGHTS = "weights"
"""Ends the name of a trait that lists proofs, with a space between them."""

UNPROVEN = "unproven: "
"""Begins such a trait where there is no proof; why not comes after it."""

NOTHING = "nothing"
"""Shown for a field that one side does not have."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two engines differ."""

    field: str
    theirs: str
    ours: str

    def __str__(self) -> str:
        return f"{self.field}: theirs {self.theirs}, ours {self.ours}"


def proofs_in(trait: str | None) -> frozenset[str]:
    """What proves the weights that a trait is of; empty if nothing does."""
    return frozenset(() if trait is None or trait.startswith(UNPROVEN) else trait.split())


def traits_digest(traits: Mapping[str, str]) -> str:
    """16 hex digits that differ when any trait does (BLAKE2b of the sorted fields)."""
    fields = msgspec.json.encode(sorted(traits.items()))
    return hashlib.blake2b(fields, digest_size=8).hexdigest()


def trait_differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[Difference, ...]:
    """Every field that keeps us from reading what they lend, in order of its name.

    >>> trait_differences({"model": "a", "dtype": "bf16"}, {"model": "b", "dtype": "bf16"})
    (Difference(field='model', theirs='b', ours='a'),)
    """
    needed = {*ours} if any(name.startswith(DRAFT) for name in theirs) else {DRAFT_METHOD}
    return tuple(
        Difference(name, theirs.get(name, NOTHING), ours.get(name, NOTHING))
        for name in sorted({*ours, *theirs})
        if not _agree(name, ours.get(name), theirs.get(name))
        and (not name.startswith(DRAFT) or name in needed)
    )


def _agree(name: str, ours: str | None, theirs: str | None) -> bool:
    if name in (WEIGHTS, DRAFT + WEIGHTS):
        return not proofs_in(ours).isdisjoint(proofs_in(theirs))
    return ours == theirs
