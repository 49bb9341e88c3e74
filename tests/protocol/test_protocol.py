"""Laws of the wire: what was sent is received, and nothing else is."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdconn.protocol.errors import FrameError, MessageError, TicketError
from pdconn.protocol.limits import MAX_TEXT
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    Claim,
    Confirm,
    Confirmed,
    Described,
    Done,
    Frames,
    Granted,
    Hello,
    RankGeometry,
    Reader,
    RefusalReason,
    Refused,
    Renew,
    Welcome,
    decode_from_lender,
    decode_from_reader,
    encode,
    frame,
)
from pdconn.protocol.ticket import (
    TICKET_VERSION,
    BlockList,
    Ticket,
    TicketCut,
    block_digest,
    max_blocks_for,
    parse_ticket,
    trimmed,
)
from registration.references import AttentionKind, GroupMemory, build_kv_cache_references
from tests.fakes.layouts import layout_memory

READER = Reader("pull", 0, 1)
DIGEST = bytes(range(16))


def geometry() -> RankGeometry:
    layers = layout_memory(
        "BHLNC",
        base=4096,
        num_blocks=4,
        layers=["a", "b"],
        num_heads=2,
        block_tokens=4,
        token_nbytes=8,
    )
    group = GroupMemory(AttentionKind.SLIDING_WINDOW, 6, 4, layers)
    return RankGeometry(0, 1, b"address", build_kv_cache_references([group]))


def ticket() -> Ticket:
    blocks = (BlockList(0, (3, 4)), BlockList(1, (5,)))
    return Ticket("p", "boot", "r", "localhost", 5600, 40, "digest", blocks)


def test_messages_of_readers_are_received_as_sent() -> None:
    messages = [
        Hello(1, "d", "boot"),
        Hello(1, "d"),
        Claim(1, "r", READER, DIGEST),
        Renew(2, "r", READER),
        Confirm(3, "r", READER, DIGEST),
        Done("r", READER, DIGEST),
    ]
    assert decode_from_reader(encode(messages)) == messages


def test_messages_of_lenders_are_received_as_sent() -> None:
    messages = [
        Welcome.in_our_version("p", "boot", {"model": "m"}, (geometry(),)),
        Granted(1, "r", "pull", 30_000),
        Confirmed(3, "r", "pull"),
        Refused(2, "r", "pull", RefusalReason.EXPIRED, "late"),
    ]
    assert decode_from_lender(encode(messages)) == messages


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (Claim(1, "r", Reader("p", 3, 2), DIGEST), "reader.rank"),
        (Claim(1, "r", Reader("p", 0, 0), DIGEST), "reader.of"),
        (Claim(1, "", READER, DIGEST), "request"),
        (Claim(1, "r" * 1000, READER, DIGEST), "request"),
        (Confirm(1, "r", READER, DIGEST[1:]), "ticket"),
        (Confirm(1, "r", Reader("p", 3, 2), DIGEST), "reader.rank"),
        (Hello(1, "d", "boot" * 1000), "hello.wants"),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(message: Any, field: str) -> None:
    with pytest.raises(MessageError) as caught:
        decode_from_reader(encode([message]))
    assert caught.value.field == field


def test_a_lender_cannot_speak_as_a_reader() -> None:
    with pytest.raises(MessageError, match="message: expected a list of known messages"):
        decode_from_reader(encode([Granted(1, "r", "p", 1)]))


def test_a_geometry_that_cannot_be_true_is_refused() -> None:
    made = msgspec.to_builtins(
        Welcome.in_our_version("p", "b", {}, (geometry(),)), builtin_types=(bytes,)
    )
    made["ranks"][0]["references"]["tensors"][0]["nbytes"] = 3
    with pytest.raises(MessageError, match="ends at byte"):
        decode_from_lender(msgspec.msgpack.encode([made]))


@settings(max_examples=300)
@given(st.binary(max_size=300))
def test_random_bytes_raise_nothing_else(body: bytes) -> None:
    for decode in (decode_from_lender, decode_from_reader):
        try:
            decode(body)
        except MessageError:
            continue


@settings(max_examples=100)
@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 17))
def test_frames_survive_any_cutting(bodies: list[bytes], cut: int) -> None:
    stream = b"".join(frame(body) for body in bodies)
    frames = Frames(max_nbytes=64)
    received = []
    for start in range(0, len(stream), cut):
        received += frames.feed_bytes(stream[start : start + cut])
    assert received == bodies


def test_a_long_frame_is_refused_by_its_length_alone() -> None:
    with pytest.raises(FrameError, match="4 to 68, got 69"):
        Frames(max_nbytes=64).feed_bytes((69).to_bytes(4, "big"))


def test_later_frames_may_have_another_limit() -> None:
    """Without one, each frame after a Welcome may be as long as a Welcome."""
    frames = Frames(max_nbytes=64, max_later=8)
    assert frames.feed_bytes(frame(b"w" * 64) + frame(b"12345678")) == [b"w" * 64, b"12345678"]
    with pytest.raises(FrameError, match="4 to 12, got 13"):
        frames.feed_bytes(frame(b"123456789"))


def test_a_body_with_one_wrong_bit_is_refused() -> None:
    sent = frame(b"body")
    for bit in range(32, 8 * len(sent)):
        corrupted = bytearray(sent)
        corrupted[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError, match="CRC"):
            Frames(max_nbytes=64).feed_bytes(bytes(corrupted))
    assert Frames(max_nbytes=64).feed_bytes(sent) == [b"body"]


def described() -> Described:
    return Described(PROTOCOL_VERSION, "p", "boot", {}, (geometry(),))


def test_each_side_is_told_what_is_meant_for_it_alone() -> None:
    welcome = encode([Welcome.in_our_version("p", "boot", {}, (geometry(),))])
    assert decode_from_lender(encode([described()]), to_tool=True) == [described()]
    for body, to_tool in ((encode([described()]), False), (welcome, True)):
        with pytest.raises(MessageError, match="message: expected a list of known messages"):
            decode_from_lender(body, to_tool)


def least_s(call: Callable[[], object]) -> float:
    """The least processor time of three calls."""
    took = []
    for _ in range(3):
        began = time.thread_time()
        call()
        took.append(time.thread_time() - began)
    return min(took)


def test_a_description_is_refused_without_being_decoded() -> None:
    """One of 12 MB held decode's interpreter for 0.8 s, and was then of no use to it."""
    ranks = (geometry(),) * 4000
    body = encode([Described(PROTOCOL_VERSION, "p", "boot", {}, ranks)])
    assert len(body) > 1 << 20

    def refused() -> None:
        with pytest.raises(MessageError):
            decode_from_lender(body)

    whole_s = least_s(lambda: decode_from_lender(body, to_tool=True))
    assert least_s(refused) < whole_s / 10


def test_a_ticket_survives_the_proxy() -> None:
    params = ticket().to_params(tp_size=2, pp_size=1)
    carried = msgspec.json.decode(msgspec.json.encode({**params, "proxy_says": "hi"}))
    assert parse_ticket(carried) == ticket()


def test_a_ticket_survives_a_proxy_that_knows_doubles_only() -> None:
    made = replace(ticket(), num_tokens=50, cuts=(TicketCut(16, "a"), TicketCut(32, "b")))
    params = made.to_params(tp_size=2, pp_size=1)
    carried = msgspec.json.decode(msgspec.json.encode(_as_doubles(params)))
    assert type(carried["pdconn"]["version"]) is float
    assert parse_ticket(carried) == made
    assert parse_ticket(carried).digest() == made.digest()


def _as_doubles(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_doubles(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_as_doubles(one) for one in value]
    return float(value) if type(value) is int else value


@pytest.mark.parametrize("wrong", [5600.5, float("inf"), float("-inf"), -1.0, 1e300, 2.0**53])
def test_a_double_that_is_no_such_number_is_refused_like_any_other(wrong: float) -> None:
    """Negative control."""
    for changed, field in (
        (_with(remote_port=wrong), "remote_port"),
        (_with(remote_block_ids=[[1], [wrong]]), "remote_block_ids[1][0]"),
        (_ours(first_blocks=[0, wrong]), "pdconn.first_blocks[1]"),
        (_ours(cuts=[[wrong, "a"]]), "pdconn.cuts[0]"),
    ):
        with pytest.raises(TicketError) as caught:
            parse_ticket(changed)
        assert caught.value.field == field


def _without(key: str) -> dict[str, Any]:
    params = ticket().to_params(1, 1)
    del params[key]
    return params


def _with(**changes: Any) -> dict[str, Any]:
    return {**ticket().to_params(1, 1), **changes}


def test_a_block_list_travels_without_its_array() -> None:
    blocks = BlockList(3, tuple(range(1, 2000)))
    before = pickle.dumps(blocks)
    with pytest.raises(ValueError, match="read-only"):
        blocks.array[0] = 7
    assert pickle.dumps(blocks) == before
    copy = pickle.loads(before)
    assert copy == blocks
    assert copy.array.tolist() == list(blocks.ids)
    assert not copy.array.flags.writeable


def _ours(**changes: Any) -> dict[str, Any]:
    params = ticket().to_params(1, 1)
    return {**params, "pdconn": {**params["pdconn"], **changes}}


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({}, "pdconn"),
        (_without("pdconn"), "pdconn"),
        (_without("remote_port"), "remote_port"),
        (_without("remote_block_ids"), "remote_block_ids"),
        (_with(remote_port="5600"), "remote_port"),
        (_with(remote_port=True), "remote_port"),
        (_with(remote_port=70000), "remote_port"),
        (_with(remote_host=""), "remote_host"),
        (_with(remote_engine_id=7), "remote_engine_id"),
        (_with(remote_block_ids=[[1], 2]), "remote_block_ids[1]"),
        (_with(remote_block_ids=[[1], [-2]]), "remote_block_ids[1][0]"),
        (_with(remote_block_ids=[[1], [1 << 40]]), "remote_block_ids[1][0]"),
        (_with(remote_block_ids=[[1], [True]]), "remote_block_ids[1][0]"),
        (_with(remote_block_ids=[[1]]), "pdconn.first_blocks"),
        (_with(remote_block_ids=[[]] * 1000), "remote_block_ids"),
        (_with(remote_num_tokens=-1), "remote_num_tokens"),
        (_ours(version=TICKET_VERSION - 1), "pdconn.version"),
        (_ours(version=TICKET_VERSION + 1), "pdconn.version"),
        (_ours(incarnation=None), "pdconn.incarnation"),
        (_ours(first_blocks=[0, -1]), "pdconn.first_blocks[1]"),
        (_ours(first_blocks="00"), "pdconn.first_blocks"),
    ],
)
def test_a_wrong_ticket_names_the_field_what_was_expected_and_seen(
    params: dict[str, Any], field: str
) -> None:
    with pytest.raises(TicketError) as caught:
        parse_ticket(params)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: expected ")
    assert ", got " in str(caught.value)


@pytest.mark.parametrize("params", [None, 0, 1, "", "a ticket", [], [ticket().to_params(1, 1)]])
def test_a_ticket_that_is_no_object_is_refused(params: object) -> None:
    """Without the check, ``"do_remote_prefill" in params`` and the like end the engine's step."""
    with pytest.raises(TicketError, match="kv_transfer_params: expected an object, got"):
        parse_ticket(params)


@pytest.mark.parametrize(
    "wrong",
    [10**5000, [[[[[]]]]] * 1000, {"a": {"b": 1e308}}, float("nan"), "\u200b" * 600],
    ids=["an integer", "lists", "an object", "no number", "a text"],
)
@pytest.mark.parametrize(
    "field",
    ["remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_num_tokens"],
)
def test_a_value_of_any_size_is_a_typed_error_of_one_line(field: str, wrong: object) -> None:
    """The text of an integer of more than 4300 digits raised ValueError in the engine's step."""
    for changed in (_with(**{field: wrong}), _with(remote_block_ids=[[wrong], [5]])):
        with pytest.raises(TicketError) as caught:
            parse_ticket(changed)
        assert len(str(caught.value)) < 250
        assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"request_id": "r" * (MAX_TEXT + 1)}, "remote_request_id"),
        ({"request_id": "r\u200b"}, "remote_request_id"),
        ({"request_id": ""}, "remote_request_id"),
        ({"engine_id": "a\nb"}, "remote_engine_id"),
        ({"host": ""}, "remote_host"),
        ({"port": 0}, "remote_port"),
        ({"num_tokens": -1}, "remote_num_tokens"),
    ],
)
def test_a_ticket_that_would_be_refused_cannot_be_made(change: dict[str, Any], field: str) -> None:
    """Or prefill lends what decode refuses, and pins it for a whole lease."""
    with pytest.raises(TicketError) as caught:
        replace(ticket(), **change)
    assert caught.value.field == field


def many_blocks(count: int) -> dict[str, Any]:
    return _with(remote_block_ids=[list(range(1, count)), [5]])


def test_a_prompt_bounds_the_blocks_of_its_ticket() -> None:
    most = max_blocks_for(1000)
    assert parse_ticket(many_blocks(most), most).blocks[0].ids[-1] == most - 1
    with pytest.raises(TicketError, match=f"remote_block_ids: expected at most {most} blocks"):
        parse_ticket(many_blocks(most + 1), most)


def test_a_ticket_of_too_many_blocks_is_refused_before_they_are_looked_at() -> None:
    """Four million ids held decode's engine for 1 to 2 s."""
    params = many_blocks(1 << 20)

    def refused() -> None:
        with pytest.raises(TicketError, match="remote_block_ids: expected at most"):
            parse_ticket(params, max_blocks_for(1000))

    assert least_s(refused) < least_s(lambda: parse_ticket(params)) / 20


@pytest.mark.parametrize("tokens", [1, 4096, 131_072, 1 << 20])
@pytest.mark.parametrize("groups", [1, 7, 60])
def test_what_engines_lend_is_within_the_bound(tokens: int, groups: int) -> None:
    """Blocks of 16 tokens in every group, each rounded up."""
    assert groups * -(-tokens // 16) <= max_blocks_for(tokens)


def test_holes_at_the_head_are_trimmed() -> None:
    assert trimmed([0, 0, 7, 0, 9]) == BlockList(2, (7, 0, 9))
    assert trimmed([0, 0]) == BlockList(2, ())
    assert trimmed([]) == BlockList(0, ())


def test_the_digest_differs_when_any_block_does() -> None:
    base = [BlockList(0, (1, 2)), BlockList(0, (3,))]
    others = [
        [BlockList(0, (1, 2, 3)), BlockList(0, ())],
        [BlockList(0, (2, 1)), BlockList(0, (3,))],
        [BlockList(1, (1, 2)), BlockList(0, (3,))],
        [BlockList(0, (1, 2))],
    ]
    digests = {block_digest(blocks) for blocks in [base, *others]}
    assert len(digests) == len(others) + 1
    assert block_digest(base) == block_digest(list(base))
