"""What travels in the kit: which files are kept, how large it is, and that it is complete."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.gpu.kit import build
from tests.gpu.kit.build import KIT_NBYTES, MISSING, TooLarge, check_sizes, pinned
from tests.gpu.kit.slim import needed, slimmed
from tests.gpu.kit.steps.bytes import counted
from tests.gpu.kit.steps.nixl import ways_in
from tests.gpu.kit.vllm_files import STANDS_IN, files_of, packed

INFO = "nixl_cu13-1.5.1.dist-info"
PLUGINS = ".nixl_cu13.mesonpy.libs/plugins"
NIXL_FILES = {
    "nixl_cu13/_api.py": b"",
    "nixl_cu13/_bindings.so": b"libnixl.so\0",
    ".nixl_cu13.mesonpy.libs/libnixl.so": b"libgrpc-1.so\0libc.so.6\0",
    f"{PLUGINS}/libplugin_UCX.so": b"libucp-1.so.0\0",
    f"{PLUGINS}/libplugin_OBJ.so": b"libaws.so\0",
    "nixl_cu13.libs/nixl/libplugin_UCX.so": b"the same again",
    "nixl_cu13.libs/libgrpc-1.so": b"",
    "nixl_cu13.libs/libucp-1.so.0": b"",
    "nixl_cu13.libs/libaws.so": b"",
    "nixl_cu13.libs/ucx/libuct_cuda.so.0.0.0": b"libuct-1.so.0\0",
    "nixl_cu13.libs/libuct-1.so.0": b"",
    "nixl_cu13.libs/ucx/libucm_cuda.so.0.0.0": b"",
    "nixl_cu13.libs/ucx/libuct_cma.so.0.0.0": b"",
    "nixl_cu13.libs/ucx/libucx_perftest_cuda.so.0.0.0": b"",
    "nixl_ep_cu13/nixl_ep_cpp.so": b"",
    "nixl_cu13-1.5.1.data/headers/nixl.h": b"",
    f"{INFO}/METADATA": b"Name: nixl-cu13\n",
    f"{INFO}/RECORD": b"nixl_cu13/_api.py,,\nnixl_ep_cu13/nixl_ep_cpp.so,,\n",
}
DROPPED = {
    f"{PLUGINS}/libplugin_OBJ.so",
    "nixl_cu13.libs/nixl/libplugin_UCX.so",
    "nixl_cu13.libs/libaws.so",
    "nixl_cu13.libs/ucx/libucx_perftest_cuda.so.0.0.0",
    "nixl_ep_cu13/nixl_ep_cpp.so",
    "nixl_cu13-1.5.1.data/headers/nixl.h",
}


def wheel_of(files: dict[str, bytes], folder: Path) -> Path:
    """A wheel with these files."""
    path = folder / "made-1-py3-none-any.whl"
    with ZipFile(path, "w") as written:
        for name, content in files.items():
            written.writestr(name, content)
    return path


def test_of_nixl_the_plugin_for_ucx_and_what_is_linked_is_kept() -> None:
    assert set(NIXL_FILES) - needed(NIXL_FILES) == DROPPED


def test_a_slimmed_wheel_lists_what_it_has(tmp_path: Path) -> None:
    into = tmp_path / "into"
    into.mkdir()
    with ZipFile(slimmed(wheel_of(NIXL_FILES, tmp_path), into)) as made:
        assert set(made.namelist()) == set(NIXL_FILES) - DROPPED
        assert made.read(f"{INFO}/RECORD") == b"nixl_cu13/_api.py,,\n"


def test_a_nixl_without_cuda_is_refused(tmp_path: Path) -> None:
    less = {name: b for name, b in NIXL_FILES.items() if "libuct_cuda" not in name}
    with pytest.raises(ValueError, match="expected libuct_cuda"):
        slimmed(wheel_of(less, tmp_path), tmp_path)


def test_vllm_travels_without_compiled_files_and_with_what_stands_in(tmp_path: Path) -> None:
    files = {"vllm/__init__.py": b"", "vllm/_C_stable_libtorch.abi3.so": b"x", "vllm/a.cu": b""}
    found = files_of(wheel_of(files, tmp_path))
    assert found["vllm/_C_stable_libtorch.py"] == STANDS_IN.encode()
    assert not {"vllm/_C_stable_libtorch.abi3.so", "vllm/a.cu"} & set(found)
    with tarfile.open(packed(found, tmp_path / "made.tar.xz")) as opened:
        assert opened.getnames() == sorted(found)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"other/__init__.py": b""}, "expected vllm/__init__.py"),
        ({"vllm/__init__.py": b"", "vllm/_C.py": b""}, "expected a compiled module"),
    ],
)
def test_another_wheel_is_refused(files: dict[str, bytes], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        files_of(wheel_of(files, tmp_path))


def test_each_limit_is_kept() -> None:
    check_sizes(KIT_NBYTES, build.TRAVELS_NBYTES - KIT_NBYTES, 2000)
    for sizes, what in (
        ((KIT_NBYTES + 1, 0, 10), "kit, bytes"),
        ((KIT_NBYTES, build.TRAVELS_NBYTES, 10), "kit and checkout"),
        ((1, 1, 2001), "command, characters: expected at most 2000, seen 2001"),
    ):
        with pytest.raises(TooLarge, match=what):
            check_sizes(*sizes)


def test_every_package_has_a_pinned_version() -> None:
    found = pinned(MISSING, build.ROOT / "requirements.txt")
    assert len(found) == len(MISSING) == len(set(MISSING))
    assert all("==" in one for one in found)
    with pytest.raises(KeyError, match="no-such-package"):
        pinned(["no-such-package"], build.ROOT / "requirements.txt")


def test_what_a_wheel_needs_is_in_the_kit_or_on_that_machine(tmp_path: Path) -> None:
    """``typing-inspection`` was in neither: on the card vLLM was not imported."""
    with zipfile.ZipFile(tmp_path / "made_up-1-py3-none-any.whl", "w") as wheel:
        needs = (
            "torch>=2",
            "typing_inspection",
            "never; python_version < '3'",
            "odd; extra == 'x'",
        )
        lines = "".join(f"Requires-Dist: {one}\n" for one in needs)
        wheel.writestr("made_up-1.dist-info/METADATA", f"Metadata-Version: 2.1\n{lines}")
    assert build.unmet(tmp_path) == {"typing-inspection": ["made_up-1-py3-none-any.whl"]}
    with zipfile.ZipFile(tmp_path / "typing_inspection-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("typing_inspection-1.dist-info/METADATA", "Metadata-Version: 2.1\n")
    assert build.unmet(tmp_path) == {}


def test_the_ways_of_ucx_are_read_from_its_table() -> None:
    said = """
    | Transport | Device | # Lanes | Lane Types |
    | tcp       | none   | 1       | rma_bw     |
    Endpoint Config #0
    | Transport | Device | # Lanes | Lane Types    |
    | cuda_ipc  | GPU0   | 1       | rma_bw        |
    | tcp       | lo     | 1       | am, keepalive |
    """
    assert ways_in(said) == {"cuda_ipc": "rma_bw", "tcp": "am, keepalive"}


def test_tests_that_failed_are_no_passed_ones(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite tests="9" failures="2" errors="1" skipped="1"/></testsuites>'
    )
    assert counted(report) == {"passed": 5, "failed": 3, "skipped": 1}
    assert counted(tmp_path / "none.xml") == {}


@pytest.mark.matrix
@pytest.mark.timeout(1500)
def test_the_kit_keeps_its_limits_and_its_first_step_runs(tmp_path: Path) -> None:
    """Downloads 400 MB, once.  Without a Python 3.12 that has torch the kit is not run here."""
    kit = tmp_path / "kit"
    command = build.build(kit, build.DOWNLOADS)
    assert len(command) <= 2000
    assert build.nbytes_of(kit) <= KIT_NBYTES
    assert build.nbytes_of(kit) + build.travelling() <= build.TRAVELS_NBYTES
    python = shutil.which("python3.12")
    if python is None or subprocess.run([python, "-c", "import torch"], check=False).returncode:
        pytest.skip("no Python 3.12 with torch: sizes are checked, and nothing was run")
    run = [python, str(kit / "run.py"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    run += ["--steps", "nixl", "--limit-factor", "3"]
    ended = subprocess.run(run, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
