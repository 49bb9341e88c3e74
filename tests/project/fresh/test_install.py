"""What ``make venv`` says before and while pip works, without downloading anything."""

from __future__ import annotations

import importlib.util
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from transport.nixl.builds import torch_cuda_major

ROOT = Path(__file__).parents[3]

PIP_SAYS = """\
Collecting torch==2.13.0
  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (30 kB)
  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (530.5 MB)
Collecting filelock
  Using cached filelock-4.2.11-py3-none-any.whl (15 kB)
  Downloading sympy-1.14.0-py3-none-any.whl (6.3 MB)
Installing collected packages: filelock, sympy, torch
"""


@pytest.fixture(scope="module")
def install() -> ModuleType:
    """The script, which is in no package."""
    spec = importlib.util.spec_from_file_location("install", ROOT / ".ci/install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["install"] = module
    spec.loader.exec_module(module)
    return module


def test_downloads_are_counted_and_the_large_ones_shown(
    install: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = install.Progress()
    for line in PIP_SAYS.splitlines():
        progress.read(line)
    assert progress.nbytes == pytest.approx(530.5e6 + 6.3e6)
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition("] ")[2] for line in shown] == [
        "downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (530 MB)",
        "unpacking what was downloaded",
    ]


def test_a_build_for_cuda_is_announced_with_the_smaller_way(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "is_reachable", lambda url: url.startswith("https://"))
    said = install.announcement("2.13.0")
    assert "torch 2.13.0 (a build for CUDA" in said
    assert f"TORCH_INDEX={install.TORCH_CPU_INDEX}" in said


def test_the_smaller_way_is_not_named_where_it_leads_nowhere_or_is_taken(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "is_reachable", lambda _url: False)
    assert "TORCH_INDEX" not in install.announcement("2.13.0")
    monkeypatch.setattr(install, "is_reachable", lambda _url: True)
    assert "TORCH_INDEX" not in install.announcement("2.13.0+cpu")


def test_a_port_where_nothing_listens_is_not_reachable(install: ModuleType) -> None:
    assert not install.is_reachable("http://127.0.0.1:9/torch/")


def test_one_build_of_nixl_is_installed_the_one_that_this_torch_needs(install: ModuleType) -> None:
    pins = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    lines = pins.splitlines()
    for cuda, left_out in ((12, "nixl-cu13"), (13, "nixl-cu12"), (None, "nixl-cu13")):
        kept = install.pins_beside(pins, cuda).splitlines()
        assert [line.partition("==")[0] for line in lines if line not in kept] == [left_out]


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_the_cuda_of_torch_is_read_without_importing_it(install: ModuleType) -> None:
    assert install.torch_cuda_major(Path(sys.prefix)) == torch_cuda_major()


@pytest.mark.parametrize(
    ("report", "version"),
    [
        ('{"install": [{"metadata": {"name": "torch", "version": "2.13.0"}}]}', "2.13.0"),
        ('{"install": []}', None),  # a second run: it is installed already
    ],
)
def test_the_version_that_pip_would_install_is_asked_of_pip(
    install: ModuleType, tmp_path: Path, report: str, version: str | None
) -> None:
    pip = tmp_path / "pip"
    pip.write_text(f"#!/bin/sh\necho '{report}'\n", encoding="utf-8")
    pip.chmod(0o755)
    assert install.torch_version([str(pip)], "torch==2.13.0", []) == version


def test_a_failing_pip_is_shown_and_ends_the_installation(
    install: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text(
        "#!/bin/sh\necho 'ERROR: no space left on device' >&2\nexit 2\n", encoding="utf-8"
    )
    python.chmod(0o755)
    assert install.main([str(tmp_path), "--torch", "torch==2.13.0"]) == 1
    shown = capfd.readouterr().err
    assert "no space left on device" in shown
    assert "not installed: " in shown


def test_the_readme_names_what_is_downloaded(install: ModuleType) -> None:
    pages = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/quickstart.md")
    )
    for page in pages:
        assert f"{install.CUDA_TORCH_GB + install.PINNED_GB:.1f} GB" in page
        assert f"{install.CUDA_DISK_GB:.0f} GB" in page
