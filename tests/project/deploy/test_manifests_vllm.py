"""What the manifests tell vLLM and NIXL they take, and what scaling asks engines they say."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.project.deploy.expressions import documented, scalers, unexported
from tests.project.deploy.kustomize import Resource
from tests.project.deploy.manifests import Cluster, built, pod_of
from tests.project.docker.test_compose_vllm import parsed, vllms_own


def command(cluster: Cluster, workload: str) -> list[str]:
    """An engine's arguments, with variables replaced as Kubernetes does."""
    (container,) = pod_of(cluster.workloads[workload])["containers"]
    (model,) = cluster.of("ConfigMap")
    return [one.replace("$(MODEL)", model["data"]["MODEL"]) for one in container["args"]]


@pytest.mark.parametrize(
    ("workload", "role"), [("pdconn-prefill", "kv_producer"), ("pdconn-decode", "kv_consumer")]
)
def test_vllm_takes_the_arguments_and_finds_the_connector(
    default: Cluster, workload: str, role: str
) -> None:
    args = parsed(command(default, workload))
    transfer = args.kv_transfer_config
    assert transfer is not None
    assert transfer.kv_role == role
    assert hasattr(
        import_module(transfer.kv_connector_module_path or ""), transfer.kv_connector or ""
    )
    assert args.model == "openai/gpt-oss-20b"
    assert args.enable_prefix_caching


def test_vllm_refuses_an_argument_with_a_fault(
    default: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Negative control."""
    words = command(default, "pdconn-prefill")
    with pytest.raises(SystemExit):
        parsed([one.replace("--shutdown-timeout", "--shut-down-time-out") for one in words])
    capsys.readouterr()


@pytest.mark.parametrize(("role", "rank"), [("leader", 0), ("worker", 1)])
@pytest.mark.parametrize("engine", ["prefill", "decode"])
def test_vllm_takes_the_arguments_of_each_pod_of_a_group(
    examples: Path, engine: str, role: str, rank: int
) -> None:
    words = command(built(examples, "multinode"), f"pdconn-{engine}-group {role}")
    for name, value in (("GROUP_SIZE", "2"), ("WORKER_INDEX", "1"), ("LEADER_ADDRESS", "10.1.2.3")):
        words = [word.replace(f"$(LWS_{name})", value) for word in words]
    assert not any("$(" in word for word in words)
    args = parsed(words)
    assert (args.nnodes, args.node_rank, args.master_addr) == (2, rank, "10.1.2.3")
    assert args.tensor_parallel_size == 8
    assert args.distributed_executor_backend == "mp"
    transfer = args.kv_transfer_config
    assert transfer is not None
    assert transfer.kv_connector == "PdconnConnector"


def test_vllm_takes_what_llm_ds_guide_becomes(examples: Path) -> None:
    (found,) = built(examples, "llm-d").of("DisaggregatedSet")
    for role in found["spec"]["roles"]:
        pod: Resource = role["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
        words = [one for one in pod["containers"][0]["args"] if one != "MODEL"]
        transfer = parsed(words).kv_transfer_config
        assert transfer is not None
        assert transfer.kv_connector == "PdconnConnector"


def test_scaling_asks_for_metrics_that_engines_and_router_export() -> None:
    exported = {**vllms_own(), **documented()}
    assert unexported(scalers(), exported) == []
    for old, new in (("num_requests_waiting", "requests_waiting"), ('role="', 'rank="')):
        wrong = {title: query.replace(old, new) for title, query in scalers().items()}
        assert unexported(wrong, exported) != []


LISTENING = """
import os
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("listening", nixl_agent_config(backends=["UCX"]))
open_files = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
sockets = {os.readlink(path) for path in open_files if os.path.exists(path)}
for family in ("tcp", "tcp6"):
    for line in open(f"/proc/self/net/{family}").read().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == "0A" and f"socket:[{inode}]" in sockets:
            print("port", int(local.rpartition(":")[2], 16))
"""


def listening(environment: dict[str, str]) -> list[int]:
    """Where UCX listens, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", LISTENING],
        env={**os.environ, "UCX_TLS": "tcp", **environment},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("port ")]


def test_ucx_listens_where_the_network_policy_lets_it(default: Cluster) -> None:
    pytest.importorskip("nixl")
    (container,) = pod_of(default.workloads["pdconn-prefill"])["containers"]
    env = {one["name"]: one.get("value") for one in container["env"]}
    name = "UCX_TCP_PORT_RANGE"
    first, last = (int(port) for port in env[name].split("-"))
    ports = listening({name: env[name]})
    assert ports
    assert all(first <= port <= last for port in ports)
    elsewhere = listening({name: "31000-31099"})
    assert all(31000 <= port < 31100 for port in elsewhere)
    assert elsewhere
