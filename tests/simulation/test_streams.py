"""The laws hold where decode follows requests while prefill computes them.

``PDCONN_CHAOS`` and ``PDCONN_SEED`` as in :mod:`tests.simulation.test_simulation`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest

from pdconn.lender.sessions import LenderSessions
from pdconn.lifecycle.pull import Effect, Pull, PullState, StartRead
from pdconn.protocol.messages import Completed
from pdconn.protocol.ticket import Ticket
from pdconn.puller.following import FollowedStream
from tests.lender.test_every_follower import lends_again
from tests.simulation.following import FollowingDecode
from tests.simulation.laws import LawBroken
from tests.simulation.prefill import Growing, Prefill
from tests.simulation.run import simulate
from tests.simulation.test_simulation import PER_SEED, SEEDS
from tests.simulation.world import NO_FAULTS, Chances

STREAMS = Chances(stream=0.7, preempt=0.1, crash=0.03, reset=0.02)
WRONG_CLOCKS = Chances(
    stream=0.7, preempt=0.1, drift=0.3, slew=0.05, freeze=0.05, reset=0.03, late_read=0.3
)
CALM = Chances(stream=1.0, cancel=0.0, abort=0.0, crash=0.0, pause=0.0)
BREAKING = Chances(**{**vars(CALM), "failing_read": 0.3})
MUTANT_SEEDS = range(12)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of failures are meant here, and their log lines cost more than the run."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_laws_hold_while_requests_are_followed(seed: int) -> None:
    counts = simulate(seed, PER_SEED, STREAMS, kind=FollowingDecode)
    print(f"seed {seed}: {dict(sorted(counts.items()))}")
    assert counts["received"] > PER_SEED / 8
    assert min(counts[what] for what in ("announced", "preempted", "crashes", "resets")) > 0
    assert counts["promised"] == counts["received"] + counts["failed"]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_laws_hold_on_wrong_clocks_while_requests_are_followed(seed: int) -> None:
    counts = simulate(seed, PER_SEED, WRONG_CLOCKS, kind=FollowingDecode)
    assert counts["received"] > PER_SEED / 30
    assert counts["announced"] > 0


def test_without_faults_everything_that_is_followed_is_received() -> None:
    chances = Chances(**{**vars(NO_FAULTS), "stream": 1.0})
    counts = simulate(0, 200, chances, kind=FollowingDecode)
    assert counts["streams"] == counts["received"] == counts["freed read"] > 150
    assert counts["announced"] > 200
    assert counts["failed"] == counts["asked elsewhere"] == 0


# Negative controls


def breaks(what: str, chances: Chances = CALM) -> None:
    """Some run breaks the law that says ``what``, before any other."""
    for seed in MUTANT_SEEDS:
        try:
            simulate(seed, 200, chances, kind=FollowingDecode)
        except LawBroken as error:
            if not re.search(what, str(error)):
                raise
            return
    pytest.fail(f"not noticed in {len(MUTANT_SEEDS)} runs")


def test_blocks_that_are_announced_before_they_are_written_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Prefill._announce

    def hasty(self: Prefill, request: str, growing: Growing) -> None:
        growing.written += 1
        real(self, request, growing)
        growing.written -= 1

    monkeypatch.setattr(Prefill, "_announce", hasty)
    breaks("holds another request's KV")


def moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted request gets other blocks for what was announced, too."""

    def careless(self: Prefill, request: str, growing: Growing) -> None:
        others = self.pool.take(growing.number, len(growing.blocks))
        if others is None:
            return
        self.world.counts["preempted"] += 1
        for block in growing.blocks:  # the next request computes into them
            self.memory.cells[block] = 0
        self.pool.give_back(growing.blocks)
        growing.blocks, growing.written, growing.announced = others, 0, 0
        self.lent[request] = self._ticket(request, growing.blocks)

    monkeypatch.setattr(Prefill, "_preempt", careless)


MOVING = Chances(**{**vars(CALM), "preempt": 0.3})


def test_positions_that_move_fail_their_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    moving(monkeypatch)
    counts = simulate(0, 200, MOVING, kind=FollowingDecode)
    assert counts["preempted"] > 0
    assert counts["failed"] > 0


def test_a_reader_that_does_not_compare_positions_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moving(monkeypatch)
    real, grow = FollowedStream.complete, FollowedStream.grow

    def credulous(self: FollowedStream, message: Completed, now: float) -> Ticket:
        self._lists.clear()
        return real(self, message, now)

    def trusting(self: FollowedStream, *args: object) -> bool:
        for each in args[0].blocks:  # type: ignore[attr-defined]
            self._lists.setdefault(each.group, [])[each.first :] = each.ids
        grow(self, *args)  # type: ignore[arg-type]
        return True

    monkeypatch.setattr(FollowedStream, "complete", credulous)
    monkeypatch.setattr(FollowedStream, "grow", trusting)
    breaks("holds another request's KV", MOVING)


def test_a_lease_that_is_opened_for_the_ticket_of_one_that_has_ended_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that stands still hears of the end of a lease after it has written the ticket."""
    monkeypatch.setattr(LenderSessions, "_apply_stream_command", lends_again)
    stops = Chances(**{**vars(CALM), "abort": 0.9, "freeze": 0.9, "pause": 0.9, "chunk_s": 0.2})
    breaks("law 5: prefill. has leases of nothing", stops)


def test_a_pull_that_reads_on_after_an_error_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears of the error when its last read has settled, and fails then."""
    real = Pull.fail

    def later(self: Pull, reason: str, now: float, notify: bool = True) -> list[Effect]:
        is_error = reason.startswith("BackendFailure") and self.state is PullState.FOLLOWING
        return [] if is_error else real(self, reason, now, notify)

    monkeypatch.setattr(Pull, "fail", later)
    breaks("read after an error", BREAKING)


def believing_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader takes what was announced so far for everything."""
    real = Pull._read_if_wanted

    def hasty(self: Pull, now: float) -> list[Effect]:
        self.is_complete = True
        effects = real(self, now)
        return [StartRead() for _ in effects]

    monkeypatch.setattr(Pull, "_read_if_wanted", hasty)


def test_a_reader_that_believes_before_all_is_announced_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    believing_early(monkeypatch)
    breaks("holds another request's KV")


def test_announced_blocks_that_a_preemption_gives_back_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Prefill._preempt

    def careless(self: Prefill, request: str, growing: Growing) -> None:
        kept = growing.blocks[: growing.announced]
        if kept and len(kept) < len(growing.blocks):
            self.pool.give_back(kept[:1])
        real(self, request, growing)

    monkeypatch.setattr(Prefill, "_preempt", careless)
    breaks("law 3|law 4", MOVING)
