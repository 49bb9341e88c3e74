"""Which build of NIXL fits this environment, and the package that has it.

The package ``nixl`` contains no library.  On import it reads the CUDA version that torch was built
for, and imports ``nixl_cu12`` or ``nixl_cu13``, which are packages of their own; without CUDA it
imports either.  torch's wheels on the public index are built for CUDA and run without a GPU, so an
environment without a GPU needs the fitting build, too.

Nothing is imported here: torch's version file is read, as NIXL does.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Container, Mapping
from pathlib import Path

TESTED = "1.5.1"
"""The release that is pinned in requirements.txt, and that a new installation gets."""

BUILDS = ("nixl-cu12", "nixl-cu13")

_ASKED_FIRST = ("torch", "cuda.bindings", "cupy")
"""Modules that NIXL asks for the CUDA version, if they are imported."""

_CUDA_LINE = re.compile(r"^cuda\b[^=\n]*=\s*['\"](\d+)\.", re.MULTILINE)


def torch_cuda_major() -> int | None:
    """The major version of the CUDA that the installed torch is built for; None without CUDA.

    NIXL chooses by this version, and not by that of a driver or a GPU.
    """
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    return cuda_major_of(text)


def cuda_major_of(version_file: str) -> int | None:
    """The CUDA major version in the text of ``torch/version.py``.

    >>> cuda_major_of("__version__ = '2.13.0+cu130'\\ncuda: Optional[str] = '13.0'\\n")
    13
    >>> cuda_major_of("__version__ = '2.13.0+cpu'\\ncuda: Optional[str] = None\\n") is None
    True
    """
    found = _CUDA_LINE.search(version_file)
    return int(found[1]) if found else None


def installed_versions() -> dict[str, str]:
    """The versions of ``nixl`` and its builds that are installed here."""
    found = {}
    for name in ("nixl", *BUILDS):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def missing_build(installed: Mapping[str, str], cuda_major: int | None) -> str | None:
    """What pip must install so that NIXL loads, like ``nixl-cu13==1.5.1``; None if it is installed.

    Args:
        installed: versions by distribution, of ``nixl`` and its builds at least.
        cuda_major: from :func:`torch_cuda_major`.

    >>> missing_build({"nixl": "1.5.1", "nixl-cu12": "1.5.1"}, 13)
    'nixl-cu13==1.5.1'
    >>> missing_build({"nixl": "1.5.1", "nixl-cu12": "1.5.1"}, None) is None
    True
    """
    # The build must be of the same release as the wrapper, which imports its modules by name.
    release = installed.get("nixl", TESTED)
    if "nixl" not in installed:
        return f"nixl=={release}"
    if cuda_major is None:
        return None if any(name in installed for name in BUILDS) else f"{BUILDS[-1]}=={release}"
    fitting = f"nixl-cu{cuda_major}"
    return None if fitting in installed else f"{fitting}=={release}"


def package_to_import(
    installed: Mapping[str, str], cuda_major: int | None, imported: Container[str]
) -> str:
    """``nixl``, or the build that it would choose.

    NIXL reads torch's version file.  Where that names no CUDA, it imports torch to ask again, which
    takes 1.7 s of a process that has no other use for torch.

    Args:
        installed: versions by distribution, of ``nixl`` and its builds at least.
        cuda_major: from :func:`torch_cuda_major`.
        imported: names of the modules that are imported already.

    >>> package_to_import({"nixl": "1.5.1", "nixl-cu12": "1.5.1"}, None, ())
    'nixl_cu12'
    >>> package_to_import({"nixl": "1.5.1", "nixl-cu12": "1.5.1"}, None, {"torch"})
    'nixl'
    """
    is_asked = cuda_major is not None or any(name in imported for name in _ASKED_FIRST)
    if is_asked or missing_build(installed, cuda_major) is not None:
        return "nixl"
    # Without CUDA, NIXL tries the newest first.
    return next(name for name in reversed(BUILDS) if name in installed).replace("-", "_")
