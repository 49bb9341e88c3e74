"""NIXL's wheel with what reading over UCX needs, and no more.

It brings a plugin for every storage and network, examples, headers, and ``nixl_ep`` for three
versions of torch.  Kept are its Python package, the plugin for UCX, UCX's modules for CUDA and for
processes of one machine, and every library whose file name stands in a kept file: a library names
what it is linked with, and what it loads later.  So gRPC and protobuf stay: ``libnixl`` is linked
with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from zipfile import ZIP_DEFLATED, ZipFile

PLUGINS = ("libplugin_UCX.so",)
MODULES = ("libuct_cuda", "libucm_cuda", "libuct_cma")
"""Of UCX: cuda_ipc and cuda_copy, their hooks, and reads of other processes' host memory.  Shared
memory, TCP and the process itself are within libuct."""


def needed(files: Mapping[str, bytes]) -> set[str]:
    """The files of NIXL's wheel that are kept, by name within the wheel."""
    kept = {name for name in files if _is_root(name)}
    shared = {name: PurePosixPath(name).name.encode() for name in files if _is_library(name)}
    looked_at: set[str] = set()
    while waiting := kept - looked_at:
        for name in waiting:
            looked_at.add(name)
            if ".so" in name:
                kept |= {one for one, called in shared.items() if called in files[name]}
    return kept


def slimmed(wheel: Path, into: Path) -> Path:
    """Write the wheel again, with what is needed of it.

    Raises:
        ValueError: it has no plugin for UCX or lacks a module.
    """
    with ZipFile(wheel) as opened:
        files = {name: opened.read(name) for name in opened.namelist() if name[-1] != "/"}
    kept = needed(files)
    for wanted in (*PLUGINS, *MODULES):
        if not any(PurePosixPath(name).name.startswith(wanted) for name in kept):
            raise ValueError(f"{wheel.name}: expected {wanted} in it, found none")
    made = into / wheel.name
    with ZipFile(made, "w", ZIP_DEFLATED, compresslevel=9) as written:
        for name in sorted(kept):
            content = files[name]
            if name.endswith(".dist-info/RECORD"):
                content = _rows(content, kept)
            written.writestr(name, content)
    return made


def _is_root(name: str) -> bool:
    path = PurePosixPath(name)
    top, last = path.parts[0], path.name
    if top.startswith("nixl_cu") and top.endswith(".dist-info"):
        return True
    if "." not in top:
        return top.startswith("nixl_cu")
    if path.parent.name == "ucx":
        return last.startswith(MODULES) and ".so" in last
    # The wheel has each plugin twice; NIXL looks for them beside libnixl, which is here.
    return path.parent.name == "plugins" and last in PLUGINS


def _is_library(name: str) -> bool:
    """A library beside the plugins, which no kept file names by accident."""
    path = PurePosixPath(name)
    return ".so" in path.name and len(path.parts) == 2 and path.parts[0].endswith("libs")


def _rows(record: bytes, kept: set[str]) -> bytes:
    rows = record.decode().splitlines(keepends=True)
    return "".join(row for row in rows if row.split(",")[0].strip('"') in kept).encode()
