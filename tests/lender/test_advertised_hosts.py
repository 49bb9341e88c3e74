"""A lender listens at one place and is known by another; routers write a third into tickets.

production-stack and AIBrix overwrite ``remote_host`` with the host of the endpoint that they chose.
The lender is the same, so the pull is; and a host that is not the lender's stays refused.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from pdconn.faults.frame_faults import MessageFaults
from pdconn.faults.relay import Relay
from pdconn.lender.server import Lender
from pdconn.protocol.auth import AuthError, LenderAuth, ReaderAuth, Secret
from pdconn.protocol.ticket import Ticket, parse_ticket
from pdconn.sidechannel.security import Security, Unprotected
from tests.fakes.credentials import Authority
from tests.fakes.pair import Pair

NAME = "prefill-0.invalid"
SECRET = Secret(b"known to engines only")
EVERYWHERE: dict[str, Any] = {"bound": "0.0.0.0", "advertised": NAME}


def overwritten(ticket: Ticket, host: str) -> Ticket:
    """As a router forwards it that knows prefill by ``host``: through JSON, all else whole."""
    params = json.loads(json.dumps(ticket.to_params(1, 1)))
    return parse_ticket({**params, "remote_host": host})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("how", ["insecure", "secret"])
def test_a_ticket_with_another_host_of_its_lender_is_claimed(how: str, host: str) -> None:
    """An address needs no further name; a name other than the address must be the advertised."""
    security = Security(SECRET) if how == "secret" else Security(insecure=True)
    known = {**EVERYWHERE, "advertised": NAME if host == "127.0.0.1" else host}
    with Pair(security=security, **known) as pair:
        pair.pull("d", overwritten(pair.lend("r"), host))
        assert pair.outcome_of("d") is None
        assert pair.freed() == "read"


def test_tickets_name_the_advertised_host() -> None:
    """Control of the above: this one cannot be dialled."""
    with Pair(security=Security(SECRET), **EVERYWHERE) as pair:
        ticket = pair.lend("r")
        assert ticket.host == NAME
        pair.pull("d", ticket)
        assert "side channel" in str(pair.outcome_of("d"))


@pytest.mark.parametrize(
    ("names", "is_pulled"), [((NAME, "127.0.0.1"), True), ((NAME,), False)], ids=["both", "one"]
)
def test_certificates_must_name_the_host_that_a_router_writes(
    tmp_path: Path, names: tuple[str, ...], is_pulled: bool
) -> None:
    files = Authority(tmp_path / "ca").sign("engine", *names)
    with Pair(security=Security(SECRET, files), **EVERYWHERE) as pair:
        pair.pull("d", overwritten(pair.lend("r"), "127.0.0.1"))
        assert (pair.outcome_of("d") is None) == is_pulled
        assert pair.lender.counts["claims"] == is_pulled


def test_a_host_that_is_not_the_lender_s_cannot_pass_the_handshake_on() -> None:
    """A forged ticket names a relay, of a lender that listens at every address."""
    with Pair(security=Security(SECRET), **EVERYWHERE) as pair:
        relay = Relay("127.0.0.1", pair.lender.port, MessageFaults(), 0)
        try:
            params = pair.lend("r").to_params(1, 1)
            forged = {**params, "remote_host": "127.0.0.1", "remote_port": relay.port}
            pair.pull("d", parse_ticket(forged))
            assert "does not know itself by this host" in str(pair.outcome_of("d"))
        finally:
            relay.close()
        assert pair.lender.counts["claims"] == 0


@pytest.mark.parametrize(
    ("dialled", "is_ours"),
    [("a:1", True), ("b:1", True), ("c:1", False), ("a:2", False), ("", False), ("a:1b:1", False)],
)
def test_a_proof_is_good_for_an_endpoint_of_the_lender_and_no_other(
    dialled: str, is_ours: bool
) -> None:
    reader = ReaderAuth(SECRET, b"r" * 32, dialled)
    lender = LenderAuth(SECRET, b"l" * 32, ("a:1", "b:1"))
    (hello,) = reader.opening_frames()
    (challenge,) = lender.feed_frame(hello)[1]
    (proof,) = reader.feed_frame(challenge)[1]
    if not is_ours:
        with pytest.raises(AuthError, match="for a:1 or b:1, got 'one made with another, or by"):
            lender.feed_frame(proof)
        return
    (answer,) = lender.feed_frame(proof)[1]
    assert reader.feed_frame(answer) == ([], [])
    assert lender.feed_frame(reader.seal(b"claim"))[0] == [b"claim"]
    assert reader.feed_frame(lender.seal(b"granted"))[0] == [b"granted"]


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::", "0"])
@pytest.mark.parametrize("advertised", ["127.0.0.1", "10.0.0.1"])
def test_every_address_is_off_loopback_whatever_is_advertised(
    wildcard: str, advertised: str
) -> None:
    with Pair() as pair, pytest.raises(Unprotected, match="PDCONN_SECRET"):
        Lender(pair.welcome(), wildcard, 0, advertised=advertised)


def test_what_is_advertised_beyond_loopback_is_protected_too() -> None:
    """A port that is forwarded to loopback is reached from elsewhere."""
    with Pair() as pair, pytest.raises(Unprotected, match=r"side channel at 10\.0\.0\.1"):
        Lender(pair.welcome(), "127.0.0.1", 0, advertised="10.0.0.1")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_v6_wildcard_serves_both_families(host: str) -> None:
    if host == "::1":
        _need_v6()
    with Pair(security=Security(SECRET), bound="::", advertised=NAME) as pair:
        pair.pull("d", overwritten(pair.lend("r"), host))
        assert pair.outcome_of("d") is None


def _need_v6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
