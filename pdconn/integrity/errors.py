"""What a check of lent bytes can come to, other than a pass."""

from __future__ import annotations

from pdconn.protocol.errors import ProtocolError


class NotSummed(ProtocolError):
    """An ask for pieces that the lender has no sums of."""


class Corrupted(Exception):
    """Bytes here are not those that the lender summed when it lent them."""

    def __init__(self, rank: int, field: str, theirs: int, ours: int) -> None:
        self.rank = rank
        self.field = field
        self.theirs = theirs
        self.ours = ours
        shown = f"{theirs:#018x}, ours {ours:#018x}" if field == "sum" else f"{theirs}, ours {ours}"
        super().__init__(f"{field} of what was read from rank {rank}: theirs {shown}")
