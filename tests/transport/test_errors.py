"""An error's text: what was seen, short and cheap whatever it is, and what may have been meant."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest

from transport.errors import FieldError, did_you_mean, shown

DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "value",
    [None, True, 7, -1.5, "text", b"bytes", [], {}, [1, "a", None], {"a": [1, {"b": 2}]}, (1, 2)],
    ids=repr,
)
def test_what_is_short_is_shown_whole(value: object) -> None:
    assert shown(value) == repr(value)


@pytest.mark.parametrize("value", ["x" * 1000, list(range(1000)), dict.fromkeys(range(1000), "v")])
def test_what_is_long_is_shown_from_its_beginning(value: object) -> None:
    assert shown(value) == repr(value)[:77] + "..."


def test_an_integer_that_python_does_not_write_is_given_by_its_size() -> None:
    """``repr`` raises ValueError above 4300 digits, which ended the engine's step."""
    with pytest.raises(ValueError, match="4300 digits"):
        repr(10**5000)
    assert shown(10**5000) == "<integer of 16610 bits>"
    assert shown({"port": [-(10**5000)]}) == "{'port': [<integer of 16610 bits>]}"


def test_what_is_nested_too_deep_for_repr_is_shown() -> None:
    with pytest.raises(RecursionError):
        repr(DEEP)
    assert shown(DEEP) == "[" * 77 + "..."


def _least_s(call: Callable[[object], str], value: object) -> float:
    """The least processor time of three calls."""
    took = []
    for _ in range(3):
        began = time.thread_time()
        call(value)
        took.append(time.thread_time() - began)
    return min(took)


def test_what_is_shown_costs_no_more_for_what_is_not() -> None:
    huge = [list(range(1000))] * 1000
    assert _least_s(shown, huge) < _least_s(repr, huge) / 20


KEYS = ("kv_lease_duration", "claim_timeout", "read_timeout", "rehearse", "block", "tp")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("rehears", "did you mean 'rehearse'?"),
        ("lease", "did you mean 'kv_lease_duration'?"),  # was: did you mean 'rehearse'?
        ("lease-duration", "did you mean 'kv_lease_duration'?"),
        ("foo", "known keys: "),  # was: did you mean 'block'?
        ("", "known keys: "),
        ("-", "known keys: "),
    ],
)
def test_a_key_is_proposed_only_where_it_is_near(key: str, hint: str) -> None:
    assert did_you_mean(key, KEYS).startswith(hint)


class Unwritable(FieldError, OSError):
    """One whose arguments are not those of its base."""

    def __init__(self, path: str) -> None:
        super().__init__("path", "one that can be written", path)


@pytest.mark.parametrize(
    "error",
    [
        FieldError("tp", "a number above 0", 0, "see --help").prefixed("--prefill "),
        Unwritable("/nowhere"),
    ],
)
def test_an_error_of_another_process_is_the_same_here(error: FieldError) -> None:
    """Its ``args`` are the whole text, of which it cannot be made."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
    assert vars(again) == vars(error)
