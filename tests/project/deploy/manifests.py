"""``examples/kubernetes`` as data, and what must hold of it; each law returns what is wrong."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import kubernetes_validate
from jsonschema import Draft202012Validator

from pdconn.vllm.config import read_settings
from tests.project.deploy.custom_resources import SCHEMAS
from tests.project.deploy.kustomize import Resource, build, containers

EXAMPLES = Path(__file__).parents[3] / "examples/kubernetes"
GUIDE = Path(__file__).parent / "guide"
OVERLAYS = ("default", "rdma", "keda", "keda-roles", "llm-d", "multinode", "gateway")

#: The release whose schemas the manifests are held to; the newest field is ``preStop.sleep``.
KUBERNETES = "1.34"

# It reads the definitions of the whole release, some megabytes, for every resource.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)

#: How long what prefill lends lives unread, by default.
LEASE_S = read_settings({}, "localhost", 5600, 0, environ={}).kv_lease_duration

#: The controller's label: 0 for a group's leader.
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"

SECRETS = {
    "base/secrets/pdconn.secret": "0123456789abcdef" * 4,
    "base/secrets/api-keys.txt": "fedcba9876543210" * 4,
    "components/llm-d/secrets/pdconn.secret": "0123456789abcdef" * 4,
}


@dataclass(frozen=True)
class Cluster:
    """What an overlay makes."""

    resources: list[Resource]

    def of(self, kind: str) -> list[Resource]:
        return [each for each in self.resources if each["kind"] == kind]

    def named(self, kind: str, name: str) -> Resource:
        return next(each for each in self.of(kind) if each["metadata"]["name"] == name)

    @cached_property
    def workloads(self) -> dict[str, Resource]:
        """Deployments and StatefulSets by name, and the leader and the workers of each group."""
        found = {
            each["metadata"]["name"]: each
            for each in self.resources
            if each["kind"] in ("Deployment", "StatefulSet")
        }
        for each in self.of("LeaderWorkerSet"):
            for role, index in (("leader", "0"), ("worker", "1")):
                made = _pods_of_group(each, f"{role}Template", index)
                found[f"{each['metadata']['name']} {role}"] = made
        return found


def _pods_of_group(group: Resource, template: str, index: str) -> Resource:
    """The leader or the workers of a LeaderWorkerSet, with the label that its controller adds."""
    pod = group["spec"]["leaderWorkerTemplate"][template]
    labels = {**pod["metadata"]["labels"], WORKER_INDEX: index}
    return {
        "kind": "LeaderWorkerSet",
        "metadata": group["metadata"],
        "spec": {"template": {"metadata": {"labels": labels}, "spec": pod["spec"]}},
    }


def checkout(folder: Path) -> Path:
    """A copy of the examples with secrets, and llm-d's guide from this machine."""
    copied = Path(shutil.copytree(EXAMPLES, folder / "kubernetes"))
    for name, content in SECRETS.items():
        (copied / name).write_text(content, encoding="utf-8")
    shutil.copytree(GUIDE, copied / "guide")
    overlay = copied / "overlays/llm-d/kustomization.yaml"
    overlay.write_text(
        re.sub(
            r"https://github\.com/llm-d/llm-d//\S+",
            "../../guide",
            overlay.read_text(encoding="utf-8"),
        ),
        encoding="utf-8",
    )
    return copied


def built(folder: Path, overlay: str) -> Cluster:
    """What an overlay of a checkout makes."""
    return Cluster(build(folder / "overlays" / overlay))


def is_worker(workload: Resource) -> bool:
    """Pods that serve ranks to the leader of their group, and no HTTP."""
    index = workload["spec"]["template"]["metadata"]["labels"].get(WORKER_INDEX, "0")
    return bool(index != "0")


def pod_of(workload: Resource) -> dict[str, Any]:
    return dict(workload["spec"]["template"]["spec"])


def argument(container: Mapping[str, Any], name: str) -> str | None:
    """The value of ``--name=value``."""
    found = [a.partition("=")[2] for a in container["args"] if a.startswith(f"--{name}=")]
    return found[0] if found else None


def port_of(container: Mapping[str, Any], port: str | int) -> int | None:
    """A container's port by its name, or as it is."""
    named = {one["name"]: one["containerPort"] for one in container.get("ports", ())}
    return port if isinstance(port, int) else named.get(port)


def port_numbers(container: Mapping[str, Any]) -> list[int]:
    return [one["containerPort"] for one in container.get("ports", ())]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector meets these labels."""
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for one in selector.get("matchExpressions", ()):
        if one["operator"] != "In":
            raise NotImplementedError(one["operator"])
        if labels.get(one["key"]) not in one["values"]:
            return False
    return True


# The laws


def misshapen(cluster: Cluster) -> list[str]:
    """What the schemas of the release, and of the custom resources, refuse."""
    wrong = []
    for each in cluster.resources:
        where = f"{each['kind']} {each['metadata']['name']}"
        if each["kind"] == "DisaggregatedSet":
            wrong += _bad_roles(each)
        elif each["kind"] in SCHEMAS:
            errors = Draft202012Validator(SCHEMAS[each["kind"]]).iter_errors(each)
            wrong += [f"{where}: {error.json_path}: {error.message}" for error in errors]
            if each["kind"] == "LeaderWorkerSet":
                templates = each["spec"]["leaderWorkerTemplate"]
                for role in ("leaderTemplate", "workerTemplate"):
                    wrong += _bad_pod(templates[role], f"{where}, {role}")
        else:
            wrong += _refused(each, where)
    return wrong


def _bad_roles(resource: Resource) -> list[str]:
    """Pods in a resource whose own schema is not here: each must be one that could run."""
    wrong = []
    for role in resource["spec"]["roles"]:
        template = role["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        wrong += _bad_pod(template, f"role {role['name']}")
    return wrong


def _bad_pod(template: Mapping[str, Any], where: str) -> list[str]:
    metadata = {"name": "one", **template["metadata"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    return _refused(pod, where)


def _refused(resource: Resource, where: str) -> list[str]:
    try:
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{where}: {error.json_path}: {error.message}"]
    return []


def without_bounds(cluster: Cluster) -> list[str]:
    """Containers without limits for processor and memory, or whose GPU is shared."""
    wrong = []
    for name, workload in cluster.workloads.items():
        for container in pod_of(workload)["containers"]:
            asked = container.get("resources", {}).get("requests", {})
            limits = container.get("resources", {}).get("limits", {})
            wrong += [
                f"{name}: no limit of {one}" for one in ("cpu", "memory") if one not in limits
            ]
            devices = {one for one in limits.keys() | asked.keys() if "/" in one}
            wrong += [f"{name}: {one}" for one in devices if asked.get(one) != limits.get(one)]
    return wrong


def insecure(cluster: Cluster) -> list[str]:
    """Pods that the level which their namespace enforces would refuse, or that ask for more."""
    (namespace,) = cluster.of("Namespace")
    level = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    wrong = []
    for name, workload in cluster.workloads.items():
        pod = pod_of(workload)
        wrong += [f"{name}: {fault}" for fault in _too_open(pod, restricted=level == "restricted")]
    return wrong


def _too_open(pod: Mapping[str, Any], *, restricted: bool) -> Iterator[str]:
    everyone = pod.get("securityContext", {})
    if restricted and (not everyone.get("runAsNonRoot") or everyone.get("runAsUser") in (None, 0)):
        yield "runs as root"
    if everyone.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "no seccomp profile"
    if pod.get("automountServiceAccountToken") is not False:
        yield "gets a token of the API"
    if pod.get("hostNetwork") or pod.get("hostPID") or pod.get("hostIPC"):
        yield "shares a namespace with the host"
    if any("hostPath" in one for one in pod.get("volumes", ())):
        yield "mounts the host's files"
    for container in pod["containers"]:
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            yield "may gain privileges"
        if not own.get("readOnlyRootFilesystem"):
            yield "may write to its image"
        if own.get("capabilities", {}).get("drop") != ["ALL"]:
            yield "keeps capabilities"
        if added := set(own.get("capabilities", {}).get("add", ())) - (
            set() if restricted else {"IPC_LOCK"}
        ):
            yield f"adds {sorted(added)}"


def unwritable(cluster: Cluster) -> list[str]:
    """Places that are written to, on a root that is not writable, without a volume."""
    wrong = []
    for name, workload in cluster.workloads.items():
        pod = pod_of(workload)
        scratch = {one["name"] for one in pod["volumes"] if "emptyDir" in one}
        for container in pod["containers"]:
            writable = {m["mountPath"] for m in container["volumeMounts"] if m["name"] in scratch}
            env = {one["name"]: one.get("value") for one in container["env"]}
            needed = {"/tmp"}
            if container["name"] == "engine":
                needed |= {"/dev/shm", env.get("HOME") or "/root"}
            wrong += [f"{name}: {place}" for place in sorted(needed - writable)]
    return wrong


def cut_short(cluster: Cluster) -> list[str]:
    """Pods that are killed before they have drained, by the options that they are started with."""
    wrong = []
    for name, workload in cluster.workloads.items():
        pod = pod_of(workload)
        for container in pod["containers"]:
            sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
            delay = int(argument(container, "drain-delay") or sleep.get("seconds", 0))
            drain = argument(container, "drain-timeout") or argument(container, "shutdown-timeout")
            if is_worker(workload):  # it waits for as long as its leader needs
                leader = pod_of(cluster.workloads[name.replace(" worker", " leader")])
                needed = int(argument(leader["containers"][0], "shutdown-timeout") or 0) + 5
                if not needed < delay < pod["terminationGracePeriodSeconds"]:
                    wrong.append(f"{name}: ends {delay} s on, its leader may need {needed} s")
            elif drain is None or not delay:
                wrong.append(f"{name}: no delay, or no time to drain")
            elif pod.get("terminationGracePeriodSeconds", 30) < delay + int(drain) + 5:
                wrong.append(f"{name}: killed before {delay} + {drain} s")
            lends = "prefill" in name and not is_worker(workload)
            if lends and int(drain or 0) < LEASE_S + 1:
                wrong.append(f"{name}: stops before leases of {LEASE_S:g} s end")
    return wrong


def unprobed(cluster: Cluster) -> list[str]:
    """Containers without probes, or with probes of ports that they do not have."""
    wrong = []
    for name, workload in cluster.workloads.items():
        for container in [] if is_worker(workload) else pod_of(workload)["containers"]:
            needed = ["readinessProbe", "livenessProbe"]
            needed += ["startupProbe"] if workload["kind"] != "Deployment" else []
            for probe in needed:
                asked = container.get(probe, {}).get("httpGet") or container.get(probe, {}).get(
                    "grpc"
                )
                if asked is None:
                    wrong.append(f"{name}: no {probe}")
                elif port_of(container, asked["port"]) not in port_numbers(container):
                    wrong.append(f"{name}: {probe} of {asked['port']}")
    return wrong


def unselected(cluster: Cluster) -> list[str]:
    """Services, budgets and monitors that meet no pod or no port, sets without their service."""
    pods = {
        name: (one["spec"]["template"]["metadata"]["labels"], pod_of(one)["containers"][0])
        for name, one in cluster.workloads.items()
    }
    wrong = []
    for service in cluster.of("Service"):
        name, selector = service["metadata"]["name"], {"matchLabels": service["spec"]["selector"]}
        met = [container for labels, container in pods.values() if selects(selector, labels)]
        if len(met) != 1 or any(
            port_of(met[0], port["targetPort"]) is None for port in service["spec"]["ports"]
        ):
            wrong.append(f"Service {name}: {len(met)} workloads, or no such port")
    for budget in cluster.of("PodDisruptionBudget"):
        met = [n for n, (labels, _) in pods.items() if selects(budget["spec"]["selector"], labels)]
        of_one = {n.removesuffix(" leader").removesuffix(" worker") for n in met}
        name = budget["metadata"]["name"]
        if of_one not in ({name}, {f"{name}-group"}):
            wrong.append(f"PodDisruptionBudget {budget['metadata']['name']}: {met}")
        elif budget["spec"].get("minAvailable", 0) >= cluster.workloads[met[0]]["spec"].get(
            "replicas", 2
        ):
            wrong.append(f"PodDisruptionBudget {met[0]}: a node could never be drained")
    for monitor in cluster.of("PodMonitor"):
        met = [
            container
            for name, (labels, container) in pods.items()
            if selects(monitor["spec"]["selector"], labels)
            and not is_worker(cluster.workloads[name])
        ]
        ports = [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]]
        if not met or any(port_of(one, port) is None for one in met for port in ports):
            wrong.append(f"PodMonitor {monitor['metadata']['name']}: no pod, or no such port")
    wrong += _astray(cluster, list(pods.values()))
    for name, workload in cluster.workloads.items():
        if workload["kind"] == "StatefulSet":
            service = cluster.named("Service", workload["spec"]["serviceName"])
            if service["spec"].get("clusterIP") != "None" or service["metadata"]["name"] != name:
                wrong.append(f"{name}: no headless service of its name")
    return wrong


def _astray(cluster: Cluster, pods: list[tuple[dict[str, str], dict[str, Any]]]) -> list[str]:
    """Pools that hold no pods of one workload, or name no picker; routes to no pool."""
    wrong = []
    pools = {one["metadata"]["name"]: one["spec"] for one in cluster.of("InferencePool")}
    for name, pool in pools.items():
        met = [container for labels, container in pods if selects(pool["selector"], labels)]
        numbers = [one["number"] for one in pool["targetPorts"]]
        if len(met) != 1 or not set(numbers) <= set(port_numbers(met[0])):
            wrong.append(f"InferencePool {name}: {len(met)} workloads, or no such port")
        picker = pool["endpointPickerRef"]
        ports = [
            port["port"]
            for service in cluster.of("Service")
            if service["metadata"]["name"] == picker["name"]
            for port in service["spec"]["ports"]
        ]
        if picker["port"]["number"] not in ports:
            wrong.append(f"InferencePool {name}: no picker {picker['name']}, or no such port")
    for route in cluster.of("HTTPRoute"):
        for rule in route["spec"]["rules"]:
            wrong += [
                f"HTTPRoute {route['metadata']['name']}: no pool {one['name']}"
                for one in rule["backendRefs"]
                if one.get("kind") != "InferencePool" or one["name"] not in pools
            ]
    return wrong


def unpinned(cluster: Cluster) -> list[str]:
    """Images whose tag is no version."""
    images = {
        one["image"]
        for resource in cluster.resources
        if resource["kind"] != "DisaggregatedSet"
        for one in containers(resource)
    }
    return [one for one in sorted(images) if not re.fullmatch(r"[\w./-]+:\d+(\.\d+)+(@\S+)?", one)]


CHECKS = (
    misshapen, without_bounds, insecure, unwritable, cut_short, unprobed, unselected, unpinned,
)  # fmt: skip
