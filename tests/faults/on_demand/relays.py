"""A relay that loses renewals, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from pdconn.faults.frame_faults import DelayedFrame, FrameFaults, MessageFaults
from pdconn.faults.relay import Relay
from pdconn.protocol.messages import Renew, decode_from_reader, encode, frame

_HEAD = len(frame(b""))


class _RenewalsLost(FrameFaults):
    """Cuts renewals out of frames, and counts them; a frame of nothing else is dropped."""

    def pass_frame(self, frame_: bytes, now: float) -> list[DelayedFrame]:
        messages = decode_from_reader(frame_[_HEAD:])
        kept = [message for message in messages if not isinstance(message, Renew)]
        self.counts["renewals_lost"] += len(messages) - len(kept)
        return [DelayedFrame(now, frame(encode(kept)))] if kept else []


class RelayWithoutRenewals(Relay):
    """Passes all but renewals to a lender without authentication."""

    def __init__(self, port: int) -> None:
        super().__init__("127.0.0.1", port, MessageFaults(), seed=0)

    def _faults_of(self, connection: int, direction: str) -> FrameFaults:
        made: Callable[[MessageFaults, Random, Counter[str]], FrameFaults] = (
            _RenewalsLost if direction == "there" else FrameFaults
        )
        return made(MessageFaults(), Random(connection), self.counts)
