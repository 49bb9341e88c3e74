"""A connection of the puller whose other end is the test."""

from __future__ import annotations

from collections.abc import Iterable


class ConnectionEnd:
    """As ``pdconn.puller.peers.PeerConnection``.

    Attributes:
        sent: bodies of the frames that were sent.
        arrived: bodies that the next :meth:`receive` returns.
    """

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.arrived: list[bytes] = []
        self.closed = False

    def send(self, bodies: Iterable[bytes]) -> None:
        self.sent += bodies

    def receive(self) -> list[bytes]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def close(self) -> None:
        self.closed = True
