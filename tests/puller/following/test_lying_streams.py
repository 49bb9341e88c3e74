"""What a reader makes of a lender that lies about a stream: it is found out, and nothing breaks."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pdconn.lifecycle.pace import LenderRates
from pdconn.lifecycle.pull import Patience, SendRenew
from pdconn.planning.plan import Pairing
from pdconn.protocol.early import EarlyTicket
from pdconn.protocol.errors import MessageError, ProtocolError
from pdconn.protocol.messages import Completed, Grown, GrownBlocks, Opened, Parked
from pdconn.protocol.ticket import Ticket, max_blocks_for
from pdconn.puller.commands import ClaimTicket
from pdconn.puller.following import FollowedStream
from pdconn.puller.peers import Peer, PeerKey, Rank
from pdconn.puller.request_pull import RequestPull
from tests.fakes.pair import Cache

STREAM = "0123456789abcdef"
NUM_TOKENS = 40


def early() -> EarlyTicket:
    return EarlyTicket("p", "boot", "localhost", 5600, STREAM)


def pairing() -> Pairing:
    ours, theirs = (Cache("BHLNC", filled=False).references for _ in range(2))
    return Pairing.between(ours, [theirs])


LIES = st.one_of(
    st.builds(
        Opened,
        st.sampled_from([STREAM, STREAM, "x" * 16]),
        st.just("pull"),
        st.sampled_from(["r", "r", "other"]),
        st.sampled_from([NUM_TOKENS, NUM_TOKENS, -1, 1 << 40]),
        st.just("digest"),
        st.just(""),
    ),
    st.builds(
        lambda *each: Grown("r", "pull", (GrownBlocks(*each),)),
        st.sampled_from([0, 0, 1, 255]),
        st.integers(0, 4),
        st.lists(st.integers(0, 6), max_size=4).map(tuple),
    ),
    st.builds(
        lambda first, ids: Grown("r", "pull", (GrownBlocks(0, first, tuple(ids)),)),
        st.just(0),
        st.integers(0, 8).map(range),
    ),
    st.builds(
        lambda first, ids: Completed("r", "pull", ((first, tuple(ids)),)),
        st.sampled_from([0, 0, 1]),
        st.integers(0, 10).map(range),
    ),
)


def announces_its_ticket(
    made: type[FollowedStream], messages: list[Opened | Grown | Completed]
) -> None:
    """Each position is announced as one block, which the ticket names, or the lie is found out."""
    stream, pair = made(early(), LenderRates()), pairing()
    announced: dict[int, int] = {}
    for message in messages:
        try:
            if isinstance(message, Opened):
                stream.open_stream(message)
            elif isinstance(message, Grown):
                stream.grow(message, pair, 1.0)
                if not stream._is_complete:
                    known = stream._announced(1)[0].ids
                    assert {at: known[at] for at in announced} == announced, "announced anew"
                    announced = dict(enumerate(known))
            else:
                [named] = stream.complete(message, 2.0).blocks
                assert named.first == 0 or not announced, "another position"
                assert {at: named.ids[at] for at in announced} == announced, "another block"
        except ProtocolError:
            return  # the connection is closed
        assert sum(map(len, stream._lists.values())) <= max_blocks_for(NUM_TOKENS)


@settings(max_examples=300)
@given(st.lists(LIES, max_size=12))
def test_a_lender_that_lies_is_found_out_or_announces_its_ticket(
    messages: list[Opened | Grown | Completed],
) -> None:
    announces_its_ticket(FollowedStream, messages)


class BelievesTheTicket(FollowedStream):
    """Does not compare the ticket with what was announced."""

    def complete(self, message: Completed, now: float) -> Ticket:
        self._lists.clear()
        return super().complete(message, now)


class BelievesTheLast(FollowedStream):
    """Takes a position that is announced again for the new block."""

    def grow(self, message: Grown, pairing: Pairing, now: float) -> bool:
        for each in message.blocks:
            del self._lists.setdefault(each.group, [])[each.first :]
        return super().grow(message, pairing, now)


@pytest.mark.parametrize("broken", [BelievesTheTicket, BelievesTheLast])
def test_that_law_notices_a_reader_that_believes(broken: type[FollowedStream]) -> None:
    """Negative control."""

    @settings(max_examples=1000, derandomize=True, database=None, phases=[Phase.generate])
    @given(st.lists(LIES, max_size=12))
    def law(messages: list[Opened | Grown | Completed]) -> None:
        announces_its_ticket(broken, [OPENED, *messages])

    with pytest.raises((AssertionError, IndexError)):
        law()


def claiming(ticket: EarlyTicket | Ticket) -> RequestPull:
    """A pull whose lender has not greeted yet."""
    command = ClaimTicket("d", "here/1", ticket, is_awaited=True)
    me = Rank("d", 0, 1, 0, Cache("BHLNC", filled=False).references, {})
    peer = Peer(PeerKey.from_ticket(ticket))
    return RequestPull.claiming(command, peer, me, Patience(), verify=False, at=0.0)


OPENED = Opened(STREAM, "here/1", "r", NUM_TOKENS, "digest", "")
GROWN = Grown("r", "here/1", (GrownBlocks(0, 0, (1,)),))


@pytest.mark.parametrize("is_open", [False, True])
def test_what_comes_before_the_greeting_is_a_mistake_of_the_lender(is_open: bool) -> None:
    """An assertion ended the rank's thread: names of pulls can be guessed from earlier ones."""
    pull = claiming(early())
    if is_open:
        pull.heard_of_stream(OPENED, 0.0)
    with pytest.raises(MessageError):
        pull.heard_of_stream(GROWN, 0.0)


def test_a_pull_with_a_ticket_hears_of_no_stream() -> None:
    ticket = FollowedStream(early(), LenderRates()).open_stream(OPENED)
    pull = claiming(ticket)
    for message in (Parked(1, STREAM, "here/1", 1), OPENED, GROWN, Completed("r", "here/1", ())):
        with pytest.raises(MessageError, match="no stream"):
            pull.heard_of_stream(message, 0.0)


SAYS_NOTHING = {
    "nothing": Grown("r", "here/1", ()),
    "what is known": GROWN,
    "what is too far": Grown("r", "here/1", (GrownBlocks(0, 7, (9,)),)),
    "other groups' nothing": Grown("r", "here/1", (GrownBlocks(3, 0, ()),)),
}


def fails_in_time(message: Grown) -> None:
    """The lender renews the claim, and says it every second, once it has announced a block."""
    pull, now = claiming(early()), 0.0
    pull.peer.pairing = pairing()
    pull.machine.greeted(now)
    pull.heard_of_stream(OPENED, now)
    pull.machine.granted(1, 60.0, now)
    pull.heard_of_stream(GROWN, now)
    while pull.machine.reason is None:
        assert now <= Patience().read_s, "it waits on"
        now += 1.0
        pull.heard_of_stream(message, now)
        for effect in pull.machine.tick(now):
            if isinstance(effect, SendRenew):
                pull.machine.granted(effect.seq, 60.0, now)
    assert "announced nothing" in pull.machine.reason


@pytest.mark.parametrize("what", SAYS_NOTHING)
def test_messages_that_say_nothing_keep_no_pull_waiting(what: str) -> None:
    fails_in_time(SAYS_NOTHING[what])


def test_that_law_notices_a_reader_that_takes_everything_for_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FollowedStream, "grow", lambda self, message, pairing, now: True)
    with pytest.raises(AssertionError, match="it waits on"):
        fails_in_time(GROWN)
