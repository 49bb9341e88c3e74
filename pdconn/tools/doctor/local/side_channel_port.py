"""Checks the side channel's port on this host: free, used by an engine, or by something else."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pdconn.protocol.errors import ProtocolError
from pdconn.sidechannel.connection import SideChannelLost, Unauthenticated
from pdconn.sidechannel.describe import describe
from pdconn.sidechannel.security import Security, is_loopback
from pdconn.tools.doctor.findings import Finding, fault, note, one_line

_TIMEOUT_S = 2.0


class PortUse(StrEnum):
    """The user of a port."""

    FREE = "free"
    ENGINE = "an engine of pdconn answers there"
    TAKEN = "taken"
    ELSEWHERE = "not an address of this host"


@dataclass(frozen=True, slots=True)
class PortFacts:
    """``detail``: what answered, or why the address cannot be bound."""

    host: str
    port: int
    use: PortUse
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}: {self.use}{f' ({self.detail})' if self.detail else ''}"


def read_port(host: str, port: int, security: Security) -> PortFacts:
    """Try to listen; if the port is in use, query it."""
    # 1. The name does not resolve here.
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return PortFacts(host, port, PortUse.ELSEWHERE, one_line(why))
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        # 2. The address belongs to another host.
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return PortFacts(host, port, PortUse.ELSEWHERE, error.strerror or str(error))
        else:
            return PortFacts(host, port, PortUse.FREE)
    # 3. Something listens there.
    return _asked(host, port, security)


def _asked(host: str, port: int, security: Security) -> PortFacts:
    """An engine's answer; an engine that requires other credentials counts too."""
    try:
        described = describe(host, port, _TIMEOUT_S, security)
    except Unauthenticated as error:
        text = str(error)
        is_ours = "secrets probably differ" in text or "does it require" in text
        return PortFacts(host, port, PortUse.ENGINE if is_ours else PortUse.TAKEN, one_line(text))
    except (OSError, SideChannelLost, ProtocolError) as error:
        return PortFacts(host, port, PortUse.TAKEN, one_line(error))
    return PortFacts(host, port, PortUse.ENGINE, described.engine_id)


def judge_loopback(where: str, decodes: Sequence[str], *, is_isolated: bool) -> Iterator[Finding]:
    """Findings about an engine whose tickets name loopback, at ``where``.

    Args:
        decodes: hosts of known decode engines.
        is_isolated: whether the engine is in a network of its own, as in a container.
    """
    remedy = (
        'set "side_channel_host": "0.0.0.0", or VLLM_NIXL_SIDE_CHANNEL_HOST to an address that '
        "decode reaches, and a secret or TLS; nothing if decode or a relay to it is on this host"
    )
    message = "only loopback is listened at: decode can pull on this host alone"
    others = [host for host in decodes if not is_loopback(host)]
    if others:
        message += f", and decode is at {', '.join(others)}"
        yield fault("ports.loopback", where, message, remedy)
    elif is_isolated:
        message = "only loopback of a container is listened at: no other container can pull"
        yield fault("ports.loopback", where, message, remedy.partition("; nothing")[0])
    else:
        yield note("ports.loopback", where, message, remedy)


def judge_port(facts: PortFacts) -> Iterator[Finding]:
    """Findings if an engine could not listen."""
    where = f"{facts.host}:{facts.port}"
    if facts.use is PortUse.TAKEN:
        message = f"port {facts.port} is taken by something that is no engine: {facts.detail}"
        remedy = (
            f"end what listens there (ss -ltnp 'sport = :{facts.port}' names it), or set another "
            '"side_channel_port"; data-parallel ranks use the ports after it'
        )
        yield fault("ports.taken", where, message, remedy)
    elif facts.use is PortUse.ELSEWHERE:
        message = f"an engine here cannot listen at {where}: {facts.detail}"
        remedy = (
            'set "side_channel_host": "0.0.0.0" and, if decode reaches this host by another name '
            'than its own, "advertise_host"'
        )
        yield fault("ports.address", where, message, remedy)
