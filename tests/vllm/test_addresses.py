"""Where prefill listens and what its tickets name, from vLLM's environment to a ticket.

The environment is that of manifests written for NixlConnector, AIBrix's sample among them.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.protocol.messages import RankGeometry, Welcome
from pdconn.sidechannel.advertise import NoAdvertisedHost
from pdconn.sidechannel.describe import describe
from pdconn.sidechannel.security import Security, Unprotected
from pdconn.tools.lab.ports import free_ports
from pdconn.vllm.lends.lending import Lending
from tests.fakes.pair import Cache
from tests.fakes.simulated.block_pool import CountedPool
from tests.vllm.lends.scheduler import request

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's and others', about each other
    from pdconn.vllm.supported import settings_of

POD = "10.1.2.3"
SECRET = "known to engines only"


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Listening at every address; a machine whose name leads to loopback; no pod, no secret."""
    for name in ("POD_IP", "VLLM_HOST_IP", "PDCONN_SECRET", "PDCONN_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "0.0.0.0")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_ports(1)[0]))
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    return monkeypatch


def config(role: str = "kv_producer", rank: int = 0, **extra: Any) -> Any:
    """vLLM's, as far as it is looked at."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra, kv_role=role),
        parallel_config=SimpleNamespace(data_parallel_index=rank),
    )


@contextmanager
def lending(given: Any) -> Iterator[Lending]:
    made = Lending(settings_of(given), "p", "boot", (1, 1))
    made.bind_gpu_block_pool(CountedPool())
    geometry = RankGeometry(0, 0, b"address", Cache("BHLNC", filled=False).references)
    made.serve(Welcome.in_our_version("p", "boot", {}, (geometry,)))
    try:
        yield made
    finally:
        made.shutdown()


def ticket_of(given: Any) -> tuple[str, int]:
    with lending(given) as made:
        params = made.lend_request(request("r"), ([3],))
        assert params is not None
        return params["remote_host"], params["remote_port"]


def port() -> int:
    from vllm import envs

    return int(envs.VLLM_NIXL_SIDE_CHANNEL_PORT)


@pytest.mark.parametrize("rank", [0, 2])
def test_tickets_name_the_pod_and_the_rank_s_port(environ: pytest.MonkeyPatch, rank: int) -> None:
    environ.setenv("POD_IP", POD)
    environ.setenv("PDCONN_SECRET", SECRET)
    assert ticket_of(config(rank=rank)) == (POD, port() + rank)


def test_a_host_of_the_configuration_goes_before_the_pod(environ: pytest.MonkeyPatch) -> None:
    environ.setenv("POD_IP", POD)
    environ.setenv("PDCONN_SECRET", SECRET)
    given = config(advertise_host="prefill-0", side_channel_port=port(), rank=1)
    assert ticket_of(given) == ("prefill-0", port() + 1)


def test_every_rank_s_port_is_served_at_every_address(environ: pytest.MonkeyPatch) -> None:
    environ.setenv("POD_IP", POD)
    environ.setenv("PDCONN_SECRET", SECRET)
    security = Security.load()
    with lending(config(rank=1)):
        assert describe("127.0.0.1", port() + 1, security=security).engine_id == "p"
        with pytest.raises(OSError, match="refused"):
            describe("127.0.0.1", port(), security=security)


def test_without_a_secret_every_address_is_refused(environ: pytest.MonkeyPatch) -> None:
    environ.setenv("POD_IP", "127.0.0.1")
    with pytest.raises(Unprotected, match=r"side channel at 0\.0\.0\.0"), lending(config()):
        pass


def test_prefill_that_knows_no_address_of_its_own_says_so_at_its_start(
    environ: pytest.MonkeyPatch,
) -> None:
    environ.setenv("PDCONN_SECRET", SECRET)
    with pytest.raises(NoAdvertisedHost, match=r"advertise_host: expected a host .* 127\.0\.0\.1"):
        Lending(settings_of(config()), "p", "boot", (1, 1))


@pytest.mark.usefixtures("environ")
def test_decode_needs_none_and_its_configuration_is_good() -> None:
    assert settings_of(config("kv_consumer")).side_channel_host == "0.0.0.0"
