"""What NixlTransport makes of NIXL's answers, given by a scripted NIXL.

The contract suite runs it on the real one; here are answers that a healthy NIXL
gives rarely: a post that fails half way, peers that it forgets by itself.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from transport.address import pack
from transport.errors import (
    BackendFailure,
    BadAddress,
    OutOfBounds,
    PeerLost,
    PeerUnknown,
    TransportClosed,
    TransportUnavailable,
)
from transport.nixl.agent import NixlLibrary
from transport.nixl.options import UCX_DEFAULTS, backend_params, merged_engine_config, ucx_version
from transport.nixl.transport import NixlTransport, load_library
from transport.types import Memory, PeerId, Settled, Spans

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


@pytest.fixture
def world() -> World:
    return World()


def test_stats_count_the_descriptors_and_time_posting_and_transfer_apart(world: World) -> None:
    settled = world.settle("PROC", "DONE")
    assert settled is not None
    assert settled.ok
    assert settled.stats.num_descriptors == 1
    assert 0 < settled.stats.post_s < settled.stats.transfer_s
    assert world.nixl.all_released_once()


@pytest.mark.parametrize(
    ("call", "error", "expected"),
    [
        ("prep_local", "nixlNotFoundError", OutOfBounds),
        ("prep_remote", "nixlNotFoundError", OutOfBounds),
        ("make_prepped_xfer", "nixlNotFoundError", PeerLost),
        ("make_prepped_xfer", "nixlBackendError", BackendFailure),
        ("transfer", "nixlRemoteDisconnectError", PeerLost),
        ("transfer", "nixlNotFoundError", PeerLost),
        ("check", "nixlRemoteDisconnectError", PeerLost),
        ("check", "nixlNotFoundError", PeerLost),
        ("check", "nixlCancelledError", BackendFailure),
    ],
)
def test_failures_settle_the_read(
    world: World, call: str, error: str, expected: type[Exception]
) -> None:
    world.nixl.will(call, failing(error))
    settled = world.reader.poll(world.reader.read(world.peer, world.spans))
    assert settled is not None
    assert type(settled.error) is expected
    assert type(settled.error.__cause__) is ERRORS[error]
    assert world.nixl.all_released_once()


def test_neighbours_are_merged_unless_that_leaves_a_registered_memory(world: World) -> None:
    runs = np.array([4096, 5120], np.uint64)
    spans = Spans(runs, runs, np.array([1024, 1024], np.uint64))
    world.nixl.will("transfer", "DONE")
    world.reader.read(world.peer, spans)
    assert world.nixl.rows[-1] == 1
    world.nixl.will("prep_remote", failing("nixlNotFoundError"))
    world.nixl.will("transfer", "DONE")
    settled = world.reader.poll(world.reader.read(world.peer, spans))
    assert settled is not None
    assert settled.ok
    assert world.nixl.rows[-2:] == [2, 2]
    assert world.nixl.all_released_once()


def test_the_local_run_that_lies_outside_is_named(world: World) -> None:
    world.reader.register([Memory(1 << 20, 1 << 20)])
    world.nixl.will("prep_local", failing("nixlNotFoundError"))
    runs = np.array([1 << 20, 1 << 22], np.uint64)
    read = world.reader.read(world.peer, Spans(runs, runs, np.array([64, 64], np.uint64)))
    settled = world.reader.poll(read)
    assert settled is not None
    assert "local run 1, [0x400000, 0x400040)" in str(settled.error)


def test_a_peer_that_nixl_forgot_is_lost_and_not_out_of_bounds(world: World) -> None:
    world.nixl.known.clear()
    world.nixl.will("prep_remote", failing("nixlNotFoundError"))
    settled = world.reader.poll(world.reader.read(world.peer, world.spans))
    assert settled is not None
    assert isinstance(settled.error, PeerLost)


def test_a_lost_peer_is_not_asked_again_until_it_is_connected_again(world: World) -> None:
    world.settle(failing("nixlRemoteDisconnectError"))
    calls = len(world.nixl.log)
    settled = world.reader.poll(world.reader.read(world.peer, world.spans))
    assert settled is not None
    assert isinstance(settled.error, PeerLost)
    assert len(world.nixl.log) == calls
    assert world.reader.connect(world.address) == world.peer
    assert world.nixl.log[-2:] == ["remove_remote_agent", "add_remote_agent"]
    settled = world.settle("DONE")
    assert settled is not None
    assert settled.ok


def test_a_half_posted_read_is_pending_until_nixl_takes_it() -> None:
    world = World(repost_s=0.0)
    refusal = failing("nixlBackendError")
    world.nixl.will("transfer", refusal, refusal, "PROC")
    read = world.reader.read(world.peer, world.spans)
    assert world.reader.poll(read) is None  # refused again
    assert world.reader.poll(read) is None  # taken
    assert world.nixl.log.count("transfer") == 3
    world.nixl.will("check", "DONE")
    settled = world.reader.poll(read)
    assert settled is not None
    assert settled.ok
    assert world.nixl.all_released_once()


def test_a_half_posted_read_is_not_posted_again_at_every_poll() -> None:
    world = World(repost_s=60.0)
    world.nixl.will("transfer", failing("nixlBackendError"))
    read = world.reader.read(world.peer, world.spans)
    assert all(world.reader.poll(read) is None for _ in range(100))
    assert world.nixl.log.count("transfer") == 1


def test_a_peer_is_removed_with_its_last_read(world: World) -> None:
    reads = [world.reader.read(world.peer, world.spans) for _ in range(2)]
    world.reader.disconnect(world.peer)
    with pytest.raises(PeerUnknown):
        world.reader.read(world.peer, world.spans)
    for left, read in enumerate(reversed(reads)):
        assert world.reader.poll(read) is None
        assert "remove_remote_agent" not in world.nixl.log
        world.nixl.will("check", "DONE")
        settled = world.reader.poll(read)
        assert settled is not None
        assert isinstance(settled.error, PeerLost)
        assert ("remove_remote_agent" in world.nixl.log) == (left == 1)
    assert world.nixl.all_released_once()


def test_connecting_again_keeps_a_leaving_peer_but_fails_its_reads(world: World) -> None:
    failed = world.reader.read(world.peer, world.spans)
    world.reader.disconnect(world.peer)
    assert world.reader.connect(world.address) == world.peer
    world.nixl.will("check", "DONE", "DONE")
    settled = world.reader.poll(failed)
    assert settled is not None
    assert isinstance(settled.error, PeerLost)
    assert "remove_remote_agent" not in world.nixl.log
    settled = world.settle()
    assert settled is not None
    assert settled.ok


def test_a_restarted_peer_waits_for_the_reads_from_before(world: World) -> None:
    read = world.reader.read(world.peer, world.spans)
    newer = pack("nixl", "p", b"p 2")
    world.nixl.will("add_remote_agent", failing("nixlNotAllowedError"))
    with pytest.raises(BackendFailure, match="p was restarted, and 1 reads"):
        world.reader.connect(newer)
    world.nixl.will("check", failing("nixlRemoteDisconnectError"))
    assert world.reader.poll(read) is not None
    assert world.reader.connect(newer) == world.peer
    settled = world.settle("DONE")
    assert settled is not None
    assert settled.ok


def test_an_address_for_another_name_is_refused(world: World) -> None:
    with pytest.raises(BadAddress, match="'q' holds metadata of 'r'"):
        world.reader.connect(pack("nixl", "q", b"r 1"))
    assert world.nixl.known == {"p"}
    with pytest.raises(BadAddress, match="itself"):
        world.reader.connect(pack("nixl", "d-1", b"d-1 1"))


def test_closing_waits_and_keeps_memory_registered_while_reads_can_write(world: World) -> None:
    world.reader.register([Memory(1 << 20, 1 << 20)])
    read = world.reader.read(world.peer, world.spans)
    with pytest.raises(BackendFailure, match="1 reads from p can still write"):
        world.reader.close()
    assert "deregister_memory" not in world.nixl.log
    assert "remove_remote_agent" not in world.nixl.log
    with pytest.raises(TransportClosed, match="closing"):
        world.reader.read(world.peer, world.spans)
    assert world.reader.poll(read) is None
    world.nixl.will("check", "DONE")
    world.reader.close()
    assert world.nixl.log[-2:] == ["remove_remote_agent", "deregister_memory"]
    world.reader.close()
    assert world.nixl.all_released_once()


def test_a_refused_region_takes_back_those_before_it(world: World) -> None:
    memories = [Memory(base << 20, 1 << 20) for base in (1, 2, 3)]
    world.nixl.will("register_memory", [1], [2], failing("nixlBackendError"))
    with pytest.raises(BackendFailure):
        world.reader.register(memories)
    assert world.nixl.log.count("deregister_memory") == 2
    world.reader.register(memories)


def test_a_backend_that_is_missing_or_does_not_start_is_named() -> None:
    with pytest.raises(TransportUnavailable, match="no plugin 'MOONCAKE', only POSIX, UCX"):
        World(backends=["MOONCAKE"])
    nixl = FakeNixl()
    nixl.will("create_backend", failing("nixlBackendError"))
    api = SimpleNamespace(nixl_agent_config=SimpleNamespace, nixl_agent=lambda *_: nixl)
    bindings = SimpleNamespace(
        **ERRORS,
        nixlAgentConfig=SimpleNamespace,
        nixlAgent=lambda *_: None,
        NIXL_THREAD_SYNC_STRICT=0,
    )
    with pytest.raises(TransportUnavailable, match="cannot start UCX"):
        NixlTransport("d", library=NixlLibrary(api, bindings, "0"))


def test_without_nixl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(TransportUnavailable, match=r"Install nixl as docs/quickstart.md shows"):
        load_library()


def test_agents_of_one_name_differ_at_every_boot() -> None:
    library = World().reader._library
    names = {NixlTransport("d", library=library, huge_pages=False).peer_id for _ in range(20)}
    assert len(names) == 20
    assert all(name.startswith("d-") for name in names)


@pytest.mark.parametrize(
    "make",
    [
        lambda: backend_params([], None),
        lambda: backend_params(["UCX"], {"ucx": {}}),
        lambda: backend_params(["UCX"], {"UCX": {"num_workers": "2"}}),
        lambda: backend_params(["UCX"], {"UCX": {"num_threads": "4"}}),
        lambda: merged_engine_config("TLS=rc,cuda_copy"),
        lambda: World(progress_delay_us=0),
        lambda: NixlTransport("x" * 300),
        lambda: NixlTransport(""),
    ],
)
def test_invalid_options_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        make()


def test_the_users_settings_win_over_ours() -> None:
    assert merged_engine_config("") == "TCP_TX_SEG_SIZE=520K,TCP_RX_SEG_SIZE=2064K"
    assert merged_engine_config("UCX_TCP_TX_SEG_SIZE=1M, TLS=tcp") == (
        f"TCP_TX_SEG_SIZE=1M,TCP_RX_SEG_SIZE={UCX_DEFAULTS['TCP_RX_SEG_SIZE']},TLS=tcp"
    )
    assert backend_params(["POSIX"], {"POSIX": {"a": "b"}}) == {"POSIX": {"a": "b"}}
    assert backend_params(["UCX"], {"UCX": {"num_workers": "1"}})["UCX"]["num_workers"] == "1"


def test_ucx_prints_what_it_chose_where_we_log_it(caplog: pytest.LogCaptureFixture) -> None:
    """NIXL cannot be asked which transports a connection has.  It does so at DEBUG alone."""
    printing = "PRINT_TRANSPORT_TABLES=y"
    assert printing not in World().reader.describe()["UCX"]
    caplog.set_level(logging.DEBUG, logger="transport")
    assert printing in World().reader.describe()["UCX"]
    options = {"UCX": {"engine_config": "PRINT_TRANSPORT_TABLES=n"}}
    assert printing not in World(backend_options=options).reader.describe()["UCX"]


def test_ucx_may_be_absent() -> None:
    assert ucx_version("") == "unknown"
    assert ucx_version("7f00-7f01 r-xp 00 00:00 0 /nowhere/nixl/libucp.so") == "unknown"


def test_describing_names_versions_settings_and_the_environment(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    facts = world.reader.describe()
    assert facts["agent"] == "d-1"
    assert facts["progress_delay_us"] == "5000"
    assert facts["UCX_TLS"] == "tcp"
    assert PeerId("d-1") == world.reader.peer_id
