"""Answers of OpenAI-compatible servers, which are read in one place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdconn.router.fleet.prometheus_page import MAX_COUNT, all_samples, read_values
from pdconn.tools.doctor.fleet.golden import golden_answer
from pdconn.tools.doctor.fleet.traffic import traffic_of
from pdconn.tools.lab.lab_client import answer_of
from pdconn.tools.openai.completions import BrokenAnswer, completion_request, read_completion
from pdconn.tools.openai.served_models import ServedModel, listed_models

CHOICE = {
    "text": "a",
    "token_ids": [7],
    "finish_reason": "length",
    "logprobs": {
        "token_logprobs": [-0.5],
        "top_logprobs": [{"token_id:7": -0.5, "token_id:8": -2}],
    },
}
ANSWER = json.dumps({"choices": [CHOICE], "kv_transfer_params": {"remote_host": "p"}}).encode()


def test_one_answer_is_read_alike_by_the_lab_and_the_doctor() -> None:
    completion = read_completion(ANSWER)
    lab, doctor = answer_of([completion]), golden_answer(completion)
    assert lab.tokens == doctor.tokens == (7,)
    assert lab.top == ({7: -0.5, 8: -2},)
    assert doctor.gaps == (1.5,)
    assert lab.kv_transfer_params == doctor.ticket == {"remote_host": "p"}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"choices": []}, "expected token ids"),
        ({"choices": [{**CHOICE, "logprobs": None}]}, "expected token ids"),
        ({"choices": [{**CHOICE, "token_ids": None}]}, "expected token ids"),
        ({"choices": [{**CHOICE, "token_ids": ["x"]}]}, "Expected `int`, got `str`"),
        ({"choices": None}, "Expected `array`, got `null`"),
    ],
)
def test_an_answer_of_another_form_names_what_is_wrong(
    changed: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BrokenAnswer, match=reason):
        answer_of([read_completion(json.dumps(changed).encode())])


def test_a_request_is_greedy_and_as_long_as_asked() -> None:
    request = completion_request("m", (4, 5), 2, stream=True)
    assert request["prompt"] == [4, 5]
    assert (request["temperature"], request["ignore_eos"], request["stream"]) == (0.0, True, True)
    assert completion_request("m", "text", 1)["prompt"] == "text"


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        ([{"id": "m", "max_model_len": 9}], (ServedModel("m", 9),)),
        ([{"id": "m", "max_model_len": "9"}], (ServedModel("m"),)),
        ([{"id": "m", "max_model_len": True}], (ServedModel("m"),)),
        ([{"id": "a", "parent": "m"}], (ServedModel("a", is_adapter=True),)),
        ([{"id": 7}, {}, 3, None], ()),
    ],
)
def test_models_are_listed_and_nonsense_is_left_out(listed: Any, found: Any) -> None:
    assert listed_models(json.dumps({"data": listed}).encode()) == found
    assert listed_models(b"{}") == ()


def test_a_page_of_metrics_is_read_alike_by_the_lab_and_the_doctor() -> None:
    page = 'pdconn:pulls_total{engine="0"} 3.0\npdconn:pulls_total{engine="1"} 4.0\n'
    assert traffic_of(page).pulls == sum(sample.value for sample in all_samples(page)) == 7


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "1e300", "x", ""])
def test_a_count_that_makes_no_sense_is_left_out(value: str) -> None:
    """Before, an infinite count ended ``pdconn doctor`` with an OverflowError."""
    page = f"pdconn:pulls_total {value}\npdconn:leases_granted_total 2\n"
    assert (traffic_of(page).pulls, traffic_of(page).lent) == (0, 2)
    assert read_values(page, {"pdconn:pulls_total": MAX_COUNT}).num_ignored == 1
