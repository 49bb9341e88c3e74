"""Engines of several nodes: groups of pods whose ranks make one engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.project.deploy import manifests as laws
from tests.project.deploy.kustomize import BuildError
from tests.project.deploy.manifests import Cluster, argument, built, checkout, pod_of
from tests.project.deploy.network import reachable

Change = Callable[[Cluster], object]
GROUPS = ("pdconn-prefill-group", "pdconn-decode-group")
OWN = {"host", "port", "shutdown-timeout", "headless", "node-rank"}
"""Options that a leader and its workers do not share."""


@pytest.fixture(scope="module")
def multinode(examples: Path) -> Cluster:
    return built(examples, "multinode")


def container(cluster: Cluster, group: str, role: str) -> Any:
    (found,) = pod_of(cluster.workloads[f"{group} {role}"])["containers"]
    return found


def options(one: Any) -> dict[str, str]:
    words = (word.removeprefix("--").partition("=") for word in one["args"] if word[:2] == "--")
    return {name: value for name, _, value in words}


def unlike(cluster: Cluster) -> list[str]:
    """Options, variables and devices in which the pods of one engine differ and may not."""
    wrong = []
    for group in GROUPS:
        leader, worker = (container(cluster, group, role) for role in ("leader", "worker"))
        ours, theirs = options(leader), options(worker)
        names = (ours.keys() | theirs.keys()) - OWN
        wrong += [
            f"{group}: --{name}" for name in sorted(names) if ours.get(name) != theirs.get(name)
        ]
        for field in ("image", "env", "envFrom", "resources", "volumeMounts", "securityContext"):
            if leader[field] != worker[field]:
                wrong.append(f"{group}: {field}")
        if ("headless" in ours, "headless" in theirs) != (False, True):
            wrong.append(f"{group}: expected workers alone to be headless")
    return wrong


def uneven(cluster: Cluster) -> list[str]:
    """Groups whose GPUs are not as many as their engine has ranks."""
    wrong = []
    for group in cluster.of("LeaderWorkerSet"):
        name, size = group["metadata"]["name"], group["spec"]["leaderWorkerTemplate"]["size"]
        leader = container(cluster, name, "leader")
        gpus = size * int(leader["resources"]["limits"]["nvidia.com/gpu"])
        ranks = int(argument(leader, "tensor-parallel-size") or 1)
        wrong += [f"{name}: {gpus} GPUs for {ranks} ranks"] if gpus != ranks else []
    return wrong


def test_an_engine_s_pods_are_alike_and_have_a_gpu_for_each_rank(multinode: Cluster) -> None:
    assert [each["metadata"]["name"] for each in multinode.of("LeaderWorkerSet")] == sorted(
        GROUPS, reverse=True
    )
    assert multinode.of("StatefulSet") == []
    assert unlike(multinode) == []
    assert uneven(multinode) == []


def test_a_service_s_name_is_not_the_group_s(multinode: Cluster) -> None:
    """The controller makes a Service of the group's name, which would replace ours."""
    ours = {each["metadata"]["name"] for each in multinode.of("Service")}
    assert ours & set(GROUPS) == set()
    assert {"pdconn-prefill", "pdconn-decode"} <= ours


def templates(cluster: Cluster) -> Any:
    return cluster.of("LeaderWorkerSet")[0]["spec"]["leaderWorkerTemplate"]


def worker(cluster: Cluster) -> Any:
    return templates(cluster)["workerTemplate"]["spec"]


@pytest.mark.parametrize(
    ("check", "change"),
    [
        (unlike, lambda c: worker(c)["containers"][0]["args"].remove("--headless")),
        (unlike, lambda c: worker(c)["containers"][0]["args"].remove("--enable-prefix-caching")),
        (unlike, lambda c: worker(c)["containers"][0]["env"].pop()),
        (uneven, lambda c: templates(c).update(size=3)),
        (laws.misshapen, lambda c: templates(c).update(sise=2)),
        (laws.misshapen, lambda c: worker(c).update(containerz=[])),
        (laws.insecure, lambda c: worker(c)["securityContext"].update(runAsUser=0)),
        (laws.without_bounds, lambda c: worker(c)["containers"][0]["resources"].pop("limits")),
        (laws.cut_short, lambda c: worker(c)["containers"][0].pop("lifecycle")),
        (laws.cut_short, lambda c: worker(c).update(terminationGracePeriodSeconds=40)),
        (
            laws.unselected,
            lambda c: c.named("Service", "pdconn-decode")["spec"]["selector"].pop(
                laws.WORKER_INDEX
            ),
        ),
    ],
)
def test_a_group_with_a_fault_is_refused(
    multinode: Cluster, check: Callable[[Cluster], list[str]], change: Change
) -> None:
    """Negative control."""
    cluster = Cluster(copy.deepcopy(multinode.resources))
    change(cluster)
    assert check(cluster) != []


def test_ranks_reach_each_other_and_nobody_else_reaches_them(
    multinode: Cluster, default: Cluster
) -> None:
    names = (group.removeprefix("pdconn-") for group in GROUPS)
    engines = {f"{name} {role}" for name in names for role in ("leader", "worker")}
    for port in (29500, 41234):
        assert reachable(multinode, port) == {(a, b) for a in engines for b in engines}
        assert reachable(default, port) == set()
    assert {source for source, target in reachable(multinode, 9000) if target == "router"} == {
        "monitoring"
    }


def test_a_patch_that_deletes_nothing_is_refused(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    path = folder / "components/multinode/kustomization.yaml"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("pdconn-(prefill", "pdcon-(prefill", 1), encoding="utf-8")
    with pytest.raises(BuildError, match="patch"):
        built(folder, "multinode")
