"""Certificates and secrets for tests, and two connections over a real socket."""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trustme

from pdconn.protocol.auth import Secret
from pdconn.sidechannel.connection import AuthPolicy, Connection, SideChannelLost
from pdconn.sidechannel.security import Security, TlsFiles

SECRET = b"correct horse battery"
OTHER = b"another horse battery"
SHARED = Security(Secret(SECRET))
FOREIGN = Security(Secret(OTHER))
OPEN = Security()


class Authority:
    """A CA that writes what it signs to ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._ca = trustme.CA()
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self.file = str(folder / "ca.pem")
        self._ca.cert_pem.write_to_path(self.file)

    def sign(self, name: str, *hosts: str, expired: bool = False, rsa: bool = False) -> TlsFiles:
        """Files of a certificate for ``hosts``, that trusts this CA."""
        past = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
        leaf = self._ca.issue_cert(
            *hosts,
            not_before=past - datetime.timedelta(days=9) if expired else None,
            not_after=past if expired else None,
            key_type=trustme.KeyType.RSA if rsa else trustme.KeyType.ECDSA,
        )
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        leaf.private_key_pem.write_to_path(str(key))
        key.chmod(0o600)
        cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        return TlsFiles(str(cert), str(key), self.file)


@dataclass
class Ends:
    """A reader's and a lender's connection, what each received, and how each was lost."""

    reader: Connection
    lender: Connection
    received: dict[str, list[bytes]] = field(default_factory=lambda: {"reader": [], "lender": []})
    lost: dict[str, SideChannelLost] = field(default_factory=dict)

    def turn(self) -> None:
        """Each open end flushes and receives once; an end that is lost closes."""
        for name, end in (("reader", self.reader), ("lender", self.lender)):
            if name in self.lost:
                continue
            try:
                end.flush_unsent()
                self.received[name] += end.receive_frames()
            except SideChannelLost as error:
                self.lost[name] = error
                end.close()

    def until(self, reader: int = 0, lender: int = 0, timeout_s: float = 10.0) -> None:
        """Take turns until each end has received so many messages."""
        give_up = time.monotonic() + timeout_s
        while len(self.received["reader"]) < reader or len(self.received["lender"]) < lender:
            assert not self.lost, self.lost
            assert time.monotonic() < give_up, "no message in time"
            self.turn()

    def until_lost(self, answer: bool = False, timeout_s: float = 10.0) -> tuple[str, str]:
        """Take turns until both ends are lost; return the reader's reason and the lender's.

        With ``answer`` the lender replies to the first message that it receives.
        """
        give_up = time.monotonic() + timeout_s
        while len(self.lost) < 2:
            assert time.monotonic() < give_up, f"only lost {self.lost}"
            self.turn()
            if answer and self.received["lender"] and "lender" not in self.lost:
                self.lender.send_frames([b"rejected: that is no message"])
                answer = False
        return str(self.lost["reader"]), str(self.lost["lender"])


def sockets() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection: first the dialling one, then the accepted one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    for end in (dialled, accepted):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return dialled, accepted


@contextmanager
def ends(
    reader: Security, lender: Security, host: str = "localhost", max_frame: int = 1 << 24
) -> Iterator[Ends]:
    """Connections between a reader that dialled ``host`` and a lender."""
    with between(reader.for_reader(host), lender.for_lender(), max_frame) as both:
        yield both


@contextmanager
def between(
    reader: AuthPolicy | None, lender: AuthPolicy | None, max_frame: int = 1 << 24
) -> Iterator[Ends]:
    """Connections with these authentication policies."""
    dialled, accepted = sockets()
    with dialled, accepted:
        yield Ends(
            Connection(dialled, max_frame, policy=reader),
            Connection(accepted, max_frame, policy=lender),
        )
