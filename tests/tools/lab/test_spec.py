"""An engine is what its spec says and nothing that the shell adds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdconn.tools.lab.spec import EngineSpec

_MODEL = Path("/models/tiny")


def _spec(**fields: object) -> EngineSpec:
    return EngineSpec(**{"name": "e", "model": _MODEL, "port": 8000, **fields})  # type: ignore[arg-type]


def _after(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_the_command_line_says_all_that_matters() -> None:
    config = {"kv_connector": "PdconnConnector", "kv_role": "kv_both"}
    spec = _spec(kv_transfer_config=config, num_blocks=40, tensor_parallel=2, args=("--seed", "3"))
    command = spec.command()
    assert _after(command, "--model") == str(_MODEL)
    assert json.loads(_after(command, "--kv-transfer-config")) == config
    assert _after(command, "--num-gpu-blocks-override") == "40"
    assert _after(command, "--tensor-parallel-size") == "2"
    assert _after(command, "--kv-cache-memory-bytes") == str(256 << 20)
    assert "--no-enable-prefix-caching" in command
    assert command[-2:] == ["--seed", "3"]


def test_an_engine_without_connector_gets_no_connector_options() -> None:
    command = _spec(prefix_caching=True).command()
    assert "--kv-transfer-config" not in command
    assert "--enable-prefix-caching" in command


def test_an_engine_elsewhere_is_the_same_behind_the_words_that_lead_there() -> None:
    there = ("ip", "netns", "exec", "p1")
    assert _spec(within=there).command() == [*there, *_spec().command()]


def test_a_gpu_keeps_vllms_own_choices() -> None:
    spec = _spec(device="gpu")
    assert not {"--kv-cache-memory-bytes", "--dtype", "--enforce-eager"} & set(spec.command())
    env = spec.environment({}, Path("c"))
    assert not [name for name in env if "OMP" in name]
    assert "PDCONN_FORK_ENGINES" not in env


def test_settings_of_the_shell_do_not_leak_in() -> None:
    shell = {"PATH": "/bin", "VLLM_KV_CACHE_LAYOUT": "LBNHC", "OMP_NUM_THREADS": "8"}
    env = _spec(cpus=(0,)).environment({**shell, "PYTHONDONTWRITEBYTECODE": "1"}, Path("cache"))
    assert env["PATH"] == "/bin"
    assert env["VLLM_CACHE_ROOT"] == "cache"
    assert env["OMP_NUM_THREADS"] == "1"
    assert not {"VLLM_KV_CACHE_LAYOUT", "PYTHONDONTWRITEBYTECODE"} & set(env)


def test_the_specs_own_variables_win() -> None:
    env = _spec(env={"VLLM_CACHE_ROOT": "mine"}).environment({}, Path("cache"))
    assert env["VLLM_CACHE_ROOT"] == "mine"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"cpus": (1,)}, {"VLLM_CPU_OMP_THREADS_BIND": "1", "OMP_NUM_THREADS": "1"}),
        ({"cpus": (0, 1), "tensor_parallel": 2}, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}),
        ({}, {"PDCONN_FORK_ENGINES": "1"}),
        ({}, {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}),
        ({"one_process": True}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}),
        ({"layout": "BHLNC"}, {"VLLM_KV_CACHE_LAYOUT": "BHLNC", "PDCONN_CPU_LAYOUTS": "1"}),
        ({"side_channel_port": 5601}, {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5601"}),
        ({}, {"HF_HUB_OFFLINE": "1"}),
    ],
)
def test_fields_become_variables(fields: dict[str, object], expected: dict[str, str]) -> None:
    env = _spec(**fields).environment({}, Path("cache"))
    assert expected.items() <= env.items()


def test_a_model_from_a_hub_may_be_fetched() -> None:
    assert "HF_HUB_OFFLINE" not in _spec(model="org/name").environment({}, Path("cache"))


@pytest.mark.parametrize(
    "fields",
    [
        {"cpus": (0, 1)},
        {"cpus": (0,), "tensor_parallel": 2},
        {"one_process": True, "tensor_parallel": 2},
    ],
)
def test_ranks_cores_and_processes_must_fit(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"^e: "):
        _spec(**fields)
