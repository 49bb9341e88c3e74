"""One peer's or one ticket's nonsense costs that peer or that request, and no other."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

import msgspec
import pytest

from pdconn.lender.server import Lender, LenderBroken
from pdconn.lifecycle.lease import MAX_PULLS
from pdconn.lifecycle.peer import PeerState
from pdconn.planning import plan as planning
from pdconn.planning.plan import Need, Pairing
from pdconn.planning.planning_errors import TooManyRuns
from pdconn.protocol import messages
from pdconn.protocol.errors import MessageError
from pdconn.protocol.limits import MAX_GROUPS, MAX_MESSAGES, MAX_TEXT
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    Claim,
    Describe,
    Done,
    Hello,
    Reader,
    RefusalReason,
    Refused,
    Rejected,
    Welcome,
    decode_from_lender,
    encode,
    frame,
)
from pdconn.protocol.ticket import BlockList
from pdconn.puller.commands import ClaimTicket
from pdconn.sidechannel.connection import Connection
from registration.references import (
    AttentionKind,
    KVCacheGroupReference,
    KVCacheReferences,
    RegistrationError,
)
from tests.fakes.pair import Cache, Pair
from tests.threads.inside import num_open, pulls_of
from transport import Device
from transport.testing.inprocess.faults import Held


def serves(pair: Pair, request: str = "after") -> bool:
    """Whether a good request still goes through."""
    pair.pull(request, pair.lend(f"lent-{request}"))
    return pair.outcome_of(request) is None


@pytest.mark.parametrize("host", ["a" * 64 + ".com", "a..b", "no.such.host.invalid"])
def test_a_host_that_is_no_name_fails_its_request(host: str) -> None:
    with Pair() as pair:
        pair.pull("bad", replace(pair.lend("r"), host=host))
        assert "side channel" in str(pair.outcome_of("bad"))
        assert serves(pair)


def test_a_group_without_blocks_and_a_list_without_any_are_no_contradiction() -> None:
    with Pair() as pair:
        empty = KVCacheGroupReference(AttentionKind.FULL, None, 4, ())
        references = replace(pair.theirs.references, groups=(*pair.theirs.references.groups, empty))
        [rank] = pair.welcome().ranks
        rank = msgspec.structs.replace(rank, references=references)
        pair.lender.close()
        pair.lender = Lender(
            Welcome.in_our_version("prefill", pair.incarnation, pair.traits, (rank,)),
            "127.0.0.1",
            0,
        )
        blocks = (BlockList(0, (3, 4, 5)), BlockList(0, ()))
        pair.pull("d", pair.lend_blocks("r", blocks))
        assert pair.outcome_of("d") is None


def test_a_reader_without_layers_is_done_at_once() -> None:
    """A pipeline stage may hold no layer that takes part."""
    with Pair() as pair:
        empty = KVCacheGroupReference(AttentionKind.FULL, None, 4, ())
        nothing = replace(pair.ours.references, groups=(empty,))
        pulls_of(pair.puller)._me = replace(pulls_of(pair.puller)._me, references=nothing)
        pulls_of(pair.puller).peers._pair = pulls_of(pair.puller)._me.pair
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        assert pair.freed() == "read"


@pytest.mark.parametrize("redialled", ["by another name", "after the channel was lost"])
def test_a_lender_dialled_twice_stays_connected_when_one_of_them_goes(redialled: str) -> None:
    with Pair() as pair:
        pair.network.script = lambda _: Held()
        first = pair.lend("r1")
        pair.pull("first", first)
        pair.wait(lambda: pair.lender.counts["claims"] == 1)
        pair.wait(pair.network.in_flight)
        pair.network.script = None
        if redialled == "by another name":
            pair.pull("second", replace(pair.lend("r2"), host="localhost"))
            assert pair.outcome_of("second") is None
        [peer] = [
            p for p in pulls_of(pair.puller).peers._peers.values() if p.key.host != "localhost"
        ]
        assert isinstance(peer.connection, Connection)
        peer.connection.socket.shutdown(socket.SHUT_RDWR)
        if redialled != "by another name":
            pair.wait(lambda: peer.state is PeerState.CLOSED)
            assert serves(pair, "second")
        pair.network.release_held()
        pair.outcome_of("first")
        time.sleep(0.2)
        again = replace(pair.lend("r3"), host="localhost")
        pair.pull("third", again)
        assert pair.outcome_of("third") is None


def test_only_the_connection_that_claimed_may_end_a_claim() -> None:
    with Pair() as pair:
        blocks = (BlockList(0, (3, 4, 5)),)
        digest = pair.lend_blocks("r", blocks).digest()
        reader = Reader("victim/1", 0, 1)
        with _connected(pair) as victim, _connected(pair) as intruder:
            victim.sendall(frame(encode([Claim(1, "r", reader, digest)])))
            pair.wait(lambda: pair.lender.counts["claims"] == 1)
            intruder.sendall(frame(encode([Done("r", reader, digest)])))
            pair.wait(lambda: pair.lender.counts["done_rejected"] == 1)
            assert pair.lender.take_freed() == []
            victim.sendall(frame(encode([Done("r", reader, digest)])))
            assert pair.freed() == "read"


def test_asking_a_thousand_times_in_one_frame_is_answered_once() -> None:
    with Pair() as pair, socket.create_connection(("127.0.0.1", pair.lender.port)) as asker:
        asker.sendall(frame(encode([Describe(PROTOCOL_VERSION)] * 1000)))
        answer = b"".join(iter(lambda: asker.recv(1 << 20), b""))
        assert len(answer) < 2 * len(encode([pair.welcome()]))
        assert pair.lender.counts["described"] == 1
        assert serves(pair)


def test_a_second_greeting_is_refused() -> None:
    with Pair() as pair, _connected(pair) as connection:
        connection.sendall(frame(encode([Hello(PROTOCOL_VERSION, "d", pair.incarnation)])))
        pair.wait(lambda: pair.lender.counts["connections_rejected"] == 1)
        assert serves(pair)


def _connected(pair: Pair) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", pair.lender.port))
    connection.sendall(frame(encode([Hello(PROTOCOL_VERSION, "d", pair.incarnation)])))
    connection.settimeout(20.0)
    assert connection.recv(1 << 16)
    return connection


@pytest.mark.parametrize(
    "message",
    [
        Rejected("x" * (MAX_TEXT + 1), "", ""),
        Refused(1, "r", "p", RefusalReason.UNKNOWN, "x" * (MAX_TEXT + 1)),
        Welcome.in_our_version("p", "b", {"model": "x" * (MAX_TEXT + 1)}, ()),
        Welcome.in_our_version("p", "b", {}, ()),
    ],
    ids=lambda message: type(message).__name__,
)
def test_long_texts_and_empty_engines_are_refused(message: Rejected | Refused | Welcome) -> None:
    with pytest.raises(MessageError):
        decode_from_lender(encode([message]))


def test_more_groups_than_any_engine_has_are_refused() -> None:
    with Pair() as pair:
        [rank] = pair.welcome().ranks
        empty = KVCacheGroupReference(AttentionKind.FULL, None, 4, ())
        many = replace(rank.references, groups=(empty,) * (MAX_GROUPS + 1))
        welcome = Welcome.in_our_version(
            "p", "b", {}, (msgspec.structs.replace(rank, references=many),)
        )
    with pytest.raises(MessageError, match="groups: expected at most"):
        decode_from_lender(encode([welcome]))


def test_more_tensors_than_any_rank_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair() as pair:
        [rank] = pair.welcome().ranks
        count = len(rank.references.tensors)
        welcome = encode([pair.welcome()])
        monkeypatch.setattr(messages, "MAX_LAYER_CHUNKS", max(count, _chunks(rank.references)))
        assert decode_from_lender(welcome)
        one = rank.references.tensors[0]
        many = replace(rank.references, tensors=(one,) * (messages.MAX_LAYER_CHUNKS + 1))
        welcome = Welcome.in_our_version(
            "p", "b", {}, (msgspec.structs.replace(rank, references=many),)
        )
    with pytest.raises(MessageError, match="tensors of a rank: expected at most"):
        decode_from_lender(encode([welcome]))


def _chunks(references: KVCacheReferences) -> int:
    return sum(len(group.data) for group in references.groups)


def test_numbers_beyond_63_bits_are_refused() -> None:
    [ref, *_] = Cache("LBHNC", filled=False).references.groups[0].data
    for field in ("token_stride", "token_nbytes"):
        with pytest.raises(RegistrationError):
            replace(ref, **{field: 1 << 63})
    with pytest.raises(RegistrationError, match="below 2\\^62"):
        KVCacheGroupReference(AttentionKind.STATE, None, 1 << 63, ())
    for index in (-1, 1 << 63):
        with pytest.raises(ValueError, match="device index"):
            Device("cpu", index)


def test_a_plan_of_too_many_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (Cache("LBHNC", filled=False).references for _ in range(2))
    blocks = (BlockList(0, (3, 9, 5)),)
    pairing = Pairing.between(ours, [theirs])
    assert pairing.plan(Need.for_range(0, 12, blocks), blocks).num_runs == 6
    monkeypatch.setattr(planning, "MAX_RUNS", 5)
    with pytest.raises(TooManyRuns, match="at most 5, got 6"):
        pairing.plan(Need.for_range(0, 12, blocks), blocks)


@pytest.mark.parametrize("change", [{"prompt": "another"}, {"num_tokens": 11}])
def test_a_ticket_that_promises_something_else_is_refused(change: dict[str, object]) -> None:
    """A client may know how another prompt's digest is made; the lender knows what it lent."""
    with Pair() as pair:
        pair.pull("forged", replace(pair.lend("r"), **change))
        assert "refused, altered" in str(pair.outcome_of("forged"))
        assert serves(pair)


def test_thousands_of_claims_at_once_are_cut_into_frames() -> None:
    with Pair(claim_timeout_s=30.0, ttl_s=60.0) as pair:
        tickets = [pair.lend(f"r{number}") for number in range(MAX_MESSAGES // MAX_PULLS + 2)]
        for number in range(MAX_MESSAGES + 100):
            pair.puller.post_command(
                ClaimTicket(f"d{number}", f"pull/{number}", tickets[number % len(tickets)])
            )
        pair.start_read("d0")
        assert pair.outcome_of("d0") is None
        pair.start_read("d100", (1, 2, 3))
        assert pair.outcome_of("d100") is None


def test_a_read_that_never_ends_is_given_up_although_its_claim_is_renewed() -> None:
    with Pair(ttl_s=3.0, read_s=4.0, drain_s=0.2) as pair:
        pair.network.script = lambda _: Held()
        pair.pull("d", pair.lend("r"))
        assert "the read did not end in 4 s" in str(pair.outcome_of("d"))
        assert pair.released == []
        pair.network.release_held()
        pair.wait(lambda: pair.released == ["d"])
        assert num_open(pair.puller) == 0


def test_one_request_is_lent_once() -> None:
    """A second lease under a name would free the first one's blocks."""
    with Pair() as pair:
        pair.lend("r")
        pair.lend("r")
        with pytest.raises(LenderBroken, match="has a lease already"):
            pair.wait(pair.lender.take_freed)
