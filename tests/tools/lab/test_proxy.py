"""The lab's proxy listens at the given port, and is gone with its block."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.lab_errors import EngineDied, PortInUse
from pdconn.tools.lab.ports import free_ports, is_free
from pdconn.tools.lab.proxy import admin_url, running_proxy

_OTHER = "127.0.0.2"
_NOBODY = ["http://127.0.0.1:1"]


def test_it_is_waited_for_at_its_address(tmp_path: Path) -> None:
    port, _ = free_ports(2, _OTHER, in_a_row=True)
    with running_proxy(_NOBODY, _NOBODY, tmp_path, port, host=_OTHER) as url:
        assert url == f"http://{_OTHER}:{port}"
        assert Client(url).get_text("/livez")
        assert "pdconn_router_inflight_requests" in Client(admin_url(url)).get_text("/metrics")
    assert is_free(port, _OTHER)


def test_words_in_front_of_its_command_are_run(tmp_path: Path) -> None:
    there = ("env", "PDCONN_TRIED=1")
    with running_proxy(_NOBODY, _NOBODY, tmp_path, within=there) as url:
        assert Client(admin_url(url)).get_text("/metrics")
    nowhere = running_proxy(_NOBODY, _NOBODY, tmp_path, within=("false",))
    with pytest.raises(EngineDied), nowhere:
        pytest.fail("it must not be handed over")


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server((_OTHER, 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(PortInUse, match=f"port {port} on {_OTHER}"),
            running_proxy(_NOBODY, _NOBODY, tmp_path, port, host=_OTHER),
        ):
            pytest.fail("it must not be handed over")
