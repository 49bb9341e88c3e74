"""Mooncake's transfer engine, for comparison, if installed (``pdconn[rivals]``).

It reads the same runs from the same memory over TCP; addresses are exchanged peer to peer.  A batch
has 512 runs: version 0.3.13 fails on batches of a few thousand.
"""

from __future__ import annotations

import os
from typing import Any

from pdconn.tools.bench.bench_errors import BenchError
from transport import Memory, Spans

_BATCH = 512


class Mooncake:
    """One transfer engine, listening at ``host``.

    Raises:
        BenchError: it is not installed, or fails.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        os.environ.setdefault("GLOG_minloglevel", "2")
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise BenchError(
                f"mooncake cannot be imported: {error}. It needs pdconn[rivals], "
                "and libibverbs.so.1 where the loader finds it: see docs/benchmarks.md"
            ) from error
        self._engine: Any = TransferEngine()
        _check("initialize", self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""))
        self.address = f"{host}:{self._engine.get_rpc_port()}"
        self._memories: list[int] = []

    def register_memory(self, memory: Memory) -> None:
        """Register ``memory`` as source or target of reads."""
        _check("register", self._engine.register_memory(memory.base, memory.nbytes))
        self._memories.append(memory.base)

    def read_spans(self, address: str, spans: Spans) -> None:
        """Copy ``spans`` from the engine at ``address``; returns when all bytes have arrived."""
        local, remote, nbytes = (
            column.tolist() for column in (spans.local, spans.remote, spans.nbytes)
        )
        for first in range(0, len(local), _BATCH):
            part = slice(first, first + _BATCH)
            code = self._engine.batch_transfer_sync_read(
                address, local[part], remote[part], nbytes[part]
            )
            _check("read", code)

    def close(self) -> None:
        """Unregister all memory; the engine ends with its last reference."""
        while self._memories:
            self._engine.unregister_memory(self._memories.pop())
        self._engine = None


def _check(what: str, code: int) -> None:
    if code != 0:
        raise BenchError(f"mooncake: {what} failed with {code}")
