"""``--wait`` promises an engine of each role, also where a source names none."""

from __future__ import annotations

import asyncio
import socket

import pytest

from pdconn.router.fleet import sources
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_errors import EnginesMissing
from pdconn.router.router_server import Limits, running_proxy
from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop

NAME = "dns+http://prefill.test:8000"
QUICK = Limits(ready_pause_s=0.02, fleet_interval_s=0.02)


@pytest.fixture
def dns(monkeypatch):
    """What the name resolves to; nothing, at first."""
    addresses: list[str] = []

    async def resolve(name: str) -> list[str]:
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return addresses

    monkeypatch.setattr(
        sources.DnsName.__init__, "__kwdefaults__", dict(sources.DnsName.__init__.__kwdefaults__)
    )
    monkeypatch.setattr(sources.DnsName.__init__, "__defaults__", (resolve,))
    return addresses


def test_a_name_that_does_not_resolve_ends_the_wait(dns):
    """It served at once, with no prefill engine, since all engines that it knew were ready."""

    @in_loop
    async def scene():
        async with deployment() as d:
            config = ProxyConfig.from_options([NAME], [d.decode[0].url], port=0, wait_s=0.1)
            with pytest.raises(EnginesMissing, match="no prefill engine") as caught:
                async with running_proxy(config, limits=QUICK):
                    pytest.fail("it cannot serve")
            assert [one.engine for one in caught.value.failures] == [NAME]

    scene()


def test_a_name_that_resolves_in_time_is_waited_for(dns):
    """The control: engines of a name join during the wait."""

    @in_loop
    async def scene():
        async with deployment() as d:
            named = NAME.replace("prefill.test:8000", f"prefill.test:{d.prefill[0].port}")
            config = ProxyConfig.from_options([named], [d.decode[0].url], port=0, wait_s=20.0)
            ready = []

            def note(one):
                ready.append(one.engine)
                dns.append("127.0.0.1")  # once decode is there

            async with asyncio.timeout(15), running_proxy(config, note, limits=QUICK) as proxy:
                assert ready == [d.decode[0].url, d.prefill[0].url]
                async with d.client.post(
                    proxy.url + "/v1/completions", json={"prompt": "x"}
                ) as reply:
                    assert reply.status == 200
            assert d.leases.granted == 1

    scene()


@in_loop
async def test_a_fleet_file_without_a_role_ends_the_wait(tmp_path):
    async with deployment() as d:
        path = tmp_path / "fleet.toml"
        path.write_text(
            f'[[engine]]\nurl = "{d.prefill[0].url}"\nroles = ["prefill"]\n', encoding="utf-8"
        )
        config = ProxyConfig.from_options([], [], fleet=str(path), port=0, wait_s=0.1)
        with pytest.raises(EnginesMissing, match=f"{path}: no decode engine"):
            async with running_proxy(config, limits=QUICK):
                pytest.fail("it cannot serve")
