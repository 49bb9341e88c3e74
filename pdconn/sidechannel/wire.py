"""A channel that a selector watches: they open, change and close together."""

from __future__ import annotations

import selectors
from collections.abc import Iterable

from pdconn.sidechannel.connection import Connection


class PolledConnection:
    """Watches ``channel`` for reading, and for writing while bytes wait to be sent.

    Args:
        channel: owned from now on.
        selector: watches the channel's socket with ``data``.
        connecting: whether to watch for writing until the first send.
    """

    def __init__(
        self,
        channel: Connection,
        selector: selectors.BaseSelector,
        data: object,
        connecting: bool = False,
    ) -> None:
        self._channel = channel
        self._selector = selector
        self._data = data
        self._reading = selectors.EVENT_READ
        self._watched = self._reading | (selectors.EVENT_WRITE if connecting else 0)
        self._closed = False
        selector.register(channel.socket, self._watched, data)

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait to be sent."""
        return self._channel.has_unsent

    @property
    def is_midway(self) -> bool:
        """Whether a handshake or a frame is unfinished, or bytes wait to be sent."""
        return self._channel.is_midway

    def send(self, bodies: Iterable[bytes]) -> None:
        """Send frames and what waited before them.

        Raises:
            SideChannelLost: the connection broke, or too much waits to be sent.
        """
        for body in bodies:
            self._channel.send(body)
        self._channel.flush()
        self._watch()

    def receive(self) -> list[bytes]:
        """Frames that arrived.

        Raises:
            SideChannelLost: the connection is over.
        """
        bodies = self._channel.receive()
        self._watch()
        return bodies

    def read_on(self, wanted: bool) -> None:
        """Whether to watch for more to read, or only for room to send what waits."""
        self._reading = selectors.EVENT_READ if wanted else 0
        self._watch()

    def close(self) -> None:
        """Leave the selector and close the socket; harmless when closed."""
        if self._closed:
            return
        self._closed = True
        self._selector.unregister(self._channel.socket)
        self._channel.close()

    def _watch(self) -> None:
        wanted = self._reading | (selectors.EVENT_WRITE if self.has_unsent else 0)
        if wanted and wanted != self._watched:
            self._selector.modify(self._channel.socket, wanted, self._data)
            self._watched = wanted
