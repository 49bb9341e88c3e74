"""This machine's network cards, and the addresses of its side channel.

Cards are those of this network namespace, from ``getifaddrs``; which RDMA ports they have is read
from ``/sys``.  An RDMA port counts if UCX can use it: its link is up, and its device node is here.
A container sees every port of its host under ``/sys``, and has the nodes of its own alone.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from pdconn.sidechannel.advertise import NoAdvertisedHost, advertised_host, is_wildcard
from pdconn.sidechannel.kv_card import HostAddress, HostCards, HostInterface, NetCard

_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_MAX_STACKED = 4
"""Cards below a card that are followed: a VLAN on a bond on its ports."""

Interfaces = Iterable[tuple[str, int, HostInterface | None]]
"""Name, flags and address; a row for each address, and one without for each card."""


def read_cards(
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    interfaces: Callable[[], Interfaces] | None = None,
) -> HostCards:
    """The cards, in the kernel's order.

    Args:
        root: where ``sys`` and ``dev`` are.
        environ: may let UCX use bridges.
        interfaces: in place of the kernel's.

    Raises:
        OSError: the kernel does not list them.
    """
    flags: dict[str, int] = {}
    addresses: dict[str, list[HostInterface]] = {}
    for name, has, address in (interfaces or _interfaces)():
        flags[name] = has
        addresses.setdefault(name, []).extend([] if address is None else [address])
    rdma = tuple(_usable_ports(root))
    folder = root / "sys/class/net"
    takes_bridges = environ.get("UCX_TCP_BRIDGE_ENABLE", "n").lower() in ("y", "yes", "on", "1")
    cards = []
    for name, has in flags.items():
        is_bridge = (folder / name / "bridge").is_dir() and not takes_bridges
        unusable = ""
        if not has & _IFF_UP or not has & _IFF_RUNNING:
            unusable = "is down"
        elif not addresses[name]:
            unusable = "has no address"
        elif is_bridge:
            unusable = "is a bridge, which UCX leaves out without UCX_TCP_BRIDGE_ENABLE=y"
        ports = dict.fromkeys(_ports_of(root, name, _MAX_STACKED))
        cards.append(
            NetCard(
                name,
                tuple(addresses[name]),
                unusable,
                is_loopback=bool(has & _IFF_LOOPBACK),
                rdma=tuple(port for port in ports if port in rdma),
            )
        )
    return HostCards(tuple(cards), rdma)


def side_channel_addresses(
    host: str, advertise: str | None, environ: Mapping[str, str] = os.environ
) -> tuple[HostAddress, ...]:
    """Addresses of a side channel that listens at ``host``; of a wildcard, what tickets name.

    Empty if its name leads nowhere, or tickets could name nothing: the side channel itself
    reports that when it starts.
    """
    try:
        if is_wildcard(host):
            host = advertised_host(host, advertise, environ)
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (NoAdvertisedHost, OSError, UnicodeError):
        return ()
    texts = dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found)
    return tuple(_unmapped(ipaddress.ip_address(text)) for text in texts)


def _unmapped(address: HostAddress) -> HostAddress:
    """Of ``::ffff:10.0.0.1`` the IPv4 address, which is what the card has."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


# --- RDMA, from /sys and /dev -------------------------------------------------------------


def _usable_ports(root: Path) -> Iterator[str]:
    nodes = _has_node(root)
    for device in _listed(root / "sys/class/infiniband"):
        # Without an answer it counts: then UCX chooses, which cannot switch RDMA off.
        if not nodes.get(device.name, True):
            continue
        for port in _listed(device / "ports"):
            if _text(port / "state").endswith("ACTIVE"):
                yield f"{device.name}:{port.name}"


def _has_node(root: Path) -> dict[str, bool]:
    """Whether the node of each RDMA device is in ``/dev``."""
    return {
        _text(verbs / "ibdev"): (root / "dev/infiniband" / verbs.name).exists()
        for verbs in _listed(root / "sys/class/infiniband_verbs")
        if verbs.name.startswith("uverbs")
    }


def _ports_of(root: Path, name: str, depth: int) -> Iterator[str]:
    """RDMA ports of a card, or of the cards that a VLAN or a bond is made of."""
    card = root / "sys/class/net" / name
    for device in _listed(card / "device/infiniband"):
        ports = root / "sys/class/infiniband" / device.name / "ports"
        known = [port.name for port in _listed(ports)]
        dev_port = _text(card / "dev_port")
        # The second port of a card is another interface of the same PCI device.
        own = str(int(dev_port) + 1) if dev_port.isdecimal() else ""
        for port in [own] if own in known else known:
            yield f"{device.name}:{port}"
    for lower in _listed(card) if depth else ():
        if lower.name.startswith("lower_"):
            yield from _ports_of(root, lower.name.removeprefix("lower_"), depth - 1)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


# --- interfaces, from the kernel ----------------------------------------------------------


class _Ifaddrs(ctypes.Structure):
    pass


_Ifaddrs._fields_ = [
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("addr", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("broadcast", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]

_OFFSETS = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
"""Where in a ``sockaddr`` of each family the address is, and its bytes."""


def _interfaces() -> Iterator[tuple[str, int, HostInterface | None]]:
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs")
    try:
        at = first
        while at:
            entry = at.contents
            # An address may have a label of its own, ``eth1:0``; no card has a colon in its name.
            name = (entry.name or b"").decode(errors="replace").partition(":")[0]
            yield name, int(entry.flags), _interface(entry.addr, entry.netmask)
            at = entry.next
    finally:
        libc.freeifaddrs(first)


def _interface(addr: int | None, netmask: int | None) -> HostInterface | None:
    """The address at a ``sockaddr``, with the prefix of its mask; None for another family."""
    if not addr:
        return None
    family = ctypes.c_uint16.from_address(addr).value
    if family not in _OFFSETS:
        return None
    offset, size = _OFFSETS[socket.AddressFamily(family)]
    mask = ctypes.string_at(netmask + offset, size) if netmask else b"\xff" * size
    prefix = int.from_bytes(mask, "big").bit_count()
    address = ipaddress.ip_address(ctypes.string_at(addr + offset, size))
    return ipaddress.ip_interface(f"{address}/{prefix}")
