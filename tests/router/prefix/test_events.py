"""What vLLM encodes is what we read, and what cannot be read costs only itself."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdconn.router.prefix import kv_events as wire
from pdconn.router.prefix.groups import REMOTE
from pdconn.router.prefix.kv_events import (
    UNNAMED,
    BadBatch,
    Batch,
    Cleared,
    Removed,
    Stored,
    decode_batch,
)
from pdconn.router.prefix.score import DEFAULT_WEIGHTS

pytestmark = pytest.mark.usefixtures("in_both")

encode = msgspec.msgpack.encode
BIG = (1 << 64) - 3

STORED = {
    "type": "BlockStored",
    "block_hashes": [BIG, 7],
    "parent_block_hash": 5,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": "poet",
    "extra_keys": [["poet"], None],
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 128,
}
REMOVED = {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU", "group_idx": 0}
CLEARED = {"type": "AllBlocksCleared"}


def row(event: dict[str, Any]) -> list[Any]:
    return list(event.values())


def read(*events: Any) -> Batch:
    return decode_batch(encode([1.5, events, 3]))


def only(event: Any) -> Any:
    batch = read(event)
    assert batch.num_undecodable == 0
    (decoded,) = batch.events
    return decoded


def plain(event: Any) -> Any:
    """An event with lists of hashes and its raw parts decoded, to be compared."""
    if isinstance(event, Removed):
        return Removed(list(event.hashes), event.group, event.medium)
    if not isinstance(event, Stored):
        return event
    raws = (event.token_ids, event.extra_keys)
    fields = msgspec.structs.asdict(event) | {"hashes": list(event.hashes)}
    fields["token_ids"], fields["extra_keys"] = (
        None if raw is None else msgspec.msgpack.decode(raw) for raw in raws
    )
    return fields


EXPECTED = {
    "hashes": [BIG, 7],
    "group": 1,
    "medium": "gpu",
    "block_tokens": 2,
    "kind": "sliding_window",
    "window": 128,
    "parent": 5,
    "token_ids": [1, 2, 3, 4],
    "lora": "poet",
    "extra_keys": [["poet"], None],
}


@pytest.mark.parametrize("form", [dict, row])
def test_maps_and_rows_say_the_same(form: Any) -> None:
    batch = read(*map(form, (STORED, REMOVED, CLEARED)))
    assert (batch.ts, batch.rank, batch.num_undecodable) == (1.5, 3, 0)
    assert plain(batch.events[0]) == EXPECTED
    assert [*map(plain, batch.events[1:])] == [Removed([7], 0, "cpu"), Cleared()]


@pytest.mark.parametrize("num_fields", range(5, len(STORED) + 1))
def test_rows_may_end_where_their_vllm_ended(num_fields: int) -> None:
    defaults = dict.fromkeys(EXPECTED) | {"medium": UNNAMED}
    names = ["hashes", "parent", "token_ids", "block_tokens", None, "medium", "lora",
             "extra_keys", "group", "kind", "window"]  # fmt: skip
    sent = {name: EXPECTED[name] for name in names[: num_fields - 1] if name}
    assert plain(only(row(STORED)[:num_fields])) == defaults | sent


def test_a_removal_may_be_its_hashes_alone() -> None:
    for alone in (["BlockRemoved", [1]], {"type": "BlockRemoved", "block_hashes": [1]}):
        assert plain(only(alone)) == Removed([1], None, UNNAMED)


def test_the_rank_may_be_left_out() -> None:
    assert decode_batch(encode([1, []])) == Batch(1.0, [])


def test_hashes_are_the_low_64_bits_whatever_they_came_as() -> None:
    digest = bytes(range(32))
    low = int.from_bytes(digest[-8:], "big")
    hashes = only(row(REMOVED | {"block_hashes": [-1, digest, BIG]})).hashes
    assert list(hashes) == [(1 << 64) - 1, low, BIG]
    assert only(STORED | {"parent_block_hash": digest}).parent == low
    assert only(STORED | {"parent_block_hash": -2}).parent == (1 << 64) - 2


def test_fields_of_the_future_are_passed_over() -> None:
    assert plain(only(REMOVED | {"new": {"deep": [1]}})) == Removed([7], 0, "cpu")
    assert only([*row(STORED), "LOCAL", None, "session", "new"]).group == 1
    assert decode_batch(encode([1.5, [], 0, "new"])).rank == 0


BAD = [
    {"type": "BlockMoved", "block_hashes": [1]},
    ["BlockMoved", [1]],
    {},
    [],
    7,
    STORED | {"block_size": -16},
    STORED | {"block_size": 0},
    STORED | {"block_size": wire.MAX_BLOCK_TOKENS + 1},
    STORED | {"group_idx": -1},
    STORED | {"group_idx": wire.MAX_GROUP + 1},
    STORED | {"block_hashes": 7},
    STORED | {"block_hashes": [1.5]},
    STORED | {"block_hashes": [bytes(7)]},
    STORED | {"token_ids": "tokens"},
    STORED | {"extra_keys": 5},
    STORED | {"medium": 1},
    row(STORED)[:4],
    row(REMOVED | {"group_idx": "0"}),
    REMOVED | {"block_hashes": None},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("form", [dict, row])
def test_a_bad_event_costs_itself_alone(bad: Any, form: Any) -> None:
    batch = read(form(REMOVED), bad, form(STORED), bad)
    assert batch.num_undecodable == 2
    assert [plain(event) for event in batch.events] == [Removed([7], 0, "cpu"), EXPECTED]


def test_the_check_of_bad_events_can_fail() -> None:
    with pytest.raises(AssertionError):
        test_a_bad_event_costs_itself_alone(REMOVED, dict)


def test_text_that_is_not_utf8_costs_its_event_alone() -> None:
    payload = encode([1.5, [REMOVED, REMOVED | {"medium": "QQQ"}], 0])
    batch = decode_batch(payload.replace(b"QQQ", b"\xff\xff\xff"))
    assert [*map(plain, batch.events)] == [Removed([7], 0, "cpu")]
    assert batch.num_undecodable == 1


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", encode(7), encode([1.5]), encode(["now", []]), encode([1.5, {}]),
     encode([1.5, [], "rank"]), encode([1.5, [REMOVED], 0])[:-1], b"\x92\x01\xdd\xff\xff\xff\xff",
     b"\x92\x01" + b"\x91" * 100_000],
    ids=repr,
)  # fmt: skip
def test_what_is_no_batch_is_refused_with_both_values(payload: bytes) -> None:
    with pytest.raises(BadBatch, match=r"expected .*, got \S"):
        decode_batch(payload)


def test_oversized_payloads_are_refused_before_they_are_decoded() -> None:
    payload = encode([1.5, [REMOVED], 0])
    assert decode_batch(payload, len(payload)).events
    with pytest.raises(BadBatch, match=f"got {len(payload)}"):
        decode_batch(payload, len(payload) - 1)


def test_more_events_than_any_step_has_are_refused() -> None:
    def payload(number: int) -> bytes:
        events = b"\xdd" + number.to_bytes(4, "big") + number * encode(row(CLEARED))
        return b"\x92" + encode(1.5) + events

    assert len(decode_batch(payload(wire.MAX_EVENTS)).events) == wire.MAX_EVENTS
    with pytest.raises(BadBatch, match=str(wire.MAX_EVENTS)):
        decode_batch(payload(wire.MAX_EVENTS + 1))


def test_an_event_of_more_blocks_than_any_has_costs_itself_alone() -> None:
    most = [7] * wire.MAX_EVENTS
    assert len(only(REMOVED | {"block_hashes": most}).hashes) == len(most)
    assert read(REMOVED | {"block_hashes": [*most, 7]}).num_undecodable == 1


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.binary(max_size=40)
    | st.text(max_size=8)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(st.sampled_from([*STORED]) | st.text(max_size=3), inner, max_size=6)
    ),
    max_leaves=20,
)
NEARLY = st.builds(
    lambda event, field, value, form: form(event | {field: value}),
    st.sampled_from([STORED, REMOVED]),
    st.sampled_from([*STORED]),
    JUNK,
    st.sampled_from([dict, row]),
)


@given(st.binary(max_size=200) | JUNK.map(encode))
def test_junk_raises_nothing_but_bad_batch(payload: bytes) -> None:
    with suppress(BadBatch):
        decode_batch(payload)


def in_order(events: list[Any]) -> list[Any]:
    """The events, each removed block by itself."""
    found: list[Any] = []
    for event in events:
        if isinstance(event, Removed):
            found += [Removed([one], event.group, event.medium) for one in event.hashes]
        else:
            found.append(plain(event))
    return found


def test_removals_in_a_row_from_one_place_are_one_event() -> None:
    gone = [row(REMOVED | {"block_hashes": [number]}) for number in range(5)]
    other = row(REMOVED | {"block_hashes": [9], "group_idx": 1})
    remote = row(REMOVED | {"block_hashes": [9], "locality": "REMOTE"})
    events = read(gone[0], gone[1], gone[1], other, gone[2], remote, gone[3], row(CLEARED), gone[4])
    assert [*map(plain, events.events)] == [
        Removed([0, 1, 1], 0, "cpu"),
        Removed([9], 1, "cpu"),
        Removed([2], 0, "cpu"),
        Removed([9], 0, "remote"),
        Removed([3], 0, "cpu"),
        Cleared(),
        Removed([4], 0, "cpu"),
    ]


@given(st.lists(JUNK | NEARLY, max_size=4), st.sampled_from([dict, row]), st.data())
@example([{"type": "BlockStored"}], dict, None)
def test_junk_never_costs_its_neighbours(junk: list[Any], form: Any, data: Any) -> None:
    good = form(REMOVED | {"block_hashes": [BIG]})
    batch = read(good, *junk, good)
    alone = [read(one) for one in (good, *junk, good)]
    assert in_order(batch.events) == in_order([event for one in alone for event in one.events])
    assert sum(len(one.events) for one in alone) + batch.num_undecodable == len(junk) + 2
    for event in batch.events:
        hashes = [] if isinstance(event, Cleared) else event.hashes
        assert all(0 <= one < 1 << 64 for one in hashes)


# --- vLLM's own encoder -------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm() -> Any:
    return pytest.importorskip("vllm.distributed.kv_events")


def test_what_vllm_encodes_is_what_we_read(vllm: Any) -> None:
    digest = bytes(range(32))
    stored = vllm.BlockStored(
        block_hashes=[BIG, 7],
        parent_block_hash=5,
        token_ids=[1, 2, 3, 4],
        block_size=2,
        lora_id=1,
        medium=vllm.MEDIUM_GPU,
        lora_name="poet",
        extra_keys=[("poet",), None],
        group_idx=1,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=128,
        locality="LOCAL",
        session_id="s",
    )
    removed = vllm.BlockRemoved(block_hashes=[digest], medium=None)
    events = [stored, removed, vllm.AllBlocksCleared()]
    batch = decode_batch(encode(vllm.KVEventBatch(ts=2.5, events=events, data_parallel_rank=4)))
    assert (batch.ts, batch.rank, batch.num_undecodable) == (2.5, 4, 0)
    assert plain(batch.events[0]) == EXPECTED
    low = int.from_bytes(digest[-8:], "big")
    assert [*map(plain, batch.events[1:])] == [Removed([low], None, UNNAMED), Cleared()]


@pytest.mark.parametrize("num_tokens", [0, 15, 16, 65_535, 65_536])
def test_tokens_are_counted_without_being_decoded(vllm: Any, num_tokens: int) -> None:
    stored = vllm.BlockStored([7], None, [3] * num_tokens, 16, None, None, None)
    (read,) = decode_batch(encode(vllm.KVEventBatch(ts=0.0, events=[stored]))).events
    assert isinstance(read, Stored)
    assert read.num_tokens == num_tokens


def test_our_fields_are_vllms_in_vllms_order(vllm: Any) -> None:
    for theirs, ours in ((vllm.BlockStored, wire._Stored), (vllm.BlockRemoved, wire._Removed)):
        fields = ours.__struct_fields__
        assert theirs.__struct_fields__[: len(fields)] == fields


# What a medium is


@pytest.mark.parametrize(
    ("named", "locality", "medium"),
    [
        ("GPU", None, "gpu"),
        ("STORAGE", "LOCAL", "storage"),
        ("STORAGE", "REMOTE", "remote"),
        ("CPU", "remote", "remote"),
        ("FS", None, "fs"),
        ("OBJ", None, "obj"),
        (None, None, UNNAMED),
    ],
)
@pytest.mark.parametrize("form", [dict, row])
def test_what_lies_on_another_host_is_of_a_medium_of_its_own(form, named, locality, medium):
    """A store that hosts share weighed as a disk of this one, and a bucket as the GPU's memory."""
    stored = {**STORED, "medium": named, "locality": locality}
    removed = {**REMOVED, "medium": named, "locality": locality}
    assert only(form(stored)).medium == only(form(removed)).medium == medium


def test_vllm_has_no_medium_that_we_do_not_know(vllm: Any) -> None:
    offload = pytest.importorskip("vllm.v1.kv_offload.base")
    stored = vllm.BlockStored
    media = {one.value.lower() for one in offload.Medium} | {"gpu"}
    assert media <= DEFAULT_WEIGHTS.keys()
    assert {one.value for one in offload.Locality} == {"LOCAL", REMOTE.upper()}
    names = list(stored.__struct_fields__)
    assert names.index("locality") == names.index("kv_cache_spec_sliding_window") + 1
