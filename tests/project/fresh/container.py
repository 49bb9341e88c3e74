"""A container of plain Debian in which somebody has cloned pdconn, and nothing else.

Standard library only: ``make fresh`` runs it before anything is installed.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.project.docker.debian import DockerFailed, base_image, engine, run, why_not

USER = "new"
HOME = Path("/home") / USER
CLONE = HOME / "pdconn"

NEEDED = ("git", "libnuma1", "make")
"""Debian packages that README asks for beside Python; the base image has none of them."""

Say = Callable[[str], None]


class NoContainer(Exception):
    """No container can be had here."""


@contextmanager
def plain_debian(source: Path, say: Say) -> Iterator[tuple[str, ...]]:
    """What to put in front of a command to run it in the clone, as a user who is not root.

    Raises:
        NoContainer: why not.
    """
    if (reason := why_not()) is not None:
        raise NoContainer(reason)
    try:
        with engine(say):
            name = f"pdconn-fresh-{secrets.token_hex(4)}"
            # The network of this machine: the package index may be reachable by it alone.
            run(["docker", "run", "--detach", "--rm", "--init", "--network=host", "--shm-size=2g",
                 "--name", name, base_image(say), "sleep", "infinity"])  # fmt: skip
            try:
                _clone_into(name, source, say)
                yield (
                    "docker", "exec", "--user", USER, "--env", f"HOME={HOME}", "--workdir",
                    str(CLONE), name,
                )  # fmt: skip
            finally:
                run(["docker", "kill", name])
    except DockerFailed as failure:
        raise NoContainer(str(failure)) from failure


def _clone_into(container: str, source: Path, say: Say) -> None:
    say(f"installing {', '.join(NEEDED)} in a container of Debian, and cloning as {USER}")
    as_root = ["docker", "exec", container]
    run([*as_root, "apt-get", "update", "-q"])
    run([*as_root, "apt-get", "install", "-q", "-y", "--no-install-recommends", *NEEDED])
    run([*as_root, "useradd", "--create-home", USER])
    # As a bundle: the container sees nothing of this machine's file system.
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "pdconn.bundle"
        run(["git", "-C", source, "bundle", "create", "--quiet", bundle, "HEAD", "--branches"])
        bundle.chmod(0o644)
        run(["docker", "cp", bundle, f"{container}:/tmp/pdconn.bundle"])
    as_user = ["docker", "exec", "--user", USER, container]
    run([*as_user, "git", "clone", "--quiet", "/tmp/pdconn.bundle", CLONE])
