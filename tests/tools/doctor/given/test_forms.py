# ruff: noqa: E501 - commands are written as users write them, in one line
"""Everything that engines are started with is read, or refused; none is taken for no connector."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pdconn.tools.doctor.bad_question import BadQuestion
from pdconn.tools.doctor.given.given_config import GivenConfig
from pdconn.tools.doctor.given.judge import judge_given, settings_of_given
from pdconn.tools.doctor.given.read import read_engines, read_given
from pdconn.vllm.config import Settings

CASES = Path(__file__).parent / "cases"
ROOT = Path(__file__).parents[4]
KV = '{"kv_connector": "PdconnConnector", "kv_connector_module_path": "pdconn.vllm", "kv_role": "kv_producer"}'
DOTTED = (
    "--kv-transfer-config.kv_connector PdconnConnector --kv-transfer-config.kv_role kv_producer "
    "--kv-transfer-config.kv_connector_module_path=pdconn.vllm"
)


@dataclass(frozen=True)
class Expected:
    """What an engine is started with."""

    role: str = "kv_producer"
    host: str = "localhost"
    port: int = 5600
    findings: list[str] = field(default_factory=list)


def settings(given: GivenConfig, environ: dict[str, str] | None = None) -> Settings:
    found, errors = settings_of_given(given, environ or {})
    assert errors == []
    assert found is not None
    return found


def check(given: GivenConfig, expected: Expected, environ: dict[str, str] | None = None) -> None:
    assert given.transfer is not None
    found = settings(given, environ)
    assert given.transfer["kv_role"] == expected.role
    assert (found.side_channel_host, found.side_channel_port) == (expected.host, expected.port)
    assert [one.id for one in judge_given(given, [])] == expected.findings


CASE_FILES = {
    "d2_mapping.yaml": Expected("kv_consumer"),
    "d4_underscores_and_variable.txt": Expected(host="127.0.0.1"),
    "d5_dotted.yaml": Expected("kv_consumer"),
    "d6_config_inside_a_line.txt": Expected("kv_consumer"),
    "d7_docker.txt": Expected(host="127.0.0.1", port=5700),
}


@pytest.mark.parametrize(("name", "expected"), CASE_FILES.items())
def test_a_file_is_read(name: str, expected: Expected) -> None:
    check(read_given(str(CASES / name), {}), expected)


@pytest.mark.parametrize("name", [name for name in CASE_FILES if name.endswith(".txt")])
def test_its_line_is_read_as_an_argument_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CASES)
    check(read_given((CASES / name).read_text(encoding="utf-8"), {}), CASE_FILES[name])


def test_every_file_has_its_right_values() -> None:
    assert {path.name for path in CASES.iterdir()} == set(CASE_FILES)


LINES = {
    "underscores": f"vllm serve m --kv_transfer_config '{KV}'",
    "equals": f"vllm serve m --kv-transfer-config='{KV}'",
    "an abbreviation": f"vllm serve m --kv-transfer '{KV}'",
    "a flag before the model": f"vllm serve --enforce-eager m --kv-transfer-config '{KV}'",
    "dotted": f"vllm serve m {DOTTED}",
    "-O beside it": f"vllm serve m -O3 --kv-transfer-config '{KV}' -O 2",
    "double quotes": f'vllm serve m --kv-transfer-config "{KV.replace(chr(34), chr(92) + chr(34))}"',
    "without a program": f"--kv-transfer-config '{KV}' --port 8100",
    "a module": f"python3 -m vllm.entrypoints.openai.api_server --model m --kv-transfer-config '{KV}'",
    "a path": f"exec /opt/venv/bin/vllm serve m --kv-transfer-config '{KV}' > log 2>&1 &",
    "a wrapper": f"numactl --cpunodebind=0 nohup vllm serve m --kv_transfer_config='{KV}' &",
    "bash -c": f"bash -lc \"vllm serve m {DOTTED}\"",
    "a variable": f"KV='{KV}'\nvllm serve m --kv-transfer-config \"$KV\"",
    "a default": "vllm serve m --kv-transfer-config \"${KV:-$(cat kv.json)}\"",
    "a file in a command": "vllm serve m --kv-transfer-config \"$(cat kv.json)\"",
    "an array": f"ARGS=(--kv-transfer-config '{KV}'\n  --port 8100) # both\nvllm serve m \"${{ARGS[@]}}\"",
    "words of a variable": f"ARGS='--port 8100 --enforce-eager'; vllm serve m $ARGS {DOTTED}",
    "a here-document": f"cat > /tmp/nowhere.yaml <<'EOF'\nkv-transfer-config: {KV}\nEOF\nvllm serve m --config /tmp/nowhere.yaml",
    "a branch": f"if true; then\n  vllm serve m --kv-transfer-config '{KV}'\nfi",
    "slurm": f"#!/bin/bash\n#SBATCH -N 1\nsrun --ntasks=1 vllm serve m --kv-transfer-config '{KV}'",
}  # fmt: skip


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_line_is_read_as_a_shell_and_vllm_read_it(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kv.json").write_text(KV, encoding="utf-8")
    check(read_given(line, {}), Expected())
    Path("start.sh").write_text(line, encoding="utf-8")
    check(read_given("start.sh", {}), Expected())


HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1"
PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT=5700"
SERVE = f"vllm serve m --kv-transfer-config '{KV}'"
BOTH = Expected(host="127.0.0.1", port=5700)
VARIABLES = {
    "before it": (f"{HOST} {PORT} {SERVE}", BOTH),
    "of env": (f"env -u X {HOST} {PORT} {SERVE}", BOTH),
    "exported": (f"export {HOST} {PORT}\n{SERVE}", BOTH),
    "exported later": (f"{PORT}; {HOST}\nexport VLLM_NIXL_SIDE_CHANNEL_HOST\n{SERVE}", Expected(host="127.0.0.1")),
    "set -a": (f"set -a\n{HOST}\n{PORT}\n{SERVE}", BOTH),
    "of bash -c": (f"{HOST} bash -c '{PORT} vllm serve m {DOTTED}'", BOTH),
    "docker -e": (f"docker run -d --name p -e {HOST} --env={PORT} img m --kv-transfer-config '{KV}'", BOTH),
    "docker, not the shell's": (f"{HOST} {PORT} docker run --gpus all img m --kv-transfer-config '{KV}'", Expected()),
    "docker -e NAME": (f"export {HOST}; {PORT} docker run -eVLLM_NIXL_SIDE_CHANNEL_PORT -it img m {DOTTED}", Expected(port=5700)),
    "docker exec": (f"docker exec -e {PORT} -e {HOST} box {SERVE}", BOTH),
    "docker, its own program": (f"docker run --rm -e {PORT} -e {HOST} --entrypoint vllm img serve m {DOTTED}", BOTH),
    "docker, a shell": (f"docker run --rm -e {PORT} --entrypoint bash img -c '{HOST} vllm serve m {DOTTED}'", BOTH),
    "podman": (f"podman run --env-file vars --network host img vllm serve m {DOTTED}", BOTH),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_count_where_the_engine_gets_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("vars").write_text(f"# both\n{HOST}\n{PORT}\n", encoding="utf-8")
    line, expected = VARIABLES[name]
    check(read_given(line, {}), expected)


def test_variables_of_this_shell_reach_no_container() -> None:
    outer = {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5800"}
    check(read_given(SERVE, outer), Expected(port=5800), outer)
    inside = read_given(f"docker run img m --kv-transfer-config '{KV}'", outer)
    check(inside, Expected(), outer)
    assert not inside.has_addresses_of_host
    assert read_given(f"docker run --net=host img m {DOTTED}", outer).has_addresses_of_host


def test_what_only_a_shell_knows_is_not_guessed() -> None:
    given = read_given(
        f"VLLM_NIXL_SIDE_CHANNEL_HOST=$(hostname -i) PDCONN_SECRET={'x' * 20} {SERVE}"
    )
    found = settings(given)
    assert given.guessed == ("VLLM_NIXL_SIDE_CHANNEL_HOST",)
    assert found.side_channel_host == "192.0.2.1"
    assert not given.has_addresses_of_host


COMPOSE = f"""
x-kv: &kv '{KV}'
services:
  prefill:
    image: vllm/vllm-openai:v0.32.0
    network_mode: host
    environment: [VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1, "VLLM_NIXL_SIDE_CHANNEL_PORT=${{PORT:-5700}}"]
    command: [m, --kv-transfer-config, *kv]
  decode:
    image: vllm/vllm-openai:v0.32.0
    environment: {{VLLM_NIXL_SIDE_CHANNEL_PORT: 5701}}
    command: >
      m {DOTTED.replace("producer", "consumer")}
      --kv-transfer-config.kv_load_failure_policy recompute
  redis: {{image: redis, command: [redis-server, --port, "6379"]}}
"""
KUBERNETES = f"""
kind: Deployment
metadata: {{name: prefill}}
spec:
  template:
    spec:
      initContainers: [{{name: fetch, command: [sh, -c, "echo serve"]}}]
      containers:
        - name: vllm
          image: vllm/vllm-openai:v0.32.0
          command: ["/bin/sh", "-c"]
          args:
            - |
              exec vllm serve m --port 8100 \\
                --kv-transfer-config '{KV}'
          env:
            - {{name: POD_IP, valueFrom: {{fieldRef: {{fieldPath: status.podIP}}}}}}
            - {{name: VLLM_NIXL_SIDE_CHANNEL_HOST, value: $(POD_IP)}}
            - {{name: VLLM_NIXL_SIDE_CHANNEL_PORT, value: "5700"}}
            - {{name: PDCONN_SECRET, valueFrom: {{secretKeyRef: {{name: s, key: k}}}}}}
---
kind: Service
metadata: {{name: prefill}}
"""
UNIT = f"""
[Unit]
Description=prefill

[Service]
Environment="VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1" OTHER=1
EnvironmentFile=-vars
ExecStart=/opt/vllm/bin/vllm serve m --port ${{HTTP}} \\
    --kv-transfer-config '{KV}'
Restart=always
"""
HELM = f"""
servingEngineSpec:
  modelSpec:
    - name: prefill
      vllmConfig:
        extraArgs: ["--kv-transfer-config", '{KV}']
"""
RAY = f"""
applications:
  - args:
      llm_configs:
        - engine_kwargs: {{kv_transfer_config: {KV}, tensor_parallel_size: 2}}
"""
DOCUMENTS = {
    "compose.yaml#prefill": (COMPOSE, BOTH),
    "compose.yaml#decode": (COMPOSE, Expected("kv_consumer", port=5701)),
    "pod.yaml": (KUBERNETES, Expected(host="192.0.2.1", port=5700)),
    "pod.json": (None, Expected(host="192.0.2.1", port=5700)),
    "prefill.service": (UNIT, BOTH),
    "values.yaml": (HELM, Expected()),
    "serve.yaml": (RAY, Expected()),
}


@pytest.mark.parametrize("where", DOCUMENTS)
def test_a_document_is_read(where: str, tmp_path: Path) -> None:
    text, expected = DOCUMENTS[where]
    if text is None:
        import yaml

        text = json.dumps({"items": list(yaml.safe_load_all(KUBERNETES))})
    name, hash_, engine = where.partition("#")
    (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "vars").write_text(f"{PORT}\nHTTP=8100\n", encoding="utf-8")
    check(read_given(f"{tmp_path / name}{hash_}{engine}", {}), expected)


def test_of_several_engines_each_has_a_name(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(COMPOSE, encoding="utf-8")
    assert [one.name for one in read_engines(str(path), {})] == ["prefill", "decode"]
    for text, seen in ((str(path), "2: prefill, decode"), (f"{path}#redis", "2: prefill, decode")):
        with pytest.raises(BadQuestion, match=seen):
            read_given(text, {})


def test_our_own_manifests_are_read() -> None:
    compose = read_engines(str(ROOT / "docker/compose.yaml"), {})
    assert [one.name for one in compose] == ["p1", "p2", "d1", "d2"]
    assert all(one.transfer is not None for one in compose)
    folder = ROOT / "examples/kubernetes/base"
    for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        given = read_given(str(folder / f"{name}.yaml"), {})
        check(given, Expected(role, host="192.0.2.1"))


OPAQUE = {
    "another key": f"engine:\n  connector: {KV}\n",
    "a comment": "# kv_connector: none\nport: 8000\n",
    "python": f"LLM(model='m', kv_transfer_config=KVTransferConfig(**{KV}))\n",
    "a command that is none of vLLM": f"serve-model --extra '{KV}'\n",
}


@pytest.mark.parametrize("text", OPAQUE.values(), ids=OPAQUE)
def test_a_connector_in_a_place_that_is_not_understood_is_no_engine_without_one(
    text: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadQuestion):
        read_engines(str(path), {})
    path.write_text("port: 8000\nmodel: m\n", encoding="utf-8")  # the control: there is none
    given = read_given(str(path), {})
    assert [one.id for one in judge_given(given, [])] == ["config.no-connector"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"kv_connector_module_path": "pdconn.vlm"}, ("config.module-path", "'pdconn.vllm'")),
        ({"kv_connector_module_path": "pdconn.vllm.nixI"}, ("config.module-path", "pdconn.vllm")),
        ({"kv_connector_module_path": "pdconn.vllmx"}, ("config.module-path", "'pdconn.vllm'")),
        ({"kv_connector": "PdconConnector"}, ("config.connector", "PdconnConnector")),
        ({"kv_connector_module_path": "pdconn.vllm.nixl"}, ("config.connector", "NixlConnector")),
        ({"kv_rol": "kv_both"}, ("config.transfer-key", "'kv_role'")),
    ],
)
def test_a_typo_is_named_with_what_was_meant(
    changed: dict[str, Any], expected: tuple[str, str]
) -> None:
    given = read_given(json.dumps({**json.loads(KV), **changed}), {})
    (finding,) = judge_given(given, [])
    assert finding.id == expected[0]
    assert expected[1] in finding.message


def test_every_bad_key_is_reported() -> None:
    extra = {"verifi": "off", "kv_lease_duration": -1, "huge_pages": "yes", "store": {"root": "x"}}
    given = read_given(json.dumps({**json.loads(KV), "kv_connector_extra_config": extra}), {})
    _, errors = settings_of_given(given, {})
    found = [one.id for one in judge_given(given, errors)]
    assert found[:3] == [
        "config.kv_connector_extra_config", "config.kv_lease_duration", "config.huge_pages",
    ]  # fmt: skip
    assert found[3].startswith("config.store.")
