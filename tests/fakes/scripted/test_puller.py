"""The puller that laws of the scheduler's half script keeps the promises of the real one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from pdconn.planning import cover
from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList, Ticket
from pdconn.puller.commands import (
    AbandonPull,
    CancelPull,
    ClaimTicket,
    Command,
    EndBeside,
    FailPull,
    ReadBlocks,
)
from pdconn.puller.thread import Puller, PullResults
from tests.fakes.pair import Pair
from tests.fakes.scripted.puller import ScriptedPuller
from transport.testing.inprocess.faults import Late
from transport.testing.inprocess.transport import InProcessNetwork

BLOCKS = (BlockList(0, (7, 8, 9)),)
NEED = Need.for_range(0, 12, BLOCKS)
STORED = Need((range(8),), BLOCKS)
QUIET_S = 0.2
"""Of silence, after which nothing more is reported."""


@dataclass
class Told:
    """What an engine hears, without reasons: those are in the words of each."""

    received: list[str] = field(default_factory=list)
    failed: list[tuple[str, bool]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    claims: list[tuple[str, str, bool]] = field(default_factory=list)

    def hear(self, results: PullResults) -> None:
        self.received += results.received
        self.failed += [(one.request, one.quarantined) for one in results.failed]
        self.released += results.released
        self.claims += [(one.request, one.pull, one.problem is None) for one in results.claims]


Script = Callable[["Side", Ticket, Ticket], None]


class Side:
    """A puller of either kind, and what happens around it."""

    def __init__(self, puller: Puller | ScriptedPuller, pair: Pair) -> None:
        self.puller, self.pair, self.told = puller, pair, Told()

    def post(self, *commands: Command) -> None:
        for command in commands:
            self.puller.post_command(command)

    def settle(self) -> None:
        """Until nothing more comes."""
        if isinstance(self.puller, ScriptedPuller):
            self.told.hear(self.puller.take_results())
            return
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < QUIET_S:
            results = self.puller.take_results()
            if results.records or results.failed or results.released or results.claims:
                quiet_since = time.monotonic()
            self.told.hear(results)
            time.sleep(0.005)

    def answered(self) -> None:
        """The lender answers each claim: it grants what it lends, and refuses the rest."""
        if isinstance(self.puller, ScriptedPuller):
            for request, pull in list(self.puller.pulls.items()):
                lent = pull.claim.ticket.request_id == "lent"
                (self.puller.grant if lent else self.puller.lose)(request)
        self.settle()

    def read(self) -> None:
        """Reads settle in time, of claims that are granted."""
        if isinstance(self.puller, ScriptedPuller):
            for request, pull in list(self.puller.pulls.items()):
                if pull.need is not None and pull.is_granted:
                    self.puller.receive(request)
        self.settle()


def claim(ticket: Ticket, *, is_awaited: bool = False) -> ClaimTicket:
    return ClaimTicket("d", "here/1", ticket, is_awaited)


def is_received(side: Side, lent: Ticket, gone: Ticket) -> None:
    side.post(claim(lent), ReadBlocks("d", NEED))
    side.answered()
    side.read()
    assert side.told == Told(received=["d"])


def is_given_up(side: Side, lent: Ticket, gone: Ticket) -> None:
    """Nothing is reported of it, and a cancel of what has ended does nothing."""
    side.post(claim(lent))
    side.answered()
    side.post(CancelPull("d"))
    side.settle()
    side.post(CancelPull("d"))
    side.settle()
    assert side.told == Told()


def is_refused(side: Side, lent: Ticket, gone: Ticket) -> None:
    """Without blocks that is not reported, unless it is awaited."""
    side.post(claim(gone))
    side.answered()
    assert side.told == Told()
    side.post(ReadBlocks("d", NEED))
    side.settle()
    assert side.told == Told(failed=[("d", False)])


def is_awaited(side: Side, lent: Ticket, gone: Ticket) -> None:
    side.post(claim(lent, is_awaited=True))
    side.answered()
    assert side.told == Told(claims=[("d", "here/1", True)])
    side.post(ReadBlocks("d", NEED))
    side.read()
    assert side.told == Told(received=["d"], claims=[("d", "here/1", True)])


def is_awaited_in_vain(side: Side, lent: Ticket, gone: Ticket) -> None:
    side.post(claim(gone, is_awaited=True))
    side.answered()
    assert side.told == Told(claims=[("d", "here/1", False)])
    side.post(CancelPull("d"))
    side.settle()
    assert side.told == Told(claims=[("d", "here/1", False)])


def is_failed_by_the_engine(side: Side, lent: Ticket, gone: Ticket) -> None:
    side.post(FailPull("d", "its ticket is wrong"))
    side.settle()
    assert side.told == Told(failed=[("d", False)])


def comes_again_under_its_name(side: Side, lent: Ticket, gone: Ticket) -> None:
    side.post(claim(gone), CancelPull("d"))
    side.settle()
    side.post(claim(lent), ReadBlocks("d", NEED))
    side.answered()
    side.read()
    assert side.told == Told(received=["d"])


def is_read_beside_a_store(side: Side, lent: Ticket, gone: Ticket) -> None:
    """Nothing is reported before the store has ended; what it has left is read then."""
    side.post(claim(lent), ReadBlocks("d", cover.rest_of(NEED, STORED), STORED))
    side.answered()
    side.read()
    assert side.told == Told()
    side.post(EndBeside("d", cover.NOTHING))
    side.settle()
    assert side.told == Told(received=["d"])


def is_refused_beside_a_store(side: Side, lent: Ticket, gone: Ticket) -> None:
    side.post(claim(gone), ReadBlocks("d", cover.rest_of(NEED, STORED), STORED))
    side.answered()
    side.settle()
    assert side.told == Told()
    side.post(EndBeside("d", STORED))
    side.settle()
    assert side.told == Told(failed=[("d", False)])


def is_given_up_beside_a_store(side: Side, lent: Ticket, gone: Ticket) -> None:
    side.post(claim(lent), ReadBlocks("d", cover.rest_of(NEED, STORED), STORED))
    side.answered()
    side.read()
    side.post(CancelPull("d"))
    side.settle()
    assert side.told == Told()
    side.post(EndBeside("d", STORED))
    side.settle()
    assert side.told == Told(failed=[("d", False)])


SCRIPTS: list[Script] = [
    is_received, is_given_up, is_refused, is_awaited, is_awaited_in_vain, is_failed_by_the_engine,
    comes_again_under_its_name, is_read_beside_a_store, is_refused_beside_a_store,
    is_given_up_beside_a_store,
]  # fmt: skip


@contextmanager
def sides(kind: str, pair: Pair) -> Iterator[tuple[Side, Ticket, Ticket]]:
    with pair:
        puller = pair.puller if kind == "real" else ScriptedPuller(0, lambda pull: None)
        lent = pair.lend("lent")
        yield Side(puller, pair), lent, pair.ticket("gone", lent.blocks)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.parametrize("kind", ["real", "scripted"])
def test_both_report_the_same(kind: str, script: Script) -> None:
    with sides(kind, Pair(warms=True)) as (side, lent, gone):
        script(side, lent, gone)


@pytest.mark.parametrize("ends", [AbandonPull("d"), CancelPull("d")], ids=["abandoned", "given up"])
@pytest.mark.parametrize("kind", ["real", "scripted"])
def test_a_read_that_hangs_is_reported_twice_by_both(kind: str, ends: Command) -> None:
    """As failed with its blocks in quarantine, and when it has settled."""
    network = InProcessNetwork(script=lambda read: Late(1.5))
    with sides(kind, Pair(network=network, drain_s=0.2, probes=False)) as (side, lent, _):
        side.post(claim(lent), ReadBlocks("d", NEED))
        time.sleep(0.3)  # the read has begun
        if isinstance(side.puller, ScriptedPuller):
            side.puller.grant("d")
        side.post(ends)
        if isinstance(side.puller, ScriptedPuller) and isinstance(ends, CancelPull):
            side.puller.leave_behind("d")
        give_up = time.monotonic() + 20
        while not side.told.failed and time.monotonic() < give_up:
            side.settle()
        assert side.told == Told(failed=[("d", True)])
        if isinstance(side.puller, ScriptedPuller):
            side.puller.settle(0)
        while not side.told.released and time.monotonic() < give_up:
            side.settle()
        assert side.told == Told(failed=[("d", True)], released=["d"])


def test_the_scripted_one_insists_on_what_the_real_one_relies_on() -> None:
    ticket = Ticket("p", "boot", "lent", "localhost", 1, 12, "prompt", BLOCKS)
    cases: list[list[Command]] = [
        [ReadBlocks("d", NEED)],
        [claim(ticket), claim(ticket)],
        [claim(ticket), FailPull("d", "its ticket is wrong")],
        [claim(ticket, is_awaited=True), ReadBlocks("d", NEED)],
        [claim(ticket), ReadBlocks("d", NEED), ReadBlocks("d", NEED)],
    ]
    for wrong in cases:
        puller = ScriptedPuller(0, lambda pull: None)
        *before, last = wrong
        for command in before:
            puller.post_command(command)
        with pytest.raises(AssertionError, match=r"^d "):
            puller.post_command(last)
