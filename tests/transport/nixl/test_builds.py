"""Our rule for NIXL's build against NIXL's own: what it looks for, and whether it loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from transport.nixl.builds import (
    cuda_major_of,
    installed_versions,
    missing_build,
    package_to_import,
)
from transport.nixl.transport import TransportUnavailable, load_library

ROOT = Path(__file__).parents[3]

VERSION_FILES = {
    "__version__ = '2.13.0'\ncuda: str | None = '13.0'\nhip: str | None = None\n": 13,
    "__version__ = '2.9.1+cu126'\ncuda = '12.6'\n": 12,
    "from typing import Optional\n__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n": None,
    "__version__ = '2.13.0'\n": None,
}

_ASKS = """
import json, sys
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))  # None in there: not installed
from nixl_meta_utils import detect_cuda_major
from transport.nixl.builds import torch_cuda_major
ours, theirs = torch_cuda_major(), detect_cuda_major()
try:
    import nixl._bindings
    failure = None
except ImportError as error:
    failure = str(error)
print(json.dumps([ours, theirs, failure]))
"""


def asked(torch: Path, hidden: list[str]) -> tuple[int | None, int | None, str | None]:
    """Our CUDA version, NIXL's, and why ``import nixl`` fails, beside a torch that is made up."""
    command = [sys.executable, "-c", _ASKS, json.dumps(hidden)]
    shown = subprocess.run(
        command, env={"PYTHONPATH": f"{torch}:{ROOT}"}, check=True, capture_output=True
    )
    ours, theirs, failure = json.loads(shown.stdout)
    return ours, theirs, failure


@pytest.mark.parametrize("text", VERSION_FILES)
@pytest.mark.parametrize("hidden", [[], ["nixl_cu12"], ["nixl_cu13"], ["nixl_cu12", "nixl_cu13"]])
def test_what_we_say_is_missing_is_what_nixl_does_not_load_without(
    tmp_path: Path, text: str, hidden: list[str]
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/version.py").write_text(text, encoding="utf-8")
    ours, theirs, failure = asked(tmp_path, hidden)
    assert ours == theirs == VERSION_FILES[text]
    gone = [name.replace("_", "-") for name in hidden]
    installed = {name: one for name, one in installed_versions().items() if name not in gone}
    assert (missing_build(installed, ours) is None) == (failure is None), failure


def test_a_version_file_of_another_kind_of_accelerator_has_no_cuda() -> None:
    assert cuda_major_of("hip = '7.0.1'\ncuda = None\ncudart = '12.1'\n") is None


def test_without_the_wrapper_the_wrapper_is_what_is_missing() -> None:
    assert missing_build({}, None) == "nixl==1.5.1"
    assert missing_build({"nixl-cu12": "1.5.1"}, 12) == "nixl==1.5.1"


def test_the_error_names_the_command_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl", "nixl._api", "nixl._bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(
        "transport.nixl.transport.installed_versions",
        lambda: {"nixl": "1.5.1", "nixl-cu12": "1.5.1"},
    )
    monkeypatch.setattr("transport.nixl.transport.torch_cuda_major", lambda: 13)
    with pytest.raises(TransportUnavailable, match=r"pip install nixl-cu13==1\.5\.1"):
        load_library()


_LOADS = """
import sys
from transport.nixl.transport import load_library
library = load_library()
print(library.api.__name__, "torch" in sys.modules)
import nixl._api, nixl._bindings
print(nixl._api.__name__, "torch" in sys.modules)
assert (library.api, library.bindings) == (nixl._api, nixl._bindings)
"""


_HIDES = """
import importlib.metadata, sys
hidden = {hidden!r}
sys.modules.update(dict.fromkeys(hidden))
version = importlib.metadata.version
def version_if_shown(name):
    if name.replace("-", "_") in hidden:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = version_if_shown
"""


@pytest.mark.parametrize(
    ("builds", "chosen"),
    [
        (["nixl_cu12"], "nixl_cu12"),
        (["nixl_cu13"], "nixl_cu13"),
        (["nixl_cu12", "nixl_cu13"], "nixl_cu13"),
    ],
)
def test_without_cuda_the_build_that_nixl_chooses_is_imported_and_torch_is_not(
    tmp_path: Path, builds: list[str], chosen: str
) -> None:
    """The second line is the control: NIXL imports torch here, to choose the same."""
    for name in ("torch", *builds):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "torch/version.py").write_text("cuda = None\n", encoding="utf-8")
    for name in builds:
        for module in ("_api", "_bindings", "_utils", "logging"):
            (tmp_path / name / f"{module}.py").touch()
        metadata = tmp_path / f"{name}-1.5.1.dist-info/METADATA"
        metadata.parent.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5.1\n"
        metadata.write_text(text, encoding="utf-8")
    hidden = [name for name in ("nixl_cu12", "nixl_cu13") if name not in builds]
    shown = subprocess.run(
        [sys.executable, "-c", _HIDES.format(hidden=hidden) + _LOADS],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert shown.stdout.splitlines() == [f"{chosen}._api False", f"{chosen}._api True"]


@pytest.mark.parametrize("imported", [(), ("torch",), ("cuda.bindings",), ("cupy",)])
@pytest.mark.parametrize("cuda_major", [None, 12])
def test_nixl_chooses_wherever_it_knows_more_than_the_version_file(
    imported: tuple[str, ...], cuda_major: int | None
) -> None:
    installed = {"nixl": "1.5.1", "nixl-cu12": "1.5.1"}
    ours = package_to_import(installed, cuda_major, imported)
    assert ours == ("nixl" if imported or cuda_major else "nixl_cu12")
    assert package_to_import({"nixl-cu12": "1.5.1"}, None, imported) == "nixl", "no wrapper"
    assert package_to_import({"nixl": "1.5.1"}, None, imported) == "nixl", "no build"
