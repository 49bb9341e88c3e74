"""vLLM's Python files without its compiled ones, and ``native`` in their place.

The kernels are built for another torch than that machine has, and are larger than what may travel.
"""

from __future__ import annotations

import io
import lzma
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

KEPT = {".py", ".json", ".jinja", ".typed", ".txt", ".yaml"}
STANDS_IN = "from tests.gpu.kit import native\n\nnative.stand_in()\n"
INSTEAD = ("_C_stable_libtorch", "_C", "_C_AVX512", "_C_AVX2")
"""Modules that ``vllm.platforms`` imports for CUDA, and for CPUs of three kinds."""
EMPTY = ("_moe_C_stable_libtorch", "vllm_flash_attn/_vllm_fa2_C")


def files_of(wheel: Path) -> dict[str, bytes]:
    """vLLM's files by name, as they are packed.

    Raises:
        ValueError: it is no wheel of vLLM, or a module that we stand in for is Python now.
    """
    with ZipFile(wheel) as opened:
        files = {name: opened.read(name) for name in opened.namelist() if _is_kept(name)}
    if "vllm/__init__.py" not in files:
        raise ValueError(f"{wheel.name}: expected vllm/__init__.py in it, found none")
    for module, content in _instead():
        name = f"vllm/{module}.py"
        if name in files:
            raise ValueError(f"{wheel.name}: {name} is Python, expected a compiled module")
        files[name] = content
    return files


def packed(files: Mapping[str, bytes], into: Path) -> Path:
    """The files as tar.xz, the same bytes for the same files."""
    with (
        lzma.open(into, "wb", preset=6) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as written,
    ):
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size = len(files[name])
            written.addfile(entry, io.BytesIO(files[name]))
    return into


def _instead() -> Iterable[tuple[str, bytes]]:
    yield from ((module, STANDS_IN.encode()) for module in INSTEAD)
    yield from ((module, b"") for module in EMPTY)


def _is_kept(name: str) -> bool:
    path = PurePosixPath(name)
    if path.parts[0].endswith(".dist-info"):
        return path.name in ("METADATA", "WHEEL", "entry_points.txt")
    return path.suffix in KEPT
