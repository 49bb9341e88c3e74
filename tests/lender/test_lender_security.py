"""A lender with a secret serves readers that know it, at the endpoint in the ticket."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace

import pytest

from pdconn.faults.frame_faults import MessageFaults
from pdconn.faults.relay import Relay
from pdconn.lender.server import Lender
from pdconn.protocol.auth import Secret
from pdconn.sidechannel.security import Security, Unprotected
from tests.fakes.pair import Pair

SECURED = Security(Secret(b"known to engines only"))
OTHER = Security(Secret(b"known to other engines"))


def test_a_reader_with_the_secret_pulls() -> None:
    with Pair(security=SECURED) as pair:
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        assert pair.freed() == "read"


@pytest.mark.parametrize("theirs", [OTHER, Security()], ids=["another secret", "no secret"])
def test_a_reader_without_the_secret_is_sent_nothing_counted_and_logged(
    theirs: Security, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with Pair(security=theirs) as pair:
        pair.lender.close()
        pair.security = SECURED
        pair.lender = pair.open_lender(0)
        pair.pull("d", pair.lend("r"))
        assert "side channel" in str(pair.outcome_of("d"))
        pair.wait(lambda: pair.lender.counts["connections_unauthenticated"] == 1)
        assert pair.lender.counts["claims"] == 0
    assert "not authenticated" in caplog.text


@pytest.mark.parametrize("theirs", [OTHER, Security()], ids=["another secret", "no secret"])
def test_a_lender_without_the_secret_is_counted_as_unauthenticated(theirs: Security) -> None:
    with Pair(security=SECURED) as pair:
        pair.lender.close()
        pair.security = theirs
        pair.lender = pair.open_lender(0)
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is not None
        assert pair.puller.take_pull_counts() == {"pulls_unauthenticated": 1}


def test_a_lender_that_is_down_is_counted_as_unreachable() -> None:
    with Pair(security=SECURED) as pair:
        ticket = pair.lend("r")
        pair.lender.close()
        pair.pull("d", ticket)
        assert pair.outcome_of("d") is not None
        assert pair.puller.take_pull_counts() == {"pulls_unreachable": 1}


@pytest.mark.parametrize("security", [SECURED, Security()], ids=["secret", "none"])
def test_a_host_that_a_forged_ticket_names_cannot_pass_the_handshake_on(
    security: Security,
) -> None:
    """The relay knows no secret.  Without one, the negative control, it is not noticed."""
    with Pair(security=security) as pair:
        relay = Relay("127.0.0.1", pair.lender.port, MessageFaults(), 0)
        try:
            pair.pull("d", replace(pair.lend("r"), port=relay.port))
            assert (pair.outcome_of("d") is None) == (security is not SECURED)
        finally:
            relay.close()
        assert pair.lender.counts["claims"] == (security is not SECURED)


def test_a_port_probe_is_not_counted_as_unauthenticated() -> None:
    with Pair(security=SECURED) as pair:
        for _ in range(3):
            socket.create_connection(("127.0.0.1", pair.lender.port)).close()
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        assert pair.lender.counts["connections_unauthenticated"] == 0


def test_an_unprotected_address_is_neither_served_nor_dialled() -> None:
    with Pair() as pair:
        with pytest.raises(Unprotected, match="secret_file"):
            Lender(pair.welcome(), "192.0.2.1", 0)
        pair.pull("d", replace(pair.lend("r"), host="192.0.2.1"))
        assert "PDCONN_SECRET" in str(pair.outcome_of("d"))
