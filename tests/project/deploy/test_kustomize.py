"""Overlays are built as kustomize builds them, and what it would refuse is refused."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.project.deploy.kustomize import BuildError, build
from tests.project.deploy.manifests import OVERLAYS, checkout

KUBECTL = shutil.which("kubectl")
_SUFFIX = re.compile(r"^(pdconn-(?:secret|api-keys|model))-[a-z0-9]{10}$")


@pytest.mark.skipif(KUBECTL is None, reason="no kubectl to compare with")
@pytest.mark.parametrize("overlay", [*OVERLAYS, "base"])
def test_our_renderer_builds_what_kubectl_builds(examples: Path, overlay: str) -> None:
    folder = examples / (overlay if overlay == "base" else f"overlays/{overlay}")
    assert KUBECTL is not None
    theirs = subprocess.run(
        [KUBECTL, "kustomize", folder], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    expected = [each for each in yaml.safe_load_all(theirs) if each]
    assert by_name(build(folder)) == by_name(expected)
    assert len(expected) > 1


def by_name(resources: list[dict[str, Any]]) -> dict[str, Any]:
    """Resources by kind and name, without the hashes, which only kustomize knows how to make."""
    plain = [_without_hashes(each) for each in resources]
    for each in plain:
        if each["kind"] == "Secret":  # base64, which kustomize breaks into lines
            each["data"] = {key: "".join(value.split()) for key, value in each["data"].items()}
    return {f"{one['kind']} {one['metadata']['name']}": one for one in plain}


def _without_hashes(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_hashes(value) for key, value in node.items()}
    if isinstance(node, list):  # kustomize merges lists in another order, which means nothing
        items = [_without_hashes(each) for each in node]
        named = all(isinstance(each, dict) and "name" in each for each in items)
        return sorted(items, key=lambda each: str(each["name"])) if named else items
    return _SUFFIX.sub(r"\1", node) if isinstance(node, str) else node


def test_a_changed_secret_changes_the_name_that_pods_mount(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    before = mounted(build(folder / "base"))
    (folder / "base/secrets/pdconn.secret").write_text("another" * 8, encoding="utf-8")
    after = mounted(build(folder / "base"))
    assert before["pdconn-router"] == after["pdconn-router"]
    for name in ("pdconn-prefill", "pdconn-decode"):
        assert before[name] != after[name]
        assert after[name].startswith("pdconn-secret-")


def mounted(resources: list[dict[str, Any]]) -> dict[str, str]:
    return {
        each["metadata"]["name"]: volume["secret"]["secretName"]
        for each in resources
        if each["kind"] in ("Deployment", "StatefulSet")
        for volume in each["spec"]["template"]["spec"]["volumes"]
        if "secret" in volume
    }


@pytest.mark.parametrize(
    ("path", "old", "new", "message"),
    [
        (
            "overlays/default/kustomization.yaml",
            "components:",
            "namePrefix: a-\ncomponents:",
            "namePrefix",
        ),
        ("components/rdma/kustomization.yaml", "pdconn-(prefill", "pdcon-(prefill", "patch"),
        ("components/keda/kustomization.yaml", "/spec/replicas", "/spec/replica", "nothing there"),
        ("base/kustomization.yaml", "decode.yaml", "decoder.yaml", "got nothing"),
        ("base/kustomization.yaml", "- decode.yaml", "- prefill.yaml", "twice"),
        (
            "guide/set.yaml",
            "--block-size=128",
            "--block-size=128\n                    - --more",
            "args/7",
        ),
        ("guide/set.yaml", "- name: prefill", "- name: encode", "roles/0/name"),
    ],
)
def test_what_cannot_be_built_is_refused(
    tmp_path: Path, path: str, old: str, new: str, message: str
) -> None:
    folder = checkout(tmp_path)
    text = (folder / path).read_text(encoding="utf-8")
    assert old in text
    (folder / path).write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(BuildError, match=message):
        build_all(folder)


def build_all(folder: Path) -> list[list[dict[str, Any]]]:
    return [build(folder / "overlays" / overlay) for overlay in OVERLAYS]


def test_secrets_of_the_examples_are_left_out_of_git(examples: Path) -> None:
    folders = sorted(path.parent for path in examples.rglob("*.secret"))
    assert len(folders) == 2
    for folder in folders:
        assert (folder / ".gitignore").read_text(encoding="utf-8").splitlines()[0] == "*"
