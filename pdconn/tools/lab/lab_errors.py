"""Errors of engines on this machine; each message contains a remedy or a place to look."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class LabError(Exception):
    """Base of every error of this package."""


class MissingDependency(LabError):
    """A package that engines need is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(
            f"{package} is not installed; 'make venv' installs all that is needed on a CPU, "
            "and docs/quickstart.md says what a machine with a GPU needs"
        )
        self.package = package


class PortInUse(LabError):
    """The port of an engine or of the proxy is in use."""

    def __init__(self, name: str, host: str, port: int) -> None:
        super().__init__(f"{name}: port {port} on {host} is in use; choose another or free it")
        self.port = port


class MissingLibrary(LabError):
    """A shared library that vLLM loads is missing on this system."""

    def __init__(self, library: str, packages: str) -> None:
        super().__init__(
            f"vLLM's CPU build needs {library}, so no engine would start: install {packages}"
        )
        self.library = library


class MissingBuild(LabError):
    """NIXL is installed without the build that it needs beside this torch.

    Args:
        package: with its version, in pip's syntax.
    """

    def __init__(self, package: str) -> None:
        super().__init__(
            f"nixl does not load here, so no engine would start: pip install {package}"
        )
        self.package = package


class EngineDied(LabError):
    """A process ended by itself.

    Args:
        cause: the exception that ended it, if its log contains one.
    """

    def __init__(
        self, name: str, exit_code: int | None, log: Path, tail: str, cause: str | None = None
    ) -> None:
        because = "" if cause is None else f": {cause}"
        super().__init__(
            f"{name} died with exit status {exit_code}{because}\nThe end of its log {log}:\n{tail}"
        )
        self.exit_code = exit_code
        self.log = log


class EngineStartTimeout(LabError):
    """An engine did not become healthy in time."""

    def __init__(self, name: str, timeout_s: float, log: Path, tail: str) -> None:
        super().__init__(
            f"{name} was not healthy within {timeout_s:.0f} s; the end of its log {log}:\n{tail}"
        )
        self.log = log


class LeftBehind(LabError):
    """Processes of an engine survived SIGKILL."""

    def __init__(self, name: str, processes: Sequence[str]) -> None:
        super().__init__(f"{name} left processes behind: {', '.join(processes)}")
        self.processes = tuple(processes)


class RequestRefused(LabError):
    """An engine answered with an HTTP error."""

    def __init__(self, url: str, status: int, body: str) -> None:
        super().__init__(f"{url} answered {status}: {body[:2000]}")
        self.status = status
        self.body = body
