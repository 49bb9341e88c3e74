"""A reader without claim deadlines: the negative control of every test about leases."""

from __future__ import annotations

import pytest

from pdconn.lifecycle.pull import Effect, Pull, PullState, ReportFailed, ReportReceived, SendDone


def without_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch pulls to believe a read whenever it settles, as connectors without leases do."""
    tick, next_deadline = Pull.tick, Pull.next_deadline

    def copied(self: Pull, error: str | None, now: float) -> list[Effect]:
        del now
        self._enter("settled")
        return [SendDone(ok=error is None), ReportFailed(error) if error else ReportReceived()]

    def patient_tick(self: Pull, now: float) -> list[Effect]:
        return self._renew(now) if self.state is PullState.READING else tick(self, now)

    def patient_deadline(self: Pull) -> float | None:
        return self._renew_at if self.state is PullState.READING else next_deadline(self)

    monkeypatch.setattr(Pull, "_copied", copied)
    monkeypatch.setattr(Pull, "tick", patient_tick)
    monkeypatch.setattr(Pull, "next_deadline", patient_deadline)
