"""Readers that believe too much: the negative controls of every test about leases.

A pull is received if it settles before the deadline of its claim (for nothing, where it would be
refused anyway) and if the lender confirms that the claim held.
"""

from __future__ import annotations

import pytest

from pdconn.lifecycle.pull import Effect, Pull, PullState, ReportReceived, SendDone


def without_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch pulls to leave it to the lender whether a read was in time."""
    copied, tick, next_deadline = Pull._copied, Pull.tick, Pull.next_deadline

    def copied_in_time(self: Pull, now: float) -> list[Effect]:
        self._deadline = now + 1.0
        return copied(self, now)

    def patient_tick(self: Pull, now: float) -> list[Effect]:
        return self._renew(now) if self.state is PullState.READING else tick(self, now)

    def patient_deadline(self: Pull) -> float | None:
        return self._renew_at if self.state is PullState.READING else next_deadline(self)

    monkeypatch.setattr(Pull, "_copied", copied_in_time)
    monkeypatch.setattr(Pull, "tick", patient_tick)
    monkeypatch.setattr(Pull, "next_deadline", patient_deadline)


def without_confirmation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch pulls to believe their own clock alone."""

    def confirm(self: Pull, now: float) -> list[Effect]:
        del now
        self._enter("confirmed")
        return [SendDone(), ReportReceived()]

    monkeypatch.setattr(Pull, "_confirm", confirm)


def without_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch pulls to believe a read whenever it settles, as connectors without leases do."""
    without_deadline(monkeypatch)
    without_confirmation(monkeypatch)
