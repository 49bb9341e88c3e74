"""A scripted NIXL, whose answers a test chooses, and a reader over it that has one peer."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np

from transport.address import pack
from transport.nixl.agent import NixlLibrary
from transport.nixl.transport import NixlTransport
from transport.types import Settled, Spans

ERRORS = {
    name: type(name, (Exception,), {})
    for name in (
        "nixlRemoteDisconnectError",
        "nixlNotFoundError",
        "nixlMismatchError",
        "nixlNotAllowedError",
        "nixlBackendError",
        "nixlCancelledError",
    )
}


def failing(name: str) -> Exception:
    return ERRORS[name](f"NIXL_ERR of {name}")


class FakeHandle:
    def __init__(self, nixl: FakeNixl, kind: str) -> None:
        self.nixl, self.kind, self.released = nixl, kind, 0
        nixl.handles.append(self)

    def release(self) -> None:
        self.released += 1


class FakeNixl:
    """A nixl_agent whose answers are queued per call; without one it succeeds."""

    def __init__(self) -> None:
        self.handles: list[FakeHandle] = []
        self.log: list[str] = []
        self.rows: list[int] = []
        self.answers: dict[str, deque[Any]] = {}
        self.known: set[str] = set()

    def will(self, call: str, *answers: Any) -> None:
        self.answers.setdefault(call, deque()).extend(answers)

    def _answer(self, call: str, default: Any = None) -> Any:
        self.log.append(call)
        queue = self.answers.get(call)
        answer = queue.popleft() if queue else default
        if isinstance(answer, Exception):
            raise answer
        return answer

    def get_plugin_list(self) -> list[str]:
        return ["POSIX", "UCX"]

    def create_backend(self, backend: str, options: dict[str, str]) -> None:
        self._answer("create_backend")

    def register_memory(self, rows: list[Any], kind: str, backends: list[str]) -> Any:
        return self._answer("register_memory", rows)

    def deregister_memory(self, region: Any) -> None:
        self._answer("deregister_memory")

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name: bytes = self._answer("add_remote_agent", metadata.partition(b" ")[0])
        self.known.add(name.decode())
        return name

    def remove_remote_agent(self, peer: str) -> None:
        self._answer("remove_remote_agent")
        self.known.discard(peer)

    def check_remote_metadata(self, peer: str) -> bool:
        return peer in self.known

    def get_xfer_descs(self, rows: Any, kind: str) -> int:
        assert rows.dtype == np.uint64
        assert rows.flags.c_contiguous
        return len(rows)

    def initialize_xfer(
        self, operation: str, ours: int, theirs: int, peer: str, backends: list[str]
    ) -> FakeHandle:
        """Fails, as NIXL does, where a step of its own would."""
        for step in ("prep_local", "prep_remote", "make_prepped_xfer"):
            if any(isinstance(answer, Exception) for answer in self.answers.get(step, ())):
                raise failing("nixlBackendError")
        self.rows += [ours, theirs]
        return FakeHandle(self, "request")

    def prep_xfer_dlist(self, agent: str, rows: Any, kind: str, backends: list[str]) -> FakeHandle:
        assert rows.dtype == np.uint64
        assert rows.flags.c_contiguous
        self.rows.append(len(rows))
        self._answer("prep_local" if agent == "NIXL_INIT_AGENT" else "prep_remote")
        return FakeHandle(self, "side")

    def make_prepped_xfer(self, *args: Any, backends: list[str]) -> FakeHandle:
        self._answer("make_prepped_xfer")
        return FakeHandle(self, "request")

    def transfer(self, request: FakeHandle) -> str:
        return str(self._answer("transfer", "PROC"))

    def check_xfer_state(self, request: FakeHandle) -> str:
        assert request.released == 0
        return str(self._answer("check", "PROC"))

    def all_released_once(self) -> bool:
        return all(handle.released == 1 for handle in self.handles)


class World:
    def __init__(self, **options: Any) -> None:
        self.nixl = FakeNixl()
        bindings = SimpleNamespace(
            **ERRORS,
            nixlAgentConfig=SimpleNamespace,
            nixlAgent=lambda name, config: config,
            NIXL_THREAD_SYNC_STRICT="strict",
        )
        api = SimpleNamespace(
            nixl_agent_config=SimpleNamespace, nixl_agent=lambda name, config: self.nixl
        )
        options = {"huge_pages": False, "close_wait_s": 0.0, **options}
        library = NixlLibrary(api, bindings, "0")
        self.reader = NixlTransport("d", boot="1", library=library, **options)
        self.address = pack("nixl", "p", b"p 1")
        self.peer = self.reader.connect(self.address)
        self.spans = Spans(*(np.array([1 << 20], np.uint64) for _ in range(3)))

    def settle(self, *checks: Any) -> Settled | None:
        self.nixl.will("check", *checks)
        read = self.reader.read(self.peer, self.spans)
        for _ in range(len(checks) - 1):
            assert self.reader.poll(read) is None
        return self.reader.poll(read)
