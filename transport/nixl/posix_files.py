"""Files through NIXL's POSIX back end: ranges of an open file to host memory, and back.

NIXL moves bytes between registered memory and registered files.  Both are registered for each
transfer: that takes microseconds on the host, and the buffers of a store change.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from transport.errors import BackendFailure
from transport.nixl.agent_errors import error_classes, mapper
from transport.nixl.transport import load_library

_BACKEND = "POSIX"
_NAP_S, _LONGEST_NAP_S = 20e-6, 1e-3


class NixlFiles:
    """One agent with the POSIX back end.  One thread.

    Raises:
        TransportUnavailable: NIXL or its back end is missing.
    """

    def __init__(self, name: str) -> None:
        library = load_library()
        self._name = name
        self._mapped = mapper(error_classes(library.bindings))
        with self._mapped(f"create agent {name}"):
            empty = library.api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._raw: Any = library.api.nixl_agent(name, empty)
            self._raw.create_backend(_BACKEND, {})

    def transfer(
        self, kind: Literal["READ", "WRITE"], fd: int, runs: Sequence[tuple[int, int, int]]
    ) -> None:
        """Move ``(offset in the file, address, bytes)`` of each run; returns when all have moved.

        Raises:
            BackendFailure: NIXL or the device has failed.
        """
        if not runs:
            return
        table = np.array(runs, dtype=np.uint64)
        memory = [(int(address), int(nbytes), 0, "") for _, address, nbytes in table]
        ranges = [(int(offset), int(nbytes), fd, "") for offset, _, nbytes in table]
        with self._mapped(f"{kind.lower()} a file"):
            regions: list[Any] = []
            handle = None
            try:
                for rows, segment in ((memory, "DRAM"), (ranges, "FILE")):
                    regions.append(self._raw.register_memory(rows, segment, [_BACKEND]))
                ours, theirs = (region.trim() for region in regions)
                handle = self._raw.initialize_xfer(kind, ours, theirs, self._name, b"", [_BACKEND])
                self._wait(handle, self._raw.transfer(handle))
            finally:
                if handle is not None:
                    self._raw.release_xfer_handle(handle)
                for region in reversed(regions):
                    self._raw.deregister_memory(region, [_BACKEND])

    def close(self) -> None:
        """Release the agent."""
        self._raw = None

    def _wait(self, handle: Any, state: str) -> None:
        nap_s = _NAP_S
        while state == "PROC":
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
            state = self._raw.check_xfer_state(handle)
        if state != "DONE":
            raise BackendFailure(f"nixl ended a transfer of a file in state {state!r}")
