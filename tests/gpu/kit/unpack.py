"""Unpacks a kit: ``python3 unpack.py KIT INTO --found FILE``.  Needs nothing but Python with pip.

INTO/site gets the wheels, INTO/vllm and INTO/tests what is packed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

INSTALL = ("--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--quiet")


def main() -> None:
    """Exit status 1 with pip's words, if a wheel does not fit this Python."""
    kit, into, found = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[4])
    wheels = sorted(map(str, (kit / "wheels").glob("*.whl")))
    pip = [sys.executable, "-m", "pip", "install", *INSTALL, "--target", str(into / "site")]
    subprocess.run([*pip, *wheels], check=True)
    for name in ("vllm", "tests"):
        with tarfile.open(kit / f"{name}.tar.xz") as packed:
            packed.extractall(into / name, filter="data")
    found.write_text(json.dumps({"wheels": len(wheels), **_machine()}), encoding="utf-8")


def _machine() -> dict[str, object]:
    """What the figures were measured on."""
    import platform

    said: dict[str, object] = {"python": platform.python_version()}
    try:
        import torch

        said["torch"] = torch.__version__
        has_gpu = torch.cuda.is_available()
        said["card"] = torch.cuda.get_device_name(0) if has_gpu else None
    except ImportError as error:
        said["torch"] = repr(error)
    return said


if __name__ == "__main__":
    main()
