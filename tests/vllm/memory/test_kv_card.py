"""What goes before ``kv_interface``, and that it reaches the transport."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest

from pdconn.sidechannel.kv_card import HostCards, NetCard
from pdconn.vllm.config import ConfigError, read_settings
from pdconn.vllm.memory import card as card_module
from pdconn.vllm.memory.card import kv_card, why_unreachable
from tests.sidechannel.test_kv_card import CONTAINER, LO


@pytest.fixture(autouse=True)
def container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_module, "read_cards", lambda environ: CONTAINER)


def chosen(
    host: str = "172.30.1.11", /, environ: dict[str, str] | None = None, **extra: Any
) -> str:
    card = kv_card(read_settings(extra, host, 5600, 0), environ or {})
    return ",".join(card.devices) or card.sentence


def test_it_follows_from_the_side_channel() -> None:
    assert chosen("172.30.1.11") == "eth1"
    assert chosen("172.30.0.11") == "eth0"
    assert chosen("0.0.0.0", {"POD_IP": "172.30.0.11"}) == "eth0"
    assert chosen("0.0.0.0", {"POD_IP": "172.30.0.11"}, advertise_host="172.30.1.11") == "eth1"
    assert chosen("172.30.0.11", advertise_host="203.0.113.7") == "eth0", "translated on its way"
    assert "loopback" in chosen("localhost")


def test_the_key_goes_before_the_side_channel() -> None:
    assert chosen("172.30.1.11", kv_interface="eth0") == "eth0"
    assert chosen("localhost", kv_interface="172.30.0.0/24") == "eth0"
    with pytest.raises(ConfigError, match="kv_interface: expected a card of this machine"):
        chosen(kv_interface="eth9")


@pytest.mark.parametrize("wanted", ["auto", "eth0", "eth9"])
def test_what_is_set_for_ucx_itself_goes_first(wanted: str) -> None:
    said = chosen(environ={"UCX_NET_DEVICES": "eth7,lo"}, kv_interface=wanted)
    assert said.startswith("KV goes over what UCX_NET_DEVICES=eth7,lo allows")
    assert said.endswith(f"which overrides kv_interface: {wanted}")
    for written in ("NET_DEVICES=eth7", "TLS=tcp, UCX_NET_DEVICES=eth7"):
        options = {"UCX": {"engine_config": written}}
        said = chosen(backend_options=options, kv_interface=wanted)
        assert said.startswith(f"KV goes over what {written.split()[-1]} allows")
    options = {"UCX": {"engine_config": "TLS=tcp"}}
    assert chosen(backend_options=options) == "eth1", "the control: another setting of UCX"


def test_other_backends_heed_no_card() -> None:
    assert "NIXL's UCX backend only" in chosen(backends=["POSIX"], kv_interface="eth0")
    assert chosen(backends=["POSIX", "UCX"], kv_interface="eth0") == "eth0"


def test_a_machine_that_lists_no_cards_leaves_it_to_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(environ: object) -> HostCards:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr(card_module, "read_cards", refuse)
    assert chosen().startswith("UCX chooses the network card of KV: no card here carries")
    with pytest.raises(ConfigError, match="kv_interface"):
        chosen(kv_interface="eth0")


def test_the_only_card_of_a_machine_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    only = NetCard("ens5", CONTAINER.cards[1].addresses)
    monkeypatch.setattr(card_module, "read_cards", lambda environ: HostCards((LO, only)))
    assert chosen("172.30.0.11") == "ens5"


def test_a_reader_that_the_card_has_no_route_to_is_refused_before_ucx_meets_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def routes(card: str) -> list[ipaddress.IPv4Network]:
        return [ipaddress.IPv4Network("172.30.1.0/24" if card == "eth1" else "0.0.0.0/0")]

    monkeypatch.setattr(card_module, "routes_of", routes)
    [eth1, eth0] = [why_unreachable((name,)) for name in ("eth1", "eth0")]
    assert eth1 is not None
    assert eth0 is not None
    assert eth1("172.30.1.21") == eth0("10.9.9.9") == caplog.text == ""
    assert eth1("10.9.9.9") == "KV goes over eth1, which has no route to 10.9.9.9"
    assert "connection refused: KV goes over eth1, which has no route to 10.9.9.9" in caplog.text
    assert why_unreachable(()) is why_unreachable(("mlx5_0:1", "eth1")) is None


def test_routes_that_cannot_be_read_refuse_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(card: str) -> list[ipaddress.IPv4Network]:
        raise OSError(19, "No such device")

    monkeypatch.setattr(card_module, "routes_of", refuse)
    why = why_unreachable(("eth1",))
    assert why is not None
    assert why("10.9.9.9") == ""
