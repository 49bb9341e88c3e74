"""Finds engines in YAML, JSON and systemd units.

Compose, Kubernetes and its custom resources, Helm values and the rest have one thing in common: a
mapping with ``command`` or ``args`` and an environment.  Such mappings are searched at any depth,
and mappings with vLLM's own key ``kv_transfer_config``, as in Ray Serve.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdconn.tools.doctor.bad_question import BadQuestion
from pdconn.tools.doctor.given.given_config import AN_ADDRESS
from pdconn.tools.doctor.given.launch import (
    Launch,
    is_transfer_option,
    launches_of,
    variables_of_file,
)
from pdconn.tools.doctor.given.shell import ReadText, ShellCommand, expanded

_A_SECRET = "a value of the cluster, which is not known here"
_WORDS = ("entrypoint", "command", "args")
_IN_KUBERNETES = re.compile(r"\$\((\w+)\)")
_IN_UNIT = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class GivenMapping:
    """vLLM's options as a mapping, from a ``--config`` file or a Python configuration."""

    options: Mapping[str, Any]
    name: str = ""


def engines_in(
    node: Any, environ: Mapping[str, str], read: ReadText
) -> Iterator[Launch | GivenMapping]:
    """Every start of vLLM below ``node``."""
    if isinstance(node, Mapping) and isinstance(node.get("services"), Mapping):
        outer = {**variables_of_file(read(".env") or "", environ), **environ}
        for name, service in node["services"].items():
            filled = _filled(service, outer)
            yield from _below(filled, str(name), outer, read)
        return
    yield from _below(node, "", environ, read)


def _below(
    node: Any, name: str, environ: Mapping[str, str], read: ReadText
) -> Iterator[Launch | GivenMapping]:
    if isinstance(node, list):
        for each in node:
            yield from _below(each, name, environ, read)
        return
    if not isinstance(node, Mapping):
        return
    name = _name_of(node) or name
    if any(is_transfer_option(f"--{key}") for key in node):
        yield GivenMapping(node, name)
        return
    found = list(_launches_of_container(node, name, environ, read))
    yield from found
    for key, inner in node.items():
        if not (found and key in _WORDS):
            yield from _below(inner, name, environ, read)


def _name_of(node: Mapping[Any, Any]) -> str:
    metadata = node.get("metadata")
    named = node.get("name") or (metadata.get("name") if isinstance(metadata, Mapping) else None)
    return named if isinstance(named, str) else ""


def _launches_of_container(
    node: Mapping[Any, Any], name: str, environ: Mapping[str, str], read: ReadText
) -> Iterator[Launch]:
    """The starts in a mapping with ``command`` or ``args``, or another list of vLLM's options."""
    words = [word for key in _WORDS for word in _words(node.get(key))]
    for key, value in node.items():
        if key not in _WORDS and isinstance(value, list):
            listed = [str(word) for word in value if isinstance(word, str | int | float)]
            words += listed if any(map(is_transfer_option, listed)) else []
    if not words:
        return
    own = _environment(node, environ, read)
    words = [_IN_KUBERNETES.sub(lambda m: own.get(m[1], m[0]), word) for word in words]
    found = list(launches_of(ShellCommand(tuple(words), own), own, read))
    options = any(map(is_transfer_option, words)) or "--config" in words
    if not found and options:
        found = [Launch(tuple(words), own)]  # the image's entry point, or a script, runs vllm serve
    is_host = node.get("network_mode") == "host"
    for one in found:
        yield replace(one, name=name, in_container=True, inherits=False, is_host_network=is_host)


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError as error:
            raise BadQuestion("--config", "a command line in balanced quotes", error) from None
    return [str(word) for word in value] if isinstance(value, list) else []


def _environment(
    node: Mapping[Any, Any], outer: Mapping[str, str], read: ReadText
) -> dict[str, str]:
    """Read ``environment`` (a mapping, or ``NAME=VALUE``), ``env`` and ``env_file``."""
    found: dict[str, str] = {}
    files = node.get("env_file") or []
    for one in files if isinstance(files, list) else [files]:
        path = one.get("path") if isinstance(one, Mapping) else one
        found |= variables_of_file(read(str(path)) or "", outer)
    for given in (node.get("environment"), node.get("env")):
        if isinstance(given, Mapping):
            found |= {str(k): _scalar(v) for k, v in given.items() if v is not None}
        for one in given if isinstance(given, list) else []:
            if isinstance(one, Mapping) and isinstance(one.get("name"), str):
                value = _of_kubernetes(one)
                found |= {} if value is None else {one["name"]: value}
            elif isinstance(one, str):
                found |= variables_of_file(one, outer)
    return {k: _IN_KUBERNETES.sub(lambda m: found.get(m[1], m[0]), v) for k, v in found.items()}


def _of_kubernetes(one: Mapping[str, Any]) -> str | None:
    """A variable's value, a placeholder if only the cluster knows it; None without either."""
    if "value" in one:
        return _scalar(one["value"])
    source = one.get("valueFrom")
    if not isinstance(source, Mapping):
        return None
    path = (source.get("fieldRef") or {}).get("fieldPath", "")
    if str(path).lower().endswith("ip"):
        return AN_ADDRESS
    return _A_SECRET if "secretKeyRef" in source else None


def _scalar(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _filled(node: Any, environ: Mapping[str, str]) -> Any:
    """``node`` with Compose's ``${NAME:-default}`` expanded in every text."""
    if isinstance(node, str):
        return expanded(node, environ) if "$" in node else node
    if isinstance(node, Mapping):
        return {key: _filled(value, environ) for key, value in node.items()}
    return [_filled(each, environ) for each in node] if isinstance(node, list) else node


def launches_of_unit(text: str, read: ReadText) -> list[Launch]:
    """The starts in ``ExecStart=`` of a systemd unit, with its environment."""
    environ: dict[str, str] = {}
    starts: list[Sequence[str]] = []
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        key, equals, value = line.strip().partition("=")
        if not equals or line.lstrip().startswith(("#", ";")):
            continue
        try:
            words = shlex.split(value.replace("%%", "%"))
        except ValueError as error:
            raise BadQuestion("--config", "a unit in balanced quotes", error) from None
        if key.strip() == "Environment":
            environ |= variables_of_file("\n".join(words), {})
        elif key.strip() == "EnvironmentFile":
            environ |= variables_of_file(read(value.strip().removeprefix("-")) or "", {})
        elif key.strip() == "ExecStart" and words:
            starts.append((words[0].lstrip("@-:+!"), *words[1:]))
    found: list[Launch] = []
    for start in starts:
        filled: list[str] = []
        for word in start:
            alone = re.fullmatch(r"\$(\w+)", word)  # split into words, unlike ${NAME}
            text_of = environ.get(alone[1], "") if alone else ""
            whole = _IN_UNIT.sub(lambda m: environ.get(m[1], ""), word)
            filled += shlex.split(text_of) if alone else [whole]
        command = ShellCommand(tuple(filled), environ)
        found += [replace(one, inherits=False) for one in launches_of(command, environ, read)]
    return found


def is_bare_transfer(node: Mapping[Any, Any]) -> bool:
    """Whether a mapping is itself the value of ``--kv-transfer-config``."""
    return "kv_connector" in node or "kv_connector_extra_config" in node
