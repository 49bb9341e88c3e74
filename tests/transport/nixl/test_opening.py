"""What NixlTransport opens NIXL with: its backends, options of ours and of users, and a name."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.transport.nixl.scripted import ERRORS, FakeNixl, World, failing
from transport.errors import TransportUnavailable
from transport.nixl import transport as transport_module
from transport.nixl.agent import NixlLibrary
from transport.nixl.agent_options import (
    UCX_DEFAULTS,
    backend_params,
    merged_engine_config,
    restricted_to,
    ucx_version,
)
from transport.nixl.transport import NixlTransport, load_library
from transport.types import PeerId


def scripted_library(nixl: FakeNixl) -> NixlLibrary:
    """A library whose agent is ``nixl``."""
    api = SimpleNamespace(nixl_agent_config=SimpleNamespace, nixl_agent=lambda *_: nixl)
    bindings = SimpleNamespace(
        **ERRORS,
        nixlAgentConfig=SimpleNamespace,
        nixlAgent=lambda *_: None,
        NIXL_THREAD_SYNC_STRICT=0,
    )
    return NixlLibrary(api, bindings, "0")


def test_a_backend_that_is_missing_or_does_not_start_is_named() -> None:
    with pytest.raises(TransportUnavailable, match="no plugin 'MOONCAKE', only POSIX, UCX"):
        World(backends=["MOONCAKE"])
    nixl = FakeNixl()
    nixl.will("create_backend", failing("nixlBackendError"))
    with pytest.raises(TransportUnavailable, match="cannot start UCX"):
        NixlTransport("d", library=scripted_library(nixl))


def test_without_nixl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    monkeypatch.setattr(transport_module, "installed_versions", dict)
    with pytest.raises(TransportUnavailable, match=r"install what is missing: pip install nixl"):
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
    ours = "TCP_TX_SEG_SIZE=520K,TCP_RX_SEG_SIZE=2064K,CUDA_IPC_ENABLE_GET_ZCOPY=on"
    assert merged_engine_config("") == ours
    user = "UCX_TCP_TX_SEG_SIZE=1M, TLS=tcp, CUDA_IPC_ENABLE_GET_ZCOPY=auto"
    assert merged_engine_config(user) == (
        f"TCP_TX_SEG_SIZE=1M,TCP_RX_SEG_SIZE={UCX_DEFAULTS['TCP_RX_SEG_SIZE']},"
        "CUDA_IPC_ENABLE_GET_ZCOPY=auto,TLS=tcp"
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


def test_network_devices_are_set_for_ucx_while_it_starts_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    for devices, expected in ((("mlx5_0:1", "eth1"), "mlx5_0:1,eth1"), ((), None)):
        nixl, seen = FakeNixl(), []

        def start(*_: object, seen: list[str | None] = seen) -> None:
            seen.append(os.environ.get("UCX_NET_DEVICES"))

        monkeypatch.setattr(nixl, "create_backend", start)
        library = scripted_library(nixl)
        transport = NixlTransport("d", library=library, net_devices=devices, huge_pages=False)
        assert seen == [expected]
        assert transport.describe().get("net_devices") == expected
        assert "UCX_NET_DEVICES" not in os.environ


def test_network_devices_never_replace_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    with (
        pytest.raises(ValueError, match=r"none beside UCX_NET_DEVICES=eth7 .*, got eth1"),
        restricted_to(["eth1"]),
    ):
        pass
    with restricted_to([]):
        assert os.environ["UCX_NET_DEVICES"] == "eth7"
