"""Laws of lender and puller together, over real sockets and threads."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest

from pdconn.lender.server import Lender, SideChannelInUse
from pdconn.protocol.messages import PROTOCOL_VERSION, Hello, encode, frame
from pdconn.protocol.ticket import BlockList
from pdconn.tools.lab.ports import free_ports
from tests.fakes.credulous import without_confirmation
from tests.fakes.pair import Pair
from tests.threads.inside import num_open, num_peers
from transport import PeerLost
from transport.testing.inprocess.faults import Failing, Held, Late


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC", "BHLNC"])
def test_a_pull_moves_the_blocks_and_frees_the_lease(layout: str) -> None:
    with Pair(layout) as pair:
        before = pair.ours.bytes.copy()
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        assert pair.freed() == "read"
        if layout != "LBHNC":
            for ours, theirs in ((7, 3), (8, 4), (9, 5)):
                assert pair.ours.row(ours) == pair.theirs.row(theirs)
            assert pair.ours.row(6) == b"\0" * len(pair.ours.row(6))
        assert (pair.ours.bytes != before).any()
        assert num_open(pair.puller) == 0


def test_block_outermost_layouts_read_one_run_per_block() -> None:
    with Pair("BHLNC") as pair:
        pair.pull("d", pair.lend("r", (3, 9, 5)), (7, 2, 11))
        assert pair.outcome_of("d") is None
        assert pair.records[0].num_descriptors == 3
        assert pair.records[0].moved.full == 3 * len(pair.ours.row(0))


def test_neighbouring_blocks_merge_into_one_run() -> None:
    with Pair("BHLNC") as pair:
        pair.pull("d", pair.lend("r", (3, 4, 5)), (7, 8, 9))
        assert pair.outcome_of("d") is None
        assert pair.records[0].num_descriptors == 1


@pytest.mark.parametrize(
    ("end", "why"),
    [(Lender.close, "side channel: closed by the peer"), (Lender.revoke_all, "refused, aborted")],
    ids=["closed", "revoked"],
)
def test_a_read_that_lands_after_the_lease_is_never_reported_received(
    end: Callable[[Lender], None], why: str
) -> None:
    """Renewals are refused, or answered by nothing, and the data is late."""
    with Pair(ttl_s=2.5, drain_s=20.0) as pair:
        pair.network.script = lambda _: Late(6.0)
        pair.pull("d", pair.lend("r"))
        pair.wait(pair.network.in_flight)
        end(pair.lender)
        pair.wait(lambda: pair.failed, 20.0)
        assert why in pair.failed["d"]


def _pull_whose_lease_is_revoked(pair: Pair) -> None:
    """Long before its claim is over by the reader's clock, and before its data has come."""
    pair.network.script = lambda _: Held()
    pair.pull("d", pair.lend("r"))
    pair.wait(pair.network.in_flight)
    pair.lender.revoke_all()
    pair.wait(lambda: pair.lender.counts["freed_aborted"])
    pair.network.release_held()
    pair.wait(lambda: pair.received or pair.failed)


def test_the_lender_has_the_last_word_on_whether_a_read_was_in_time() -> None:
    with Pair(ttl_s=60.0) as pair:
        _pull_whose_lease_is_revoked(pair)
        assert pair.received == []
        assert "refused, aborted" in pair.failed["d"]
        assert pair.lender.counts["unconfirmed_aborted"] == 1


def test_without_its_word_such_a_read_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: this is what a reader's clock alone cannot know."""
    without_confirmation(monkeypatch)
    with Pair(ttl_s=60.0) as pair:
        _pull_whose_lease_is_revoked(pair)
        assert pair.received == ["d"]


def test_renewals_keep_the_lease_while_a_read_is_slow() -> None:
    with Pair(ttl_s=3.0, claim_timeout_s=20.0) as pair:
        pair.network.script = lambda _: Late(7.5)
        pair.pull("d", pair.lend("r"))
        pair.wait(lambda: pair.received or pair.failed, 30.0)
        assert (pair.received, pair.failed) == (["d"], {})
        assert pair.lender.counts["renewals"] >= 3


def test_a_claim_is_kept_while_the_request_queues() -> None:
    with Pair(ttl_s=3.0, claim_timeout_s=20.0) as pair:
        pair.claim("d", pair.lend("r"))
        time.sleep(7.5)
        pair.start_read("d")
        assert pair.outcome_of("d") is None


def test_waiting_ends_at_the_first_news_and_never_begins_without_a_pull() -> None:
    with Pair() as pair:
        began = time.monotonic()
        pair.puller.wait_for_report(60.0)
        pair.network.script = lambda _: Late(0.3)
        pair.pull("d", pair.lend("r"))
        pair.puller.wait_for_report(60.0)
        assert time.monotonic() - began >= 0.3
        assert "d" in pair.collect().received
        pair.puller.wait_for_report(60.0)
        assert time.monotonic() - began < 30.0


def test_an_unread_lease_runs_out() -> None:
    with Pair(ttl_s=0.1) as pair:
        ticket = pair.lend("r")
        assert pair.freed() == "expired"
        pair.pull("d", ticket)
        assert "refused, expired" in str(pair.outcome_of("d"))


def test_a_consumed_ticket_is_refused() -> None:
    with Pair() as pair:
        ticket = pair.lend("r")
        pair.pull("d", ticket)
        assert pair.outcome_of("d") is None
        pair.pull("again", ticket)
        assert "refused, consumed" in str(pair.outcome_of("again"))


def test_two_requests_with_one_ticket_both_read_it() -> None:
    with Pair() as pair:
        ticket = pair.lend("r")
        pair.claim("first", ticket)
        pair.claim("second", ticket)
        pair.wait(lambda: pair.lender.counts["claims"] == 2)
        pair.start_read("first")
        assert pair.outcome_of("first") is None
        assert pair.lender.take_freed() == []
        pair.start_read("second", (1, 2, 3))
        assert pair.outcome_of("second") is None
        assert pair.freed() == "read"


def test_altered_blocks_are_refused() -> None:
    with Pair() as pair:
        pair.lend("r", (3, 4, 5))
        pair.pull("d", pair.ticket("r", (BlockList(0, (3, 4, 6)),)))
        assert "refused, altered" in str(pair.outcome_of("d"))


def test_a_ticket_from_before_a_restart_is_refused_at_the_first_message() -> None:
    with Pair(claim_timeout_s=60.0) as pair:
        pair.lender.close()
        [port] = free_ports(1)  # assigned to no other process while no lender listens
        pair.lender = pair.open_lender(port)
        old = pair.lend("r")
        pair.lender.close()
        pair.incarnation = "boot-2"
        pair.lender = pair.open_lender(port)
        began = time.monotonic()
        pair.pull("old", old)
        assert "incarnation: theirs boot-2, ours boot-1" in str(pair.outcome_of("old"))
        assert time.monotonic() - began < pair.claim_timeout_s
        pair.pull("new", pair.lend("r2"))
        assert pair.outcome_of("new") is None


def test_other_traits_are_refused_by_name() -> None:
    with Pair(traits={"model": "other"}) as pair:
        pair.pull("d", pair.lend("r"))
        assert "model: theirs other, ours tiny" in str(pair.outcome_of("d"))


def test_a_lender_without_one_of_our_groups_is_refused_by_its_layer() -> None:
    with Pair(groups=2) as pair:
        pair.pull("d", pair.lend("r"))
        assert "layer a1 chunk 0: theirs not held, ours held" in str(pair.outcome_of("d"))


def test_a_ticket_with_another_number_of_groups_fails_before_it_claims() -> None:
    with Pair() as pair:
        pair.lend("r")
        two = (BlockList(0, (3, 4, 5)),) * 2
        pair.pull("d", pair.ticket("r", two))
        assert (
            "remote_block_ids: expected 1 lists, one per KV cache group of prefill, got 2"
            in str(pair.outcome_of("d"))
        )
        assert pair.lender.counts["claims"] == 0


def test_a_block_out_of_range_fails_that_pull_only() -> None:
    with Pair() as pair:
        pair.pull("bad", pair.lend("r", (3, 4, 99)))
        pair.pull("good", pair.lend("r2"))
        assert "remote_block_ids[0][2]: expected 0 to 15, got 99" in str(pair.outcome_of("bad"))
        assert pair.outcome_of("good") is None


def test_a_block_that_is_not_lent_fails_the_pull() -> None:
    with Pair() as pair:
        pair.pull("d", pair.lend("r", (3, 4)))
        assert "tokens from 8 on are needed and not lent" in str(pair.outcome_of("d"))
        assert pair.freed() == "read"


def test_a_failed_read_fails_its_request_and_frees_the_lease() -> None:
    with Pair() as pair:
        reads = iter([Failing(PeerLost("cut"))])
        pair.network.script = lambda _: next(reads, None)
        pair.pull("d", pair.lend("r"))
        assert "PeerLost: cut" in str(pair.outcome_of("d"))
        pair.pull("e", pair.lend("r2"))
        assert pair.outcome_of("e") is None


def test_a_cancelled_pull_is_reported_only_when_nothing_can_write() -> None:
    with Pair() as pair:
        pair.network.script = lambda _: Held()
        pair.pull("d", pair.lend("r"))
        pair.wait(pair.network.in_flight)
        pair.cancel("d")
        time.sleep(0.2)
        pair.collect()
        assert pair.failed == {}
        pair.network.release_held()
        assert pair.outcome_of("d") == "cancelled"
        assert pair.freed() == "read"
        assert num_open(pair.puller) == 0


def test_a_cancelled_claim_frees_the_lease_and_reports_nothing() -> None:
    with Pair() as pair:
        pair.claim("d", pair.lend("r"))
        pair.cancel("d")
        assert pair.freed() == "read"
        assert pair.collect().failed == ()
        assert num_open(pair.puller) == 0


def test_a_closed_port_is_a_failure_not_a_wait() -> None:
    with Pair() as pair:
        ticket = pair.lend("r")
        pair.lender.close()
        pair.pull("d", ticket)
        assert "side channel" in str(pair.outcome_of("d"))


def test_a_silent_lender_is_given_up() -> None:
    with Pair(claim_timeout_s=0.3) as pair, socket.create_server(("127.0.0.1", 0)) as silent:
        ticket = pair.lend("r")
        mute = type(ticket)(
            "prefill", "boot-1", "r", "127.0.0.1", silent.getsockname()[1], 12, "p", ticket.blocks
        )
        pair.pull("d", mute)
        assert "no answer to the claim while greeting" in str(pair.outcome_of("d"))
        pair.pull("e", mute)
        assert "no answer to the claim while greeting" in str(pair.outcome_of("e"))


def test_a_lender_that_dies_fails_what_waits_for_it() -> None:
    with Pair() as pair:
        pair.claim("d", pair.lend("r"))
        pair.wait(lambda: pair.lender.counts["claims"])
        pair.lender.close()
        pair.wait(lambda: num_peers(pair.puller) == 0)
        pair.start_read("d")
        assert "side channel" in str(pair.outcome_of("d"))


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        frame(b"\x93\x01\x02"),
        frame(encode([Hello(PROTOCOL_VERSION + 1, "d", "boot-1")])),
        b"\xff\xff\xff\xff",
        b"\0\0",
    ],
)
def test_a_lender_survives_noise_and_serves_on(noise: bytes) -> None:
    with Pair() as pair, socket.create_connection(("127.0.0.1", pair.lender.port)) as intruder:
        intruder.sendall(noise)
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        if len(noise) > 2:
            intruder.settimeout(5)
            while intruder.recv(4096):
                pass


def test_a_taken_port_is_named() -> None:
    with Pair() as pair, pytest.raises(SideChannelInUse, match="side_channel_port: cannot listen"):
        Lender(pair.welcome(), "127.0.0.1", pair.lender.port)


def test_nothing_is_left_after_closing() -> None:
    before = set(threading.enumerate())
    with Pair() as pair:
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
    pair.puller.close()
    assert not set(threading.enumerate()) - before
