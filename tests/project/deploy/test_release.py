"""What would be published: it is whole, its metadata is, and it runs without vLLM."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from pdconn.tools.cli.main import COMMANDS
from tests.project.deploy.expressions import ROOT

PACKAGES = ("pdconn", "transport", "registration")
FILES = ("pyproject.toml", "README.md", "LICENSE")
HEAVY = {"vllm", "torch", "nixl", "ucxx", "libucx", "boto3", "transformers"}


def distribution(folder: Path) -> Path:
    """Build sdist, and the wheel from it, of a copy of the sources; the folder they are in."""
    source = folder / "source"
    for name in FILES:
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    words = ["-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)]
    subprocess.run([sys.executable, *words], check=True, capture_output=True, timeout=240)
    return folder / "dist"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return distribution(tmp_path_factory.mktemp("distribution"))


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


def metadata(wheel: Path) -> Message:
    """What an index reads of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    present = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert len(present) > 300
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == present


def test_the_sdist_has_what_a_build_needs_and_the_licence(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*FILES, "pdconn/py.typed", "pdconn/router/admin/page.html"} <= names
    compiled = Path("pdconn/router/prefix/compiled")
    assert {str(compiled / path.name) for path in (ROOT / compiled).glob("*.?pp")} <= names
    assert not any(name.startswith(("tests/", "docker/", ".")) for name in names)


def test_twine_has_nothing_against_them(dist: Path) -> None:
    assert twine(dist) == ""


def twine(dist: Path) -> str:
    """What ``twine check`` finds; nothing if all is well."""
    words = ["-m", "twine", "--no-color", "check", "--strict", *map(str, sorted(dist.iterdir()))]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=60, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_a_distribution_without_its_description_is_noticed(dist: Path, tmp_path: Path) -> None:
    """Negative control: the same wheel, its README left out."""
    (whole,) = dist.glob("*.whl")
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(tmp_path / whole.name, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("/METADATA"):
                head = data.partition(b"\n\n")[0]
                data = head.replace(b"Description-Content-Type: text/markdown\n", b"") + b"\n\n"
            new.writestr(name, data)
    assert "long_description" in twine(tmp_path)


def test_metadata_say_what_it_is_and_what_it_needs(wheel: Path) -> None:
    seen = metadata(wheel)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (seen["Name"], seen["Version"]) == ("pdconn", project["version"])
    assert seen["License-Expression"] == "Apache-2.0"
    assert seen["License-File"] == "LICENSE"
    assert seen["Requires-Python"] == ">=3.11"
    assert {"vllm", "kv-cache", "nixl"} <= set(seen["Keywords"].split(","))
    classifiers = seen.get_all("Classifier", [])
    assert "Typing :: Typed" in classifiers
    assert not any(one.startswith("License ::") for one in classifiers)
    assert seen.get_payload().startswith("# pdconn")
    required = seen.get_all("Requires-Dist", [])
    (nixl,) = [one for one in required if one.startswith("nixl")]
    assert nixl == 'nixl<1.6,>=1.5.1; extra == "engine"'
    bare = [one for one in required if "extra ==" not in one]
    assert not any(one.startswith(tuple(HEAVY)) for one in bare)


# Installed where there is nothing else: about a minute, and it needs the package registry.


@pytest.fixture(scope="module")
def empty(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and its base dependencies; its folder of programs."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    words = ["install", "--quiet", str(wheel), "--constraint", str(ROOT / "requirements.txt")]
    subprocess.run([folder / "bin/pip", *words], check=True, timeout=280, cwd=folder)
    return folder / "bin"


def clean() -> dict[str, str]:
    """The environment without what would let the checkout's own packages be found."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


def said(empty: Path, *words: str) -> str:
    done = subprocess.run(
        [empty / "pdconn", *words], cwd=empty, env=clean(),
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.matrix
def test_without_vllm_every_command_explains_itself_and_a_plan_is_made(empty: Path) -> None:
    script = (
        "import importlib.util as u, json, pdconn;"
        f"print(json.dumps([[n for n in {sorted(HEAVY)} if u.find_spec(n)], pdconn.__file__]))"
    )
    printed = subprocess.run(
        [empty / "python", "-c", script], cwd=empty, env=clean(),
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    found, where = json.loads(printed)
    assert found == []
    assert Path(where).is_relative_to(empty.parent)
    for command in COMMANDS:
        assert command.name in said(empty, "--help")
        assert "usage" in said(empty, command.name, "--help").lower()
    plan = said(empty, "plan", "--model", "gpt-oss-20b", "--prompt", "32768", "--decode", "tp=2")
    assert "gpt-oss-20b" in plan
    assert said(empty, "score", str(ROOT / "examples/snapshot.json"))


@pytest.mark.matrix
def test_without_vllm_the_router_serves_and_drains(empty: Path) -> None:
    gone = "http://127.0.0.1:9"
    words = ["proxy", "--prefill", gone, "--decode", gone, "--port", "0", "--admin-port", "0"]
    process = subprocess.Popen(
        [empty / "pdconn", *words, "--json", "--log-level", "error"],
        cwd=empty, env=clean(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["admin_url"]
        for page, text in (("livez", ""), ("metrics", "pdconn_router_"), ("", "<html")):
            with urllib.request.urlopen(f"{url}/{page}", timeout=30) as answer:
                assert answer.status == 200
                assert text in answer.read().decode()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
