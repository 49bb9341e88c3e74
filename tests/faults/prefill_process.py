"""A prefill engine in a process of its own, that lends over NIXL."""

from __future__ import annotations

from typing import Any

from pdconn.protocol.ticket import Ticket, parse_ticket
from tests.fakes.model_free_engines import Prefill
from tests.faults.child import Child, serve


class PrefillProcess:
    """A :class:`~tests.fakes.model_free_engines.Prefill` in a process of its own."""

    def __init__(self) -> None:
        self._child = Child("tests.faults.prefill_process")

    def open(self, ttl_s: float, options: dict[str, Any]) -> int:
        """Start anew, with a transport and leases of its own; returns the port."""
        port: int = self._child.ask(do="open", ttl_s=ttl_s, options=options)
        return port

    def compute(self, number: int) -> Ticket | None:
        """Compute request ``number`` and lend it; None when there is no room."""
        params = self._child.ask(do="compute", number=number)
        return None if params is None else parse_ticket(params)

    def close(self) -> None:
        self._child.close()


class _Served:
    """What the process does."""

    def __init__(self) -> None:
        self._prefill: Prefill | None = None

    def open(self, ttl_s: float, options: dict[str, Any]) -> int:
        from transport.nixl.transport import NixlTransport

        if self._prefill is not None:
            self._prefill.close()
        self._prefill = Prefill(NixlTransport("prefill", **options), ttl_s=ttl_s)
        return self._prefill.lender.port

    def compute(self, number: int) -> dict[str, Any] | None:
        assert self._prefill is not None
        ticket = self._prefill.compute(number)
        return None if ticket is None else ticket.to_params(1, 1)


if __name__ == "__main__":
    served = _Served()
    serve({"open": served.open, "compute": served.compute})
