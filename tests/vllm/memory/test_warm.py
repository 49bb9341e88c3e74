"""The start is never refused because a rehearsal failed."""

from __future__ import annotations

import logging

import pytest

from pdconn.vllm.memory.warm import network_only, rehearse_pulls
from transport import Transport, TransportUnavailable
from transport.testing.inprocess.transport import InProcessNetwork, InProcessTransport, Lost


class Partners:
    """Opens partners on the network, and keeps them to look at."""

    def __init__(self, network: InProcessNetwork) -> None:
        self._network = network
        self.opened: list[InProcessTransport] = []

    def __call__(self) -> Transport:
        partner = InProcessTransport(self._network, f"partner{len(self.opened)}")
        self.opened.append(partner)
        return partner


def rehearsed(network: InProcessNetwork, *, lends: bool, pulls: bool) -> list[object]:
    transport = InProcessTransport(network, "ours")
    partners = Partners(network)
    kept = rehearse_pulls(transport, [partners, partners], lends=lends, pulls=pulls)
    assert len(partners.opened) == 2
    return kept


@pytest.mark.parametrize(("lends", "pulls"), [(True, False), (False, True), (True, True)])
def test_a_rehearsal_is_one_line_of_the_log(
    lends: bool, pulls: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pdconn.vllm"):
        kept = rehearsed(InProcessNetwork(), lends=lends, pulls=pulls)
    assert len(kept) == 1, "our page, which is registered as long as the transport lives"
    said = [each.getMessage() for each in caplog.records]
    [line] = [each for each in said if each.startswith("pdconn: rehears")]
    assert f"lends={lends} pulls={pulls} partners=2 seconds=" in line


@pytest.mark.parametrize("error", [TransportUnavailable, OSError, KeyError])
def test_a_partner_that_does_not_start_is_a_warning(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Transport:
        raise error("no such backend")

    transport = InProcessTransport(InProcessNetwork(), "ours")
    rehearse_pulls(transport, [broken], lends=True, pulls=True)
    assert "the rehearsal failed" in caplog.text
    assert "no such backend" in caplog.text


def test_a_pull_that_fails_is_a_warning_and_its_memory_stays(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdconn.vllm.memory.warm.LIMIT_S", 0.2)
    network = InProcessNetwork()
    network.script = lambda read: Lost()
    transport, partners = InProcessTransport(network, "ours"), Partners(network)
    kept = rehearse_pulls(transport, [partners], lends=False, pulls=True)
    assert "the rehearsal failed" in caplog.text
    assert len(kept) == 3, "a read that did not end can still write to a page"


@pytest.mark.parametrize(
    ("options", "environ"),
    [
        ({"UCX": {"engine_config": "TLS=tcp"}}, {}),
        ({"UCX": {"engine_config": "TCP_TX_SEG_SIZE=64K, UCX_TLS=rc"}}, {}),
        ({}, {"UCX_TLS": "tcp"}),
    ],
)
def test_a_users_own_list_of_transports_is_rehearsed_alone(
    options: dict[str, dict[str, str]], environ: dict[str, str]
) -> None:
    assert network_only(options, environ) is None


def test_other_options_stay_as_they_are() -> None:
    options = {"UCX": {"engine_config": "TCP_TX_SEG_SIZE=64K", "num_workers": "2"}, "POSIX": {}}
    assert network_only(options, {}) == {
        "UCX": {"engine_config": "TCP_TX_SEG_SIZE=64K,TLS=^sm", "num_workers": "2"},
        "POSIX": {},
    }
