"""The pure parts of ``pdconn bench serve``: answers, schedule, statistics, report."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.tools.bench.bench_errors import BadOption
from pdconn.tools.bench.serving.answer_stream import TimedLine, read_answer
from pdconn.tools.bench.serving.replies import (
    AnswerContent,
    CompleteReply,
    FailedReply,
    Reply,
    TurnResult,
)
from pdconn.tools.bench.serving.schedule import due_times, order, prompts
from pdconn.tools.bench.serving.serve_report import ServeReport
from pdconn.tools.bench.serving.summary import Bounds, Spread, check, summarise
from pdconn.tools.bench.serving.turns import RunPlan
from pdconn.tools.openai.completions import BrokenAnswer

BOUNDS = Bounds(ttft_s=1.0, itl_s=0.1)
PLAN = RunPlan(prompt_tokens=10, output_tokens=3, requests=2, rounds=1)


def complete(
    prompt: int, arrivals_s: tuple[float, ...], *tokens: int, began_s: float = 0.0
) -> CompleteReply:
    return CompleteReply(prompt, began_s, arrivals_s, len(arrivals_s), AnswerContent("", tokens))


def turn(name: str, *replies: Reply, number: int = 1, seconds: float = 2.0) -> TurnResult:
    return TurnResult(number, name, replies, seconds)


# Answers out of events


def event(text: str = "", ids: list[int] | None = None, reason: str | None = None) -> bytes:
    choice: dict[str, object] = {"text": text, "finish_reason": reason}
    if ids is not None:
        choice["token_ids"] = ids
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n"


def stream(*lines: bytes) -> list[TimedLine]:
    """A line a second from the first second on, with the empty ones that end events."""
    return [
        (float(second), part)
        for second, line in enumerate(lines, 1)
        for part in (line, b"\n")
    ]  # fmt: skip


def test_an_answer_is_its_tokens_and_the_times_at_which_they_came() -> None:
    answer = read_answer(
        3, 0.5, stream(event("a", [7]), event("bc", [8, 9]), event("", [], "length"))
    )
    assert answer.content == AnswerContent("abc", (7, 8, 9))
    assert (answer.prompt, answer.num_tokens) == (3, 3)
    assert answer.arrivals_s == (1.0, 2.0), "an event without tokens is no arrival"
    assert answer.ttft_s == 0.5
    assert answer.gaps_s == (1.0,)
    assert answer.mean_gap_s == 0.5, "two tokens came after the first, in one second"


def test_without_token_ids_the_text_counts() -> None:
    answer = read_answer(0, 0.0, stream(event("a"), event("bc"), b"data: [DONE]\n"))
    assert answer.content == AnswerContent("abc", None)
    assert answer.num_tokens == 2


def test_ids_of_only_some_chunks_do_not_count() -> None:
    answer = read_answer(0, 0.0, stream(event("a", [7]), event("b"), event("c", [9], "stop")))
    assert answer.content.tokens is None
    assert answer.num_tokens == 3


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([event("a", [7])], "broke off after 1 chunks"),
        ([], "broke off after 0 chunks"),
        ([b"data: [DONE]\n"], "has no token"),
        ([event("a", [7]), b'data: {"error": {"message": "gone"}}\n'], "gone"),
        ([b"data: {nonsense\n"], "malformed event"),
        ([b'data: {"choices": [{"text": "a", "finish_reason": "abort"}]}\n'], "ended by 'abort'"),
        ([b'data: {"choices": [{"token_ids": ["x"]}]}\n'], "malformed event"),
        ([b"data: \xff\n"], "malformed event"),
    ],
)
def test_an_incomplete_answer_is_an_error_with_a_reason(lines: list[bytes], reason: str) -> None:
    with pytest.raises(BrokenAnswer, match=reason):
        read_answer(0, 0.0, stream(*lines))


def test_comments_and_other_fields_of_events_are_passed_over() -> None:
    lines = stream(b": ping\n", b"event: x\n", event("a", [7]), b"data:[DONE]\r\n")
    assert read_answer(0, 0.0, lines).content.tokens == (7,)


def test_a_difference_names_the_first_place_and_both_values() -> None:
    right = AnswerContent("abc", (4, 5, 6))
    assert right.difference(right) is None
    assert AnswerContent("abd", (4, 5, 7)).difference(right) == "token 2: expected 6, seen 7"
    assert AnswerContent("ab", (4, 5)).difference(right) == "expected 3 tokens, seen 2"
    assert AnswerContent("abd").difference(right) == "character 2: expected c, seen d"
    assert AnswerContent("abc").difference(right) is None, (
        "texts are compared where ids are not known"
    )


# Turns


@given(st.lists(st.text(), min_size=1, max_size=6, unique=True), st.integers(1, 100))
def test_everyone_has_every_place_equally_often(names: list[str], first: int) -> None:
    rounds = [order(names, first + number) for number in range(len(names))]
    assert all(sorted(one) == sorted(names) for one in rounds)
    for place in range(len(names)):
        assert {one[place] for one in rounds} == set(names)


def test_the_first_round_is_in_the_order_given() -> None:
    assert order(["a", "b", "c"], 1) == ("a", "b", "c")


def test_rounds_share_no_prompt_and_a_seed_repeats_them() -> None:
    rounds = [prompts(4, 20, seed, number) for seed in (0, 1) for number in (-1, 0, 1, 2)]
    every = [prompt for one in rounds for prompt in one]
    assert len(set(every)) == len(every)
    assert {len(prompt) for prompt in every} == {20}
    assert prompts(4, 20, 0, -1) == rounds[0]


def test_requests_come_by_chance_at_the_rate_asked_for() -> None:
    times = due_times(4001, per_s=8.0, seed=1, round_number=1)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) >= 0.0
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 8, rel=0.1)
    # Of exponential gaps the deviation is the mean; of even ones it is nothing.
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.1)
    assert times == due_times(4001, 8.0, 1, 1) != due_times(4001, 8.0, 1, 2)


@pytest.mark.parametrize(
    "values",
    [
        {"prompt_tokens": 0},
        {"output_tokens": 0},
        {"requests": 0},
        {"rounds": 0},
        {"concurrency": 0},
        {"rate": 0.0},
        {"rate": float("nan")},
        {"timeout_s": float("inf")},
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(values: dict[str, float]) -> None:
    [(name, value)] = values.items()
    with pytest.raises(BadOption, match=f"{name.split('_')[0]}: expected .*got {value}"):
        replace(PLAN, **values)


# What it comes to


def test_a_spread_is_median_and_worst_of_few() -> None:
    assert Spread.of_values([3.0, 1.0, 2.0]) == Spread(2.0, 3.0)
    assert Spread.of_values([]) is None


def test_a_request_is_good_if_it_keeps_both_bounds() -> None:
    good = complete(0, (1.0, 1.1, 1.2), 4, 5, 6)
    stalled_once = complete(0, (0.5, 0.69, 0.7), 4, 5, 6)
    assert BOUNDS.hold(good)
    assert BOUNDS.hold(stalled_once), "the mean counts, not each gap"
    assert not BOUNDS.hold(complete(0, (1.01, 1.1, 1.2), 4, 5, 6)), "late to begin"
    assert not BOUNDS.hold(complete(0, (0.5, 0.6, 0.71), 4, 5, 6)), "slow to go on"
    assert BOUNDS.hold(complete(0, (0.9,), 4)), "one token has no gaps"


def test_time_counts_from_when_a_request_was_due() -> None:
    assert complete(0, (5.0,), 4, began_s=4.5).ttft_s == 0.5


def test_goodput_counts_what_is_whole_right_and_in_time() -> None:
    right = complete(0, (0.5, 0.55), 4, 5)
    late = complete(1, (2.0, 2.05), 6, 7)
    wrong = complete(2, (0.5, 0.55), 8, 8)
    turns = [
        turn("ref", right, late, replace(wrong, content=AnswerContent("", (8, 9)))),
        turn("one", right, late, wrong, FailedReply(3, 0.0, "gone"), seconds=4.0),
    ]
    answers = check(turns, "ref")
    assert [(one.contestant, one.prompt) for one in answers.wrong] == [("one", 2)]
    one = summarise("one", turns, answers, BOUNDS)
    assert (one.requests, one.failed, one.wrong, one.met) == (4, 1, 1, 1)
    assert one.goodput == 1 / 4.0
    assert one.throughput == 3 / 4.0
    assert one.ttft == Spread.of_values([0.5, 2.0, 0.5])
    assert summarise("ref", turns, answers, BOUNDS).met == 2


def test_gaps_are_pooled_over_requests_and_rounds() -> None:
    turns = [
        turn("one", complete(0, (1.0, 1.5), 4, 5), number=1),
        turn("one", complete(0, (1.0, 1.25, 2.25), 4, 5, 6), number=2),
    ]
    one = summarise("one", turns, check(turns, "one"), BOUNDS)
    assert one.itl == Spread.of_values([0.5, 0.25, 1.0])
    assert one.seconds == 4.0
    assert one.handover is None


def test_an_answer_is_compared_within_its_round_only() -> None:
    turns = [
        turn("ref", complete(0, (1.0,), 4), number=1),
        turn("ref", complete(0, (1.0,), 5), number=2),
        turn("one", complete(0, (1.0,), 5), number=1),
        turn("one", complete(0, (1.0,), 5), number=2),
    ]
    answers = check(turns, "ref")
    assert [(one.round_number, one.difference) for one in answers.wrong] == [
        (1, "token 0: expected 4, seen 5")
    ]


def made(turns: list[TurnResult]) -> ServeReport:
    return ServeReport.of_turns(
        PLAN, BOUNDS, turns, ["ref", "one"], "ref", manifest={"when": "now"}
    )


def test_what_the_reference_did_not_answer_is_not_called_right() -> None:
    turns = [turn("ref", FailedReply(0, 0.0, "gone")), turn("one", complete(0, (1.0,), 4))]
    answers = check(turns, "ref")
    assert answers.unchecked == {(1, "one", 0)}
    assert summarise("one", turns, answers, BOUNDS).met == 0
    report = made(turns)
    assert not report.is_good
    assert "1 could not be compared: ref did not answer" in report.text()


def test_the_table_and_the_document_say_what_came() -> None:
    answer = replace(complete(0, (10.5, 10.6), 4, 5, began_s=10.0), handover_s=0.025)
    turns = [
        turn("ref", answer, complete(1, (10.5,), 6)),
        replace(turn("one", answer, complete(1, (10.5,), 7)), others=0.25),
    ]
    report = made(turns)
    text = report.text()
    row = next(line for line in text.splitlines() if line.strip().startswith("one")).split()
    assert row == [
        "one", "2", "500.0", "10,500.0", "100.0", "100.0", "25.0", "25.0", "1", "0.50", "1.00",
        "0", "1",
    ]  # fmt: skip
    assert "4 answers: 1 differ from those of ref" in text
    assert "more than 10% of this machine in 1 of 2 turns, at most 25% (one, round 1)" in text
    document = json.loads(json.dumps(report.document()))
    assert document["manifest"] == {"when": "now"}
    replies = document["turns"][1]["replies"]
    assert replies[0]["arrivals_s"] == pytest.approx([0.5, 0.6])
    assert [one["wrong"] for one in replies] == [None, "token 0: expected 6, seen 7"]
    assert document["contestants"][1]["goodput_per_s"] == report.summaries[1].goodput


def test_nothing_wrong_and_nothing_failed_is_good() -> None:
    turns = [turn(name, complete(0, (1.0,), 4)) for name in ("ref", "one")]
    report = made(turns)
    assert report.is_good
    assert "2 answers: none differs from that of ref" in report.text()
