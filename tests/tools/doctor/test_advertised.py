"""Addresses of tickets: a relay is as good as prefill, and loopback is another on each host."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdconn.faults.frame_faults import MessageFaults
from pdconn.faults.relay import Relay
from pdconn.protocol.messages import Described
from pdconn.tools.doctor.findings import Severity
from pdconn.tools.doctor.fleet.advertised import judge_advertised
from pdconn.tools.doctor.fleet.channels import ChannelFacts
from pdconn.tools.doctor.fleet.golden import GoldenFacts
from pdconn.tools.lab.ports import free_ports
from tests.fakes.event_loop import in_loop
from tests.fakes.pair import Cache
from tests.tools.doctor.healthy import healthy, ids, welcome

LOOPBACK, ROUTED = "127.0.0.1:5600", "10.0.0.1:5600"
TOKENS = (1, 2)


def described(engine_id: str) -> Described:
    return Described.from_welcome(welcome(engine_id, Cache("BHLNC", filled=False), {}))


def pair(where: str, decode: str = "10.0.0.2", **facts: Any) -> GoldenFacts:
    made = GoldenFacts("http://p:1", f"http://{decode}:1", None, TOKENS, TOKENS, (), where)
    return replace(made, **{"engine_id": "prefill", **facts})


def judged(one: GoldenFacts, channel: ChannelFacts) -> list[tuple[str, Severity]]:
    found = judge_advertised([one], {one.advertised or "": channel})
    return [(finding.id, finding.severity) for finding in found]


PULLED: dict[str, Any] = {"pulled": True}
FAILED: dict[str, Any] = {"pulled": False, "failed": True}
UNKNOWN: dict[str, Any] = {"pulled": None}


@pytest.mark.parametrize("where", [LOOPBACK, ROUTED, "[::1]:5600"])
@pytest.mark.parametrize("decode", ["10.0.0.2", "127.0.0.1"])
def test_an_address_that_answers_and_was_pulled_by_is_right(where: str, decode: str) -> None:
    channel = ChannelFacts(where, described("prefill"))
    assert judged(pair(where, decode, **PULLED), channel) == []


@pytest.mark.parametrize("where", [LOOPBACK, ROUTED])
@pytest.mark.parametrize("engine", [None, "another"])
def test_a_pull_proves_an_address_whatever_answers_this_host(where: str, engine: Any) -> None:
    """It leads elsewhere from decode's host: to prefill, or to a relay."""
    channel = ChannelFacts(where, error="refused") if engine is None else None
    channel = channel or ChannelFacts(where, described(engine))
    assert judged(pair(where, **PULLED), channel) == [("channel.elsewhere", Severity.NOTE)]


@pytest.mark.parametrize("facts", [FAILED, UNKNOWN, {"pulled": False}])
def test_an_address_where_nothing_answers_and_nothing_was_pulled_is_a_fault(facts: Any) -> None:
    for where in (LOOPBACK, ROUTED):
        channel = ChannelFacts(where, error="refused")
        assert judged(pair(where, **facts), channel) == [("channel.advertised", Severity.FAULT)]


@pytest.mark.parametrize("facts", [FAILED, UNKNOWN])
def test_another_engine_at_the_address_is_a_fault_unless_it_was_pulled_by(facts: Any) -> None:
    channel = ChannelFacts(LOOPBACK, described("another"))
    assert judged(pair(LOOPBACK, **facts), channel) == [("channel.other-engine", Severity.FAULT)]


def test_loopback_is_judged_by_where_decode_is_and_what_it_did() -> None:
    channel = ChannelFacts(LOOPBACK, described("prefill"))
    assert judged(pair(LOOPBACK, **FAILED), channel) == [("golden.loopback", Severity.FAULT)]
    assert judged(pair(LOOPBACK, **UNKNOWN), channel) == [("golden.loopback", Severity.WARNING)]
    assert judged(pair(LOOPBACK, "127.0.0.1", **FAILED), channel) == []
    assert judged(pair(ROUTED, **FAILED), replace(channel, where=ROUTED)) == []


def test_credentials_that_are_refused_are_not_taken_for_another_engine() -> None:
    channel = ChannelFacts(LOOPBACK, error="the secrets probably differ", is_refused=True)
    assert judged(pair(LOOPBACK, **FAILED), channel) == [("channel.credentials", Severity.FAULT)]
    assert judged(pair(LOOPBACK, **PULLED), channel) == [("channel.credentials", Severity.FAULT)]


# With a real side channel


@in_loop
async def test_a_relay_on_loopback_is_healthy(tmp_path: Path, capsys: Any) -> None:
    async with healthy(tmp_path) as one:
        port = int(one.channel.rpartition(":")[2])
        with closing(Relay("127.0.0.1", port, MessageFaults(), 0)) as relay:
            one.prefill.advertised = ("127.0.0.1", relay.port)
            code, document = await one.ask(capsys)
    assert (code, ids(document)) == (0, [])


@in_loop
async def test_a_relay_to_another_engine_is_a_fault(tmp_path: Path, capsys: Any) -> None:
    """The control of the test above."""
    async with healthy(tmp_path) as one:
        one.prefill.engine_id = "the one behind the relay"
        one.decode.cannot = True
        code, document = await one.ask(capsys)
    assert (code, "channel.other-engine" in ids(document)) == (1, True)


@in_loop
async def test_a_ticket_that_names_a_closed_port_is_found(tmp_path: Path, capsys: Any) -> None:
    async with healthy(tmp_path) as one:
        one.prefill.advertised = ("127.0.0.1", free_ports(1)[0])
        one.decode.cannot = True
        code, document = await one.ask(capsys)
    assert (code, sorted(ids(document))) == (1, ["channel.advertised", "golden.not-pulled"])


def test_a_description_is_what_engines_send() -> None:
    """The facts above are no invention: they pass through the wire's codec."""
    sent = msgspec.json.encode(described("prefill"))
    assert msgspec.json.decode(sent, type=Described).engine_id == "prefill"
