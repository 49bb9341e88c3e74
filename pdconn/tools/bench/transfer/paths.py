"""The paths of a benchmark: the backend, the transports allowed to UCX, the page size.

``shm``, ``shm-huge`` and ``tcp`` are links of ``pdconn plan --link`` too.  A path is set per
connection, so one run can compare several; ``UCX_TLS`` in the environment of either side overrides
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from transport import Transport
from transport.nixl.transport import NixlTransport
from transport.ucx.transport import UcxTransport


@dataclass(frozen=True, slots=True)
class Path:
    """``tls`` is UCX's list of transports, None for UCX's choice; huge pages have 2 MiB."""

    name: str
    tls: str | None
    huge_pages: bool
    words: str
    backend: Literal["nixl", "ucx"] = "nixl"

    def open_transport(self, name: str) -> Transport:
        """A transport called ``name`` that uses this path.

        Raises:
            TransportUnavailable: the backend does not load here.
        """
        if self.backend == "ucx":
            settings = {} if self.tls is None else {"TLS": self.tls}
            return UcxTransport(name, options=settings, huge_pages=self.huge_pages)
        options = {} if self.tls is None else {"UCX": {"engine_config": f"TLS={self.tls}"}}
        return NixlTransport(name, backend_options=options, huge_pages=self.huge_pages)


PATHS: Mapping[str, Path] = MappingProxyType(
    {
        path.name: path
        for path in (
            Path("auto", None, True, "UCX's own choice, huge pages"),
            Path("shm", None, False, "CMA between processes of one host, 4 KiB pages"),
            Path("shm-huge", None, True, "CMA between processes of one host, huge pages"),
            Path("tcp", "tcp", True, "TCP, huge pages"),
            Path("tcp-ucx", "tcp", True, "as tcp, with transport: ucx", "ucx"),
        )
    }
)
