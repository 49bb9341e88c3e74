"""The host that tickets name, where the side channel listens at every address.

``0.0.0.0`` and ``::`` are addresses to listen at that no peer can dial.  Tickets then name another
host: the one that the user gives, else the pod's address, else the machine's.  It is loopback only
if the user says so: a ticket with it would send every decode engine to its own machine.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Iterable, Mapping

from transport.errors import FieldError

VARIABLES = ("POD_IP", "VLLM_HOST_IP")
"""Where Kubernetes manifests put the pod's address, and where users put the machine's for vLLM."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class NoAdvertisedHost(FieldError, ValueError):
    """There is no host that tickets could name."""


def is_wildcard(host: str) -> bool:
    """Whether ``host`` stands for every address, in any notation.

    >>> [is_wildcard(host) for host in ("0.0.0.0", "0", "::", "0::0", "10.0.0.1", "prefill-0")]
    [True, True, True, True, False, False]
    """
    try:
        found = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except OSError:
        return False
    return ipaddress.ip_address(found[0][4][0]).is_unspecified


def own_addresses() -> list[str]:
    """The addresses that this machine's name resolves to; empty if it does not resolve."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]


def advertised_host(
    bound: str,
    given: str | None,
    environ: Mapping[str, str] = os.environ,
    addresses: Callable[[], Iterable[str]] = own_addresses,
) -> str:
    """The host that tickets name, for a side channel that listens at ``bound``.

    Args:
        given: by the user; takes precedence.
        environ: may have an address in one of :data:`VARIABLES`.
        addresses: returns this machine's; called last, since it may ask a name server.

    Raises:
        NoAdvertisedHost: the given host cannot be dialled, or none is given and none is found.
    """
    if given is not None:
        if is_wildcard(given):
            expected = "a host that decode engines can dial"
            raise NoAdvertisedHost("advertise_host", expected, repr(given))
        return given
    if not is_wildcard(bound):
        return bound
    for name in VARIABLES:
        if environ.get(name):
            return _from_variable(name, environ[name], bound)
    seen = list(addresses())
    for text in seen:
        if _leads_here(ipaddress.ip_address(text.partition("%")[0]), bound):
            return text
    raise NoAdvertisedHost(
        "advertise_host",
        f"a host for tickets to name, since side_channel_host is {bound}",
        f"none, and this machine's name leads to {', '.join(seen) or 'no address'}",
        f"set it, or {' or '.join(VARIABLES)}, to an address that decode engines can dial",
    )


def _from_variable(name: str, text: str, bound: str) -> str:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise NoAdvertisedHost(name, "an address", repr(text)) from None
    if not _is_served(address, bound):
        hint = f"set side_channel_host to :: or advertise_host to an address that {bound} serves"
        raise NoAdvertisedHost(name, "an IPv4 address", repr(text), hint)
    if address.is_unspecified:
        raise NoAdvertisedHost(name, "an address that decode engines can dial", repr(text))
    return text


def _leads_here(address: Address, bound: str) -> bool:
    """Whether a peer on another machine reaches us at this address of ours."""
    is_local = address.is_loopback or address.is_link_local or address.is_unspecified
    return _is_served(address, bound) and not is_local


def _is_served(address: Address, bound: str) -> bool:
    """Whether a socket at ``bound`` serves the address: ``::`` serves IPv4, too."""
    return ":" in bound or address.version == 4


def local_host(sock: socket.socket) -> str:
    """Our address of an accepted connection, as its peer writes it.

    A socket of ``::`` writes IPv4 addresses in IPv6, as ``::ffff:10.0.0.1``.
    """
    address = ipaddress.ip_address(str(sock.getsockname()[0]).partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
