"""Laws of early tickets and of what a lender announces: round trips, bounds, and hostile values."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdconn.protocol.early import STREAM_CHARS, EarlyTicket, parse_early_ticket, stream_of
from pdconn.protocol.errors import MessageError, TicketError
from pdconn.protocol.limits import DIGEST_NBYTES, MAX_GROUPS, MAX_TEXT
from pdconn.protocol.messages import (
    Completed,
    Follow,
    FromLender,
    Grown,
    GrownBlocks,
    Opened,
    Parked,
    Reader,
    decode_from_lender,
    decode_from_reader,
    encode,
    encode_frames,
)
from pdconn.protocol.ticket import (
    MAX_BLOCK_ID,
    MAX_BLOCKS,
    TICKET_VERSION,
    BlockList,
    Ticket,
)
from pdconn.sidechannel.connection import MAX_REPLIES

STREAM = "0123456789abcdef"
READER = Reader("pull", 0, 1)
PRINTABLE = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1)
STREAMS = st.text(
    st.characters(codec="ascii", categories=("L", "N")),
    min_size=STREAM_CHARS[0],
    max_size=STREAM_CHARS[1],
)


def early(stream: str = STREAM) -> EarlyTicket:
    return EarlyTicket("p", "boot", "localhost", 5600, stream)


def ticket() -> Ticket:
    blocks = (BlockList(0, (3, 4)),)
    return Ticket("p", "boot", "r", "localhost", 5600, 8, "digest", blocks)


# Early tickets


@given(PRINTABLE, PRINTABLE, PRINTABLE, st.integers(1, 65535), STREAMS)
def test_an_early_ticket_survives_the_proxy(
    engine_id: str, incarnation: str, host: str, port: int, stream: str
) -> None:
    made = EarlyTicket(engine_id[:MAX_TEXT], incarnation[:MAX_TEXT], host[:MAX_TEXT], port, stream)
    params = made.to_params()
    assert parse_early_ticket(msgspec.json.decode(msgspec.json.encode(params))) == made
    params["remote_port"] = float(port)  # a proxy that knows doubles only
    params["pdconn"]["version"] = float(TICKET_VERSION)
    assert parse_early_ticket(params) == made
    assert stream_of(params) == stream


def test_an_early_ticket_is_made_from_any_ticket_of_the_same_boot() -> None:
    for known in (ticket().to_params(1, 1), early("x" * 20).to_params()):
        assert EarlyTicket.like(known, STREAM) == early()


def test_a_ticket_names_no_stream_and_an_early_one_no_blocks() -> None:
    assert parse_early_ticket(ticket().to_params(1, 1)) is None
    assert "remote_block_ids" not in early().to_params()


def test_digests_differ_by_boot_and_by_stream_and_from_those_of_tickets() -> None:
    made = [early(), early("x" * 16), replace(early(), incarnation="other")]
    digests = {one.digest() for one in made} | {ticket().digest()}
    assert len(digests) == 4
    assert {len(digest) for digest in digests} == {DIGEST_NBYTES}
    assert early().digest() == early().digest()


@pytest.mark.parametrize("params", [None, 0, "", "a ticket", [], {}, {"pdconn": None}])
def test_parameters_without_a_stream_name_none(params: object) -> None:
    assert stream_of(params) is None
    assert parse_early_ticket(params) is None


HOSTILE = [
    None, True, 7, 1.5, b"0123456789abcdef", "short", "x" * 65, "0123456789abcde\n",
    "0123456789abcde\u200b", [STREAM], {STREAM: 1}, 10**5000, "\x00" * 16,
]  # fmt: skip


@pytest.mark.parametrize("wrong", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_stream_is_a_typed_error_of_one_line(wrong: object) -> None:
    params = early().to_params()
    params["pdconn"]["stream"] = wrong
    for read in (stream_of, parse_early_ticket):
        with pytest.raises(TicketError) as caught:
            read(params)
        assert caught.value.field == "pdconn.stream"
        assert len(str(caught.value)) < 250
        assert str(caught.value).isprintable()
    with pytest.raises(TicketError):
        EarlyTicket.like(early().to_params(), wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "wrong", "field"),
    [
        ("remote_engine_id", 7, "remote_engine_id"),
        ("remote_engine_id", "", "remote_engine_id"),
        ("remote_host", "h" * (MAX_TEXT + 1), "remote_host"),
        ("remote_host", "a\nb", "remote_host"),
        ("remote_port", 0, "remote_port"),
        ("remote_port", 65536, "remote_port"),
        ("remote_port", "5600", "remote_port"),
        pytest.param("remote_port", 10**5000, "remote_port", id="a port of 5000 digits"),
        ("incarnation", None, "pdconn.incarnation"),
        ("incarnation", "", "pdconn.incarnation"),
        ("version", TICKET_VERSION + 1, "pdconn.version"),
        ("version", None, "pdconn.version"),
    ],
)
def test_a_wrong_early_ticket_names_the_field(key: str, wrong: object, field: str) -> None:
    params = early().to_params()
    (params if key.startswith("remote") else params["pdconn"])[key] = wrong
    with pytest.raises(TicketError) as caught:
        parse_early_ticket(params)
    assert caught.value.field == field
    assert len(str(caught.value)) < 250


# Messages

IDS = st.lists(st.integers(0, MAX_BLOCK_ID), max_size=8).map(tuple)
FIRSTS = st.integers(0, MAX_BLOCKS)
GROUPS = st.integers(0, MAX_GROUPS - 1)
TTLS = st.integers(1, 2**31 - 1)
LISTS = st.lists(st.tuples(FIRSTS, IDS), max_size=4).map(tuple)
REPLIES = st.one_of(
    st.builds(Parked, st.integers(0, 9), PRINTABLE, PRINTABLE, TTLS),
    st.builds(Opened, STREAMS, PRINTABLE, STREAMS, st.integers(0, 1 << 31), STREAMS, STREAMS),
    st.builds(
        Grown,
        PRINTABLE,
        PRINTABLE,
        st.lists(st.builds(GrownBlocks, GROUPS, FIRSTS, IDS), max_size=4).map(tuple),
    ),
    st.builds(Completed, PRINTABLE, PRINTABLE, LISTS),
)


@given(st.lists(REPLIES, max_size=4))
def test_what_a_lender_announces_is_received_as_sent(sent: list[FromLender]) -> None:
    assert decode_from_lender(encode(sent)) == sent


@given(st.integers(0, 1 << 31), STREAMS)
def test_what_a_reader_follows_is_received_as_sent(seq: int, stream: str) -> None:
    sent = [Follow(seq, stream, READER)]
    assert decode_from_reader(encode(sent)) == sent


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (Follow(1, "", READER), "request"),
        (Follow(1, "s" * (MAX_TEXT + 1), READER), "request"),
        (Follow(1, "s\n", READER), "request"),
        (Follow(1, STREAM, Reader("p", 3, 2)), "reader.rank"),
    ],
)
def test_what_is_followed_is_within_bounds(message: Follow, field: str) -> None:
    with pytest.raises(MessageError) as caught:
        decode_from_reader(encode([message]))
    assert caught.value.field == field


def grown(*blocks: GrownBlocks) -> Grown:
    return Grown("r", "pull", blocks)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (Parked(1, STREAM, "pull", 0), "ttl_ms"),
        (Parked(1, STREAM, "pull", 1 << 31), "ttl_ms"),
        (Opened(STREAM, "pull", "", 1, "d", ""), "opened.request"),
        (Opened(STREAM, "pull", "r" * (MAX_TEXT + 1), 1, "d", ""), "opened.request"),
        (Opened(STREAM, "pull", "r", 1, "", ""), "opened.prompt"),
        (Opened(STREAM, "pull", "r", 1, "d", "a" * (MAX_TEXT + 1)), "opened.adapter"),
        (grown(GrownBlocks(-1, 0, (1,))), "grown.group"),
        (grown(GrownBlocks(MAX_GROUPS, 0, (1,))), "grown.group"),
        (grown(GrownBlocks(0, -1, (1,))), "blocks of a stream"),
        (grown(GrownBlocks(0, MAX_BLOCKS + 1, (1,))), "blocks of a stream"),
        (grown(GrownBlocks(0, 0, (-1,))), "block id of a stream"),
        (grown(GrownBlocks(0, 0, (MAX_BLOCK_ID + 1,))), "block id of a stream"),
        (grown(*[GrownBlocks(0, 0, ())] * (MAX_GROUPS + 1)), "groups of a stream"),
        (Completed("r", "pull", ((0, ()),) * (MAX_GROUPS + 1)), "groups of a stream"),
        (Completed("r", "pull", ((-1, (1,)),)), "blocks of a stream"),
        (Completed("r", "pull", ((0, (1, -1)),)), "block id of a stream"),
    ],
)
def test_what_is_announced_is_within_bounds(message: Any, field: str) -> None:
    with pytest.raises(MessageError) as caught:
        decode_from_lender(encode([message]))
    assert caught.value.field == field


def test_a_reader_cannot_announce() -> None:
    with pytest.raises(MessageError, match="message: expected a list of known messages"):
        decode_from_reader(encode([grown()]))


@settings(max_examples=200)
@given(st.lists(REPLIES, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_changed_bytes_raise_nothing_else(sent: list[FromLender], rng: Random) -> None:
    body = bytearray(encode([*sent]))
    for _ in range(rng.randint(1, 4)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    with suppress(MessageError):
        decode_from_lender(bytes(body))


def test_the_blocks_of_a_million_tokens_in_sixteen_groups_fit_into_a_frame() -> None:
    ids = tuple(range(MAX_BLOCK_ID - 1_000_000 // 16, MAX_BLOCK_ID))
    [body] = encode_frames([Completed("request", "pull", tuple((0, ids) for _ in range(16)))])
    assert len(body) < MAX_REPLIES
    assert len(body) > MAX_REPLIES // 2, "the bound has a reason"
