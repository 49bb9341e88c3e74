"""KV goes over the card that carries the side channel, in bytes that each card counts.

Two machines with two cables between them, as containers have that are on two networks.  The
first looks faster to UCX, since its packets are larger::

    p (eth0 10.213.0.11, eth1 10.214.0.11) ════ two cables ════ d (eth0 …21, eth1 …21)
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdconn.sidechannel.host_cards import routes_of, without_route
from tests.multinode.card_end import NBYTES
from tests.multinode.namespaces import Machine, Network, why_not

_WHY_NOT = why_not()
_ROOT = Path(__file__).parents[2]
in_namespaces = pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))
pytestmark = [pytest.mark.multinode, pytest.mark.timeout(240)]

if importlib.util.find_spec("nixl") is None:
    pytest.skip("nixl is not installed", allow_module_level=True)

KINDS = ["nixl"] + ["ucx"] * (importlib.util.find_spec("ucxx") is not None)
FIRST, SECOND = "10.213.0.", "10.214.0."


@pytest.fixture(scope="module")
def two_cards() -> Iterator[Network]:
    with Network({"p": 11, "d": 21}) as network:
        p, d = network["p"], network["d"]
        far = ("type", "veth", "peer", "name", "eth1", "netns", d.namespace)
        ip("link", "add", "name", "eth1", "netns", p.namespace, *far)
        for machine, address in ((p, f"{SECOND}11/24"), (d, f"{SECOND}21/24")):
            ip("-n", machine.namespace, "address", "add", address, "dev", "eth1")
            ip("-n", machine.namespace, "link", "set", "dev", "eth1", "mtu", "1400", "up")
        yield network


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def handed_over(
    kind: str, lends: list[str], reads: list[str], within: tuple[tuple[str, ...], ...] = ((), ())
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A read between two processes; what each end said."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("UCX_")}
    env["UCX_TLS"] = "tcp"

    def end(side: str, words: list[str], where: tuple[str, ...]) -> subprocess.Popen[str]:
        command = [*where, sys.executable, "-m", "tests.multinode.card_end", side, kind, *words]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(command, text=True, env=env, cwd=_ROOT, **pipes)

    with end("lend", lends, within[0]) as lender, end("read", reads, within[1]) as reader:
        try:
            ours = said(lender)
            assert reader.stdin is not None
            reader.stdin.write(json.dumps(ours) + "\n")
            reader.stdin.flush()
            theirs = said(reader)
        finally:
            lender.kill()
            reader.kill()
    assert (theirs["error"], theirs["arrived"]) == ("", True)
    return ours, theirs


def said(end: subprocess.Popen[str]) -> dict[str, Any]:
    assert end.stdout is not None
    for line in end.stdout:
        if line.startswith("@"):
            facts: dict[str, Any] = json.loads(line[1:])
            return facts
    raise AssertionError(f"it ended with {end.wait()} and said nothing")


def carried(two_cards: Network, kind: str, lends: list[str], reads: list[str]) -> dict[str, float]:
    """The part of a read's bytes that came in at each card of ``d``."""
    p, d = two_cards["p"], two_cards["d"]

    def now(machine: Machine) -> dict[str, int]:
        return {card: machine.received_nbytes(card) for card in ("eth0", "eth1")}

    before = now(d)
    handed_over(kind, lends, reads, (p.within, d.within))
    after = now(d)
    return {card: (after[card] - before[card]) / NBYTES for card in before}


@in_namespaces
@pytest.mark.parametrize("kind", KINDS)
def test_left_to_itself_ucx_takes_the_card_that_looks_faster(two_cards: Network, kind: str) -> None:
    """The control of the tests below."""
    by = carried(two_cards, kind, ["-"], ["-"])
    assert by["eth0"] >= 1.0
    assert by["eth1"] < 0.01


@in_namespaces
@pytest.mark.parametrize("kind", KINDS)
def test_the_side_channels_card_carries_all_though_only_prefill_has_one(
    two_cards: Network, kind: str
) -> None:
    """Decode, which listens nowhere, leaves it to UCX, which follows prefill's card."""
    by = carried(two_cards, kind, [f"{SECOND}11"], ["localhost"])
    assert by["eth1"] >= 1.0
    assert by["eth0"] < 0.01


@in_namespaces
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wanted", ["eth1", f"{SECOND}0/24"])
def test_decode_alone_may_ask_for_a_card(two_cards: Network, kind: str, wanted: str) -> None:
    key = json.dumps({"kv_interface": wanted})
    by = carried(two_cards, kind, ["-"], ["localhost", key])
    assert by["eth1"] >= 1.0
    assert by["eth0"] < 0.01


@in_namespaces
@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_cards_reaches_ucx(two_cards: Network, kind: str) -> None:
    """Both cards lie in this network; a list that is read as one name would leave UCX without."""
    key = json.dumps({"kv_interface": "10.208.0.0/12"})
    by = carried(two_cards, kind, ["localhost", key], ["localhost", key])
    assert by["eth0"] >= 1.0


@in_namespaces
def test_the_choice_is_said_and_leaves_no_variable_behind(two_cards: Network) -> None:
    within = two_cards["p"].within, two_cards["d"].within
    lender, reader = handed_over("nixl", [f"{SECOND}11"], [f"{SECOND}21"], within)
    assert lender["devices"] == ["eth1"]
    assert lender["sentence"] == (
        f"KV goes over eth1, which carries {SECOND}11 (kv_interface: auto)"
    )
    assert reader["devices"] == ["eth1"]
    assert lender["environment"] is reader["environment"] is None


@in_namespaces
def test_a_reader_on_the_other_network_has_no_route_over_the_card(two_cards: Network) -> None:
    """UCX ends a lender's process then, so that the side channel refuses such a reader."""
    with two_cards["p"].inside():
        assert without_route("eth1", "10.213.0.21", routes_of)
        assert not without_route("eth1", f"{SECOND}21", routes_of)
        assert not without_route("eth0", "10.213.0.21", routes_of)
        assert not without_route("eth1", f"{FIRST}11", routes_of), "this machine itself"


@pytest.mark.parametrize("kind", KINDS)
def test_on_loopback_nothing_is_restricted(kind: str) -> None:
    lender, reader = handed_over(kind, ["localhost"], ["localhost"])
    for end in (lender, reader):
        assert end["devices"] == []
        assert "on loopback" in end["sentence"]
        assert end["environment"] is None
