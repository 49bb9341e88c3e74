"""The module that brings a Docker Engine along: what it needs, which programs it takes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.project.docker import debian


def test_without_root_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root, and this is user 1000" in (debian.why_not() or "")


def test_without_debians_packages_the_reason_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no Debian" in (debian.why_not() or "")


def test_a_failure_says_what_the_program_wrote() -> None:
    with pytest.raises(debian.DockerFailed, match="exit code 3: no such image"):
        debian.run(["sh", "-c", "echo no such image >&2; exit 3"])
    with pytest.raises(debian.DockerFailed, match="not-a-program"):
        debian.run(["not-a-program"])


def program(folder: Path, name: str, script: str) -> Path:
    """A program that a search of ``folder`` finds."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def old_docker(tmp_path: Path) -> Path:
    """Of before 23, which has BuildKit within."""
    return program(
        tmp_path / "old", "docker", '[ "$1" = --version ] && echo "Docker version 20.10.24+dfsg1"'
    )


@pytest.fixture
def new_docker(tmp_path: Path) -> Path:
    """Of later, without the plugin that builds."""
    return program(
        tmp_path / "new", "docker", '[ "$1" = --version ] && echo "Docker version 28.2.2, build e"'
    )


def test_the_docker_that_can_build_is_taken(
    old_docker: Path, new_docker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{new_docker.parent}:{old_docker.parent}:/usr/bin:/bin")
    assert debian.builder() == str(old_docker)
    program(new_docker.parent, "docker", '[ "$1" != --version ] || echo "Docker version 28.2.2"')
    assert debian.builder() == str(new_docker)  # this one has buildx, or says so


def test_without_any_that_can_build_the_plugin_is_named(
    new_docker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(new_docker.parent))
    with pytest.raises(debian.DockerFailed, match="docker-buildx"):
        debian.builder()


def test_compose_is_a_plugin_or_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert debian.compose_command() is None
    assert "docker-compose" in debian.missing()
    program(tmp_path / "bin", "docker-compose", "exit 0")
    assert debian.compose_command() == ("docker-compose",)
    program(tmp_path / "bin", "docker", "exit 0")
    assert debian.compose_command() == ("docker", "compose")
    assert debian.missing() == ["docker.io", "iptables", "debootstrap"]


ONE, TWO = (f"-----BEGIN CERTIFICATE-----\n{name}\n-----END CERTIFICATE-----\n" for name in "ab")


@pytest.mark.parametrize(
    ("ours", "shared"), [(ONE, False), (ONE + TWO, True)], ids=["Debian's alone", "one more"]
)
def test_an_image_trusts_whom_this_machine_trusts(
    ours: str, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, host = tmp_path / "image/certificates", tmp_path / "host/certificates"
    for path, text in ((bundle, ONE), (host, ours)):
        path.parent.mkdir()
        path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(debian, "_AUTHORITIES", "certificates")
    settings = debian.share_authorities(tmp_path / "image", tmp_path / "host")
    assert bool(settings) == shared
    assert bundle.read_text(encoding="utf-8") == (ours if shared else ONE)


def test_a_machine_without_room_for_images_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=10**11, used=0, free=2 * 10**9)
    monkeypatch.setattr(debian.os, "geteuid", lambda: 0)
    monkeypatch.setattr(debian.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(debian.Path, "exists", lambda path: True)
    monkeypatch.setattr(debian.shutil, "disk_usage", lambda path: usage)
    assert debian.why_not() == "images need 25 GB below /var/lib, and 2.0 are free"


def test_a_machine_whose_packages_cannot_be_had_has_no_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(words: list[str], **_: object) -> str:
        raise debian.DockerFailed(f"{words[0]}: no network")

    monkeypatch.setattr(debian, "missing", lambda: ["docker.io"])
    monkeypatch.setattr(debian, "run", refused)
    with pytest.raises(debian.NoEngine, match="apt-get: no network"), debian.engine(print):
        pass
