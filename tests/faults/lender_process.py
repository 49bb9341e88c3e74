"""A lender in a process of its own, so that its memory and files can be measured.

``mutant`` breaks it on purpose, for negative controls:

``fragile``   its decoder raises an unexpected exception for an invalid message
``hoarder``   it keeps everything that it ever received
"""

from __future__ import annotations

import logging
import resource
import time
from dataclasses import asdict
from typing import Any

import numpy as np

from pdconn.lender import server as lenders
from pdconn.lender.server import Lender
from pdconn.protocol.auth import Secret
from pdconn.protocol.errors import MessageError
from pdconn.protocol.messages import FromReader, decode_from_reader
from pdconn.sidechannel.security import Security
from tests.fakes.model_free_engines import Prefill
from tests.faults.child import serve
from tests.faults.footprint import Footprint, peak_nbytes
from tests.threads.inside import loop_of, sessions_of
from transport.testing.inprocess.transport import InProcessNetwork, InProcessTransport


class _Served:
    """What the process does."""

    def __init__(self) -> None:
        self._prefill: Prefill | None = None
        self._freed: list[str] = []

    @property
    def _lender(self) -> Lender:
        assert self._prefill is not None
        return self._prefill.lender

    def open(self, secret: str | None, mutant: str | None) -> int:
        """Start listening; returns the port."""
        logging.disable(logging.CRITICAL)
        if mutant is not None:
            _break(mutant)
        security = Security(None if secret is None else Secret(secret.encode()))
        transport = InProcessTransport(InProcessNetwork(), "prefill")
        self._prefill = Prefill(transport, security=security)
        return self._lender.port

    def lend(self, request: str, digest: str, ttl_s: float) -> None:
        """Lend something under ``request``."""
        self._lender.lend(request, bytes.fromhex(digest), ttl_s)

    def report(self) -> dict[str, Any]:
        """The state of the lender; opens no file."""
        alive = self._lender._worker.is_alive
        if alive:
            self._freed += [freed.request for freed in self._lender.take_freed()]
        return {
            "alive": alive,
            "connections": len(loop_of(self._lender)._connections),
            "lent": sessions_of(self._lender).num_lent,
            "freed": self._freed,
            "counts": dict(self._lender.counts),
            "cpu_s": time.process_time(),
        }

    def measure(self) -> dict[str, Any]:
        """What the process holds, and the most memory that it ever held."""
        return {"now": asdict(Footprint.now()), "peak_nbytes": peak_nbytes()}

    def limit_files(self, spare: int | None) -> None:
        """Allow as many more files as ``spare``; None lifts the limit again."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        soft = hard if spare is None else Footprint.now().files + spare
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _break(mutant: str) -> None:
    received = []

    def fragile(body: bytes) -> list[FromReader]:
        try:
            return decode_from_reader(body)
        except MessageError as error:
            raise KeyError(error.field) from error

    def hoarding(body: bytes) -> list[FromReader]:
        received.append(np.ones(len(body) + 8192, dtype=np.uint8))
        return decode_from_reader(body)

    mutants = {"fragile": fragile, "hoarder": hoarding}
    lenders.decode_from_reader = mutants[mutant]  # type: ignore[attr-defined]


if __name__ == "__main__":
    served = _Served()
    serve(
        {
            "open": served.open,
            "lend": served.lend,
            "report": served.report,
            "measure": served.measure,
            "limit_files": served.limit_files,
        }
    )
