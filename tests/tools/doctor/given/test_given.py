"""The three forms of a configuration, read without vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdconn.tools.doctor.bad_question import BadQuestion
from pdconn.tools.doctor.given.judge import judge_given, named_host, settings_of_given
from pdconn.tools.doctor.given.read import read_given
from pdconn.vllm.config import Settings

KEY = "kv_connector_extra_config"
EXTRA = {"kv_lease_duration": 60}
TRANSFER: dict[str, Any] = {
    "kv_connector": "PdconnConnector",
    "kv_connector_module_path": "pdconn.vllm",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": EXTRA,
}


def found(text: str, environ: dict[str, str] | None = None) -> list[str]:
    given = read_given(text)
    _, refused = settings_of_given(given, environ or {})
    return [finding.id for finding in judge_given(given, refused)]


def forms(folder: Path, transfer: dict[str, Any], **options: Any) -> list[str]:
    """The same configuration in every form that is understood."""
    text = json.dumps(transfer)
    bare, whole, page = folder / "a.json", folder / "b.json", folder / "c.yaml"
    bare.write_text(text, encoding="utf-8")
    whole.write_text(json.dumps({"kv-transfer-config": text, **options}), encoding="utf-8")
    lines = [f"kv-transfer-config: '{text}'", "model: m"]
    page.write_text(
        "\n".join([*lines, *(f"{k}: {json.dumps(v)}" for k, v in options.items())]),
        encoding="utf-8",
    )
    flags = " ".join(f"--{name}" for name in options)
    line = f"HF_HOME=/x vllm serve m --port 8100 {flags} --kv-transfer-config='{text}'"
    dotted = " ".join(f"--kv-transfer-config.{k} '{v}'" for k, v in transfer.items() if k != KEY)
    dotted += f" --kv-transfer-config.{KEY}.kv_lease_duration 60"
    lines = line, f"vllm serve m {dotted} {flags}"
    return [str(whole), str(page), *lines, *([] if options else [text, str(bare)])]


def test_every_form_is_read_alike(tmp_path: Path) -> None:
    for form in forms(tmp_path, TRANSFER):
        given = read_given(form)
        assert given.extra == EXTRA, form
        settings, refused = settings_of_given(given, {})
        assert refused == []
        assert settings is not None
        assert (settings.kv_lease_duration, settings.side_channel_port) == (60.0, 5600)
        assert found(form) == []


@pytest.mark.parametrize("end", ["\\\n", "\\\r\n"], ids=["unix", "windows"])
def test_a_line_that_goes_on_is_read_as_a_shell_does(end: str) -> None:
    words = ("vllm serve m", "--disable-hybrid-kv-cache-manager", "--kv-transfer-config")
    line = f" {end}  ".join([*words, f"'{json.dumps(TRANSFER)}'"])
    assert read_given(line).extra == EXTRA
    assert found(line) == ["config.hybrid-off"]


def test_the_hybrid_manager_switched_off_is_found_in_every_form(tmp_path: Path) -> None:
    options = {"disable-hybrid-kv-cache-manager": True}
    for form in forms(tmp_path, TRANSFER, **options):
        assert found(form) == ["config.hybrid-off"], form
    assert "config.hybrid-off" not in found(
        json.dumps({"kv_transfer_config": TRANSFER, "disable_hybrid_kv_cache_manager": False})
    )


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"kv_role": "kv_consumer"}, ["config.fail-policy"]),
        ({"kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}, []),
        ({"kv_role": None}, ["config.role"]),
        (
            {"kv_connector": "NixlConnector", "kv_connector_module_path": None},
            ["config.connector"],
        ),
        ({"kv_connector": "NixlConnector", "kv_connector_module_path": "pdconn.vllm.nixl"}, []),
        ({"kv_connector_extra_config": {"verify": "often"}}, ["config.verify"]),
        (
            {"kv_connector_extra_config": {"store": {"root": "/kv"}}},
            ["config.store.capacity"],
        ),
        ({"kv_connector_extra_config": {"tls_cert": "/nowhere"}}, ["config.tls_key"]),
    ],
)
def test_what_an_engine_would_refuse_or_regret_is_found(
    changed: dict[str, Any], expected: list[str]
) -> None:
    assert found(json.dumps({**TRANSFER, **changed})) == expected


def test_our_entry_of_a_multi_connector_is_the_one_that_is_checked() -> None:
    other = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
    bad = {**TRANSFER, "kv_connector_extra_config": {"verifi": "off"}}
    for children, expected in (
        ([TRANSFER, other], []),
        ([other, bad], ["config.kv_connector_extra_config"]),
        ([other], ["config.connector"]),
    ):
        extra = {"connectors": children}
        multi = {"kv_connector": "MultiConnector", "kv_role": "kv_producer"}
        assert found(json.dumps({**multi, "kv_connector_extra_config": extra})) == expected


def test_variables_of_the_line_go_before_those_of_the_shell() -> None:
    line = "VLLM_NIXL_SIDE_CHANNEL_PORT=5700 vllm serve m --kv-transfer-config '{}'"
    settings, _ = settings_of_given(read_given(line), {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5800"})
    assert settings is not None
    assert settings.side_channel_port == 5700
    assert "config.VLLM_NIXL_SIDE_CHANNEL_PORT" in found(
        json.dumps(TRANSFER), {"VLLM_NIXL_SIDE_CHANNEL_PORT": "x"}
    )


def test_every_data_parallel_rank_here_has_a_port() -> None:
    transfer = json.dumps(TRANSFER)
    for options, expected in (
        ("", 1),
        ("--data-parallel-size 4", 4),
        ("--data-parallel-size 8 --data-parallel-size-local=2", 2),
    ):
        line = f"vllm serve m --kv-transfer-config '{transfer}' {options}"
        assert read_given(line).num_ports == expected
        assert read_given(line).lends


def test_the_host_that_tickets_name_is_found_as_the_engine_finds_it() -> None:
    pod = {"POD_IP": "10.0.0.7"}
    for host, expected in (("10.0.0.1", "10.0.0.1"), ("p0", "p0"), ("0.0.0.0", "10.0.0.7")):
        assert named_host(Settings(host, 5600), pod) == expected


def test_an_engine_that_no_ticket_could_name_is_found() -> None:
    """``POD_IP`` is an IPv6 address, and the engine listens at IPv4 alone; then at both."""
    for host, expected in (("0.0.0.0", ["config.POD_IP"]), ("::", [])):
        extra = {**EXTRA, "side_channel_host": host}
        text = json.dumps({**TRANSFER, KEY: extra})
        assert found(text, {"POD_IP": "fd00::7"}) == expected


def test_the_name_of_nixl_connector_is_ours_where_it_is_replaced() -> None:
    transfer = {key: TRANSFER[key] for key in ("kv_role", KEY)} | {"kv_connector": "NixlConnector"}
    line = f"vllm serve m --kv-transfer-config '{json.dumps(transfer)}'"
    assert "config.connector" in found(line)
    assert "config.connector" not in found(f"PDCONN_AS_NIXL=1 {line}")
    by_module = {**transfer, "kv_connector_module_path": "pdconn.vllm.nixl"}
    assert "config.connector" not in found(json.dumps(by_module))


@pytest.mark.parametrize(
    ("seconds", "warned"), [("1", True), ("4", True), ("x", True), ("5", False), ("75", False)]
)
def test_an_engine_that_closes_idle_connections_before_the_router_is_found(
    seconds: str, warned: bool
) -> None:
    line = f"vllm serve m --kv-transfer-config '{json.dumps(TRANSFER)}'"
    ids = found(f"VLLM_HTTP_TIMEOUT_KEEP_ALIVE={seconds} {line}")
    assert ("config.keep-alive" in ids) == warned
    assert "config.keep-alive" not in found(line)


def test_an_engine_without_connector_is_found() -> None:
    assert found("vllm serve m") == ["config.no-connector"]


@pytest.mark.parametrize(
    "text",
    [
        "{not json",
        "/nowhere/engine.json",
        "vllm serve m --kv-transfer-config 'open",
        "vllm serve m --kv-transfer-config [1]",
        "vllm serve m --kv-transfer-config --port 8000",
        '{"kv_transfer_config": 7}',
    ],
)
def test_what_is_no_configuration_is_a_bad_question(text: str) -> None:
    with pytest.raises(BadQuestion, match=r"--config|--kv-transfer-config"):
        read_given(text)


def test_a_configuration_is_checked_without_importing_vllm() -> None:
    code = (
        "import sys; from pdconn.tools.doctor.examine import Questions, examine\n"
        "from pdconn.tools.doctor.given.read import read_engines\n"
        f"examine(Questions(configs=read_engines({json.dumps(TRANSFER)!r}), asks_nixl=False))\n"
        "print(sorted({'vllm', 'torch', 'nixl', 'ucxx'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
