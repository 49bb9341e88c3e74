"""The Python files of a vLLM that has no build for CPUs, over the installed one's libraries."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile, is_zipfile

_KEPT = {".py", ".json", ".jinja", ".typed", ".txt", ".yaml"}
_NEEDED = ("orjson",)
"""What the server of 0.33 imports and that of 0.32 did not: fetched with it, unless installed."""

_DOWNLOAD_S = 900.0


class NotHad(Exception):
    """The version cannot be had: no network, or no such version."""


def download(requirement: str, into: Path) -> None:
    """Let pip download the wheel of a package, and nothing that it depends on.

    Raises:
        NotHad: with what pip said last.
    """
    pip_download(requirement, "--only-binary", ":all:", "--dest", str(into))


def pip_download(
    requirement: str,
    *options: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float = _DOWNLOAD_S,
) -> None:
    """Let pip download a package, and nothing that it depends on.

    Raises:
        NotHad: with what pip said last.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    try:
        ended = subprocess.run(
            [*command, *options, requirement],
            check=False,
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise NotHad(f"{requirement}: pip took longer than {timeout_s:.0f} s") from error
    if ended.returncode:
        said = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
        why = "; ".join(said) or ended.stderr[-500:] or f"exit status {ended.returncode}"
        raise NotHad(f"{requirement}: pip download failed: {why}")


def obtain(
    version: str,
    work: Path,
    *,
    fetch: Callable[[str, Path], None] = download,
    installed: Path | None = None,
) -> tuple[Path, bool]:
    """The folder to put on the path, and whether it was there already.

    Args:
        version: of vLLM, such as 0.33.0.
        work: where the folder is kept.
        fetch: puts the wheel of a requirement into a folder.
        installed: the package whose compiled libraries are taken; the installed vLLM's.

    Raises:
        NotHad: it is not there and cannot be fetched, or is not what was asked for.
    """
    tree = work / version
    libraries = installed or installed_vllm()
    was_there = tree.is_dir()
    if not was_there:
        work.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=work) as made:
            unpacked = Path(made) / "tree"
            _unpack(_fetched(f"vllm=={version}", Path(made) / "vllm", fetch), version, unpacked)
            for requirement in _lacking(unpacked):
                found = _fetched(requirement, Path(made) / requirement, fetch)
                with ZipFile(found) as wheel:
                    wheel.extractall(unpacked)
            unpacked.rename(tree)  # whole, or not at all
    _link(libraries, tree / "vllm")
    return tree, was_there


def installed_vllm() -> Path:
    """The folder of the installed package.

    Raises:
        NotHad: there is none.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise NotHad("vllm: not installed, and its compiled libraries are needed: make venv")
    return Path(spec.origin).parent


def _fetched(requirement: str, folder: Path, fetch: Callable[[str, Path], None]) -> Path:
    folder.mkdir()
    fetch(requirement, folder)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1 or not is_zipfile(wheels[0]):
        raise NotHad(f"{requirement}: expected one wheel, got {[w.name for w in wheels]}")
    return wheels[0]


def _lacking(tree: Path) -> list[str]:
    """Of what is needed besides: what this vLLM requires and this environment lacks."""
    (metadata,) = tree.glob("vllm-*.dist-info/METADATA")
    lines = metadata.read_text(encoding="utf-8").splitlines()
    return [
        line.removeprefix("Requires-Dist: ")
        for name in _NEEDED
        for line in lines
        if line.startswith(f"Requires-Dist: {name}") and find_spec(name) is None
    ]


def _unpack(wheel: Path, version: str, tree: Path) -> None:
    with ZipFile(wheel) as opened:
        opened.extractall(tree, [name for name in opened.namelist() if _is_kept(name)])
    said = tree / f"vllm-{version}.dist-info" / "METADATA"
    if not said.is_file() or not (tree / "vllm/__init__.py").is_file():
        raise NotHad(f"{wheel.name}: it is no wheel of vLLM {version}")
    said.write_text(
        said.read_text(encoding="utf-8").replace(
            f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n"
        ),
        encoding="utf-8",
    )
    said.parent.rename(tree / f"vllm-{version}+cpu.dist-info")


def _is_kept(name: str) -> bool:
    path = Path(name)
    return path.parts[0].endswith(".dist-info") or path.suffix in _KEPT


def _link(installed: Path, package: Path) -> None:
    """Take the compiled libraries of the installed package; another may be installed by now."""
    for old in package.rglob("*.so"):
        old.unlink()
    for library in installed.rglob("*.so"):
        link = package / library.relative_to(installed)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(library)


def environment(tree: Path | None, root: Path) -> dict[str, str]:
    """Of a child process that imports pdconn from ``root``, and vLLM from ``tree``, if given."""
    places = [str(place) for place in (tree, root) if place is not None]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # importing vLLM without bytecode takes minutes
    return env | {"PYTHONPATH": os.pathsep.join(places)}
