"""``verify``: what was read is compared with what was lent, or the pull fails."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec
import pytest

from pdconn.lender.checksums import MAX_ASKS
from pdconn.lender.sessions import ConnectionLimits, LenderSessions
from pdconn.protocol.errors import MessageError
from pdconn.protocol.messages import Checksum, ChecksumRequest, ChecksumUnavailable, Reader
from pdconn.protocol.proof import ChecksumQuery, PieceRange, PieceSum
from pdconn.protocol.ticket import BlockList, Ticket
from pdconn.puller.verification import Verification, Verify
from tests.fakes.pair import Pair
from tests.faults.raw_clients import RawReader
from tests.threads.inside import sessions_of
from transport.testing.inprocess.faults import Late

PROVING = [Verify.SAMPLE, Verify.ALWAYS]


@pytest.mark.parametrize("layout", ["LBHNC", "BHLNC"])
@pytest.mark.parametrize("verify", PROVING)
def test_good_bytes_are_received_and_verified(verify: Verify, layout: str) -> None:
    with Pair(layout, verify=verify, their_verify=verify) as pair:
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        assert pair.lender.counts["checksum_requests"] == 1
        assert pair.freed() == "read"


@pytest.mark.parametrize("verify", PROVING)
def test_a_byte_that_changed_after_it_was_lent_fails_the_pull(verify: Verify) -> None:
    """The last block is in every sample.  Without verify the same is received."""
    for wanted, problem in ((verify, "Corrupted: sum of what was read"), (Verify.OFF, "None")):
        with Pair(verify=wanted, their_verify=verify) as pair:
            ticket = pair.lend("r", (3, 4, 5))
            row = pair.theirs.bytes.size // 16
            pair.theirs.bytes[5 * row] ^= 1
            pair.pull("d", ticket)
            assert problem in str(pair.outcome_of("d"))
            assert pair.freed() == "read"


def test_a_lender_without_checksums_is_named() -> None:
    with Pair(verify=Verify.ALWAYS) as pair:
        pair.pull("d", pair.lend("r"))
        assert "prefill keeps no checksums: set verify there too" in str(pair.outcome_of("d"))


def test_a_sample_is_verified_by_a_lender_that_sums_all_and_not_the_other_way_round() -> None:
    with Pair(verify=Verify.SAMPLE, their_verify=Verify.ALWAYS) as pair:
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
    with Pair(verify=Verify.ALWAYS, their_verify=Verify.SAMPLE) as pair:
        pair.pull("d", pair.lend("r"))
        assert "those of the sample" in str(pair.outcome_of("d"))


def test_a_pull_waits_for_sums_that_are_made_later() -> None:
    with Pair(verify=Verify.ALWAYS, their_verify=Verify.ALWAYS, claim_timeout_s=60.0) as pair:
        blocks = (BlockList(0, (3, 4, 5)),)
        pair.pull("d", pair.lend_blocks("r", blocks))
        pair.wait(lambda: pair.lender.counts["checksum_requests"])
        time.sleep(0.1)
        pair.collect()
        assert pair.received == []
        pair.sum("r", blocks)
        assert pair.outcome_of("d") is None


def test_sums_that_never_come_fail_the_pull_and_leave_nothing() -> None:
    with Pair(verify=Verify.ALWAYS, their_verify=Verify.ALWAYS, claim_timeout_s=2.5) as pair:
        blocks = (BlockList(0, (3, 4, 5)),)
        pair.pull("d", pair.lend_blocks("r", blocks))
        assert "no checksum of what was lent" in str(pair.outcome_of("d"))
        assert pair.freed() == "read"
        assert sessions_of(pair.lender).num_summed == 0


def test_checksums_do_not_save_a_read_that_was_late() -> None:
    with Pair(verify=Verify.ALWAYS, their_verify=Verify.ALWAYS, ttl_s=2.5, drain_s=20.0) as pair:
        pair.network.script = lambda _: Late(6.0)
        ticket = pair.lend("r")
        pair.pull("d", ticket)
        pair.wait(pair.network.in_flight)
        pair.lender.revoke_all()
        pair.wait(lambda: pair.failed, 20.0)
        assert "refused, aborted" in pair.failed["d"]


@pytest.mark.parametrize("early", [True, False], ids=["before its sums", "after them"])
def test_an_ask_for_what_is_not_there_costs_its_pull_only(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: Verification, *names: object) -> list[ChecksumRequest]:
        asks = real(self, *names)  # type: ignore[arg-type]
        [share] = asks[0].ask.shares
        share = msgspec.structs.replace(share, group=7)
        ask = msgspec.structs.replace(asks[0].ask, shares=(share,))
        return [msgspec.structs.replace(asks[0], ask=ask)]

    real = Verification.requests
    with Pair(verify=Verify.ALWAYS, their_verify=Verify.ALWAYS, claim_timeout_s=60.0) as pair:
        blocks = (BlockList(0, (3, 4, 5)),)
        with monkeypatch.context() as patch:
            patch.setattr(Verification, "requests", wrong)
            ticket = pair.lend_blocks("r", blocks)
            if not early:
                pair.sum("r", blocks)
            pair.pull("d", ticket)
            pair.wait(lambda: pair.lender.counts["checksum_requests"])
            if early:
                pair.sum("r", blocks)
            assert "share.group" in str(pair.outcome_of("d"))
        pair.pull("e", pair.lend("s"))
        assert pair.outcome_of("e") is None


def test_a_checksum_that_was_not_requested_costs_that_lender_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = LenderSessions.take_frames

    def lying(self: LenderSessions, session: object) -> list[bytes]:
        session.replies = [  # type: ignore[attr-defined]
            msgspec.structs.replace(reply, number=99) if isinstance(reply, Checksum) else reply
            for reply in session.replies  # type: ignore[attr-defined]
        ]
        return real(self, session)  # type: ignore[arg-type]

    with Pair(verify=Verify.ALWAYS, their_verify=Verify.ALWAYS, claim_timeout_s=5.0) as pair:
        with monkeypatch.context() as patch:
            patch.setattr(LenderSessions, "take_frames", lying)
            pair.pull("d", pair.lend("r"))
            assert pair.outcome_of("d") is not None
        pair.pull("e", pair.lend("s"))
        assert pair.outcome_of("e") is None


def test_only_answers_to_asks_are_heard_once() -> None:
    proof = Verification(())
    with pytest.raises(MessageError, match=r"checksum\.number"):
        proof.heard(0, PieceSum(1, 1))


def asks(ticket: Ticket, pull: str, numbers: Iterable[int]) -> list[ChecksumRequest]:
    """Request after request for all that ``ticket`` lends, by the pull ``pull`` that claimed it."""
    ask = ChecksumQuery(0, False, (PieceRange(0, 0, 2, 0, 2, 0, 3),))
    return [
        ChecksumRequest(number, ticket.request_id, Reader(pull, 0, 1), ask) for number in numbers
    ]


def test_a_reader_may_ask_a_few_times_only() -> None:
    with (
        Pair(their_verify=Verify.ALWAYS, ttl_s=60.0) as pair,
        RawReader(pair.lender.port) as raw,
    ):
        ticket = pair.lend("r")
        for pull in ("greedy", "modest"):
            raw.claim("r", ticket.digest(), pull)
        raw.say(*asks(ticket, "greedy", range(MAX_ASKS)))
        assert [raw.hear(Checksum).number for _ in range(MAX_ASKS)] == list(range(MAX_ASKS))
        raw.say(*asks(ticket, "greedy", [MAX_ASKS]))
        assert raw.hear(ChecksumUnavailable) == ChecksumUnavailable(
            MAX_ASKS, "greedy", f"rank 0 was asked {MAX_ASKS} times already"
        )
        raw.say(*asks(ticket, "modest", [0]))
        assert raw.hear(Checksum).pull == "modest"


@pytest.mark.parametrize("over", ["summed", "ended"])
def test_so_many_asks_wait_and_no_more(over: str) -> None:
    """Those that were answered, or whose lease has ended, wait no longer."""
    limits = ConnectionLimits(checksum_requests=2)
    with (
        Pair(their_verify=Verify.ALWAYS, ttl_s=60.0, limits=limits) as pair,
        RawReader(pair.lender.port) as raw,
    ):
        blocks = (BlockList(0, (3, 4, 5)),)
        slow, next_one = (pair.lend_blocks(name, blocks) for name in ("slow", "next"))
        pair.sum("next", blocks)
        for number, ticket in enumerate((slow, slow, slow, next_one)):
            raw.claim(ticket.request_id, ticket.digest(), f"reader/{number}")
        for number in range(3):
            raw.say(*asks(slow, f"reader/{number}", [7]))
        full = "2 others wait for checksums"
        assert raw.hear(ChecksumUnavailable) == ChecksumUnavailable(7, "reader/2", full)
        raw.say(*asks(next_one, "reader/3", [8]))
        assert raw.hear(ChecksumUnavailable) == ChecksumUnavailable(8, "reader/3", full)
        if over == "summed":
            pair.sum("slow", blocks)
            assert [raw.hear(Checksum).pull for _ in range(2)] == ["reader/0", "reader/1"]
        else:
            for number in range(3):
                raw.done("slow", slow.digest(), f"reader/{number}")
            ended = {raw.hear(ChecksumUnavailable) for _ in range(2)}
            assert ended == {
                ChecksumUnavailable(7, f"reader/{n}", "the lease has ended") for n in (0, 1)
            }
        raw.say(*asks(next_one, "reader/3", [9]))
        assert raw.hear(Checksum).number == 9
