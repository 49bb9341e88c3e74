"""Laws of choosing the network card that carries KV; no machine is read here."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.sidechannel.kv_card import (
    HostCards,
    NetCard,
    NoSuchCard,
    asked_card,
    parse_kv_interface,
    side_channel_card,
)


def card(name: str, *addresses: str, rdma: tuple[str, ...] = (), unusable: str = "") -> NetCard:
    return NetCard(
        name,
        tuple(ipaddress.ip_interface(each) for each in addresses),
        unusable,
        is_loopback=name == "lo",
        rdma=rdma,
    )


LO = card("lo", "127.0.0.1/8", "::1/128")
ETH0 = card("eth0", "172.30.0.11/24", "fd00:30::11/64")
ETH1 = card("eth1", "172.30.1.11/24", "fd00:31::11/64")
DOWN = card("eth2", "172.30.2.11/24", unusable="is down")
BRIDGE = card("br0", "172.30.3.11/24", unusable="is a bridge")
FAST = card("eth3", "172.30.4.11/24", rdma=("mlx5_0:1",))
CONTAINER = HostCards((LO, ETH0, ETH1, DOWN, BRIDGE))
ONE_FAST = HostCards((LO, ETH0, FAST), ("mlx5_0:1",))
EIGHT_FAST = HostCards((LO, ETH0, FAST), tuple(f"mlx5_{number}:1" for number in range(8)))


def auto(host: HostCards, *addresses: str) -> tuple[str, ...]:
    return side_channel_card([ipaddress.ip_address(each) for each in addresses], host).devices


def asked(text: str, host: HostCards = CONTAINER) -> tuple[str, ...]:
    return asked_card(parse_kv_interface(text), host).devices


def test_kv_goes_over_the_card_that_carries_the_side_channel() -> None:
    assert auto(CONTAINER, "172.30.1.11") == ("eth1",)
    assert auto(CONTAINER, "172.30.0.11") == ("eth0",)
    assert auto(CONTAINER, "fd00:31::11") == ("eth1",)
    assert auto(CONTAINER, "172.30.1.11", "fd00:31::11") == ("eth1",), "one name, two addresses"


@pytest.mark.parametrize(
    ("addresses", "why"),
    [
        ((), "no address of a side channel is known here"),
        (("10.9.9.9",), "no card here carries 10.9.9.9"),
        (("172.30.1.12",), "no card here carries 172.30.1.12"),
        (("127.0.0.1",), "the side channel is on loopback, at 127.0.0.1"),
        (("::1", "127.0.0.1"), "the side channel is on loopback, at ::1, 127.0.0.1"),
        (("172.30.0.11", "172.30.1.11"), "several cards carry .*: eth0, eth1"),
        (("172.30.2.11",), "eth2, which carries 172.30.2.11, is down"),
        (("172.30.3.11",), "br0, which carries 172.30.3.11, is a bridge"),
    ],
)
def test_ucx_chooses_where_the_side_channel_does_not_say(
    addresses: tuple[str, ...], why: str
) -> None:
    chosen = side_channel_card([ipaddress.ip_address(each) for each in addresses], CONTAINER)
    assert chosen.devices == ()
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(chosen.sentence)


def test_a_card_comes_with_its_rdma_port() -> None:
    """Without it a list of devices would switch RDMA off."""
    assert auto(ONE_FAST, "172.30.4.11") == ("mlx5_0:1", "eth3")
    assert asked("eth3", ONE_FAST) == asked("172.30.4.0/24", ONE_FAST) == ("mlx5_0:1", "eth3")


def test_a_side_channel_on_a_slow_card_does_not_take_kv_off_the_fast_ones() -> None:
    for host in (ONE_FAST, EIGHT_FAST):
        slow = side_channel_card([ipaddress.ip_address("172.30.0.11")], host)
        assert slow.devices == ()
        assert "eth0 carries 172.30.0.11, and there is RDMA by mlx5_0:1" in slow.sentence
    assert auto(EIGHT_FAST, "172.30.4.11") == (), "seven fast cards would be lost"
    assert asked("eth0", EIGHT_FAST) == ("eth0",), "the user may do it"


def test_the_log_says_which_card_and_why() -> None:
    chosen = side_channel_card([ipaddress.ip_address("172.30.1.11")], CONTAINER)
    assert chosen.sentence == "KV goes over eth1, which carries 172.30.1.11 (kv_interface: auto)"
    assert asked_card("eth0", CONTAINER).sentence == "KV goes over eth0 (kv_interface: eth0)"


def test_cards_are_asked_for_by_name_or_network() -> None:
    assert asked("eth1") == asked("172.30.1.0/24") == asked("172.30.1.7/24") == ("eth1",)
    assert asked("fd00:31::/64") == asked("172.30.1.11") == ("eth1",)
    assert asked("172.30.0.0/16") == ("eth0", "eth1"), "down cards are left out"
    assert asked("0.0.0.0/0") == ("eth0", "eth1"), "loopback is not meant"
    assert asked("lo") == asked("127.0.0.0/8") == ("lo",)
    assert asked("mlx5_0:1", EIGHT_FAST) == asked("mlx5_0", EIGHT_FAST) == ("mlx5_0:1",)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("eth9", r"kv_interface: expected a card of this machine \(lo, eth0, eth1\), got 'eth9'"),
        ("mlx5_0:1", r"expected a card of this machine \(lo, eth0, eth1\), got 'mlx5_0:1'"),
        ("10.0.0.0/8", r"a network that a card is in \(lo 127.0.0.1/8, .*\), got 10.0.0.0/8"),
        ("eth2", r"a card that UCX can use \(lo, eth0, eth1\), got eth2: eth2 is down"),
        ("172.30.3.0/24", "got 172.30.3.0/24: br0 is a bridge"),
    ],
)
def test_a_card_that_is_not_here_is_an_error_that_names_those_that_are(
    text: str, error: str
) -> None:
    with pytest.raises(NoSuchCard, match=error) as raised:
        asked(text)
    assert raised.value.field == "kv_interface"


@pytest.mark.parametrize(
    "value", ["", "eth0,eth1", "^eth0", "eth 0", "10.0.0.0/33", "a/b", 5, None]
)
def test_what_is_no_card_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match='"auto", a card like "eth1"'):
        parse_kv_interface(value)


PORTS = [f"mlx5_{number}:1" for number in range(3)]


@st.composite
def hosts(draw: st.DrawFn) -> HostCards:
    cards = []
    for number in range(draw(st.integers(0, 4))):
        addresses = draw(st.lists(st.sampled_from(["10.0.0.1/24", "10.0.1.1/24", "fd00::1/64"])))
        ports = tuple(draw(st.lists(st.sampled_from(PORTS), unique=True)))
        unusable = draw(st.sampled_from(["", "", "is down"]))
        cards.append(card(f"eth{number}", *addresses, rdma=ports, unusable=unusable))
    ports = {port for each in cards for port in each.rdma} | draw(st.sets(st.sampled_from(PORTS)))
    return HostCards((LO, *cards), tuple(sorted(ports)))


@given(
    hosts(),
    st.lists(st.sampled_from(["127.0.0.1", "10.0.0.1", "10.0.1.1", "fd00::1", "10.9.9.9"])),
)
def test_auto_excludes_no_rdma_port_and_leaves_a_usable_card(
    host: HostCards, addresses: list[str]
) -> None:
    chosen = auto(host, *addresses)
    if not chosen:
        return
    assert set(host.rdma) <= set(chosen)
    [own] = [each for each in host.usable if each.name in chosen]
    assert {str(each.ip) for each in own.addresses} & set(addresses)
    assert not own.is_loopback
