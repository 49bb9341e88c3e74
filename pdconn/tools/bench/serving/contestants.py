"""The measured systems: local engines behind the router, or a running service.

Local engines are frozen outside their turns.  Idle is not enough: the in-tree connector's agent
spins on a core even when idle, and vLLM's processes do for a second after each request.  The router
is started for each turn, so that it has no outdated health of frozen engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pdconn.tools.bench.bench_errors import BenchError
from pdconn.tools.bench.serving.lineup import CONNECTORS, assign_engines, engine_specs
from pdconn.tools.lab.engine import Engine, Progress, running
from pdconn.tools.lab.proxy import admin_url, running_proxy

#: Memory of an engine that serves the small model, with its share of common pages.
ENGINE_NBYTES = 1_600 << 20
START_TIMEOUT_S = 900.0
_MEMINFO = Path("/proc/meminfo")


class TooLittleMemory(BenchError):
    """The machine has too little memory for the requested engines."""

    def __init__(self, num_engines: int, free_nbytes: int) -> None:
        needed = num_engines * ENGINE_NBYTES / (1 << 30)
        super().__init__(
            f"memory: {num_engines} engines need about {needed:.1f} GiB, "
            f"{free_nbytes / (1 << 30):.1f} GiB are free; ask for fewer --contestants"
        )


class Contestant(Protocol):
    """One of the compared systems: a service of completions."""

    @property
    def name(self) -> str:
        """The name in the table."""

    def active(self) -> AbstractContextManager[str]:
        """Run the contestant for one turn; yields its URL."""

    def admin_of(self, url: str) -> str | None:
        """The admin URL of the ``pdconn proxy`` behind ``url``; None without one."""


@dataclass(frozen=True, slots=True)
class Target:
    """A running service; it is neither started nor frozen.

    ``admin``: the URL of its admin pages, if it is a ``pdconn proxy`` and they are reachable.
    """

    name: str
    url: str
    admin: str | None = None

    @contextmanager
    def active(self) -> Iterator[str]:
        """Yield the URL; starts nothing."""
        yield self.url

    def admin_of(self, url: str) -> str | None:
        """The configured admin URL."""
        del url
        return self.admin


@dataclass(frozen=True, slots=True)
class LocalEngines:
    """One engine, or a prefill and a decode engine behind the router."""

    name: str
    engines: tuple[Engine, ...]
    directory: Path

    @contextmanager
    def active(self) -> Iterator[str]:
        """Resume the engines, and freeze them afterwards.

        Raises:
            LabError: an engine died, or the router could not be started.
        """
        try:
            for engine in self.engines:
                engine.check_alive()
                engine.resume()
            with self._served() as url:
                yield url
        finally:
            self.freeze()

    def admin_of(self, url: str) -> str | None:
        """The admin URL of the router, if the engines are behind one."""
        return None if len(self.engines) == 1 else admin_url(url)

    def freeze(self) -> None:
        """Pause the engines that are running."""
        for engine in self.engines:
            with suppress(ProcessLookupError):
                engine.pause()

    @contextmanager
    def _served(self) -> Iterator[str]:
        if len(self.engines) == 1:
            yield self.engines[0].url
            return
        prefill, decode = self.engines
        args = ["--policy", "round-robin"]  # with one engine per role there is nothing to score
        args += ["--streams", "on" if CONNECTORS[self.name].streams else "off"]
        with running_proxy([prefill.url], [decode.url], self.directory, args=args) as url:
            yield url


@contextmanager
def running_contestants(
    names: Sequence[str],
    model: Path,
    cores: str,
    directory: Path,
    progress: Progress,
    *,
    meminfo: Path = _MEMINFO,
) -> Iterator[list[LocalEngines]]:
    """Start the engines of all ``names`` at once and freeze them; stops them at the end.

    Raises:
        TooLittleMemory: before anything is started.
        LabError: an engine could not be started, or died.
    """
    specs = engine_specs(names, model, cores)
    free = _available_nbytes(meminfo)
    if free is not None and free < len(specs) * ENGINE_NBYTES:
        raise TooLittleMemory(len(specs), free)
    with running(specs, directory, timeout_s=START_TIMEOUT_S, progress=progress) as engines:
        contestants = []
        for name, its_engines in assign_engines(names, engines):
            own = directory / name
            own.mkdir(parents=True, exist_ok=True)
            contestants.append(LocalEngines(name, its_engines, own))
        for contestant in contestants:
            contestant.freeze()
        yield contestants


def _available_nbytes(meminfo: Path) -> int | None:
    """Available memory in bytes; None where the system does not report it."""
    try:
        lines = meminfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    words = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return None if words is None else int(words[1]) << 10
