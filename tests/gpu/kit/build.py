"""``make gpu-kit``: writes ``.gpu-kit/`` and prints the commands that run it.

What is downloaded (400 MB, nearly all of it vLLM's wheel) is kept in ``.work/gpu-kit``.
"""

from __future__ import annotations

import argparse
import email
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.gpu.kit.run import PARTS
from tests.gpu.kit.slim import slimmed
from tests.gpu.kit.vllm_files import files_of, packed
from tests.project.next.tree import NotHad, pip_download

ROOT = Path(__file__).parents[3]
KIT, DOWNLOADS = ROOT / ".gpu-kit", ROOT / ".work" / "gpu-kit"

MIB = 1 << 20
KIT_NBYTES = 60 * MIB
TRAVELS_NBYTES = 64 * MIB
"""The kit, and every file of the checkout that git does not ignore."""
COMMAND_CHARACTERS = 2000
LIMIT_S = 580

VLLM, NIXL = "vllm==0.32.0", "nixl-cu13==1.5.1"
MISSING = (
    "annotated-types", "apache-tvm-ffi", "astor", "blake3", "cachetools", "cbor2",
    "compressed-tensors", "depyf", "dill", "fastapi", "httpcore2", "httptools", "httpx2",
    "interegular", "jiter", "jsonschema", "jsonschema-specifications", "lark", "llguidance",
    "lm-format-enforcer", "loguru", "msgspec", "nixl", "openai", "oss-harmony",
    "partial-json-parser", "pybase64", "pydantic", "pydantic-extra-types", "pydantic-settings",
    "pydantic_core", "python-dotenv", "python-json-logger", "pyzmq", "referencing", "rpds-py",
    "setproctitle", "sniffio", "starlette", "truststore", "typing-inspection", "uvloop", "xgrammar",
)  # fmt: skip
"""What pdconn and vLLM import on the way to an answer, and that machine lacks.  Their versions are
those of ``requirements.txt``."""

THERE = (
    "aiohappyeyeballs", "aiohttp", "annotated-doc", "anyio", "attrs", "h11", "idna", "numpy",
    "packaging", "prometheus-client", "pyyaml", "torch", "transformers", "triton",
    "typing-extensions", "xxhash",
)  # fmt: skip
"""What the wheels of the kit need besides, and that machine has."""
_NOT_NEEDED = ("nixl-cu12",)
_MACHINE = {"python_version": "3.12", "python_full_version": "3.12.0", "extra": ""}

PYTHON = ("--python-version", "3.12", "--implementation", "cp", "--abi", "cp312", "--abi", "abi3")
_GLIBCS = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
_TESTS = ("tests/__init__.py", "tests/fakes", "tests/gpu", "tests/property", "tests/store/rank",
          "tests/threads")  # fmt: skip
_TESTS_OF = ("tests/store/__init__.py", "tests/transport/__init__.py", "tests/transport/contract")
_MODELS = ("tests/vllm/__init__.py", "tests/vllm/engines/__init__.py")
_FAMILIES = ("tests/vllm/engines/families/__init__.py", "tests/vllm/engines/families/models.py")
_OWN = ("run.py", "unpack.py")


class TooLarge(Exception):
    """The kit, or what travels with it, is over its limit."""


class NotWhole(Exception):
    """A wheel of the kit needs one that neither the kit nor that machine has."""


def fetched(requirement: str, downloads: Path) -> Path:
    """The wheel of a requirement, for the Python of that machine; downloaded once.

    Raises:
        NotHad: it cannot be downloaded.
    """
    folder = downloads / requirement
    if not list(folder.glob("*.whl")):
        with tempfile.TemporaryDirectory(dir=downloads) as made:
            platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBCS]
            platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
            options = [word for one in platforms for word in ("--platform", one)]
            pip_download(
                requirement, "--only-binary", ":all:", *PYTHON, *options, "--dest", made
            )  # fmt: skip
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(made, folder)
    [wheel] = folder.glob("*.whl")
    return wheel


def unmet(wheels: Path) -> dict[str, list[str]]:
    """What wheels need and nobody has: by name, the files that need it."""
    files = sorted(wheels.glob("*.whl"))
    had = {canonicalize_name(file.name.partition("-")[0]) for file in files}
    had |= {*THERE, *_NOT_NEEDED}
    found: dict[str, list[str]] = {}
    for file in files:
        with zipfile.ZipFile(file) as wheel:
            [name] = [one for one in wheel.namelist() if one.endswith(".dist-info/METADATA")]
            headers = email.message_from_bytes(wheel.read(name))
        for line in headers.get_all("Requires-Dist", ()):
            needed = Requirement(line)
            applies = needed.marker is None or needed.marker.evaluate(_MACHINE)
            if applies and canonicalize_name(needed.name) not in had:
                found.setdefault(canonicalize_name(needed.name), []).append(file.name)
    return found


def pinned(names: Sequence[str], requirements: Path) -> list[str]:
    """The requirement of each name.

    Raises:
        KeyError: a name has none.
    """
    lines = [line for line in requirements.read_text(encoding="utf-8").splitlines() if "==" in line]
    known = {line.partition("==")[0]: line.partition(";")[0].strip() for line in lines}
    return [known[name] for name in names]


def build(kit: Path, downloads: Path) -> str:
    """Write the kit, whole or not at all; the command that runs it.

    Raises:
        NotHad: something cannot be downloaded.
        NotWhole, TooLarge: see there.
    """
    downloads.mkdir(parents=True, exist_ok=True)
    command = command_of(kit.relative_to(ROOT) if kit.is_relative_to(ROOT) else kit)
    with tempfile.TemporaryDirectory(dir=downloads) as folder:
        made = Path(folder) / "kit"
        _write(made, downloads)
        if missing := unmet(made / "wheels"):
            raise NotWhole(f"expected every wheel's needs in the kit or there, missing: {missing}")
        (made / "command").write_text(command + "\n", encoding="utf-8")
        shutil.rmtree(kit, ignore_errors=True)
        check_sizes(nbytes_of(made), travelling(), len(command))
        shutil.copytree(made, kit)
    return command


def _write(kit: Path, downloads: Path) -> None:
    wheels = kit / "wheels"
    wheels.mkdir(parents=True)
    for requirement in pinned(MISSING, ROOT / "requirements.txt"):
        shutil.copy(fetched(requirement, downloads), wheels)
    slimmed(fetched(NIXL, downloads), wheels)
    _own_wheel(wheels)
    packed(files_of(fetched(VLLM, downloads)), kit / "vllm.tar.xz")
    packed(_tests(), kit / "tests.tar.xz")
    for name in _OWN:
        shutil.copy(Path(__file__).with_name(name), kit)


def command_of(kit: Path) -> str:
    """Runs in the checkout's folder; what it finds lies in ``$OUT``, or in a folder of its own.

    A line for each part of the steps: a machine may be lent for ten minutes at a time.
    """
    out = '"${OUT:-/tmp/gpu-kit-out}"'
    return "\n".join(
        f"timeout -k 5 {LIMIT_S} python3 {kit}/run.py --out {out} --steps {','.join(part)}"
        for part in PARTS
    )


def check_sizes(kit_nbytes: int, tree_nbytes: int, characters: int) -> None:
    """Each of the three limits.

    Raises:
        TooLarge: with what was seen and expected.
    """
    for what, seen, most in (
        ("kit, bytes", kit_nbytes, KIT_NBYTES),
        ("kit and checkout, bytes", kit_nbytes + tree_nbytes, TRAVELS_NBYTES),
        ("command, characters", characters, COMMAND_CHARACTERS),
    ):
        if seen > most:
            raise TooLarge(f"{what}: expected at most {most}, seen {seen}")


def nbytes_of(folder: Path) -> int:
    """Of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def travelling() -> int:
    """Bytes of the checkout's files that git does not ignore."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-coz", "--exclude-standard"]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0")
    paths = [ROOT / name for name in names if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def _own_wheel(into: Path) -> None:
    """pdconn's own wheel; built from a copy, since setuptools writes beside its source."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for package in ("pdconn", "transport", "registration"):
            shutil.copytree(ROOT / package, copy / package)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, copy)
        wheel = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
        ]
        subprocess.run([*wheel, "--wheel-dir", str(into), str(copy)], check=True)


def _tests() -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for name in (*_TESTS, *_TESTS_OF, *_MODELS, *_FAMILIES):
        path = ROOT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            files[file.relative_to(ROOT).as_posix()] = file.read_bytes()
    return files


def main() -> int:
    """Exit status 1: what could not be had, or is too large."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    try:
        command = build(KIT, DOWNLOADS)
    except (NotHad, NotWhole, TooLarge) as error:
        print(f"gpu-kit: {error}", file=sys.stderr)
        return 1
    nbytes, tree = nbytes_of(KIT), travelling()
    print(f"{KIT.relative_to(ROOT)}: {nbytes / MIB:.1f} MiB, {KIT_NBYTES / MIB:.0f} at most")
    print(f"with the checkout {(nbytes + tree) / MIB:.1f} MiB, {TRAVELS_NBYTES / MIB:.0f} at most")
    print(
        f"To run there, in this folder, one after the other ({LIMIT_S} s at most each):\n{command}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
