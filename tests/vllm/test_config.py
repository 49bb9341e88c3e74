"""Laws of configuration: strict keys, typed values, vLLM's own defaults."""

from __future__ import annotations

from typing import Any

import pytest

from pdconn.lifecycle.promises import KeepShares
from pdconn.puller.warmup import Place
from pdconn.vllm.config import ConfigError, read_settings


def test_defaults_come_from_vllms_environment() -> None:
    settings = read_settings({}, "10.0.0.1", 5600, port_offset=2)
    assert (settings.side_channel_host, settings.side_channel_port) == ("10.0.0.1", 5602)
    assert settings.kv_lease_duration == 30.0


def test_the_config_wins_over_the_environment() -> None:
    extra = {"side_channel_host": "h", "side_channel_port": 1234, "kv_lease_duration": 5}
    settings = read_settings(extra, "localhost", 5600, port_offset=1)
    assert (settings.side_channel_host, settings.side_channel_port) == ("h", 1235)
    assert settings.kv_lease_duration == 5.0


def test_lenders_to_warm_are_places() -> None:
    listed = ["p1:5600", "10.0.0.2:5601", "[fe80::1]:5602"]
    settings = read_settings({"warm_peers": listed}, "localhost", 5600, 0)
    assert settings.warm_peers == (
        Place("p1", 5600), Place("10.0.0.2", 5601), Place("fe80::1", 5602),
    )  # fmt: skip
    assert read_settings({}, "localhost", 5600, 0).warm_peers == ()


def test_an_unknown_key_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'side_channel_prot'; did you mean 'side_channel_port'"):
        read_settings({"side_channel_prot": 1}, "localhost", 5600, 0)
    with pytest.raises(ConfigError, match="known keys: side_channel_host"):
        read_settings({"zzz": 1}, "localhost", 5600, 0)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"side_channel_port": "5600"}, "side_channel_port: expected a port number"),
        ({"side_channel_port": True}, "side_channel_port: expected a port number"),
        ({"side_channel_host": 5}, "side_channel_host: expected text, got 5"),
        ({"kv_lease_duration": 0}, "kv_lease_duration: expected seconds above 0"),
        ({"kv_lease_duration": "9"}, "kv_lease_duration: expected seconds above 0"),
        ({"backends": "UCX"}, "backends: expected a list of backend names, got 'UCX'"),
        ({"backend_options": {"UCX": 1}}, "backend_options: expected options per backend"),
        ({"huge_pages": 1}, "huge_pages: expected true or false, got 1"),
        ({"progress_cores": 2}, "progress_cores: expected 'auto', 0 or 1, got 2"),
        ({"progress_cores": True}, "progress_cores: expected 'auto', 0 or 1, got True"),
        ({"layout": "NHD"}, "layout: expected auto or none or LBHNC or .*, got 'NHD'"),
        ({"layout": ["LBHNC"]}, "layout: expected auto or none or LBHNC"),
        ({"warm_peers": "p1:5600"}, "warm_peers: expected a list of at most 256"),
        ({"warm_peers": ["p1:5600"] * 257}, "warm_peers: expected a list of at most 256"),
        ({"warm_peers": ["p1:5600", "p2"]}, 'warm_peers: expected "host:port".* as entry 1, got'),
        ({"warm_peers": ["p1:5600", "p1:5600"]}, "every place once, and entry 1 repeats p1:5600"),
        ({"advertise_host": ["10.0.0.1"]}, "advertise_host: expected text"),
    ],
)
def test_a_wrong_value_names_key_expected_and_seen(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_settings(extra, "localhost", 5600, 0)


def kept_by(extra: dict[str, Any]) -> KeepShares | None:
    return read_settings(extra, "localhost", 5600, 0).keep


def test_what_sessions_keep_is_bounded_by_shares() -> None:
    assert kept_by({}) == KeepShares(0.5, 0.5, 3600.0)
    assert kept_by({"keep": False}) is None
    given = {"share": 0.3, "tenant_share": 0.4, "seconds": 60}
    assert kept_by({"keep": given}) == KeepShares(0.3, 0.3, 60.0), "a tenant keeps no more"


@pytest.mark.parametrize(
    "keep", [0, "on", {"shares": 1}, {"share": 0}, {"share": 1}, {"tenant_share": True},
             {"seconds": 0}, {"seconds": 1e9}, {"share": "0.1"}],
)  # fmt: skip
def test_other_shares_are_refused_by_name(keep: object) -> None:
    with pytest.raises(ConfigError, match=r"^keep: expected "):
        kept_by({"keep": keep})
