"""Faults of a message stream, frame by frame, as a bad network or a faulty peer causes them.

Pure: a relay passes in the frames that arrived and sends the results when they are due; a
simulation does the same in virtual time.  The faults of frame n are drawn as described in
``transport.fault_schedule``, so they do not depend on arrival times::

    pass_frame(frame, now) ──► [DelayedFrame(due, frame), …]    due never decreases
                               state CUT: close both ends, drop the queue
                               state STALLED: pass no more frames, still send the queue

Bodies are opaque: they may be encrypted, and a peer must survive any bytes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from random import Random

from transport.fault_schedule import check_chances, check_count, check_seconds, drawn, in_words

_KINDS = ("cut", "stall", "drop", "corrupt", "duplicate", "delay", "reorder")
_PREFIX = 4

HOLD_S = 0.25
"""Seconds that a frame to be reordered waits for the next one before it is sent alone."""

MAX_FRAME = 1 << 28
"""A longer frame means that the stream is encrypted, or was corrupted before it arrived."""


@dataclass(frozen=True, slots=True)
class MessageFaults:
    """The probability, from 0 to 1, that each fault happens to a frame.

    ``delay``
        the frame is sent ``delay_s`` later, and so are the frames behind it.
    ``drop``, ``duplicate``
        the frame is never sent, or sent twice.
    ``reorder``
        the frame is sent after the next one; alone after ``HOLD_S`` if there is none.
    ``corrupt``
        one bit of the length or the body is flipped.
    ``cut``
        both ends of the connection are closed.
    ``stall``
        this frame and all later ones of the direction are never sent; the connection
        stays open.
    ``skip``
        number of first frames, per connection and direction, without faults.

    ``cut`` precedes ``stall``, which precedes ``drop``, which precedes the others;
    those combine.

    Raises:
        FaultError: a value out of range, by its field.
    """

    delay: float = 0.0
    delay_s: float = 0.1
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    cut: float = 0.0
    stall: float = 0.0
    skip: int = 0

    def __post_init__(self) -> None:
        check_chances(self, _KINDS)
        check_seconds("delay_s", self.delay_s)
        check_count("skip", self.skip)

    def __str__(self) -> str:
        return in_words(self, _KINDS)

    def __bool__(self) -> bool:
        """Whether any fault can happen."""
        return bool(str(self))


class FlowState(Enum):
    """The state of one direction."""

    OPEN = "open"
    STALLED = "stalled"
    CUT = "cut"


@dataclass(frozen=True, slots=True)
class DelayedFrame:
    """A frame, its length included, to be sent at ``due`` seconds."""

    due: float
    frame: bytes


@dataclass(frozen=True, slots=True)
class _Held:
    """A frame, or two copies of it, that the next frame overtakes."""

    copies: tuple[bytes, ...]
    due: float
    until: float


class FrameFaults:
    """Injects faults into one direction of one connection.

    Args:
        rng: random numbers of this direction.
        counts: receives the number of faults by kind, and as ``frames`` all frames up to one that
            ends the direction.
        hold_s: seconds that a frame to be reordered waits for the next one.

    Example:
        >>> faults = FrameFaults(MessageFaults(reorder=1.0), Random(7))
        >>> faults.pass_frame(b"one", 0.0)
        []
        >>> [out.frame for out in faults.pass_frame(b"two", 0.1)]
        [b'two', b'one']
    """

    def __init__(
        self,
        faults: MessageFaults,
        rng: Random,
        counts: Counter[str] | None = None,
        hold_s: float = HOLD_S,
    ) -> None:
        self._faults = faults
        self._rng = rng
        self._hold_s = hold_s
        self.counts: Counter[str] = Counter() if counts is None else counts
        self.state = FlowState.OPEN
        self._number = 0
        self._last_due = float("-inf")
        self._held: _Held | None = None

    @property
    def held_until(self) -> float | None:
        """When to call :meth:`release_held` unless another frame passes before."""
        return None if self._held is None else self._held.until

    def pass_frame(self, frame: bytes, now: float) -> list[DelayedFrame]:
        """Draw the faults of an arrived frame; return the frames to send, in order.

        The frame may change :attr:`state`.
        """
        happens, where = drawn(self._rng, self._faults, _KINDS), self._rng.random()
        if self.state is not FlowState.OPEN:
            return []
        self._number += 1
        self.counts["frames"] += 1
        if self._number <= self._faults.skip:
            happens = frozenset()
        for kind in ("cut", "stall", "drop"):
            if kind in happens:
                return self._withhold(kind, now)
        self.counts.update(happens - {"reorder"})
        if "corrupt" in happens:
            frame = _flipped(frame, where)
        copies = (frame, frame) if "duplicate" in happens else (frame,)
        due = now + (self._faults.delay_s if "delay" in happens else 0.0)
        if "reorder" in happens and self._held is None:
            self._held = _Held(copies, due, now + self._hold_s)
            return []
        if self._held is not None:
            self.counts["reorder"] += 1
        return [*self._delayed(copies, due), *self.release_held(now)]

    def release_held(self, now: float) -> list[DelayedFrame]:
        """Release a frame that waits for the next one, also at the end of a stream."""
        held, self._held = self._held, None
        return self._delayed(held.copies, max(held.due, now)) if held else []

    def _withhold(self, kind: str, now: float) -> list[DelayedFrame]:
        self.counts[kind] += 1
        if kind == "drop":
            return []
        if kind == "stall":
            self.state = FlowState.STALLED
            return self.release_held(now)
        self.state = FlowState.CUT
        self._held = None
        return []

    def _delayed(self, copies: tuple[bytes, ...], due: float) -> list[DelayedFrame]:
        self._last_due = max(self._last_due, due)
        return [DelayedFrame(self._last_due, copy) for copy in copies]


@dataclass(frozen=True, slots=True)
class FaultDraws:
    """The faults of all connections of a relay, as its seed determines them.

    Every connection and direction draws from ``Random(f"{seed}/{connection}/{direction}")``:
    ``connection`` counts from 0, ``direction`` is ``there`` or ``back``.
    """

    faults: MessageFaults
    seed: int
    hold_s: float = HOLD_S

    def for_direction(self, connection: int, direction: str, counts: Counter[str]) -> FrameFaults:
        """The faults of one direction of one connection."""
        rng = Random(f"{self.seed}/{connection}/{direction}")
        return FrameFaults(self.faults, rng, counts, self.hold_s)


class FrameCutter:
    """Splits a byte stream into frames, lengths included, without loss or checks.

    A length above ``max_frame`` means that the stream is not framed (TLS, for example): from there
    on, chunks pass unchanged.
    """

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self._max_frame = max_frame
        self._pending = bytearray()
        self._is_framed = True

    def cut_frames(self, data: bytes) -> list[bytes]:
        """Add received bytes; return the frames that they complete."""
        if not self._is_framed:
            return [data]
        self._pending += data
        frames = []
        start = 0
        while len(self._pending) - start >= _PREFIX:
            length = int.from_bytes(self._pending[start : start + _PREFIX], "big")
            end = start + _PREFIX + length
            if length > self._max_frame:
                self._is_framed = False
                end = len(self._pending)
            if len(self._pending) < end:
                break
            frames.append(bytes(self._pending[start:end]))
            start = end
        del self._pending[:start]
        return frames

    def take_remainder(self) -> list[bytes]:
        """End the stream; return the bytes of an unfinished frame, if any."""
        rest, self._pending = bytes(self._pending), bytearray()
        return [rest] if rest else []


def _flipped(frame: bytes, where: float) -> bytes:
    """``frame`` with the bit at ``where``, from 0 to 1, flipped."""
    byte, bit = divmod(int(where * 8 * len(frame)), 8)
    return frame[:byte] + bytes([frame[byte] ^ 1 << bit]) + frame[byte + 1 :]
