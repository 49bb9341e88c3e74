"""A Docker Engine on a plain Debian machine, and a base image that needs no registry.

    python -m tests.project.docker.debian COMMAND...    run COMMAND with an engine
    python -m tests.project.docker.debian --base        make the base image, and print its name

As root.  Missing Debian packages are installed.  Where no engine answers, ``dockerd`` is started
and is stopped again afterwards; an engine that ran before is left running.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

Say = Callable[[str], None]

BASE = "pdconn-base:bookworm"
_SUITE = "bookworm"
_INCLUDED = "python3,python3-venv,ca-certificates"

#: A program that shows that a package is there, and the package.
_PROGRAMS = {"dockerd": "docker.io", "iptables": "iptables", "debootstrap": "debootstrap"}
_COMPOSE = "docker-compose"

_AUTHORITIES = "etc/ssl/certs/ca-certificates.crt"
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.S)

#: Of no use in an image: package lists, and pages to read.
_LEFT_OUT = (
    *("var/cache/apt/*", "var/lib/apt/lists/*", "var/log/*", "dev/*", "proc/*", "sys/*"),
    *("usr/share/doc/*", "usr/share/man/*", "usr/share/info/*", "usr/share/locale/*"),
)
_START_TIMEOUT_S = 60.0
_LEAST_FREE = 25e9


class DockerFailed(Exception):
    """A command failed; says which, and what it wrote."""


class NoEngine(DockerFailed):
    """No engine here: its packages cannot be installed, or it does not start."""


def run(words: Sequence[str | Path], timeout_s: float = 600.0, **more: object) -> str:
    """Run a command; returns what it writes to standard output.

    Raises:
        DockerFailed: it fails, or does not end in time.
    """
    command = [str(word) for word in words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, **more
        )  # type: ignore[call-overload]
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise DockerFailed(f"{' '.join(command)}: {failure}") from failure
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise DockerFailed(f"{' '.join(command)}: exit code {done.returncode}: {said}")
    return str(done.stdout)


def why_not() -> str | None:
    """Why no engine can be had here, or None where one can."""
    if os.geteuid() != 0:
        return f"a Docker Engine needs root, and this is user {os.geteuid()}"
    if not Path("/etc/debian_version").exists() or shutil.which("apt-get") is None:
        return "the packages are Debian's, and this is no Debian"
    free = shutil.disk_usage("/var/lib").free
    if free < _LEAST_FREE:
        return (
            f"images need {_LEAST_FREE / 1e9:.0f} GB below /var/lib, and {free / 1e9:.1f} are free"
        )
    return _why_no_overlay()


def _why_no_overlay() -> str | None:
    """Docker would copy whole images without overlay file systems: gigabytes for each container."""
    with tempfile.TemporaryDirectory(dir="/var/lib") as root:
        folders = {name: Path(root) / name for name in ("lower", "upper", "work", "merged")}
        for folder in folders.values():
            folder.mkdir()
        options = ",".join(f"{name}dir={folders[name]}" for name in ("lower", "upper", "work"))
        try:
            run(["mount", "-t", "overlay", "overlay", "-o", options, folders["merged"]])
        except DockerFailed as failure:
            return f"overlay file systems cannot be mounted here: {failure}"
        run(["umount", folders["merged"]])
    return None


def missing() -> list[str]:
    """Debian packages that are needed and not there."""
    packages = [name for program, name in _PROGRAMS.items() if shutil.which(program) is None]
    return packages if compose_command() else [*packages, _COMPOSE]


def compose_command() -> tuple[str, ...] | None:
    """Compose as a plugin of ``docker``, or else as a program; None if neither is there."""
    if shutil.which("docker") and _succeeds(["docker", "compose", "version"]):
        return ("docker", "compose")
    return (_COMPOSE,) if shutil.which(_COMPOSE) else None


def builder() -> str:
    """A ``docker`` that can build with BuildKit, which clients from 23 on need buildx for.

    Raises:
        DockerFailed: there is none.
    """
    found = [Path(folder) / "docker" for folder in os.environ.get("PATH", "").split(os.pathsep)]
    for docker in (str(path) for path in found if os.access(path, os.X_OK)):
        version = re.search(r"version (\d+)", run([docker, "--version"]))
        if _succeeds([docker, "buildx", "version"]) or (version and int(version[1]) < 23):
            return docker
    raise DockerFailed("no docker on PATH can build with BuildKit: install docker-buildx")


def _succeeds(words: Sequence[str]) -> bool:
    try:
        run(words, 30.0)
    except DockerFailed:
        return False
    return True


def answers() -> bool:
    """Whether an engine runs."""
    return shutil.which("docker") is not None and _succeeds(["docker", "info"])


@contextmanager
def engine(say: Say) -> Iterator[None]:
    """Have an engine for the block: install what is missing, start one if none answers.

    Raises:
        NoEngine: a package cannot be installed, or ``dockerd`` does not start.
    """
    if packages := missing():
        say(f"installing {', '.join(packages)}")
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        try:
            run(["apt-get", "update"], env=quiet)
            run(["apt-get", "install", "-y", "--no-install-recommends", *packages], env=quiet)
        except DockerFailed as failure:
            raise NoEngine(str(failure)) from failure
    if answers():
        yield
        return
    say("starting dockerd")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "dockerd.log"
        with log.open("wb") as output:
            daemon = subprocess.Popen(["dockerd"], stdout=output, stderr=output)
        try:
            _await_daemon(daemon, log)
            yield
        finally:
            say("stopping dockerd")
            daemon.terminate()
            daemon.wait(60.0)


def _await_daemon(daemon: subprocess.Popen[bytes], log: Path) -> None:
    give_up = time.monotonic() + _START_TIMEOUT_S
    while not answers():
        if daemon.poll() is not None or time.monotonic() > give_up:
            raise NoEngine(f"dockerd does not start: {log.read_text(encoding='utf-8')[-2000:]}")
        time.sleep(0.2)


def base_image(say: Say) -> str:
    """Debian with Python, from Debian's archive, unless it is there already; its name.

    Raises:
        DockerFailed: the archive or the engine refuses.
    """
    if _succeeds(["docker", "image", "inspect", BASE]):
        return BASE
    say(f"making {BASE} with debootstrap")
    with tempfile.TemporaryDirectory(dir="/var/lib") as folder:
        root = Path(folder) / "root"
        run(["debootstrap", "--variant=minbase", f"--include={_INCLUDED}", _SUITE, root])
        changes = [f"--change=ENV {setting}" for setting in share_authorities(root)]
        left_out = [f"--exclude=./{path}" for path in _LEFT_OUT]
        packed = Path(folder) / "root.tar"
        run(["tar", "-C", root, *left_out, "-cf", packed, "."])
        run(["docker", "import", *changes, packed, BASE])
    return BASE


def share_authorities(root: Path, host: Path = Path("/")) -> list[str]:
    """Let the image trust whom this machine trusts; settings for programs with lists of their own.

    A machine behind a proxy that opens TLS has an authority of its own, without which no package
    index can be reached from a container.  Elsewhere the image stays as it is.
    """
    ours, theirs = host / _AUTHORITIES, root / _AUTHORITIES
    if not ours.exists() or not _certificates(ours) - _certificates(theirs):
        return []
    shutil.copyfile(ours, theirs)
    return [f"{name}=/{_AUTHORITIES}" for name in ("PIP_CERT", "SSL_CERT_FILE")]


def _certificates(bundle: Path) -> set[str]:
    return set(_CERTIFICATE.findall(bundle.read_text(encoding="utf-8")))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command's exit code; 2 where no engine can be had."""
    prog = "python -m tests.project.docker.debian"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--base", action="store_true", help="make the base image first")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run")
    args = parser.parse_args(arguments)
    if (reason := why_not()) is not None:
        print(f"docker: {reason}", file=sys.stderr)
        return 2

    def say(line: str) -> None:
        print(f"docker: {line}", file=sys.stderr, flush=True)

    try:
        with engine(say):
            if args.base:
                print(base_image(say))
            return subprocess.run(args.command, check=False).returncode if args.command else 0
    except DockerFailed as failure:
        print(f"docker: {failure}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
