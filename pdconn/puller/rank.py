"""Which decode rank we are, and whether a lender's KV means the same as ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdconn.planning.errors import Incompatible
from pdconn.planning.plan import Pairing
from pdconn.protocol.compat import trait_differences, traits_digest
from pdconn.protocol.errors import PeerMismatch
from pdconn.protocol.messages import PROTOCOL_VERSION, Welcome
from registration.references import KVCacheReferences


@dataclass(frozen=True, slots=True)
class Rank:
    """Which decode rank this is, and what its memory looks like.

    ``rank`` of ``of`` ranks pull every request together; ``spread`` says which of a
    peer's replicas to prefer; ``traits`` must equal the lender's (:mod:`pdconn.protocol.compat`).
    """

    engine_id: str
    rank: int
    of: int
    spread: int
    references: KVCacheReferences
    traits: dict[str, str]

    def pair(self, welcome: Welcome) -> Pairing:
        """Match a lender that answered our greeting with us.

        Raises:
            Incompatible: naming the field and both values, and what blocks hold.
        """
        check_traits(self.traits, welcome)
        theirs = [rank.references for rank in welcome.ranks]
        try:
            return Pairing.of(self.references, theirs, self.spread)
        except Incompatible as error:
            content = self.traits.get("block_content", "")
            raise Incompatible(*error.differences, content=content) from None


def check_traits(ours: Mapping[str, str], welcome: Welcome) -> None:
    """Whether both sides mean the same by the bytes of a block.

    Without traits of our own nothing is compared.

    Raises:
        Incompatible: every trait that differs, by name.
    """
    if ours and (differences := trait_differences(ours, welcome.traits)):
        raise Incompatible(*differences)


def check_welcome(welcome: Welcome, engine_id: str | None, incarnation: str | None) -> None:
    """Whether the lender is the one that a ticket named.

    Raises:
        PeerMismatch: another version, engine or boot, or traits of another digest.
    """
    for name, ours, theirs in (
        ("version", PROTOCOL_VERSION, welcome.version),
        ("engine_id", engine_id, welcome.engine_id),
        ("incarnation", incarnation, welcome.incarnation),
        ("digest", traits_digest(welcome.traits), welcome.digest),
    ):
        if ours != theirs:
            raise PeerMismatch(name, ours, theirs)
