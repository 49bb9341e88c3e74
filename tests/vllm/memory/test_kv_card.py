"""What goes before ``kv_interface``, and that it reaches the transport."""

from __future__ import annotations

from typing import Any

import pytest

from pdconn.sidechannel.kv_card import HostCards, NetCard
from pdconn.vllm.config import ConfigError, read_settings
from pdconn.vllm.memory import card as card_module
from pdconn.vllm.memory.card import kv_card
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
    assert said.endswith(f"which goes before kv_interface: {wanted}")
    for written in ("NET_DEVICES=eth7", "TLS=tcp, UCX_NET_DEVICES=eth7"):
        options = {"UCX": {"engine_config": written}}
        said = chosen(backend_options=options, kv_interface=wanted)
        assert said.startswith(f"KV goes over what {written.split()[-1]} allows")
    options = {"UCX": {"engine_config": "TLS=tcp"}}
    assert chosen(backend_options=options) == "eth1", "the control: another setting of UCX"


def test_other_backends_heed_no_card() -> None:
    assert "only UCX heeds it" in chosen(backends=["POSIX"], kv_interface="eth0")
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
