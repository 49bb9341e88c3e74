"""A pull's proof: the lender's checksums of what it lent beside ours of what we hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pdconn.integrity.reader import Corrupted, Expected
from pdconn.protocol.errors import MessageError
from pdconn.protocol.messages import ChecksumRequest, Reader
from pdconn.protocol.proof import NOTHING, PieceSum


class Verify(StrEnum):
    """How much of what was read is compared with what was lent."""

    OFF = "off"
    SAMPLE = "sample"
    ALWAYS = "always"


@dataclass(slots=True)
class Verification:
    """What one pull has heard and computed so far.

    Asks are numbered in order of ``expected`` and of their ``asks``.
    """

    expected: tuple[Expected, ...]
    theirs: dict[int, PieceSum] = field(default_factory=dict)
    ours: tuple[PieceSum, ...] | None = None

    def heard(self, number: int, answer: PieceSum) -> None:
        """The lender answered ask ``number``.

        Raises:
            MessageError: nobody asked that, or it was answered before.
        """
        if not 0 <= number < self._num_asks or number in self.theirs:
            raise MessageError("proven.number", f"one of {self._num_asks}, once", number)
        self.theirs[number] = answer

    def asks(self, request: str, reader: Reader) -> list[ChecksumRequest]:
        """What to ask the lender."""
        asks = [ask for expected in self.expected for ask in expected.asks]
        return [ChecksumRequest(number, request, reader, ask) for number, ask in enumerate(asks)]

    @property
    def is_answered(self) -> bool:
        """Whether the lender has told all that it was asked."""
        return len(self.theirs) == self._num_asks

    @property
    def is_complete(self) -> bool:
        """Whether everything is there that is to be compared."""
        return self.ours is not None and self.is_answered

    def problem(self) -> str | None:
        """How the two differ, or None.  Only when complete."""
        assert self.ours is not None
        number = 0
        for expected, ours in zip(self.expected, self.ours, strict=True):
            answers = [self.theirs[number + at] for at in range(len(expected.asks))]
            number += len(answers)
            try:
                expected.compare(sum(answers, NOTHING), ours)
            except (Corrupted, MessageError) as error:
                return f"{type(error).__name__}: {error}"
        return None

    @property
    def _num_asks(self) -> int:
        return sum(len(expected.asks) for expected in self.expected)
