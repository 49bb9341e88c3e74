"""What UCX may connect by is logged once, and is what UCX itself says."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping

import numpy as np
import pytest

from tests.transport.nixl.test_cuda import GPU, BoundWorld
from transport.address import pack
from transport.nixl import transport as transport_module
from transport.nixl.agent_options import settings_of, ucx_library
from transport.nixl.possible import parse, possible_transports
from transport.nixl.transport import NixlTransport
from transport.types import Memory

PRINTED = """\
#
# UCP context
#
#     component 0  :  self
#            md 0  :  component 0  self
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
#      resource 12  :  md 4  dev 7  flags -s cuda_ipc/cuda
"""


def test_resources_are_read_and_nothing_else() -> None:
    assert parse(PRINTED) == ("self/memory", "tcp/eth0", "cuda_ipc/cuda")
    assert parse("") == parse("# UCP context\n# resource without flags") == ()


def test_the_environment_goes_before_options(monkeypatch: pytest.MonkeyPatch) -> None:
    ucx = {"engine_config": "TLS=tcp,UCX_NET_DEVICES=eth0", "num_workers": "1"}
    assert settings_of(ucx) == {"TLS": "tcp", "NET_DEVICES": "eth0"}
    monkeypatch.setenv("UCX_TLS", "all")
    assert settings_of(ucx) == {"NET_DEVICES": "eth0"}
    assert settings_of({}) == {}


_ASK = """
from transport.nixl.possible import possible_transports
from transport.nixl.transport import NixlTransport
transport = NixlTransport("a", huge_pages=False)  # loads UCX
for config in ("", "TLS=tcp", "TLS=^tcp"):
    print("@" + ",".join(possible_transports({"engine_config": config} if config else {})))
transport.close()
"""


def test_ucx_itself_is_asked_with_the_settings_of_its_context() -> None:
    """In a process of its own, which has loaded NIXL's UCX and no other."""
    pytest.importorskip("nixl")
    env = {key: value for key, value in os.environ.items() if not key.startswith("UCX_")}
    ended = subprocess.run(
        [sys.executable, "-c", _ASK], env=env, capture_output=True, text=True, check=True
    )
    said = [line[1:].split(",") for line in ended.stdout.splitlines() if line.startswith("@")]
    kinds = [{name.partition("/")[0] for name in names} for names in said]
    assert {"tcp", "self", "cma"} <= kinds[0]
    assert kinds[1] & {"tcp", "cma"} == {"tcp"}, "negative control: it heeds the settings"
    assert kinds[2] == kinds[0] - {"tcp"}


def test_nothing_is_known_where_nixls_ucx_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ucx_library("") is None
    monkeypatch.setattr("transport.nixl.possible.ucx_library", lambda: None)
    assert possible_transports({}) == ()


@pytest.mark.parametrize(
    ("found", "warns"),
    [
        (("tcp/eth0", "cuda_ipc/cuda"), False),
        (("tcp/eth0", "cuda_copy/cuda"), True),
        ((), False),
    ],
)
def test_it_is_logged_at_the_first_connection(
    found: tuple[str, ...], warns: bool, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked: list[Mapping[str, str]] = []

    def possible(ucx: Mapping[str, str], net_devices: object) -> tuple[str, ...]:
        asked.append(ucx)
        return found

    monkeypatch.setattr(transport_module, "possible_transports", possible)
    caplog.set_level(logging.INFO, logger="transport")
    world = BoundWorld(GPU)  # its memory is registered before it connects again
    caplog.clear()
    asked.clear()
    world.reader._has_connected = False
    for name in ("q", "r"):
        world.reader.connect(pack("nixl", name, f"{name} 1".encode()))
    assert len(asked) == 1
    assert caplog.text.count(f"UCX may connect by: {', '.join(found) or 'unknown'}") == 1
    assert ("UCX has no cuda_ipc here" in caplog.text) == warns


def test_host_memory_needs_no_cuda_ipc(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nixl")
    monkeypatch.setattr(transport_module, "possible_transports", lambda *_: ("tcp/lo",))
    caplog.set_level(logging.INFO, logger="transport")
    held = np.zeros(8192, np.uint8)
    with NixlTransport("a", huge_pages=False) as one, NixlTransport("b") as other:
        one.register([Memory(held.ctypes.data, held.size)])
        one.connect(other.address())
    assert "UCX may connect by: tcp/lo" in caplog.text
    assert "cuda_ipc" not in caplog.text
