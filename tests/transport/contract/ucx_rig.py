"""A rig for the UCX backend: a reader here, a lender in another process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.transport.contract.rigs import Lender
from transport.testing.contract import Arena, Rig
from transport.ucx.transport import UcxTransport

TCP: dict[str, Any] = {"options": {"TLS": "tcp,self"}, "huge_pages": False}


class UcxLender(Lender):
    """As ``Lender``, over UCX."""

    def _command(self) -> list[str]:
        return ["tests.transport.contract.lender_process", "ucx"]


@contextmanager
def ucx_rig(
    lender: Lender, *, boot: str | None = None, options: dict[str, Any] | None = None
) -> Iterator[Rig]:
    """A reader here and a lender there, which can be stopped, continued and killed."""
    options = TCP if options is None else options
    address, remote = lender.open("lender", boot, options)
    arena = Arena.blank()
    reader = UcxTransport("reader", **options)
    try:
        reader.register([arena.memory])
        yield Rig(
            reader,
            reader.connect(address),
            address,
            arena,
            remote,
            lender.pause,
            lender.resume,
            lender.kill,
        )
    finally:
        lender.resume()
        reader.close()
        lender.close()
