"""Whether two engines interpret the bytes of a block alike.

An engine describes this in *traits*: short texts by field name (model, dtype, packing).  An error
names all fields that differ.  A digest of the traits travels along, to detect a message that was
put together wrongly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

DRAFT = "speculative_config."
"""Begins the names of a drafter's traits."""

DRAFT_METHOD = f"{DRAFT}method"
"""Every drafter has this trait; the only one that an error names if the lender has no drafter."""

WEIGHTS = "weights"
"""Ends the name of a trait that lists proofs, with a space between them."""

UNPROVEN = "unproven: "
"""Prefix of such a trait without a proof; the reason follows it."""

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
    """The proofs that a trait of weights lists; empty if it is unproven."""
    return frozenset(() if trait is None or trait.startswith(UNPROVEN) else trait.split())


def traits_digest(traits: Mapping[str, str]) -> str:
    """16 hex digits that differ when any trait does (BLAKE2b of the sorted fields)."""
    fields = msgspec.json.encode(sorted(traits.items()))
    return hashlib.blake2b(fields, digest_size=8).hexdigest()


def trait_differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[Difference, ...]:
    """The fields that prevent us from reading what they lend, in order of their names.

    >>> trait_differences({"model": "a", "dtype": "bf16"}, {"model": "b", "dtype": "bf16"})
    (Difference(field='model', theirs='b', ours='a'),)
    """
    # Layers of a drafter are optional: a reader without a drafter may read from a lender that has
    # one; a reader with a drafter needs a lender with the same.
    needed = {*ours} if any(name.startswith(DRAFT) for name in theirs) else {DRAFT_METHOD}
    return tuple(
        Difference(name, theirs.get(name, NOTHING), ours.get(name, NOTHING))
        for name in sorted({*ours, *theirs})
        if not _agree(name, ours.get(name), theirs.get(name))
        and (not name.startswith(DRAFT) or name in needed)
    )


def _agree(name: str, ours: str | None, theirs: str | None) -> bool:
    if name in (WEIGHTS, DRAFT + WEIGHTS):
        # Each proof (a commit, a digest of files) suffices alone, so one in common is enough.
        # Without a proof, weights are not the same as any others.
        return not proofs_in(ours).isdisjoint(proofs_in(theirs))
    return ours == theirs
