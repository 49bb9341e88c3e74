"""Who is measured: engines of our own behind the router, or a service that runs somewhere.

Engines of our own are frozen while it is not their turn.  Idle is not enough: the in-tree
connector's agent spins on a core also when nothing is asked of it, and vLLM's processes do
for a second after a request.  The router is started for each turn, so that it has no old
opinion of engines that stood still.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pdconn.bench.errors import BenchError
from pdconn.bench.serving.lineup import deal, engine_specs
from pdconn.lab.demo import check_dependencies
from pdconn.lab.engine import Engine, Progress, running
from pdconn.lab.proxy import running_proxy

#: What an engine holds once it has served the small model, its share of common pages included.
ENGINE_NBYTES = 1_600 << 20
START_TIMEOUT_S = 900.0
_MEMINFO = Path("/proc/meminfo")


class TooLittleMemory(BenchError):
    """This machine cannot hold all the engines that were asked for."""

    def __init__(self, num_engines: int, free_nbytes: int) -> None:
        wanted = num_engines * ENGINE_NBYTES / (1 << 30)
        super().__init__(
            f"memory: {num_engines} engines want about {wanted:.1f} GiB, "
            f"{free_nbytes / (1 << 30):.1f} GiB are free; ask for fewer --contestants"
        )


class Contestant(Protocol):
    """Somebody who answers prompts."""

    @property
    def name(self) -> str:
        """In the table."""

    def awake(self) -> AbstractContextManager[str]:
        """Its turn: hands over the URL at which it serves."""


@dataclass(frozen=True, slots=True)
class Target:
    """A service that runs; it is only asked."""

    name: str
    url: str

    @contextmanager
    def awake(self) -> Iterator[str]:
        """Nothing to be done."""
        yield self.url


@dataclass(frozen=True, slots=True)
class Ours:
    """One engine, or prefill and decode, which the router joins."""

    name: str
    engines: tuple[Engine, ...]
    directory: Path

    @contextmanager
    def awake(self) -> Iterator[str]:
        """Let its engines run, and freeze them afterwards.

        Raises:
            LabError: an engine died, or the router could not be started.
        """
        try:
            for engine in self.engines:
                engine.check()
                engine.resume()
            with self._served() as url:
                yield url
        finally:
            self.freeze()

    def freeze(self) -> None:
        """Stop its engines from running, those that still do."""
        for engine in self.engines:
            with suppress(ProcessLookupError):
                engine.pause()

    @contextmanager
    def _served(self) -> Iterator[str]:
        if len(self.engines) == 1:
            yield self.engines[0].url
            return
        prefill, decode = self.engines
        policy = ("--policy", "round-robin")  # with one engine a role there is nothing to weigh
        with running_proxy([prefill.url], [decode.url], self.directory, args=policy) as url:
            yield url


@contextmanager
def running_contestants(
    names: Sequence[str], model: Path, cores: str, directory: Path, progress: Progress
) -> Iterator[list[Ours]]:
    """Start the engines of all ``names`` at once and freeze them; they are gone afterwards.

    Raises:
        TooLittleMemory: before anything is started.
        LabError: something is not installed, could not be started, or died.
    """
    check_dependencies()
    specs = engine_specs(names, model, cores)
    free = _available_nbytes()
    if free is not None and free < len(specs) * ENGINE_NBYTES:
        raise TooLittleMemory(len(specs), free)
    with running(specs, directory, timeout_s=START_TIMEOUT_S, progress=progress) as engines:
        everyone = []
        for name, dealt in deal(names, engines):
            own = directory / name
            own.mkdir(parents=True, exist_ok=True)
            everyone.append(Ours(name, dealt, own))
        for one in everyone:
            one.freeze()
        yield everyone


def _available_nbytes() -> int | None:
    """Memory that programs could still get; None where the system does not tell."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    words = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return None if words is None else int(words[1]) << 10
