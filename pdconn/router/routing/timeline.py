"""When what happened to a request, as steps that follow each other: the page's waterfall.

::

    receive ─► route ─► borrow ─► prefill ─► decode ─► stream
    its body            a prefix  until the  until its  until its
                                  ticket     first byte last byte

An engine that failed has a step of its own, and the next one asked begins where it ends.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum


class StepKind(Enum):
    """What a request waits for."""

    RECEIVE = "receive"
    ROUTE = "route"
    BORROW = "borrow"
    PREFILL = "prefill"
    DECODE = "decode"
    STREAM = "stream"


@dataclass(frozen=True, slots=True)
class Step:
    """One step, in seconds from the request's arrival.

    Attributes:
        end_s: None while it is under way.
        failed: the engine that was asked has not answered.
    """

    kind: StepKind
    start_s: float
    end_s: float | None
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """What engines have answered so far.

    Attributes:
        prefilled: prefill has answered.
        borrowed_s: what the last engine asked for prefill waited for a prefix; None without.
        first_byte_s: from asking the last decode engine until its first byte; None before.
    """

    prefilled: bool = False
    borrowed_s: float | None = None
    first_byte_s: float | None = None


@dataclass(slots=True)
class Timeline:
    """The moments between steps, by ``time.perf_counter``.

    Attributes:
        began_s: the request's arrival.
        received_s: its body was read and found good.
        asked: an engine was asked, for prefill or decode; retries too.
        ended_s: its client has its answer, or will not get one; None before.
    """

    began_s: float = field(default_factory=time.perf_counter)
    received_s: float = field(default_factory=time.perf_counter)
    asked: list[tuple[StepKind, float]] = field(default_factory=list)
    ended_s: float | None = None

    def steps(self, answered: Answered) -> tuple[Step, ...]:
        """The steps so far, in their order; the last one has no end while it is under way."""
        routed_s = self.asked[0][1] if self.asked else self.ended_s
        made = [
            self._step(StepKind.RECEIVE, self.began_s, self.received_s),
            self._step(StepKind.ROUTE, self.received_s, routed_s),
        ]
        kinds = [kind for kind, _ in self.asked]
        last = {kind: number for number, kind in enumerate(kinds)}
        first_byte_s = None
        for number, (kind, asked_s) in enumerate(self.asked):
            is_last = number == last[kind]
            start_s = asked_s
            end_s = self.asked[number + 1][1] if number + 1 < len(kinds) else self.ended_s
            good = answered.prefilled
            if kind is StepKind.DECODE:
                good = answered.first_byte_s is not None
                if is_last and answered.first_byte_s is not None:
                    end_s = first_byte_s = asked_s + answered.first_byte_s
            elif is_last and answered.borrowed_s is not None:
                start_s = asked_s + answered.borrowed_s
                start_s = start_s if end_s is None else min(start_s, end_s)
                made.append(self._step(StepKind.BORROW, asked_s, start_s))
            failed = end_s is not None and not (is_last and good)
            made.append(self._step(kind, start_s, end_s, failed))
        if first_byte_s is not None:
            made.append(self._step(StepKind.STREAM, first_byte_s, self.ended_s))
        return tuple(made)

    def _step(
        self, kind: StepKind, start_s: float, end_s: float | None, failed: bool = False
    ) -> Step:
        began_s = self.began_s
        return Step(kind, start_s - began_s, None if end_s is None else end_s - began_s, failed)
