"""A request is sent to one engine of a role, and to as many others as ``--retries`` says.

However the engines fail, in whatever order, and however often decode is asked anew: because an
engine that should have answered alone has failed, or because an early ticket came to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdconn.router.fleet.engine_client import ConnectFailed, ConnectionLost
from pdconn.router.fleet.member import Role
from pdconn.router.handover.tries import EngineTries
from pdconn.router.routing.policy import Candidate, Decision
from pdconn.router.routing.routed_request import RoutedRequest
from tests.router.handover.handing import Handing

NUM_ENGINES = 4
FAILS = st.tuples(st.booleans(), st.sampled_from(["gone", "gone", "broken", "503", "no ticket"]))
"""The role of the engine that fails next, if one is asked (prefill or not), and how."""


def engines_asked(retries: int, streams: str, fails: list[tuple[bool, str]]) -> list[set[str]]:
    """The engines of each role that one request was sent to, as they have failed it."""
    handing = Handing(
        NUM_ENGINES, NUM_ENGINES, require_prefill=False, streams=streams, retries=retries
    )
    try:
        handing.learn_lenders()
        handing.arrive(is_direct=False)
        for is_prefill, how in fails:
            role = handing.prefill if is_prefill else handing.decode
            ask = next((one for one in handing.client.open if one.engine in role), None)
            if ask is None:
                continue
            if how == "gone":
                ask.fail(ConnectFailed("it is gone"))
                handing.loop.settle()
            elif how == "broken":
                ask.fail(ConnectionLost("it broke"))
                handing.loop.settle()
            elif how == "no ticket" and is_prefill:
                handing.respond(ask, lends=False)
            else:
                handing.respond(ask, 503)
        asked = [ask.engine for ask in handing.client.asks if not ask.is_return]
        return [{one for one in asked if one in role} for role in (handing.prefill, handing.decode)]
    finally:
        handing.close()


@pytest.mark.hypothesis
@settings(max_examples=300, deadline=None)
@given(st.integers(0, NUM_ENGINES), st.sampled_from(["on", "off"]), st.lists(FAILS, max_size=10))
def test_no_more_engines_of_a_role_are_asked_than_retries_allow(
    retries: int, streams: str, fails: list[tuple[bool, str]]
) -> None:
    for asked in engines_asked(retries, streams, fails):
        assert len(asked) <= 1 + retries


SPENT = [(False, "gone"), *[(True, "gone")] * NUM_ENGINES, *[(False, "gone")] * NUM_ENGINES]
"""Decode is not reached, then prefill is not, and the early ticket has come to nothing."""


@pytest.mark.parametrize("retries", range(NUM_ENGINES))
def test_as_many_are_asked_as_retries_allow(retries: int) -> None:
    assert list(map(len, engines_asked(retries, "on", SPENT))) == [1 + retries] * 2


def test_a_count_that_begins_anew_with_decode_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: each list of engines had a count of its own."""

    def candidates(
        self: EngineTries, role: Role, decision: Decision, request: RoutedRequest
    ) -> Iterator[Candidate]:
        return self.bounded(self._all(role, decision, request))

    monkeypatch.setattr(EngineTries, "candidates", candidates)
    [_, decode] = engines_asked(1, "on", SPENT)
    assert len(decode) > 2
