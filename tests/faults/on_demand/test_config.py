"""Laws of ``debug_faults``: strict keys and values, and errors that lead to them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pdconn.faults.debug_faults import Faults, read_faults
from pdconn.faults.frame_faults import MessageFaults
from transport.fault_schedule import FaultError
from transport.faulty import ReadFaults


def test_every_key_is_read() -> None:
    faults = read_faults(
        {
            "seed": 7,
            "reads": {
                "delay": 0.1, "delay_s": 2, "corrupt": 0.2, "fail": 0.3, "stall": 0.4, "kill": 1,
            },
            "messages": {
                "delay": 0.1, "delay_s": 0.5, "drop": 0.2, "duplicate": 0.3, "reorder": 0.4,
                "corrupt": 0.5, "cut": 0.6, "stall": 0.7, "skip": 3,
            },
        }
    )  # fmt: skip
    reads = ReadFaults(0.1, 2, 0.2, 0.3, 0.4, 1)
    assert faults == Faults(7, reads, MessageFaults(0.1, 0.5, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 3))


def test_what_is_not_given_does_not_happen() -> None:
    for value in ({}, {"seed": 3}, {"reads": {}, "messages": {"skip": 2, "delay_s": 1}}):
        assert not read_faults(value)
    assert read_faults({"reads": {"corrupt": 1.0}})
    assert read_faults({"messages": {"cut": 0.01}})


def test_faults_have_a_text() -> None:
    faults = read_faults({"seed": 7, "reads": {"corrupt": 1.0}, "messages": {"drop": 0.1}})
    assert str(faults) == "seed 7; reads: corrupt 1.0; messages: drop 0.1"
    assert str(Faults()) == "seed 0"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "debug_faults: expected a mapping, got 5"),
        ({"reeds": {}}, "debug_faults: expected a known key, got 'reeds'; did you mean 'reads'?"),
        ({"x": 1}, "got 'x'; known keys: seed, reads, messages"),
        ({"reads": []}, "debug_faults.reads: expected a mapping, got []"),
        (
            {"reads": {"corupt": 1}},
            "debug_faults.reads: expected a known key, got 'corupt'; did you mean 'corrupt'?",
        ),
        ({"reads": {"drop": 1}}, "debug_faults.reads: expected a known key, got 'drop'"),
        ({"messages": {"kill": 1}}, "debug_faults.messages: expected a known key, got 'kill'"),
        ({"messages": {7: 1}}, "debug_faults.messages: expected a known key, got 7; known keys"),
        ({"seed": "7"}, "debug_faults.seed: expected a whole number from 0, got '7'"),
        ({"seed": -1}, "debug_faults.seed: expected a whole number from 0, got -1"),
        ({"seed": True}, "debug_faults.seed: expected a whole number from 0, got True"),
        ({"reads": {"fail": 1.5}}, "debug_faults.reads.fail: expected a chance from 0 to 1"),
        ({"reads": {"fail": True}}, "debug_faults.reads.fail: expected a chance from 0 to 1"),
        ({"reads": {"fail": float("nan")}}, "debug_faults.reads.fail: expected a chance"),
        ({"messages": {"cut": -0.1}}, "debug_faults.messages.cut: expected a chance from 0 to 1"),
        ({"messages": {"cut": "1"}}, "debug_faults.messages.cut: expected a chance from 0 to 1"),
        ({"messages": {"delay_s": -1}}, "debug_faults.messages.delay_s: expected seconds from 0"),
        ({"reads": {"delay_s": float("inf")}}, "debug_faults.reads.delay_s: expected seconds"),
        ({"messages": {"skip": 1.0}}, "debug_faults.messages.skip: expected a whole number"),
        ({"messages": None}, "debug_faults.messages: expected a mapping, got None"),
    ],
)
def test_an_error_names_the_path_expected_and_seen(value: Any, text: str) -> None:
    with pytest.raises(FaultError, match=re.escape(text)):
        read_faults(value)


def test_an_error_carries_its_parts() -> None:
    with pytest.raises(FaultError) as caught:
        read_faults({"reads": {"fail": 2}}, path="elsewhere")
    error = caught.value
    assert (error.field, error.expected, error.seen) == (
        "elsewhere.reads.fail",
        "a chance from 0 to 1",
        2,
    )


def test_the_mapping_is_left_as_it_was() -> None:
    value: dict[str, Any] = {"reads": {"corrupt": 1.0}, "messages": {}}
    read_faults(value)
    assert value == {"reads": {"corrupt": 1.0}, "messages": {}}
