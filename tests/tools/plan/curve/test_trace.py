"""Traces: three formats, each read as what was written, and bad lines refused by name."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from pdconn.tools.plan.store.curve import TracedRequest
from pdconn.tools.plan.store.trace import (
    BadTrace,
    TraceCounts,
    find_answers,
    read_trace,
    with_answers,
)
from tests.tools.plan.curve.drawn import conversations

GOOD: dict[str, Any] = {
    "timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]
}  # fmt: skip


def read(*lines: object, block_tokens: int = 512) -> list[TracedRequest]:
    written = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines]
    return list(read_trace(written, TraceCounts(), block_tokens))


def test_a_line_of_mooncake() -> None:
    assert read(GOOD, b"", GOOD) == 2 * [TracedRequest(1100, 52, [46, 47, 48], 512, 27.482)]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"input_length": 0}, r"line 2 input_length: expected int >= 1, got 0$"),
        ({"input_length": "8"}, r"line 2 input_length: expected int, got '8'$"),
        ({"input_length": 1 << 40}, r"line 2 input_length: "),
        ({"output_length": -1}, r"line 2 output_length: "),
        ({"timestamp": None}, r"line 2 timestamp: "),
        ({"hash_ids": [1, -2, 3]}, r"line 2 hash_ids\[1\]: expected int >= 0, got -2$"),
        ({"hash_ids": [1, 2]}, r"line 2 hash_ids: expected 3, for input_length 1100 .*, got 2"),
        ({"hash_ids": None}, r"line 2 hash_ids: "),
    ],
)
def test_a_wrong_field_is_named_with_its_line(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(BadTrace, match=says):
        read(GOOD, {**GOOD, **changed})


@pytest.mark.parametrize("field", ["input_length", "hash_ids"])
def test_a_missing_field_is_named(field: str) -> None:
    wrong = {key: value for key, value in GOOD.items() if key != field}
    with pytest.raises(BadTrace, match=f"line 2: .*{field}"):
        read(GOOD, wrong)


@pytest.mark.parametrize("line", [b"{", b'{"a": 1}', b"[1]", b"\xff", b"=", b"AAAA", b"{\xff}"])
def test_a_first_line_of_no_known_format_is_refused(line: bytes) -> None:
    with pytest.raises(BadTrace, match="line 1: ") as raised:
        read(line)
    assert line in (b"{", b"{\xff}") or "hash_ids" in str(raised.value)


@given(st.lists(st.binary(max_size=80), max_size=4))
def test_no_bytes_do_more_than_be_refused(lines: list[bytes]) -> None:
    for first in (b"", json.dumps(GOOD).encode(), b'{"logger": "x"}', batch(1.0)):
        with contextlib.suppress(BadTrace):
            read(first, *lines)


LOGGED = {"logger": "pdconn.access", "prompt_tokens": 600, "time": "2026-11-29T04:00:01.500+00:00"}
DIGESTS = "256:000000000001" + "00000000000a"


def test_a_line_of_the_access_log_is_a_request_and_others_are_counted() -> None:
    counts = TraceCounts()
    lines = [
        {"logger": "pdconn.router", "message": "serving"}, {**LOGGED, "prompt_blocks": DIGESTS},
        LOGGED, {**LOGGED, "prompt_blocks": DIGESTS, "prompt_tokens": None},
    ]  # fmt: skip
    written = [json.dumps(line).encode() for line in lines]
    (found,) = read_trace([*written, b"Traceback (most recent call last):"], counts)
    assert replace(found, at_s=0.0) == TracedRequest(600, 0, [1, 10], 256)
    assert counts == TraceCounts(lines=5, skipped=4)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"prompt_blocks": "256"}, "line 1 prompt_blocks: expected TOKENS:DIGESTS"),
        ({"prompt_tokens": 511}, "line 1 prompt_tokens: expected 512 to "),
        ({"time": "yesterday"}, "line 1 time: expected a time in ISO 8601"),
    ],
)
def test_a_wrong_field_of_the_access_log_is_named(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(BadTrace, match=says):
        read({**LOGGED, "prompt_blocks": DIGESTS, **changed})


# KV events


def stored(hashes: Sequence[int], parent: int | None, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent,
        "token_ids": [], "block_size": 16, "medium": "GPU", "group_idx": 0,
        "kv_cache_spec_kind": "full_attention", **more,
    }  # fmt: skip


def batch(ts: float, *events: dict[str, Any]) -> bytes:
    return base64.b64encode(msgspec.msgpack.encode([ts, list(events), 0]))


def test_blocks_that_follow_are_one_request_and_what_lies_before_was_held() -> None:
    found = read(
        batch(1.0, stored(range(1, 9), None)),
        batch(1.5, stored(range(9, 13), 8)),  # the prompt's second pass
        batch(2.0, stored([13], 12)),  # of the answer
        batch(3.0, stored(range(14, 20), 13)),  # the next turn
        batch(4.0, stored(range(9, 13), 8)),  # lost, and computed again
    )
    expected = [
        TracedRequest(12 * 16 + 1, 16, list(range(1, 14)), 16, 1.0, 0),
        TracedRequest(19 * 16 + 1, 0, list(range(1, 20)), 16, 3.0, 13 * 16),
        TracedRequest(12 * 16 + 1, 0, list(range(1, 13)), 16, 4.0, 8 * 16),
    ]
    assert found == expected


def test_other_groups_media_and_unknown_parents_are_not_requests() -> None:
    counts = TraceCounts()
    events = [
        stored([1, 2], None),
        stored([101, 102], None, group_idx=1, kv_cache_spec_kind="sliding_window"),
        stored([3], 2, medium="STORAGE"),
        stored([50], 49),
        {"type": "AllBlocksCleared"},
        stored([1, 2], None),
    ]
    found = list(read_trace([batch(1.0, *events)], counts))
    assert [one.ids for one in found] == [[1, 2], [1, 2]]
    assert counts.skipped == 1, "a block whose parent was not recorded"


def test_a_chain_is_over_after_a_minute() -> None:
    found = read(batch(1.0, stored([1, 2], None)), batch(70.0, stored([3], 2)))
    assert [(one.ids, one.held) for one in found] == [([1, 2], 0), ([1, 2, 3], 32)]


def test_a_line_that_is_no_batch_is_refused() -> None:
    with pytest.raises(BadTrace, match="line 2: expected base64 of a batch"):
        read(batch(1.0), b"AAAA")


def test_the_program_of_the_docs_records_what_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[4] / "docs/stores.md").read_text(encoding="utf-8")
    program = re.search(r"```python\n(# record.py.*?)```", page, re.DOTALL)
    assert program is not None
    record, events = tmp_path / "record.py", tmp_path / "events"
    record.write_text(program[1], encoding="utf-8")
    payload = base64.b64decode(batch(1.0, stored([1, 2], None)))
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher, events.open("ab") as out:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        command = [sys.executable, str(record), f"tcp://127.0.0.1:{port}"]
        recorder = subprocess.Popen(command, stdout=out)
        try:
            until = time.monotonic() + 60.0
            while not events.stat().st_size:
                assert time.monotonic() < until
                publisher.send_multipart([b"", (0).to_bytes(8, "big"), payload])  # as vLLM does
                time.sleep(0.02)
        finally:
            recorder.kill()
            recorder.wait()
        publisher.close(linger=0)
    first = events.read_bytes().splitlines()[:1]
    (found,) = read_trace(first, TraceCounts())
    assert (found.ids, found.held) == ([1, 2], 0)


# Answers


def test_answers_are_those_of_the_next_turn() -> None:
    """What a trace of prompts leaves out is found in the next turn, as it was drawn."""
    known = list(conversations(1, 200, answer=150))
    told = [
        replace(
            one, ids=[*one.ids[: one.num_tokens // 32], *([10**9 + at] * (one.num_tokens % 32 > 0))]
        )
        for at, one in enumerate(known)
    ]
    answers = find_answers(told)
    assert len(answers) > 60
    for number, ids in answers.items():
        whole = known[number].num_tokens // 32
        # Of prompts that are a system prompt and no whole block more, it cannot be known.
        assert whole == 4 or list(ids) == list(known[number].ids[whole:])
    found = list(with_answers(told, answers))
    assert all(found[at].ids == known[at].ids for at in answers if known[at].num_tokens // 32 > 4)
    assert [found[at] for at in range(200) if at not in answers] == [
        told[at] for at in range(200) if at not in answers
    ]


def test_a_prompt_that_is_shorter_than_the_answer_is_no_next_turn() -> None:
    first = TracedRequest(64, 64, [1, 2], 32)
    assert find_answers([first, TracedRequest(100, 0, [1, 2, 3, 4], 32)]) == {}
    assert find_answers([first, TracedRequest(128, 0, [1, 2, 3, 4], 32)]) == {0: (3, 4)}
