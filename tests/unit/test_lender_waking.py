"""Lending wakes the lender's thread as seldom as may be, and never too late."""

from __future__ import annotations

import pytest

from pdconn.protocol.ticket import BlockList
from pdconn.runtime.mailbox import Mailbox
from tests.pair import Pair


class Woken:
    """Counts how often a lender's thread is woken."""

    def __init__(self, pair: Pair, patch: pytest.MonkeyPatch) -> None:
        self.times = 0
        wake = Mailbox.wake

        def counted(mailbox: Mailbox[object]) -> None:
            self.times += 1
            wake(mailbox)

        patch.setattr(Mailbox, "wake", counted)
        self._pair = pair
        self._lent = 0

    def by_lending(self, ttl_s: float) -> bool:
        """Whether lending something for so long wakes the thread."""
        before, self._lent = self.times, self._lent + 1
        self._pair.lender.lend(f"r{self._lent}", b"x" * 16, ttl_s)
        return self.times > before


def test_only_a_lease_that_ends_before_the_others_wakes_the_lender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Pair() as pair:
        woken = Woken(pair, monkeypatch)
        assert woken.by_lending(60.0)  # it slept until somebody would come
        pair.wait(lambda: not woken.by_lending(61.0), 20.0)  # once it knows of the first
        assert woken.by_lending(0.05)
        assert pair.freed(20.0) == "expired"


def test_a_lease_that_woke_nobody_can_be_claimed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair(ttl_s=90.0) as pair:
        woken = Woken(pair, monkeypatch)
        pair.wait(lambda: not woken.by_lending(60.0), 20.0)
        before = woken.times
        ticket = pair.lend_blocks("quiet", (BlockList(0, (3, 4, 5)),))
        assert woken.times == before
        pair.pull("d", ticket)
        assert pair.outcome_of("d") is None
