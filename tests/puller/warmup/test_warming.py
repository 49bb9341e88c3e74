"""Laws of warming, over real sockets and threads: it helps, and it harms no pull."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from pdconn.lender.server import Lender
from pdconn.protocol.auth import Secret
from pdconn.puller.warmup import Place
from pdconn.sidechannel.security import Security
from pdconn.tools.lab.ports import free_ports
from tests.fakes.credentials import Authority
from tests.puller.warmup.warm_pair import SECONDS, WarmPair, until_warm
from tests.threads.inside import num_open, num_peers, num_warm


def test_a_lender_is_warm_before_any_request_and_is_then_claimed_from_at_once() -> None:
    with WarmPair(warms=True) as pair:
        until_warm(pair)
        assert num_open(pair.puller) == 0
        counts = pair.lender.counts
        assert (counts["greeted"], counts["claims"]) == (1, 0)
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        assert num_peers(pair.puller) == 1
        assert pair.ours.row(7) == pair.theirs.row(3)
        assert counts["greeted"] == 1, "the pull greeted anew"


def test_without_places_no_lender_is_warmed() -> None:
    """Negative control."""
    with WarmPair() as pair:
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        assert num_warm(pair.puller) == 0


def test_a_lender_that_is_only_connected_is_not_read_from() -> None:
    with WarmPair(warms=True, probes=False) as pair:
        until_warm(pair)
        assert not pair.scratch.tensor.any()


def test_a_lender_that_comes_up_later_is_warmed_then() -> None:
    [port] = free_ports(1)
    with WarmPair(also_warm=(Place("127.0.0.1", port),)) as pair:
        time.sleep(0.3)  # some tries fail
        assert num_warm(pair.puller) == 0
        with closing(Lender(pair.welcome(), "127.0.0.1", port)):
            until_warm(pair)


def test_a_restarted_lender_is_warmed_anew_under_its_new_boot() -> None:
    with WarmPair(warms=True) as pair:
        until_warm(pair)
        port = pair.lender.port
        pair.lender.close()
        pair.wait(lambda: num_warm(pair.puller) == 0, SECONDS)
        pair.incarnation = "boot-2"
        pair.lender = pair.open_lender(port)
        until_warm(pair)
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        assert num_peers(pair.puller) == 1


def test_a_request_that_comes_meanwhile_joins_and_is_served() -> None:
    with WarmPair(warms=True) as pair:
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        until_warm(pair)
        assert num_peers(pair.puller) == 1


@pytest.mark.parametrize("theirs", ["boot-1", "other"])
def test_the_secret_is_proven_by_a_warm_up_too(theirs: str) -> None:
    shared = Security(Secret(b"a secret of all engines"))
    with WarmPair(warms=True, security=shared) as pair:
        until_warm(pair)
        port = pair.lender.port
        pair.lender.close()
        pair.wait(lambda: num_warm(pair.puller) == 0, SECONDS)
        other = Security(Secret(b"a secret of others"))
        pair.security = shared if theirs == "boot-1" else other
        pair.lender = pair.open_lender(port)
        if theirs == "boot-1":
            until_warm(pair)
        else:
            pair.wait(lambda: pair.lender.counts["connections_unauthenticated"] > 1, SECONDS)
            assert num_warm(pair.puller) == 0
            assert pair.lender.counts["greeted"] == 0


def test_certificates_are_shown_by_a_warm_up_too(tmp_path: Path) -> None:
    files = Authority(tmp_path).sign("engine", "127.0.0.1")
    with WarmPair(warms=True, security=Security(tls=files)) as pair:
        until_warm(pair)


def test_an_engine_does_not_warm_itself() -> None:
    with WarmPair(warms=True, our_name="prefill") as pair:
        pair.wait(lambda: pair.lender.counts["greeted"], SECONDS)
        pair.wait(lambda: num_peers(pair.puller) == 0, SECONDS)
        time.sleep(0.5)  # some pauses
        assert pair.lender.counts["greeted"] == 1
        assert num_warm(pair.puller) == 0


def test_a_warm_up_makes_no_room_for_itself_and_gives_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="pdconn")
    [port] = free_ports(1)
    with WarmPair(warms=True, also_warm=(Place("127.0.0.1", port),), max_peers=1) as pair:
        until_warm(pair)
        with closing(Lender(pair.welcome(), "127.0.0.1", port)) as other:
            tries = caplog.text.count("1 lenders are known")
            pair.wait(lambda: caplog.text.count("1 lenders are known") > tries + 4, SECONDS)
            assert other.counts["greeted"] == 0
            assert (num_warm(pair.puller), pair.lender.counts["greeted"]) == (1, 1)
            ticket = replace(pair.lend("r"), port=port)
            other.lend("r", ticket.digest(), 5.0)
            pair.pull("d", ticket)
            assert pair.outcome_of("d") is None
            assert pair.lender.counts["greeted"] == 1, "the warm-up took the room back"
        pair.wait(lambda: pair.lender.counts["greeted"] > 1, SECONDS)
