"""The part of kustomize that ``examples/kubernetes`` uses, so that tests can build overlays.

Strict: a field that is not known here is an error, as is a patch that meets nothing.  Where
``kubectl`` is installed, ``test_kustomize`` compares the two.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]

#: Lists that strategic merge joins by a key, for the kinds that we patch; others are replaced.
_MERGE_KEYS = {
    "containers": "name", "initContainers": "name", "env": "name", "volumes": "name",
    "volumeMounts": "mountPath", "ports": "containerPort",
}  # fmt: skip
_FIELDS = {
    "apiVersion", "kind", "namespace", "resources", "components", "secretGenerator",
    "configMapGenerator", "patches", "images", "configurations",
}  # fmt: skip
_NOT_IN_NAMESPACES = {"Namespace"}


class BuildError(ValueError):
    """A kustomization that cannot be built, or that uses what is not known here."""


def build(folder: Path) -> list[Resource]:
    """The resources that ``kustomize build`` makes of a folder."""
    made = _rooted(folder, [])
    names = _generated(made)
    return [_renamed(each, names) for each in made]


def _rooted(folder: Path, below: list[Resource]) -> list[Resource]:
    page = _read(folder)
    made = list(below)
    for entry in page.get("resources", ()):
        path = folder / entry
        made += _rooted(path, []) if path.is_dir() else _documents(path)
    for kind in ("Secret", "ConfigMap"):
        generator = f"{kind[0].lower()}{kind[1:]}Generator"
        made += [_generate(folder, kind, each) for each in page.get(generator, ())]
    for entry in page.get("components", ()):
        made = _rooted(folder / entry, made)
    for patch in page.get("patches", ()):
        made = _patched(folder, patch, made)
    made = [_with_images(each, page.get("images", ())) for each in made]
    if "namespace" in page:
        for each in made:
            if each["kind"] not in _NOT_IN_NAMESPACES:
                each["metadata"]["namespace"] = page["namespace"]
            else:
                each["metadata"]["name"] = page["namespace"]
    _refuse_twice(made)
    return made


def _read(folder: Path) -> Mapping[str, Any]:
    (page,) = _documents(folder / "kustomization.yaml")
    if unknown := page.keys() - _FIELDS:
        raise BuildError(f"{folder}: expected fields that are known here, got {sorted(unknown)}")
    return page


def _documents(path: Path) -> list[Resource]:
    if not path.is_file():
        raise BuildError(f"{path}: expected a file or folder, got nothing")
    return [json.loads(each) for each in _parsed(path.read_text(encoding="utf-8"))]


@cache
def _parsed(text: str) -> list[str]:
    """Its documents, in JSON.

    Overlays share most of their files, and YAML takes longer to read than all else here.  In JSON,
    since what YAML's anchors share would be changed in every place at once.
    """
    return [json.dumps(each) for each in yaml.safe_load_all(text) if each is not None]


def _refuse_twice(made: list[Resource]) -> None:
    seen = [(each["kind"], each["metadata"]["name"]) for each in made]
    if twice := {one for one in seen if seen.count(one) > 1}:
        raise BuildError(f"resources: expected each once, got {sorted(twice)} twice")


# Generators


def _generate(folder: Path, kind: str, entry: Mapping[str, Any]) -> Resource:
    data: dict[str, str] = {}
    for word in entry.get("files", ()):
        key, _, path = word.partition("=")
        content = (folder / path).read_bytes()
        data[key] = base64.b64encode(content).decode() if kind == "Secret" else content.decode()
    for word in entry.get("literals", ()):
        key, _, value = word.partition("=")
        data[key] = value
    made = {"apiVersion": "v1", "kind": kind, "metadata": {"name": entry["name"]}, "data": data}
    return made | ({"type": "Opaque"} if kind == "Secret" else {})


def _generated(made: list[Resource]) -> dict[str, str]:
    """The names of Secrets and ConfigMaps, with a hash of what is in them."""
    return {
        each["metadata"]["name"]: f"{each['metadata']['name']}-{_digest(each['data'])}"
        for each in made
        if each["kind"] in ("Secret", "ConfigMap")
    }


def _digest(data: Mapping[str, str]) -> str:
    return hashlib.sha256(repr(sorted(data.items())).encode()).hexdigest()[:10]


def _renamed(node: Any, names: Mapping[str, str], parent: str = "") -> Any:
    """References to what is generated, under its new name."""
    if isinstance(node, list):
        return [_renamed(each, names, parent) for each in node]
    if not isinstance(node, dict):
        return node
    made = {key: _renamed(value, names, key) for key, value in node.items()}
    if made.get("kind") in ("Secret", "ConfigMap"):
        made["metadata"] = {**made["metadata"], "name": names[made["metadata"]["name"]]}
    for key, places in (
        ("secretName", ("secret",)),
        ("name", ("configMapRef", "secretRef", "secretKeyRef", "configMapKeyRef")),
    ):
        if parent in places and key in made:
            made[key] = names.get(made[key], made[key])
    return made


# Patches and images


def _patched(folder: Path, patch: Mapping[str, Any], made: list[Resource]) -> list[Resource]:
    text = (
        (folder / patch["path"]).read_text(encoding="utf-8") if "path" in patch else patch["patch"]
    )
    (change,) = map(json.loads, _parsed(text))
    target = patch["target"]
    changed, met = [], False
    for each in made:
        meets = re.fullmatch(target["kind"], each["kind"]) and re.fullmatch(
            target["name"], each["metadata"]["name"]
        )
        met = met or bool(meets)
        apply = _operated if isinstance(change, list) else _merged
        if not (meets and isinstance(change, dict) and change.get("$patch") == "delete"):
            changed.append(apply(each, change) if meets else each)
    if not met:
        raise BuildError(f"{folder}: patches: expected something to patch, got none like {target}")
    return changed


def _merged(ours: Any, theirs: Any, key: str = "", *, top: bool = True) -> Any:
    """Strategic merge: ``theirs`` over ``ours``."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        made = dict(ours)
        for name, value in theirs.items():
            if top and name in ("apiVersion", "kind", "metadata"):
                continue
            if name.startswith("$"):
                raise BuildError(f"patches: expected no directive, got {name}")
            if value is None:
                made.pop(name, None)
            else:
                made[name] = _merged(made.get(name), value, name, top=False)
        return made
    if isinstance(ours, list) and isinstance(theirs, list) and key in _MERGE_KEYS:
        by = _MERGE_KEYS[key]
        mine = {each[by]: each for each in ours}
        over = {each[by]: _merged(mine.get(each[by]), each, top=False) for each in theirs}
        return [over.pop(each[by], each) for each in ours] + list(over.values())
    return copy.deepcopy(theirs)


def _operated(resource: Resource, operations: list[Mapping[str, Any]]) -> Resource:
    """JSON Patch (RFC 6902): test, add, replace, remove."""
    made = copy.deepcopy(resource)
    for one in operations:
        *way, last = [
            part.replace("~1", "/").replace("~0", "~") for part in one["path"].split("/")[1:]
        ]
        place = made
        for part in way:
            place = place[_index(place, part)]
        at = _index(place, last)
        present = at in place if isinstance(place, dict) else at < len(place)
        if one["op"] != "add" and not present:
            raise BuildError(f"patches: expected {one['path']}, got nothing there")
        if one["op"] == "test":
            if place[at] != one["value"]:
                seen = place[at]
                raise BuildError(
                    f"patches: expected {one['value']!r} at {one['path']}, got {seen!r}"
                )
        elif one["op"] == "remove":
            del place[at]
        elif one["op"] == "add" and isinstance(place, list):
            place.insert(at, one["value"])
        elif one["op"] in ("add", "replace"):
            place[at] = one["value"]
        else:
            raise BuildError(f"patches: expected test, add, replace or remove, got {one['op']}")
    return made


def _index(place: Any, part: str) -> Any:
    if isinstance(place, list):
        return len(place) if part == "-" else int(part)
    return part


def _with_images(resource: Resource, images: Any) -> Resource:
    made = copy.deepcopy(resource)
    for container in containers(made):
        name = re.split(r"[:@]", container["image"])[0]
        for image in images:
            if image["name"] == name:
                tail = f"@{image['digest']}" if "digest" in image else f":{image['newTag']}"
                container["image"] = image.get("newName", name) + tail
    return made


def containers(node: Any) -> Iterator[dict[str, Any]]:
    """Every container of a resource, at whatever depth."""
    if isinstance(node, list):
        for each in node:
            yield from containers(each)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in ("containers", "initContainers") and isinstance(value, list):
                yield from value
            else:
                yield from containers(value)
