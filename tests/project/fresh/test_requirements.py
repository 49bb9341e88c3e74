"""requirements.txt is installed without dependency resolution, so here it is resolved.

On a machine whose torch is a CPU build nothing missed ``nixl-cu13``; on every other one no engine
started.  What a pinned package requires must therefore be pinned too, or stand in ``LEFT_OUT``.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from transport.nixl.builds import BUILDS, TESTED

PINS = Path(__file__).parents[3] / "requirements.txt"

LEFT_OUT = {
    "torch": "installed first, with its own dependencies",
    "torchaudio": "for speech; it has no CPU build for this torch",
    "torchcodec": "for video; it has no CPU build for this torch",
    "torchvision": "for pictures; it has no CPU build for this torch",
    "cuda-core": "for arrays on a GPU, which the ucx transport does not read",
    "nvidia-ml-py": "for GPUs; the ucx transport reads host memory",
    "rmm-cu12": "allocates GPU memory; the ucx transport reads host memory",
    "librmm-cu12": "allocates GPU memory; the ucx transport reads host memory",
}
"""Requirements of pinned packages that are not pinned, and why pdconn runs without them."""


def pinned(text: str) -> dict[str, str]:
    """Versions by canonical name."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pins = (line.partition("==") for line in lines if line)
    return {canonicalize_name(name): version for name, _, version in pins}


def unmet(pins: Mapping[str, str], left_out: Iterable[str] = LEFT_OUT) -> Iterator[str]:
    """What pinned packages require and nothing pins, a line each."""
    for name in pins:
        for text in _required_by(name):
            requirement = Requirement(text)
            wanted = canonicalize_name(requirement.name)
            if wanted in left_out or not _applies(requirement):
                continue
            if wanted not in pins:
                yield f"{name} requires {text}, which is not pinned"
            elif not requirement.specifier.contains(pins[wanted], prereleases=True):
                yield f"{name} requires {text}, and {pins[wanted]} is pinned"


def _required_by(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        if name in BUILDS:  # the one that this torch does not need is not installed
            return []
        raise


def _applies(requirement: Requirement) -> bool:
    """Whether it holds here, without any extra."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def test_every_requirement_of_what_is_pinned_is_pinned() -> None:
    pins = pinned(PINS.read_text(encoding="utf-8"))
    assert len(pins) > 150
    assert list(unmet(pins)) == []


def test_nothing_that_torch_requires_is_replaced_by_another_version() -> None:
    """torch brings its own dependencies, and the pinned packages are installed over them."""
    pins = pinned(PINS.read_text(encoding="utf-8"))
    wrong = [line for line in unmet({**pins, "torch": ""}) if line.startswith("torch ")]
    assert [line for line in wrong if line.endswith(" is pinned")] == []


@pytest.mark.parametrize("build", BUILDS)
def test_without_a_build_of_nixl_that_is_seen(build: str) -> None:
    """The control: the older file lacked one of them."""
    pins = pinned(PINS.read_text(encoding="utf-8"))
    del pins[build]
    assert list(unmet(pins)) == [
        f"nixl requires {build}=={TESTED}, which is not pinned",
    ]


def test_another_version_than_the_required_one_is_seen() -> None:
    pins = pinned(PINS.read_text(encoding="utf-8")) | {"nixl-cu13": "1.4.0"}
    assert list(unmet(pins)) == [f"nixl requires nixl-cu13=={TESTED}, and 1.4.0 is pinned"]


def test_nothing_is_left_out_that_nobody_requires() -> None:
    pins = pinned(PINS.read_text(encoding="utf-8"))
    required = {line.split(" requires ")[1] for line in unmet(pins, left_out=())}
    names = {canonicalize_name(Requirement(text.partition(",")[0]).name) for text in required}
    # torch's own requirement is met by the version that `make venv` installs before.
    assert names == set(LEFT_OUT)


def test_the_release_that_errors_name_is_the_pinned_one() -> None:
    pins = pinned(PINS.read_text(encoding="utf-8"))
    assert {pins[name] for name in ("nixl", *BUILDS)} == {TESTED}
