"""This machine's cards: as the kernel lists them, and RDMA as ``/sys`` of other machines does."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdconn.sidechannel.host_cards import (
    Interfaces,
    read_cards,
    routes_of,
    side_channel_addresses,
    without_route,
)

UP = 0x1 | 0x40


def interfaces(*rows: tuple[str, int, str]) -> Interfaces:
    return [(name, flags, ipaddress.ip_interface(text)) for name, flags, text in rows]


class Sys:
    """A made-up ``/sys`` and ``/dev``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.net = root / "sys/class/net"

    def port(self, device: str, port: int, state: str = "4: ACTIVE", node: bool = True) -> None:
        folder = self.root / f"sys/class/infiniband/{device}/ports/{port}"
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n", encoding="utf-8")
        verbs = f"uverbs{device[-1]}"
        known = self.root / "sys/class/infiniband_verbs" / verbs
        known.mkdir(parents=True, exist_ok=True)
        (known / "ibdev").write_text(f"{device}\n", encoding="utf-8")
        if node:
            (self.root / "dev/infiniband").mkdir(parents=True, exist_ok=True)
            (self.root / "dev/infiniband" / verbs).touch()

    def card(self, name: str, device: str | None = None, dev_port: int = 0) -> None:
        (self.net / name).mkdir(parents=True)
        (self.net / name / "dev_port").write_text(f"{dev_port}\n", encoding="utf-8")
        if device is not None:
            (self.net / name / "device/infiniband" / device).mkdir(parents=True)

    def rdma(self, *names: str) -> tuple[dict[str, Sequence[str]], Sequence[str]]:
        rows = interfaces(*((name, UP, "10.0.0.1/24") for name in names))
        host = read_cards(self.root, {}, lambda: rows)
        return {card.name: card.rdma for card in host.cards}, host.rdma


@pytest.fixture
def made(tmp_path: Path) -> Sys:
    return Sys(tmp_path)


def test_a_card_has_the_port_of_its_own_device(made: Sys) -> None:
    made.port("mlx5_0", 1)
    made.port("mlx5_1", 1)
    made.card("eth0", "mlx5_0")
    made.card("eth1")
    assert made.rdma("eth0", "eth1") == (
        {"eth0": ("mlx5_0:1",), "eth1": ()}, ("mlx5_0:1", "mlx5_1:1"),
    )  # fmt: skip


def test_the_second_interface_of_a_device_has_its_second_port(made: Sys) -> None:
    made.port("mlx4_0", 1)
    made.port("mlx4_0", 2)
    made.card("eth0", "mlx4_0")
    made.card("eth1", "mlx4_0", dev_port=1)
    assert made.rdma("eth0", "eth1")[0] == {"eth0": ("mlx4_0:1",), "eth1": ("mlx4_0:2",)}


def test_a_vlan_on_a_bond_has_the_port_below(made: Sys) -> None:
    made.port("mlx5_0", 1)
    made.card("eth0", "mlx5_0")
    made.card("bond0")
    made.card("bond0.7")
    (made.net / "bond0/lower_eth0").touch()
    (made.net / "bond0.7/lower_bond0").touch()
    assert made.rdma("bond0.7")[0] == {"bond0.7": ("mlx5_0:1",)}


def test_ports_that_ucx_cannot_use_do_not_count(made: Sys) -> None:
    """One has no link; of one the container has no device node."""
    made.port("mlx5_0", 1, state="1: DOWN")
    made.port("mlx5_1", 1, node=False)
    made.port("mlx5_2", 1)
    made.card("eth0", "mlx5_0")
    made.card("eth1", "mlx5_1")
    made.card("eth2", "mlx5_2")
    assert made.rdma("eth0", "eth1", "eth2") == (
        {"eth0": (), "eth1": (), "eth2": ("mlx5_2:1",)}, ("mlx5_2:1",),
    )  # fmt: skip


def test_cards_that_ucx_cannot_use_say_why(made: Sys) -> None:
    (made.net / "br0/bridge").mkdir(parents=True)
    rows = [
        *interfaces(("eth0", UP, "10.0.0.1/24"), ("eth1", 0x1, "10.0.1.1/24")),
        *interfaces(("br0", UP, "10.0.2.1/24"), ("lo", UP | 0x8, "127.0.0.1/8")),
        ("eth3", UP, None),
    ]
    said = {card.name: card.unusable for card in read_cards(made.root, {}, lambda: rows).cards}
    assert said["eth0"] == said["lo"] == ""
    assert said["eth1"] == "is down"
    assert said["eth3"] == "has no address"
    assert "is a bridge" in said["br0"]
    environ = {"UCX_TCP_BRIDGE_ENABLE": "y"}
    with_bridges = {c.name: c.unusable for c in read_cards(made.root, environ, lambda: rows).cards}
    assert with_bridges["br0"] == ""


def test_the_kernels_list_has_every_interface_and_its_addresses() -> None:
    """Names beside those of another call; others may come and go between the two."""
    for _ in range(20):
        host, names = read_cards(), [name for _, name in socket.if_nameindex()]
        if [card.name for card in host.cards] == names:
            break
    assert [card.name for card in host.cards] == names
    [loopback] = [card for card in host.cards if card.is_loopback]
    assert ipaddress.ip_interface("127.0.0.1/8") in loopback.addresses
    assert loopback.carries(ipaddress.ip_address("127.0.0.1"))


def test_its_addresses_are_those_that_the_kernel_routes_by() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.77", 9))  # sends nothing
        except OSError:
            pytest.skip("no route leads out of this machine")
        ours = ipaddress.ip_address(probe.getsockname()[0])
    assert sum(card.carries(ours) for card in read_cards().cards) == 1


def test_addresses_of_a_side_channel() -> None:
    loopback = ipaddress.ip_address("127.0.0.1")
    assert loopback in side_channel_addresses("localhost", None)
    assert side_channel_addresses("10.1.2.3", "203.0.113.7") == (ipaddress.ip_address("10.1.2.3"),)
    assert side_channel_addresses("::ffff:10.1.2.3", None) == side_channel_addresses(
        "10.1.2.3", None
    )
    pod = {"POD_IP": "10.1.2.3"}
    assert side_channel_addresses("0.0.0.0", None, pod) == side_channel_addresses("10.1.2.3", None)
    assert side_channel_addresses("0.0.0.0", "10.1.2.4", pod) == (ipaddress.ip_address("10.1.2.4"),)
    assert side_channel_addresses("0.0.0.0", None, {"POD_IP": "nonsense"}) == ()
    assert side_channel_addresses("no.such.host.invalid", None) == ()


def networks(*texts: str) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    return [ipaddress.ip_network(text) for text in texts]


def test_a_reader_beyond_every_route_of_the_card_cannot_be_served() -> None:
    table = {"eth1": networks("10.1.0.0/16", "fd00::/64"), "eth0": networks("0.0.0.0/0")}
    assert not without_route("eth1", "10.1.2.3", table.__getitem__)
    assert not without_route("eth1", "::ffff:10.1.2.3", table.__getitem__)
    assert not without_route("eth1", "fd00::9", table.__getitem__)
    assert without_route("eth1", "10.2.2.3", table.__getitem__)
    assert not without_route("eth0", "10.2.2.3", table.__getitem__)
    assert not without_route("eth1", "127.0.0.1", table.__getitem__), "this machine itself"


def test_the_kernels_routes_are_those_of_proc() -> None:
    """Of every card, IPv4's main table as the kernel writes it elsewhere."""
    for _ in range(20):  # others may add and remove routes meanwhile
        listed = dict.fromkeys([name for _, name in socket.if_nameindex()], 0)
        written: dict[str, set[str]] = {name: set() for name in listed}
        for line in Path("/proc/net/route").read_text(encoding="utf-8").splitlines()[1:]:
            name, to, _, flags, *_, mask, _, _, _ = line.split()
            if int(flags, 16) & 0x1 and not int(flags, 16) & 0x200:
                number = bytes.fromhex(to)[::-1]
                bits = int(mask, 16).bit_count()
                written.setdefault(name, set()).add(f"{ipaddress.ip_address(number)}/{bits}")
        seen = {name: set(map(str, routes_of(name))) for name in listed}
        if all(written[name] <= seen[name] for name in listed):
            break
    assert any(written.values())
    for name in listed:
        assert written[name] <= seen[name]
        others = {route for each in listed if each != name for route in written[each]}
        assert not (others - written[name]) & seen[name], "routes of other cards are left out"
    with pytest.raises(OSError, match="interface"):
        routes_of("no-such-card")
