"""How many bytes a connection can have a lender announce, by messages of 70 bytes.

A Follow of a million tokens in blocks of 16 is answered by 300 kB.  It was each time that a reader
asked, so 4096 of them, a frame of 280 kB, made a lender encode 1.3 GB.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdconn.lender import sessions as sessions_module
from pdconn.lender.streams import StreamTable
from pdconn.protocol.messages import Granted, Rejected, encode
from tests.lender.followed_lender import (
    apply,
    completion,
    follow,
    greeted,
    growth,
    heard,
    lender,
    offer,
    say,
)

NUM_BLOCKS = 10_000
LIMIT = 1 << 18
"""Five answers."""
SLACK = 1 << 16
"""Of messages that announce nothing: they are no longer than those that they answer."""
IDS = range(1 << 20, (1 << 20) + NUM_BLOCKS)
"""As long as ids are in a message."""


@pytest.mark.parametrize("is_complete", [False, True], ids=["growing", "complete"])
def test_a_reader_that_asks_again_is_sent_no_block_again(is_complete: bool) -> None:
    asks_after_each_increment(is_complete)


def asks_after_each_increment(is_complete: bool) -> None:
    of = lender()
    apply(of, offer(), growth(0))
    session = greeted(of)
    sent = len(encode(say(of, session, follow())))
    increments, each = 100, NUM_BLOCKS // 100
    for number in range(increments):
        ids = IDS[number * each : (number + 1) * each]
        apply(of, growth(number * each, *ids))
        sent += len(encode(say(of, session, follow(number + 2))))
    if is_complete:
        apply(of, completion(ids=IDS))
        sent += len(encode(heard(session)))
        sent += len(encode(say(of, session, follow(increments + 2))))
    # 5 bytes for each block, once as it grows and once with the ticket; no more than 100 for
    # whatever else a message has, and three messages for each increment.
    assert sent <= 5 * NUM_BLOCKS * (1 + is_complete) + 300 * (increments + 2), "sent again"


def test_that_law_notices_a_lender_that_sends_all_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real = StreamTable.add_reader

    def anew(table, session, reader, stream):  # type: ignore[no-untyped-def]
        table._streams[stream].readers.clear()
        return real(table, session, reader, stream)

    monkeypatch.setattr(StreamTable, "add_reader", anew)
    with pytest.raises(AssertionError, match="sent again"):
        asks_after_each_increment(is_complete=False)


def test_a_reader_that_connects_anew_is_sent_all() -> None:
    """It may not have received what was sent on the connection that it has lost."""
    of = lender()
    apply(of, offer(), growth(0, *IDS))
    first = greeted(of)
    say(of, first, follow())
    first.leaving = True
    assert len(encode(say(of, greeted(of), follow(2)))) > NUM_BLOCKS


def asks_for_many(num_readers: int, when: str) -> tuple[int, bool]:
    """Bytes of what a connection is sent in a turn, and whether it may go on."""
    of = lender(unsent_nbytes=LIMIT)
    apply(of, offer())
    session = greeted(of)
    readers = [follow(1, f"d/{number}") for number in range(num_readers)]
    if when == "late":
        apply(of, growth(0, *IDS))
        of.handle_messages(session, readers, 0.0)
    else:
        say(of, session, *readers)
        apply(of, growth(0, *IDS) if when == "growing" else completion(ids=IDS))
    replies = heard(session)
    assert session.leaving == isinstance(replies[-1], Rejected)
    if not session.leaving and when == "late":
        assert sum(isinstance(one, Granted) for one in replies) == num_readers
    return len(encode(replies)), not session.leaving


def keeps_the_bound(when: str) -> None:
    nbytes, goes_on = asks_for_many(4, when)
    assert goes_on
    assert nbytes > 4 * 5 * NUM_BLOCKS
    nbytes, goes_on = asks_for_many(400, when)
    assert nbytes < LIMIT + SLACK, "more than may wait"
    assert not goes_on


WHEN = ["late", "growing", "complete"]


@pytest.mark.parametrize("when", WHEN)
def test_what_waits_for_a_connection_is_bounded_before_it_is_encoded(when: str) -> None:
    keeps_the_bound(when)


@pytest.mark.parametrize("when", WHEN)
def test_that_law_notices_a_lender_that_does_not_count(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uncounted: Callable[[object], int] = lambda reply: 0  # noqa: E731
    monkeypatch.setattr(sessions_module, "_num_announced", uncounted)
    with pytest.raises(AssertionError, match="more than may wait"):
        keeps_the_bound(when)


def test_others_are_served_on() -> None:
    """The lease and the readers of other connections stay as they are."""
    of = lender(unsent_nbytes=LIMIT)
    apply(of, offer())
    greedy, other = greeted(of), greeted(of)
    say(of, other, follow(1, "other/1"))
    say(of, greedy, *(follow(1, f"d/{number}") for number in range(400)))
    apply(of, growth(0, *IDS))
    assert greedy.leaving
    assert len(encode(heard(other))) > NUM_BLOCKS
    assert of.num_lent == of.num_streams == 1
