"""A reader that KV has no way to is refused before it greets: UCX would end our process."""

from __future__ import annotations

import socket
import time
from contextlib import closing

import pytest

from pdconn.lender.server import Lender
from tests.fakes.pair import Pair


@pytest.mark.parametrize("why", ["KV goes over eth1, which has no route to it", ""])
def test_a_reader_that_kv_cannot_reach_is_refused(why: str) -> None:
    asked: list[str] = []

    def why_unreachable(host: str) -> str:
        asked.append(host)
        return why

    with (
        Pair() as pair,
        closing(Lender(pair.welcome(), "127.0.0.1", 0, why_unreachable=why_unreachable)) as lender,
        socket.create_connection(("127.0.0.1", lender.port)) as reader,
    ):
        reader.settimeout(10.0 if why else 0.5)
        if why:
            assert reader.recv(1) == b""
        else:
            with pytest.raises(TimeoutError):  # the control: it waits for the reader's greeting
                reader.recv(1)
        assert asked == ["127.0.0.1"]
        until = time.monotonic() + 10.0
        while why and not lender.counts["connections_refused"]:  # counted once it is closed
            assert time.monotonic() < until
            time.sleep(0.01)
        assert lender.counts["connections_refused"] == bool(why)
