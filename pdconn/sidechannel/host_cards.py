"""This machine's network cards, and the addresses of its side channel.

Cards are those of this network namespace, from ``getifaddrs``; their RDMA ports are read from
``/sys``.  An RDMA port counts if UCX can use it: its link is up, and its device node exists.  A
container sees every port of its host under ``/sys``, but has only the nodes of its own.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from pdconn.sidechannel.advertise import NoAdvertisedHost, advertised_host, is_wildcard
from pdconn.sidechannel.kv_card import HostAddress, HostCards, HostInterface, NetCard, Network

_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_MAX_STACKED = 4
"""Levels of cards below a card that are followed: a VLAN on a bond on its ports."""

Interfaces = Iterable[tuple[str, int, HostInterface | None]]
"""Name, flags and address: a row for each address, and one without an address for each card."""


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
    """Addresses of a side channel that listens at ``host``; for a wildcard, of the advertised host.

    Empty if the name does not resolve, or no host can be advertised: the side channel itself
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


def without_route(card: str, host: str, routes: Callable[[str], Iterable[Network]]) -> bool:
    """Whether ``card`` has no route to ``host``, in any routing table.

    UCX ends the process of a lender that is restricted to such a card when ``host`` connects
    (1.23, "no active messages transport").

    Args:
        routes: the networks that a card has a route to.
    """
    address = _unmapped(ipaddress.ip_address(host.partition("%")[0]))
    if any(own is not None and own.ip == address for _, _, own in _interfaces()):
        return False  # it is this machine itself
    return not any(address in network for network in routes(card))


def _unmapped(address: HostAddress) -> HostAddress:
    """Of ``::ffff:10.0.0.1`` the IPv4 address, which is what the card has."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


# --- RDMA, from /sys and /dev -------------------------------------------------------------


def _usable_ports(root: Path) -> Iterator[str]:
    nodes = _has_node(root)
    for device in listed_files(root / "sys/class/infiniband"):
        # A device counts if its node is unknown: UCX chooses then, which does not exclude RDMA.
        if not nodes.get(device.name, True):
            continue
        for port in listed_files(device / "ports"):
            if text_of(port / "state").endswith("ACTIVE"):
                yield f"{device.name}:{port.name}"


def _has_node(root: Path) -> dict[str, bool]:
    """Whether the node of each RDMA device is in ``/dev``."""
    return {
        text_of(verbs / "ibdev"): (root / "dev/infiniband" / verbs.name).exists()
        for verbs in listed_files(root / "sys/class/infiniband_verbs")
        if verbs.name.startswith("uverbs")
    }


def _ports_of(root: Path, name: str, depth: int) -> Iterator[str]:
    """RDMA ports of a card, or of the cards that a VLAN or a bond is made of."""
    card = root / "sys/class/net" / name
    for device in listed_files(card / "device/infiniband"):
        ports = root / "sys/class/infiniband" / device.name / "ports"
        known = [port.name for port in listed_files(ports)]
        dev_port = text_of(card / "dev_port")
        # The second port of a card is another interface of the same PCI device.
        own = str(int(dev_port) + 1) if dev_port.isdecimal() else ""
        for port in [own] if own in known else known:
            yield f"{device.name}:{port}"
    for lower in listed_files(card) if depth else ():
        if lower.name.startswith("lower_"):
            yield from _ports_of(root, lower.name.removeprefix("lower_"), depth - 1)


def listed_files(folder: Path) -> list[Path]:
    """The entries of a folder of ``/sys``, in order; empty if there is no such folder."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def text_of(path: Path) -> str:
    """The stripped content of a file of ``/sys``; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
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


# --- routes, from the kernel --------------------------------------------------------------

_RTM_GETROUTE, _DUMP, _NLMSG_ERROR, _NLMSG_DONE = 26, 0x301, 2, 3
_UNICAST = 1
_RTA_DST, _RTA_OIF, _RTA_MULTIPATH = 1, 4, 9


def routes_of(card: str) -> list[Network]:
    """Networks that ``card`` has a route to, in any table, by the query that UCX makes.

    Raises:
        OSError: there is no such card, or the kernel does not answer.
    """
    index = socket.if_nametoindex(card)
    found: list[Network] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(1.0)
        kernel.send(struct.pack("=IHHII12x", 28, _RTM_GETROUTE, _DUMP, 1, 0))
        while True:
            for kind, body in _records(kernel.recv(1 << 16), 16, "=IH"):
                if kind == _NLMSG_ERROR:
                    raise OSError("the kernel does not list its routes")
                if kind == _NLMSG_DONE:
                    return found
                found += _route(body, index)


def _records(data: bytes, head: int, layout: str) -> Iterator[tuple[int, bytes]]:
    """Type and content of netlink's messages (a head of 16 bytes) or attributes (of 4)."""
    while len(data) >= head:
        size, kind = struct.unpack_from(layout, data)
        if size < head:
            return
        yield kind, data[head:size]
        data = data[(size + 3) & ~3 :]


def _route(message: bytes, index: int) -> Iterator[Network]:
    """The network of a route by interface ``index``; none of a route by another."""
    family, prefix, kind = message[0], message[1], message[7]
    if kind != _UNICAST or family not in _OFFSETS:
        return
    attributes = dict(_records(message[12:], 4, "=HH"))
    hops = [attributes[_RTA_OIF]] if _RTA_OIF in attributes else []
    several = attributes.get(_RTA_MULTIPATH, b"")
    while len(several) >= 8:
        hops.append(several[4:8])
        several = several[max(8, int.from_bytes(several[:2], sys.byteorder)) :]
    if any(int.from_bytes(hop, sys.byteorder) == index for hop in hops):
        size = _OFFSETS[socket.AddressFamily(family)][1]
        address = ipaddress.ip_address(attributes.get(_RTA_DST, bytes(size)))
        yield ipaddress.ip_network(f"{address}/{prefix}")
