"""What the puller tells of a claim that the engine waits for: granted, refused, lost; in time."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from pdconn.lifecycle.pull import PullState
from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList, Ticket
from pdconn.puller.commands import CancelPull, ClaimOutcome, ClaimTicket, ReadBlocks
from pdconn.puller.pulls import RequestPull
from tests.fakes.pair import Pair
from tests.threads.inside import num_open
from transport.testing.inprocess.faults import Held

_PATIENCE_S = 30.0


class Awaiting(Pair):
    """A pair whose engine waits for claims, and what it was told."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.told: list[ClaimOutcome] = []

    def await_claim(self, request: str, ticket: Ticket) -> None:
        self.puller.post_command(ClaimTicket(request, f"pull/{request}", ticket, is_awaited=True))

    def problems(self, count: int, seconds: float = _PATIENCE_S) -> list[str | None]:
        """What was told, as soon as that is ``count`` outcomes."""
        give_up = time.monotonic() + seconds
        while len(self.told) < count:
            assert time.monotonic() < give_up, f"told {self.told} only"
            self.puller.wait_for_report(0.05)
            self.told += self.collect().claims
        return [outcome.problem for outcome in self.told]

    def stays_silent(self, seconds: float = 0.3) -> bool:
        """Whether nothing more is told."""
        before, until = len(self.told), time.monotonic() + seconds
        while time.monotonic() < until:
            self.told += self.collect().claims
            time.sleep(0.01)
        return len(self.told) == before


def test_a_granted_claim_is_told_once_with_its_pull_and_rank() -> None:
    with Awaiting(ttl_s=0.6, claim_timeout_s=20.0) as pair:
        pair.await_claim("d", pair.lend("r"))
        assert pair.problems(1) == [None]
        assert pair.told == [ClaimOutcome("d", "pull/d", 0)]
        assert pair.stays_silent(1.0), "renewals are not told"
        pair.start_read("d")
        assert pair.outcome_of("d") is None
        assert pair.stays_silent()


def test_nothing_is_told_of_a_claim_that_is_not_awaited() -> None:
    """As of every claim of an engine without a store."""
    with Awaiting() as pair:
        ticket = pair.lend("r")
        pair.claim("d", ticket)
        pair.claim("gone", replace(ticket, request_id="never lent"))
        pair.wait(lambda: pair.puller.take_pull_counts().get("pulls_refused_unknown"))
        assert pair.stays_silent()
        began = time.monotonic()
        pair.puller.wait_for_report(60.0)
        assert time.monotonic() - began < 30.0


def _closed(pair: Pair, ticket: Ticket) -> Ticket:
    pair.lender.close()
    return ticket


def _revoked(pair: Pair, ticket: Ticket) -> Ticket:
    pair.lender.revoke_all()
    return ticket


def _altered(pair: Pair, ticket: Ticket) -> Ticket:
    del pair
    return replace(ticket, blocks=(BlockList(0, (3, 4, 6)),))


def _beyond_their_memory(pair: Pair, ticket: Ticket) -> Ticket:
    del pair
    return replace(ticket, blocks=(BlockList(0, (3, 4, 10**6)),))


def _of_another_boot(pair: Pair, ticket: Ticket) -> Ticket:
    del pair
    return replace(ticket, incarnation="boot-0")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_closed, "Connection refused"),
        (_revoked, "refused, aborted"),
        (_altered, "refused, altered"),
        (_beyond_their_memory, "remote_block_ids"),
        (_of_another_boot, "incarnation"),
    ],
)
def test_a_claim_that_cannot_be_granted_is_told_with_its_reason(
    change: Callable[[Pair, Ticket], Ticket], why: str
) -> None:
    with Awaiting() as pair:
        pair.await_claim("d", change(pair, pair.lend("r")))
        [problem] = pair.problems(1)
        assert why in str(problem)
        pair.cancel("d")
        pair.wait(lambda: num_open(pair.puller) == 0)
        assert not pair.failed, "nothing was promised, so nothing failed"


def test_a_lender_that_does_not_fit_is_told() -> None:
    with Awaiting(traits={"model": "another"}) as pair:
        pair.await_claim("d", pair.lend("r"))
        [problem] = pair.problems(1)
        assert "model" in str(problem)


@contextlib.contextmanager
def _silent() -> Iterator[int]:
    """A port at which connections are accepted and nothing is said."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(8)
        yield listening.getsockname()[1]


def test_a_lender_that_says_nothing_is_told_when_the_claim_times_out() -> None:
    with Awaiting(claim_timeout_s=0.5) as pair, _silent() as port:
        began = time.monotonic()
        pair.await_claim("d", replace(pair.lend("r"), port=port))
        [problem] = pair.problems(1)
        assert "no answer to the claim while greeting" in str(problem)
        assert time.monotonic() - began >= 0.5


def test_a_grant_that_is_lost_before_its_blocks_are_known_is_told_again() -> None:
    with Awaiting() as pair:
        pair.await_claim("d", pair.lend("r"))
        assert pair.problems(1) == [None]
        pair.lender.close()
        granted, lost = pair.problems(2)
        assert granted is None
        assert "side channel" in str(lost)
        pair.cancel("d")
        pair.wait(lambda: num_open(pair.puller) == 0)
        assert not pair.failed


def test_a_grant_that_is_lost_amid_the_read_is_a_failed_pull_and_not_told() -> None:
    with Awaiting(drain_s=0.1) as pair:
        pair.network.script = lambda _: Held()
        pair.await_claim("d", pair.lend("r"))
        assert pair.problems(1) == [None]
        pair.start_read("d")
        pair.wait(pair.network.in_flight)
        pair.lender.close()
        assert "side channel" in str(pair.outcome_of("d"))
        assert pair.stays_silent()


def test_a_claim_lost_when_its_blocks_are_known_is_a_failed_pull() -> None:
    """The engine had not heard of it when it gave the blocks."""
    with Awaiting() as pair:
        ticket = pair.lend("r")
        pair.await_claim("d", ticket)
        assert pair.problems(1) == [None]
        pair.lender.close()
        pair.wait(lambda: pair.puller.take_pull_counts().get("pulls_unreachable"))
        pair.puller.post_command(ReadBlocks("d", Need.for_range(0, 12, (BlockList(0, (7, 8, 9)),))))
        assert "side channel" in str(pair.outcome_of("d"))
        assert num_open(pair.puller) == 0


def test_a_claim_given_up_is_not_waited_for_and_not_told() -> None:
    with Awaiting(claim_timeout_s=60.0) as pair, _silent() as port:
        pair.await_claim("d", replace(pair.lend("r"), port=port))
        pair.puller.post_command(CancelPull("d"))
        began = time.monotonic()
        pair.puller.wait_for_report(60.0)
        assert time.monotonic() - began < 30.0
        pair.wait(lambda: num_open(pair.puller) == 0)
        assert pair.stays_silent()


def test_an_idle_engine_sleeps_until_a_claim_is_told() -> None:
    with Awaiting(claim_timeout_s=0.5) as pair, _silent() as port:
        began = time.monotonic()  # before the claim, whose time limit begins with it
        pair.await_claim("d", replace(pair.lend("r"), port=port))
        pair.puller.wait_for_report(60.0)
        assert 0.5 <= time.monotonic() - began < 30.0
        assert len(pair.collect().claims) == 1
        began = time.monotonic()
        pair.puller.wait_for_report(60.0)
        assert time.monotonic() - began < 30.0


def test_a_puller_that_tells_grants_only_would_leave_its_engine_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control."""
    honest = RequestPull.claim_outcome

    def grants_only(entry: RequestPull, now: float) -> ClaimOutcome | None:
        return None if entry.machine.state is PullState.FAILED else honest(entry, now)

    monkeypatch.setattr(RequestPull, "claim_outcome", grants_only)
    with Awaiting() as pair:
        pair.await_claim("d", _closed(pair, pair.lend("r")))
        pair.wait(lambda: pair.puller.take_pull_counts().get("pulls_unreachable"))
        assert pair.stays_silent()
