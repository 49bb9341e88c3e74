"""``docker/`` as data, and what must hold of it; each check returns what is wrong, in words.

The schema is ours and strict: it knows the part of the compose specification that the files
use, so that a key which is misspelt, or new here, is refused.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

DOCKER = Path(__file__).parents[3] / "docker"
Service = Mapping[str, Any]

_PINNED = re.compile(r"^[\w./-]+:v?\d+(\.\d+)+[\w.-]*(?P<digest>@sha256:[0-9a-f]{64})?$")
_VARIABLE = re.compile(r"\$\{\w+:-([^}]*)\}")


@dataclass(frozen=True)
class Stack:
    """Compose files put together, and the folder that their paths start from."""

    doc: Mapping[str, Any]
    directory: Path = DOCKER

    @property
    def services(self) -> Mapping[str, Service]:
        return dict(self.doc["services"])

    def running(self) -> dict[str, Service]:
        """Services that go on: all but those that others wait for to end."""
        ended = {name for one in self.services.values() for name in _awaited_ends(one)}
        return {name: one for name, one in self.services.items() if name not in ended}

    def engines(self) -> dict[str, Service]:
        """Services that run vLLM."""
        return {
            name: one
            for name, one in self.services.items()
            if "vllm.entrypoints.openai.api_server" in one.get("entrypoint", ())
        }


def load(*names: str) -> Stack:
    """These files of ``docker/``, the later ones over the earlier, variables at their defaults."""
    doc: dict[str, Any] = {}
    for name in names:
        text = _VARIABLE.sub(r"\1", (DOCKER / name).read_text(encoding="utf-8"))
        doc = _over(doc, yaml.safe_load(text))
    return Stack(doc)


def _over(below: Any, above: Any, key: str = "") -> Any:
    """As compose merges: mappings by key, lists one after the other, but for commands."""
    if isinstance(below, dict) and isinstance(above, dict):
        mixed = {name: _over(below[name], above[name], name) for name in below.keys() & above}
        return {**below, **above, **mixed}
    if isinstance(below, list) and isinstance(above, list):
        return above if key in ("command", "entrypoint", "test") else [*below, *above]
    return above


def option(words: list[str], name: str) -> str | None:
    """The value of ``--name=value``."""
    found = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
    return found[0] if found else None


# The schema


def _only(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _each(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": value}


_TEXT = {"type": "string", "minLength": 1}
_WORDS = {"type": "array", "items": _TEXT, "minItems": 1}
_TIME = {"type": "string", "pattern": r"^(\d+[hms])+$"}
_CONDITION = {"enum": ["service_healthy", "service_completed_successfully"]}
_DEVICE = _only(("driver", "capabilities"), driver=_TEXT, device_ids=_WORDS, capabilities=_WORDS)
_DEVICES = _only(devices={"type": "array", "items": _DEVICE})
_LIMITS = _only(
    ("cpus", "memory"), cpus=_TEXT, memory={"type": "string", "pattern": r"^\d+(mb|gb)$"}
)
_HEALTH = _only(
    ("test", "interval", "timeout", "retries"),
    test={"type": "array", "items": _TEXT, "prefixItems": [{"const": "CMD"}], "minItems": 2},
    interval=_TIME,
    timeout=_TIME,
    retries={"type": "integer", "minimum": 1},
    start_period=_TIME,
)
_SERVICE = _only(
    ("image",),
    profiles=_WORDS,
    image=_TEXT,
    build=_only(("context", "dockerfile"), context=_TEXT, dockerfile=_TEXT),
    entrypoint=_WORDS,
    command=_WORDS,
    environment=_each({"type": "string"}),
    init={"type": "boolean"},
    restart={"enum": ["unless-stopped"]},
    stop_grace_period=_TIME,
    shm_size={"type": "string", "pattern": r"^\d+(mb|gb)$"},
    ulimits=_each({"type": "integer"}),
    sysctls=_each({"type": "integer"}),
    ipc={"enum": ["shareable", "service:namespaces"]},
    pid={"const": "service:namespaces"},
    cap_drop={"const": ["ALL"]},
    cap_add={"const": ["SYS_PTRACE"]},
    security_opt={"const": ["no-new-privileges:true"]},
    read_only={"type": "boolean"},
    devices={"type": "array", "items": {"const": "/dev/infiniband"}},
    network_mode={"enum": ["none", "bridge"]},
    # Neither interface_name, which needs Docker 28.1, nor name below, which Compose 1.29 refuses.
    networks=_each(_only(("ipv4_address",), ipv4_address=_TEXT)),
    ports={"type": "array", "items": {"pattern": r"^127\.0\.0\.1:\d+:\d+$"}},
    volumes={"type": "array", "items": {"pattern": r"^[\w./-]+:/[\w./-]+(:ro)?$"}},
    secrets=_WORDS,
    depends_on=_each(_only(("condition",), condition=_CONDITION)),
    healthcheck=_HEALTH,
    deploy=_only(resources=_only(limits=_LIMITS, reservations=_DEVICES)),
)
_SUBNETS = {"type": "array", "items": _only(("subnet",), subnet=_TEXT), "minItems": 1}
SCHEMA = {
    **_only(
        ("services", "networks", "volumes", "secrets"),
        services=_each(_SERVICE),
        networks=_each(_only(("ipam",), ipam=_only(config=_SUBNETS), internal={"type": "boolean"})),
        volumes=_each(_only()),
        secrets=_each(_only(("file",), file=_TEXT)),
    ),
    "patternProperties": {"^x-": {}},
}


def misshapen(stack: Stack) -> list[str]:
    """What the schema refuses."""
    errors = Draft202012Validator(SCHEMA).iter_errors(stack.doc)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]


# The laws


def unpinned(stack: Stack) -> list[str]:
    """Images, of services and below the Dockerfiles, whose tag is no version, and images of
    others without a digest; vLLM's is given one when ours is built, see Dockerfile.gpu."""
    wrong = []
    for name, image in _images(stack).items():
        found = _PINNED.match(image)
        ours = image.startswith(("pdconn-", "vllm/"))
        if found is None or not (ours or found["digest"]):
            wrong.append(f"{name}: {image}")
    return wrong


def _images(stack: Stack) -> dict[str, str]:
    images = {name: one["image"] for name, one in stack.services.items()}
    for service in stack.services.values():
        if "build" in service:
            path = stack.directory / service["build"]["context"] / service["build"]["dockerfile"]
            text = path.read_text(encoding="utf-8")
            bases = dict(re.findall(r"^ARG (\w+)=(\S+)", text, re.M))
            stages = re.findall(r"^FROM \S+ AS (\S+)", text, re.M)
            for word in set(re.findall(r"^FROM (\S+)", text, re.M)).difference(stages):
                images[f"{path.name} {word}"] = bases.get(word.strip("${}"), word)
    return images


def unbounded(stack: Stack) -> list[str]:
    """Services that go on without limits of processor and memory, or with capabilities."""
    wrong = []
    for name, service in stack.running().items():
        limits = service.get("deploy", {}).get("resources", {}).get("limits")
        wrong += [f"{name}: no limits"] if limits is None else []
        wrong += [f"{name}: {key}" for key in ("cap_drop", "security_opt") if key not in service]
    return wrong


def collisions(stack: Stack) -> list[str]:
    """Ports of this machine that two services want."""
    taken: dict[str, str] = {}
    wrong = []
    for name, service in stack.services.items():
        for port in (each.split(":")[1] for each in service.get("ports", ())):
            if port in taken:
                wrong.append(f"{port}: {taken[port]} and {name}")
            taken[port] = name
    return wrong


def bad_addresses(stack: Stack) -> list[str]:
    """Addresses that are missing, outside their subnet, the gateway's, or given twice."""
    subnets = {
        name: ipaddress.ip_network(network["ipam"]["config"][0]["subnet"])
        for name, network in stack.doc["networks"].items()
    }
    wrong = [
        f"{name}: no network"
        for name, one in stack.running().items()
        if not one.get("networks") and one.get("network_mode") != "none"
    ]
    seen = set()
    for name, service in stack.services.items():
        for network, attached in service.get("networks", {}).items():
            address = ipaddress.ip_address(attached["ipv4_address"])
            usable = list(subnets[network].hosts())[1:] if network in subnets else []
            if address not in usable or address in seen:
                wrong.append(f"{name}: {address} on {network}")
            seen.add(address)
    pairs = [(a, b) for a in subnets for b in subnets if a < b]
    return wrong + [f"{a} and {b} overlap" for a, b in pairs if subnets[a].overlaps(subnets[b])]


def bad_volumes(stack: Stack) -> list[str]:
    """Paths that are not there, and volumes that are undeclared or unused."""
    used: set[str] = set()
    wrong = []
    for name, service in stack.services.items():
        for source in (each.split(":")[0] for each in service.get("volumes", ())):
            if not source.startswith("."):
                used.add(source)
            elif not (stack.directory / source).exists():
                wrong.append(f"{name}: {source} is not there")
    return wrong + sorted(used ^ stack.doc["volumes"].keys())


def bad_secrets(stack: Stack) -> list[str]:
    """Secrets undeclared or unused, read by whom they are not given to, or left to git."""
    used: set[str] = set()
    wrong = []
    for name, service in stack.services.items():
        given = set(service.get("secrets", ()))
        used |= given
        read = set(re.findall(r"/run/secrets/(\w+)", json.dumps(service)))
        wrong += [f"{name}: {secret} is given or read only" for secret in given ^ read]
    for name, secret in stack.doc["secrets"].items():
        ignored = (stack.directory / secret["file"]).parent / ".gitignore"
        if not ignored.exists() or ignored.read_text(encoding="utf-8").splitlines()[0] != "*":
            wrong.append(f"{name}: git would take {secret['file']}")
    return wrong + sorted(used ^ stack.doc["secrets"].keys())


def bad_health(stack: Stack) -> list[str]:
    """Services without a sound health check, or that wait for what never comes."""
    running = stack.running()
    wrong = [f"{name}: no health check" for name, s in running.items() if "healthcheck" not in s]
    for name, service in stack.services.items():
        for other, how in service.get("depends_on", {}).items():
            if other not in stack.services:
                wrong.append(f"{name}: there is no {other}")
            elif (how["condition"] == "service_healthy") != (other in running):
                wrong.append(f"{name}: {other} is never {how['condition']}")
        if name in _all_before(stack, name):
            wrong.append(f"{name}: waits for itself")
    return wrong


def held_up(stack: Stack) -> list[str]:
    """Services that do not start while an engine, or the router that needs one, is sick."""
    engines = stack.engines().keys()
    sick = engines | {n for n, one in stack.services.items() if "proxy" in one.get("command", ())}
    return [
        f"{name}: waits for {other}"
        for name in stack.services
        for other in sorted(_all_before(stack, name) & sick)
    ]


def _all_before(stack: Stack, name: str) -> set[str]:
    """All that a service waits for, directly or not."""
    before: set[str] = set()
    ahead = list(stack.services[name].get("depends_on", ()))
    while ahead:
        one = ahead.pop()
        if one not in before:
            before.add(one)
            ahead += stack.services.get(one, {}).get("depends_on", ())
    return before


def _awaited_ends(service: Service) -> Iterator[str]:
    for other, how in service.get("depends_on", {}).items():
        if how["condition"] == "service_completed_successfully":
            yield other


CHECKS = (
    misshapen,
    unpinned,
    unbounded,
    collisions,
    bad_addresses,
    bad_volumes,
    bad_secrets,
    bad_health,
    held_up,
)
