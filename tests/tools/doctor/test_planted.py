"""Each planted fault is found, and nothing else; a healthy pair has no finding."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdconn.tools.cli.main import main
from pdconn.tools.doctor.local.ucx import UcxAnswer, ask_ucx
from pdconn.tools.lab.ports import free_ports
from tests.fakes.credentials import OTHER, SECRET, Authority
from tests.fakes.event_loop import in_loop
from tests.fakes.pair import Cache
from tests.tools.doctor.healthy import SHARED, Healthy, healthy, ids, lending

# --- this host ----------------------------------------------------------------------------


class Host:
    """The configuration of a prefill engine on this machine, with files that are all right."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder / "ca")
        files = self.authority.sign("ours", "localhost", "127.0.0.1")
        secret = folder / "secret"
        secret.write_bytes(SECRET)
        secret.chmod(0o600)
        self.extra: dict[str, Any] = {
            "side_channel_host": "127.0.0.1",
            "side_channel_port": free_ports(1)[0],
            "secret_file": str(secret),
            "tls_cert": files.cert,
            "tls_key": files.key,
            "tls_ca": files.ca,
            "store": {"root": str(folder / "kv"), "capacity": "1MiB"},
        }
        self.transfer: dict[str, Any] = {
            "kv_connector": "PdconnConnector",
            "kv_connector_module_path": "pdconn.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": self.extra,
        }
        self.options: dict[str, Any] = {}

    def ask(self, capsys: Any) -> tuple[int, dict[str, Any]]:
        path = self.folder / "engine.json"
        path.write_text(
            json.dumps({"kv_transfer_config": self.transfer, **self.options}), encoding="utf-8"
        )
        code = main(["doctor", "--json", "--config", str(path)])
        return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def answer() -> UcxAnswer:
    """What NIXL's UCX says here."""
    return ask_ucx({}, os.environ)


@pytest.fixture
def host(tmp_path: Path, answer: UcxAnswer, monkeypatch: pytest.MonkeyPatch) -> Host:
    """NIXL is asked once for all tests: starting it takes seconds."""
    monkeypatch.setattr("pdconn.tools.doctor.examine.ucx.ask_ucx", lambda options, environ: answer)
    return Host(tmp_path)


def test_a_right_configuration_on_this_machine_has_no_fault(host: Host, capsys: Any) -> None:
    code, document = host.ask(capsys)
    assert [f for f in document["findings"] if f["severity"] == "fault"] == []
    assert (code, document["healthy"]) == (0, True)
    names = {check["name"]: check["outcome"] for check in document["checks"]}
    assert {names[name] for name in ("config", "credentials", "store")} == {"ok"}
    assert names["port"] == "note"  # loopback, which may be meant
    assert "skipped" not in names.values()
    assert not (host.folder / "kv").exists()  # looking makes nothing


def world_readable_secret(host: Host) -> None:
    Path(host.extra["secret_file"]).chmod(0o644)


def key_of_another_certificate(host: Host) -> None:
    host.extra["tls_key"] = host.authority.sign("other", "localhost").key


def expired_certificate(host: Host) -> None:
    files = host.authority.sign("old", "127.0.0.1", expired=True)
    host.extra |= {"tls_cert": files.cert, "tls_key": files.key}


def certificate_for_another_host(host: Host) -> None:
    files = host.authority.sign("elsewhere", "p0.example")
    host.extra |= {"tls_cert": files.cert, "tls_key": files.key}


def misspelt_key(host: Host) -> None:
    host.extra["kv_lease_durations"] = 60


def hybrid_manager_off(host: Host) -> None:
    host.options["disable-hybrid-kv-cache-manager"] = True


def no_role(host: Host) -> None:
    host.transfer["kv_role"] = "producer"


def store_larger_than_its_disk(host: Host) -> None:
    host.extra["store"]["capacity"] = shutil.disk_usage(host.folder).total * 2


def file_in_place_of_the_store(host: Host) -> None:
    (host.folder / "kv").write_text("in the way", encoding="utf-8")


def address_of_another_host(host: Host) -> None:
    host.extra["side_channel_host"] = "192.0.2.1"  # for documentation: on no host
    del host.extra["tls_cert"], host.extra["tls_key"], host.extra["tls_ca"]


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (world_readable_secret, "credentials.secret_file"),
        (key_of_another_certificate, "credentials.tls_key"),
        (expired_certificate, "credentials.tls"),
        (certificate_for_another_host, "credentials.tls-host"),
        (misspelt_key, "config.kv_connector_extra_config"),
        (hybrid_manager_off, "config.hybrid-off"),
        (no_role, "config.role"),
        (store_larger_than_its_disk, "store.space"),
        (file_in_place_of_the_store, "store.write"),
        (address_of_another_host, "ports.address"),
    ],
)
def test_a_planted_fault_of_this_host_is_found_and_nothing_else(
    plant: Callable[[Host], None], found: str, host: Host, capsys: Any
) -> None:
    _, before = host.ask(capsys)
    plant(host)
    code, document = host.ask(capsys)
    assert [one for one in ids(document) if one not in ids(before)] == [found]
    assert (code, document["healthy"]) == (1, False)
    assert all(finding["remedy"] for finding in document["findings"])


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which something answers that is no engine."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_taken_port_is_found_and_an_engine_at_it_is_not_a_fault(
    host: Host, taken: int, capsys: Any
) -> None:
    for key in ("tls_cert", "tls_key", "tls_ca"):
        del host.extra[key]
    _, before = host.ask(capsys)
    host.extra["side_channel_port"] = taken
    code, document = host.ask(capsys)
    assert [one for one in ids(document) if one not in ids(before)] == ["ports.taken"]
    assert code == 1
    with lending(Cache("BHLNC", filled=True), SHARED) as port:
        host.extra["side_channel_port"] = port
        assert ids(host.ask(capsys)[1]) == ids(before)


def test_a_producer_that_only_loopback_reaches_is_found(host: Host, capsys: Any) -> None:
    """A note where decode may be here; a fault where it is elsewhere, or behind a container."""

    def found(*words: str, config: str) -> list[str]:
        main(["doctor", "--json", "--timeout", "0.2", "--config", config, *words])
        document = json.loads(capsys.readouterr().out)
        return [f["severity"] for f in document["findings"] if f["id"] == "ports.loopback"]

    host.extra = {"side_channel_port": free_ports(1)[0]}
    host.transfer["kv_connector_extra_config"] = host.extra
    line = f"--kv-transfer-config '{json.dumps(host.transfer)}'"
    assert found(config=f"vllm serve m {line}") == ["note"]
    assert found("--decode", "http://localhost:1", config=f"vllm serve m {line}") == ["note"]
    assert found("--decode", "http://192.0.2.7:1", config=f"vllm serve m {line}") == ["fault"]
    assert found(config=f"docker run image m {line}") == ["fault"]
    assert found(config=f"docker run --network host image m {line}") == ["note"]
    protected = "PDCONN_SECRET=0123456789abcdef POD_IP=10.0.0.1"
    line = f"{protected} VLLM_NIXL_SIDE_CHANNEL_HOST=0.0.0.0 vllm serve m {line}"
    assert found(config=line) == []


def test_the_card_that_carries_kv_is_shown_and_one_that_is_not_here_found(
    host: Host, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    before = host.ask(capsys)[1]
    host.extra["kv_interface"] = "no-such-card"
    code, document = host.ask(capsys)
    assert [one for one in ids(document) if one not in ids(before)] == ["devices.kv-interface"]
    assert code == 1
    host.extra["kv_interface"] = "127.0.0.0/8"
    document = host.ask(capsys)[1]
    assert ids(document) == ids(before)
    assert "KV goes over lo (kv_interface: 127.0.0.0/8)" in json.dumps(document)


@pytest.mark.parametrize(
    ("variable", "value", "found"),
    [
        ("UCX_NET_DEVICES", "mlx5_77:1", "ucx.net-devices"),
        ("UCX_TLS", "nonsense", "ucx.start"),
        ("UCX_NET_DEVICES", "lo", "ucx.one-host"),
    ],
)
def test_a_wrong_variable_of_ucx_is_found_by_starting_it(
    variable: str, value: str, found: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UCX_NET_DEVICES", "UCX_TLS"):
        monkeypatch.delenv(name, raising=False)
    main(["doctor", "--json"])
    before = json.loads(capsys.readouterr().out)
    monkeypatch.setenv(variable, value)
    code = main(["doctor", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert [one for one in ids(document) if one not in ids(before)] == [found]
    assert code == (0 if found == "ucx.one-host" else 1)


# --- a pair -------------------------------------------------------------------------------


@in_loop
async def test_a_healthy_pair_has_no_finding(tmp_path: Path, capsys: Any) -> None:
    async with healthy(tmp_path) as pair:
        code, document = await pair.ask(capsys)
    assert (code, document["findings"]) == (0, [])
    outcomes = {check["name"]: check["outcome"] for check in document["checks"]}
    assert outcomes == dict.fromkeys(
        ("engines", "traffic", "events", "golden", "channels", "pairs"), "ok"
    )


async def decode_is_down(pair: Healthy) -> None:
    await pair.decode.stop()


async def prefill_is_unhealthy(pair: Healthy) -> None:
    pair.prefill.health_status = 503


async def another_model(pair: Healthy) -> None:
    pair.decode.models = [{"id": "m", "max_model_len": 4096}, {"id": "n", "max_model_len": 9}]


async def another_length(pair: Healthy) -> None:
    pair.decode.models = [{"id": "m", "max_model_len": 2048}]


async def another_dtype(pair: Healthy) -> None:
    pair.describe_decode(dtype="fp8")


async def events_at_a_closed_port(pair: Healthy) -> None:
    pair.events = (free_ports(1)[0], pair.events[1])


async def decode_reads_wrong_bytes(pair: Healthy) -> None:
    pair.decode.wrong = True


async def decode_computes_itself(pair: Healthy) -> None:
    pair.decode.ignores = True


async def prefill_gives_no_ticket(pair: Healthy) -> None:
    pair.prefill.lends = False
    pair.prefill.advertised = ("", 0)


async def most_pulls_have_failed(pair: Healthy) -> None:
    pair.decode.pulls, pair.decode.failed = 2, 8
    pair.decode.count()


async def nothing_answers_at_the_channel(pair: Healthy) -> None:
    pair.channel = f"127.0.0.1:{free_ports(1)[0]}"


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (decode_is_down, "engine.unreachable"),
        (prefill_is_unhealthy, "engine.unhealthy"),
        (another_model, "fleet.model"),
        (another_length, "fleet.max-model-len"),
        (another_dtype, "pair.diff"),
        (events_at_a_closed_port, "events.port"),
        (decode_reads_wrong_bytes, "golden.tokens"),
        (decode_computes_itself, "golden.not-pulled"),
        (prefill_gives_no_ticket, "golden.failed"),
        (most_pulls_have_failed, "traffic.failed"),
        (nothing_answers_at_the_channel, "channel.unreachable"),
    ],
)
def test_a_planted_fault_of_a_pair_is_found_and_nothing_else(
    plant: Callable[[Healthy], Any], found: str, tmp_path: Path, capsys: Any
) -> None:
    @in_loop
    async def planted() -> None:
        async with healthy(tmp_path) as pair:
            await plant(pair)
            code, document = await pair.ask(capsys)
        assert ids(document) == [found] * max(1, ids(document).count(found))
        assert (code, document["healthy"]) == (1, False)

    planted()


@in_loop
async def test_another_secret_is_found(tmp_path: Path, capsys: Any) -> None:
    secret = tmp_path / "s"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    async with healthy(tmp_path, SHARED) as pair:
        pair.more = ["--secret-file", str(secret)]
        assert (await pair.ask(capsys))[0] == 0
        secret.write_bytes(OTHER)
        code, document = await pair.ask(capsys)
    assert (code, set(ids(document))) == (1, {"channel.credentials"})
    assert OTHER.decode() not in json.dumps(document)
