"""What a reader is asked to do, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from pdconn.integrity.reader import Expected
from pdconn.protocol.proof import PieceSum
from transport import PeerId, Settled, Spans


@dataclass(frozen=True, slots=True)
class Connect:
    """Reach a peer's rank; answered by Connected under the same ``tag``."""

    tag: object
    address: bytes


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Forget a peer's rank; not answered."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Read:
    """Copy ``spans``; answered by ReadSettled under the same ``tag``."""

    tag: object
    peer: PeerId
    spans: Spans


@dataclass(frozen=True, slots=True)
class Sum:
    """Sum what was read, in our memory; answered by Summed under the same ``tag``."""

    tag: object
    expected: tuple[Expected, ...]


@dataclass(frozen=True, slots=True)
class Summed:
    """Our checksums, one per ``expected``; or ``error`` says why there are none."""

    tag: object
    answers: tuple[PieceSum, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Connected:
    """``peer`` is reachable, or ``error`` says why not."""

    tag: object
    peer: PeerId | None
    error: str | None


@dataclass(frozen=True, slots=True)
class ReadSettled:
    """Nothing of the read can be written any more; seen at ``at`` seconds."""

    tag: object
    settled: Settled
    at: float


@dataclass(frozen=True, slots=True)
class ReaderStopped:
    """The thread met an error of our own: what is in flight is unknown from now on."""

    error: str


Job = Connect | Disconnect | Read | Sum
News = Connected | ReadSettled | Summed
