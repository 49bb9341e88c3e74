"""Pulls from one lender renew together: seldom for the lender, never late for a claim."""

from __future__ import annotations

import heapq
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.lifecycle.pull import (
    RENEWALS_PER_TTL,
    RENEWS_ALONG_FROM,
    Effect,
    Patience,
    Pull,
    PullState,
    SendRenew,
)

TTL_S = 9.0
WAIT_S = TTL_S / RENEWALS_PER_TTL
SLACK_S = 1e-6


def held(claimed: float = 0.0) -> Pull:
    """A pull whose claim was sent at ``claimed``, and granted at once."""
    pull = Pull(Patience(), claimed)
    pull.greeted(claimed)
    pull.granted(1, TTL_S, claimed)
    return pull


def test_a_pull_renews_along_once_most_of_its_wait_is_over() -> None:
    soon = RENEWS_ALONG_FROM * WAIT_S
    pull = held()
    assert pull.renew_along(soon - SLACK_S) == []
    assert pull.renew_along(soon + SLACK_S) == [SendRenew(2)]
    assert pull.renew_along(soon + SLACK_S) == []
    assert pull.granted(2, TTL_S, soon + 0.1) == []
    assert pull.next_deadline() == pytest.approx(soon + WAIT_S)


def test_a_pull_that_holds_no_claim_does_not_renew_along() -> None:
    claiming = Pull(Patience(), 0.0)
    claiming.greeted(0.0)
    assert claiming.renew_along(2.5) == []
    confirming = held()
    confirming.want(0.0)
    confirming.settled(1.0)
    assert confirming.state is PullState.CONFIRMING
    assert confirming.renew_along(2.5) == []
    assert held().renew_along(TTL_S) == []  # its time is over, which the next tick says


class Lent:
    """Pulls from one lender that renew along, in virtual time, until ``until_s``.

    Attributes:
        renewals: when each pull sent a claim or renewal.
        frames: when the lender was sent renewals.
        expired: pulls whose claim ran out.
    """

    def __init__(self, claims: list[float], rtt_s: float, until_s: float) -> None:
        self._rtt_s = rtt_s
        self._grants: list[tuple[float, int, int]] = []
        self._pulls: dict[int, Pull] = {}
        self.renewals: dict[int, list[float]] = {}
        self.frames: list[float] = []
        self.expired: list[int] = []
        to_claim = sorted((at, number) for number, at in enumerate(claims))
        while True:
            first = min(to_claim[:1], default=(math.inf, 0))[0]
            grant = self._grants[0][0] if self._grants else math.inf
            alarm = min((self._deadline(pull) for pull in self._pulls.values()), default=math.inf)
            now = min(first, grant, alarm)
            if now > until_s:
                return
            if now == first:
                self._claim(now, to_claim.pop(0)[1])
            elif now == grant:
                _, number, seq = heapq.heappop(self._grants)
                self._pulls[number].granted(seq, TTL_S, now)
            else:
                self._tick(now)

    @staticmethod
    def _deadline(pull: Pull) -> float:
        deadline = pull.next_deadline()
        return math.inf if deadline is None else deadline

    def _claim(self, now: float, number: int) -> None:
        pull = self._pulls[number] = Pull(Patience(claim_s=math.inf), now)
        pull.greeted(now)
        self.renewals[number] = [now]
        heapq.heappush(self._grants, (now + self._rtt_s, number, 1))

    def _tick(self, now: float) -> None:
        """As ``pdconn.puller.pulls.Pulls.tick_due``."""
        renews = [self._sent(now, number, pull.tick(now)) for number, pull in self._pulls.items()]
        if any(renews):
            self.frames.append(now)
            for number, pull in self._pulls.items():
                self._sent(now, number, pull.renew_along(now))
        self.expired += [
            number
            for number, pull in self._pulls.items()
            if pull.state is PullState.FAILED and number not in self.expired
        ]

    def _sent(self, now: float, number: int, effects: list[Effect]) -> bool:
        seqs = [effect.seq for effect in effects if isinstance(effect, SendRenew)]
        for seq in seqs:
            self.renewals[number].append(now)
            heapq.heappush(self._grants, (now + self._rtt_s, number, seq))
        return bool(seqs)


_CLAIMS = st.lists(st.floats(0, 4 * WAIT_S), min_size=1, max_size=6)
_UNTIL_S = 4 * TTL_S


@given(_CLAIMS, st.floats(0, WAIT_S / 4))
def test_no_claim_runs_out_and_none_renews_later_than_alone(
    claims: list[float], rtt_s: float
) -> None:
    lent = Lent(claims, rtt_s, _UNTIL_S)
    assert lent.expired == []
    for times in lent.renewals.values():
        gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
        assert all(RENEWS_ALONG_FROM * WAIT_S - SLACK_S <= gap <= WAIT_S + SLACK_S for gap in gaps)
        assert _UNTIL_S - times[-1] <= WAIT_S + SLACK_S


@given(_CLAIMS, st.floats(0, WAIT_S / 4))
def test_what_a_lender_is_sent_does_not_grow_with_the_pulls(
    claims: list[float], rtt_s: float
) -> None:
    frames = Lent(claims, rtt_s, _UNTIL_S).frames
    apart_s = (1 - RENEWS_ALONG_FROM) * WAIT_S
    for sooner, later in itertools.pairwise(frames):
        assert later - sooner > apart_s - rtt_s - SLACK_S


def test_pulls_that_renew_alone_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    claims = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    together = len(Lent(claims, 0.0, _UNTIL_S).frames)
    monkeypatch.setattr(Pull, "renew_along", lambda _self, _now: [])
    alone = len(Lent(claims, 0.0, _UNTIL_S).frames)
    assert 2 * together <= alone


def test_pulls_that_wait_for_each_other_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renewing all at fixed times would be fewer messages, and lets claims run out."""

    def at_fixed_times(self: Pull, sent: float, left_s: float) -> None:
        self._renew_at = self._renew_from = TTL_S * math.ceil((sent + left_s / 3) / TTL_S)

    monkeypatch.setattr(Pull, "_await_renewal", at_fixed_times)
    assert Lent([0.0, 7.0], 0.1, _UNTIL_S).expired == [0, 1]
