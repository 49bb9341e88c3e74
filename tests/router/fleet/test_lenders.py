"""Where engines lend from: what their tickets say, and what an early ticket is made of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from pdconn.protocol.early import EarlyTicket
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.lenders import MOST_PAST, KnownLenders, is_one_boot, lender_of
from pdconn.router.fleet.member import Member, Role
from tests.fakes.fake_engine import TICKET, ticket_of

STREAM = "f" * 32


def lender(boot: str) -> EarlyTicket:
    found = lender_of(Raw(ticket_of(boot, "lease-1").encode()))
    assert found is not None
    return found


def incarnation(known: KnownLenders, engine: str = "p", rank: int | None = None) -> str | None:
    early = known.early_ticket(engine, rank, STREAM)
    assert early is None or early.stream == STREAM
    return None if early is None else early.incarnation


def test_a_ticket_says_which_boot_lends() -> None:
    assert lender("b") == EarlyTicket("b", "b", "127.0.0.1", 7600, lender("b").stream)
    assert is_one_boot(lender("b"), EarlyTicket("b", "b", "127.0.0.1", 7600, STREAM))
    assert not is_one_boot(lender("b"), lender("c"))


@pytest.mark.parametrize(
    "ticket",
    [
        (TICKET % "lease-1").encode(),  # another connector's
        ticket_of("b", "lease-1").replace('"version": 2', '"version": 1').encode(),
        ticket_of("b", "lease-1").replace("7600", "76000").encode(),
        ticket_of("b", "lease-1").replace('"127.0.0.1"', "127").encode(),
        b"[]",
        b"{",
        b"\xff",
        b'{"pdconn": [1]}',
    ],
)
def test_what_no_early_ticket_can_be_made_of_teaches_nothing(ticket: bytes) -> None:
    assert lender_of(Raw(ticket)) is None


@given(st.binary(max_size=60) | st.recursive(st.text(), st.lists).map(repr).map(str.encode))
def test_no_ticket_is_an_error(ticket: bytes) -> None:
    lender_of(Raw(ticket))


def test_the_newest_ticket_counts_and_each_rank_is_on_its_own() -> None:
    known = KnownLenders()
    assert incarnation(known) is None
    for boot, rank in (("a", None), ("b", None), ("r0", 0), ("r1", 1)):
        known.learn_lender("p", rank, lender(boot))
    assert [incarnation(known, rank=rank) for rank in (None, 0, 1, 2)] == ["b", "r0", "r1", None]


def test_boots_that_take_turns_are_ranks_and_none_is_followed() -> None:
    known = KnownLenders()
    for boot in "aba":
        known.learn_lender("p", None, lender(boot))
    assert incarnation(known) is None
    known.forget_engine("p")
    known.learn_lender("p", None, lender("c"))
    assert incarnation(known) == "c", "it came up again"
    for number in range(3 * MOST_PAST):  # as an engine that restarts again and again
        known.learn_lender("p", None, lender(f"boot {number}"))
    assert incarnation(known) == f"boot {number}"
    assert len(known._known["p"][None].past) == MOST_PAST


def test_engines_that_go_down_or_leave_are_forgotten() -> None:
    urls = p, q, _ = [f"http://{name}:1" for name in "pqr"]
    members = [Member(url, frozenset({Role.PREFILL})) for url in urls]
    engines = EngineRegistry.from_members(members)
    for url in urls:
        engines.lenders.learn_lender(url, None, lender(url))
    engines.mark_down(p, "it broke")
    engines.mark_up(p)
    engines.update(members[:2])
    assert [incarnation(engines.lenders, url) for url in urls] == [None, q, None]
