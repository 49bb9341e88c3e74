"""Which network card carries the KV bytes, chosen without IO from a list of this machine's cards.

UCX opens every card and prefers the one that it believes fastest, which on a machine with two
networks may be the wrong one.  Engines reach each other on the network of the side channel's
address, so by default (``auto``) KV goes over the card that has this address.

To UCX one card may be two devices: ``eth1``, for TCP, and ``mlx5_0:1``, for RDMA.  A list of
devices without the second one silently disables RDMA.  Hence two rules:

* A card is always given to UCX together with its RDMA ports.
* ``auto`` leaves the choice to UCX rather than exclude an RDMA port: on a machine with eight fast
  cards the side channel often listens on a slow ninth.

UCX has other lists for devices that are no network cards (shared memory, CUDA, the process itself);
they are not restricted.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from transport.errors import FieldError

KEY, AUTO = "kv_interface", "auto"

HostAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
HostInterface = ipaddress.IPv4Interface | ipaddress.IPv6Interface
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
WantedCard = str | Network
"""``auto``, the name of a card or of an RDMA port, or the network that the card is in."""

_NAME = re.compile(r"[^\s/,^]{1,64}")
"""Commas and ``^`` have a meaning in UCX's lists; names of cards contain neither."""


class NoSuchCard(FieldError, ValueError):
    """``kv_interface`` names a card that this machine does not have, or that UCX cannot use."""


@dataclass(frozen=True, slots=True)
class NetCard:
    """A network interface.

    Attributes:
        name: by which the kernel and UCX's TCP know it.
        addresses: its addresses with their prefix lengths.
        unusable: why UCX's TCP does not use it; empty if it does.
        rdma: usable RDMA ports of the same card, as UCX names them: ``mlx5_0:1``.
    """

    name: str
    addresses: tuple[HostInterface, ...] = ()
    unusable: str = ""
    is_loopback: bool = False
    rdma: tuple[str, ...] = ()

    def carries(self, address: HostAddress) -> bool:
        """Whether ``address`` is one of the card's own."""
        return any(own.ip == address for own in self.addresses)

    def is_in(self, network: Network) -> bool:
        """Whether one of the card's addresses lies in ``network``."""
        return any(own.ip in network for own in self.addresses)


@dataclass(frozen=True, slots=True)
class HostCards:
    """This machine's cards, and its usable RDMA ports, with those of no listed card."""

    cards: tuple[NetCard, ...] = ()
    rdma: tuple[str, ...] = ()

    @property
    def usable(self) -> tuple[NetCard, ...]:
        """Cards that UCX's TCP uses."""
        return tuple(card for card in self.cards if not card.unusable)


@dataclass(frozen=True, slots=True)
class KVCard:
    """The choice: UCX's network devices (none: UCX chooses), and a sentence for the log."""

    devices: tuple[str, ...]
    sentence: str


def parse_kv_interface(value: object) -> WantedCard:
    """A value of ``kv_interface``.

    >>> parse_kv_interface("172.30.1.11/24"), parse_kv_interface("mlx5_0:1")
    (IPv4Network('172.30.1.0/24'), 'mlx5_0:1')

    Raises:
        ValueError: saying what was expected.
    """
    if isinstance(value, str):
        with suppress(ValueError):
            return ipaddress.ip_network(value, strict=False)
        if _NAME.fullmatch(value):
            return value
    raise ValueError(
        '"auto", a card like "eth1" or "mlx5_0:1", or an address with prefix length like '
        '"172.30.1.0/24"'
    )


def asked_card(wanted: WantedCard, host: HostCards) -> KVCard:
    """The card that the user has chosen by name or network.

    Raises:
        NoSuchCard: naming the usable ones.
    """
    if isinstance(wanted, str):
        devices = tuple(_named(wanted, host))
    else:
        # 0.0.0.0/0 does not mean loopback.
        inside = [c for c in host.usable if c.is_in(wanted) and c.is_loopback <= wanted.is_loopback]
        devices = tuple(device for card in inside for device in _devices(card))
    if not devices:
        raise _no_such(wanted, host)
    return KVCard(devices, f"KV goes over {', '.join(devices)} ({KEY}: {wanted})")


def side_channel_card(addresses: Sequence[HostAddress], host: HostCards) -> KVCard:
    """The card of the side channel, or UCX's choice where that is not safe.

    Args:
        addresses: of the side channel; empty if they are unknown.
    """
    listed = ", ".join(map(str, addresses))
    carrying = [card for card in host.cards if any(map(card.carries, addresses))]
    if why := _why_not(listed, carrying, host):
        return KVCard((), f"UCX chooses the network card of KV: {why} ({KEY}: {AUTO})")
    devices = _devices(carrying[0])
    names = ", ".join(devices)
    return KVCard(devices, f"KV goes over {names}, which carries {listed} ({KEY}: {AUTO})")


def _why_not(listed: str, carrying: Sequence[NetCard], host: HostCards) -> str:
    """Why the card that carries the side channel is not chosen; empty if it is."""
    card = carrying[0] if carrying else NetCard("")
    others = [port for port in host.rdma if port not in card.rdma]
    why = ""
    # 1. No address is known (an engine without a side channel), or it is of another machine.
    if not listed:
        why = "no address of a side channel is known here"
    elif not carrying:
        why = f"no card here carries {listed}"
    # 2. Peers are on this machine, where UCX has faster transports than a card.
    elif all(each.is_loopback for each in carrying):
        why = f"the side channel is on loopback, at {listed}"
    # 3. The name resolves to several cards: each may be the one that peers use.
    elif len(carrying) > 1:
        why = f"several cards carry {listed}: {', '.join(each.name for each in carrying)}"
    # 4. UCX would have no network with this card alone.
    elif card.unusable:
        why = f"{card.name}, which carries {listed}, {card.unusable}"
    # 5. There is another RDMA port: it may be faster, or nearer to the GPU.
    elif others:
        why = f"{card.name} carries {listed}, and there is RDMA by {', '.join(others)}"
    return why


def _devices(card: NetCard) -> tuple[str, ...]:
    return (*card.rdma, card.name)


def _named(name: str, host: HostCards) -> Iterator[str]:
    """The devices of a card, an RDMA port, or all ports of an RDMA device."""
    for card in host.usable:
        if card.name == name:
            yield from _devices(card)
            return
    yield from (port for port in host.rdma if name in (port, port.rpartition(":")[0]))


def _no_such(wanted: WantedCard, host: HostCards) -> NoSuchCard:
    for card in host.cards:
        is_meant = card.name == wanted if isinstance(wanted, str) else card.is_in(wanted)
        if card.unusable and is_meant:
            seen = f"{wanted}: {card.name} {card.unusable}"
            return NoSuchCard(KEY, f"a card that UCX can use ({_known(host)})", seen)
    if isinstance(wanted, str):
        return NoSuchCard(KEY, f"a card of this machine ({_known(host)})", repr(wanted))
    networks = ", ".join(
        f"{card.name} {address}" for card in host.usable for address in card.addresses
    )
    return NoSuchCard(KEY, f"a network that a card is in ({networks or 'none'})", str(wanted))


def _known(host: HostCards) -> str:
    return ", ".join([*host.rdma, *(card.name for card in host.usable)]) or "none"
