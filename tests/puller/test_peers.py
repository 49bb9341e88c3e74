"""Laws of the one table of peers, without sockets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pdconn.lifecycle.peer import PeerState
from pdconn.lifecycle.pull import Patience, Pull
from pdconn.protocol.messages import (
    Done,
    FromLender,
    Granted,
    Hello,
    RankGeometry,
    Reader,
    Welcome,
    decode_from_reader,
    encode,
)
from pdconn.puller.peers import (
    Peer,
    PeerClosed,
    PeerKey,
    PeerPull,
    PeerReady,
    PeerReplied,
    PeerTable,
    PeerWelcomed,
    Rank,
)
from pdconn.puller.reads import Connect, Connected, Disconnect, Job
from tests.fakes.pair import TRAITS, Cache
from tests.puller.renewals.one_rank import ConnectionEnd
from transport import PeerId

KEY = PeerKey("p1", 5600, "prefill", "boot-1")


class Table(PeerTable):
    """A table with connections to nowhere, and a transport that reaches every rank at once."""

    def __init__(self, engine_id: str = "decode", max_peers: int = 8) -> None:
        self.jobs: list[Job] = []
        self.memory = Cache("BHLNC", filled=False)
        me = Rank(engine_id, 0, 1, 0, self.memory.references, TRAITS)
        super().__init__(engine_id, me.pair, self.jobs.append, self, max_peers)

    def dial(self, peer: Peer) -> None:
        peer.connection = ConnectionEnd()

    def hear(self, peer: Peer, *messages: FromLender) -> None:
        """The lender says ``messages``; every rank that is to be connected is."""
        assert isinstance(peer.connection, ConnectionEnd)
        peer.connection.arrived.append(encode(messages))
        self.receive_from(peer)
        for job in self.jobs:
            if isinstance(job, Connect):
                self.rank_connected(Connected(job.tag, PeerId("transport"), None))
        self.jobs.clear()

    def welcome(self, incarnation: str = "boot-1") -> Welcome:
        rank = RankGeometry(0, 0, b"address", self.memory.references)
        return Welcome.in_our_version("prefill", incarnation, TRAITS, (rank,))

    def take(self) -> list[tuple[type, Peer]]:
        """Events since the last call."""
        taken = [(type(event), event.peer) for event in self.events]
        self.events.clear()
        return taken


def hello_of(table: Table, peer: Peer) -> Hello:
    table.send_to(peer)
    assert isinstance(peer.connection, ConnectionEnd)
    [hello] = decode_from_reader(peer.connection.sent.pop())
    assert isinstance(hello, Hello)
    return hello


def test_what_happens_to_a_peer_is_an_event_in_its_order() -> None:
    table = Table()
    peer = table.to(KEY)
    assert hello_of(table, peer).wants == "boot-1"
    table.hear(peer, table.welcome())
    table.hear(peer, Granted(1, "r", "d/1", 1000))
    table.close(peer, "enough")
    table.close(peer, "again")
    kinds = [PeerWelcomed, PeerReady, PeerReplied, PeerClosed]
    assert table.take() == [(kind, peer) for kind in kinds]
    table.forget_peer(peer)
    assert table.jobs == [Disconnect(PeerId("transport"))]
    assert len(table) == 0


def test_a_place_is_greeted_without_a_boot_and_its_peer_is_then_the_one_of_tickets() -> None:
    table = Table()
    peer = table.to_place("p1", 5600)
    assert hello_of(table, peer).wants is None
    table.hear(peer, table.welcome())
    assert peer.key == KEY
    assert table.to(KEY) is table.to_place("p1", 5600) is peer
    assert len(table) == 1


def test_a_greeting_that_nobody_waits_for_gives_way_to_one_that_is_answered() -> None:
    """A place could never be warmed otherwise; what is due to the lender is still sent."""
    table = Table()
    abandoned, warming = table.to(KEY), table.to_place("p1", 5600)
    hello_of(table, abandoned)
    hello_of(table, warming)
    due = Done("r", Reader("d/1", 0, 1), b"0123456789abcdef")
    table.queue_messages(abandoned, [due])
    table.hear(warming, table.welcome())
    assert warming.state is PeerState.READY
    assert table.to(KEY) is warming
    assert abandoned.state is PeerState.CLOSED
    table.send_to(warming)
    assert isinstance(warming.connection, ConnectionEnd)
    assert decode_from_reader(warming.connection.sent.pop()) == [due]


def test_two_connections_to_one_boot_become_one() -> None:
    """A request came while the place was greeted: its connection stays."""
    table = Table()
    warming, pulling = table.to_place("p1", 5600), table.to(KEY)
    table.hear(pulling, table.welcome())
    table.take()
    table.hear(warming, table.welcome())
    assert table.take() == [(PeerClosed, warming)]
    assert list(table) == [pulling]
    assert table.find_peer(warming.key) is pulling


def test_another_boot_at_the_place_of_a_ticket_is_a_peer_of_its_own() -> None:
    table = Table()
    old, new = table.to(KEY), table.to_place("p1", 5600)
    table.hear(new, table.welcome("boot-2"))
    assert {peer.key.incarnation: peer for peer in table} == {"boot-1": old, "boot-2": new}


def test_our_own_engine_at_a_place_is_left_before_its_transport_is_connected() -> None:
    table = Table(engine_id="prefill")
    peer = table.to_place("p1", 5600)
    table.hear(peer, table.welcome())
    assert table.take() == [(PeerClosed, peer)]
    assert not table.jobs
    assert len(table) == 0


@dataclass(slots=True, eq=False, kw_only=True)
class Use(PeerPull):
    """A pull of a request, or one that warms."""

    is_requested: bool  # type: ignore[misc]

    def make_plan(self, clock: Callable[[], float]) -> None:
        del clock


@pytest.mark.parametrize("by", ["a request", "a warm-up", "none"])
def test_a_place_takes_no_room_from_a_peer_and_a_ticket_takes_it_from_one_that_no_request_uses(
    by: str,
) -> None:
    table, used = Table(max_peers=1), by == "a request"
    first = table.to(KEY)
    if by != "none":
        machine = Pull(Patience(), 0.0)
        first.pulls["r"] = Use(pull="r", machine=machine, peer=first, is_requested=used)
    place = table.to_place("p2", 5600)
    assert place.state is PeerState.CLOSED
    assert place.connection is None, "it was dialled"
    assert first.state is not PeerState.CLOSED
    other = table.to(PeerKey("p3", 5600, "prefill", "boot-1"))
    assert [peer.state is PeerState.CLOSED for peer in (other, first)] == [used, not used]
    assert len(table) == 1
