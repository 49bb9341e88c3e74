"""Real vLLM engines on this machine: started together, watched, gone for certain.

    with running([prefill, decode], Path(".work/run")) as (p, d):
        ...

Starting is nearly all imports, a core's worth per process, so engines are
started at once and waited for together; the first that dies ends them all.
"""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from pdconn.lab.errors import EngineDied, EngineStartTimeout, PortInUse
from pdconn.lab.ports import is_free
from pdconn.lab.process import Ended, Process
from pdconn.lab.spec import EngineSpec

#: Called about once a second for each engine that is starting: its name,
#: seconds since its start, and what it last said.
Progress = Callable[[str, float, str], None]

START_TIMEOUT_S = 300.0
_POLL_S = 0.1
_PROGRESS_S = 1.0


def no_progress(_name: str, _seconds: float, _said: str) -> None:
    """Shows nothing."""


class Engine:
    """One vLLM server in its own process group, from ``launch`` to ``stop``.

    Its log is ``directory/NAME.log``, new for each launch.  ``cache`` is where vLLM keeps
    what it finds out about a model, beside the log unless engines elsewhere share it.
    """

    def __init__(
        self,
        spec: EngineSpec,
        directory: Path,
        *,
        cache: Path | None = None,
        grace_s: float = 20.0,
    ) -> None:
        self.spec = spec
        self.log = directory / f"{spec.name}.log"
        self.boot_s: float | None = None
        self._cache = cache or directory / "vllm-cache"
        self._grace_s = grace_s
        self._process: Process | None = None
        self._launched = 0.0

    @property
    def url(self) -> str:
        """Where it serves, without a path."""
        return f"http://{self.spec.host}:{self.spec.port}"

    @property
    def pid(self) -> int:
        """Of the process group's leader, vLLM's API server."""
        return self._running().pid

    def launch(self) -> None:
        """Start it without waiting, or start it anew once it has ended.

        Raises:
            PortInUse: before anything is started.
        """
        here = not self.spec.within
        for port in (self.spec.port, self.spec.side_channel_port) if here else ():
            if port is not None and not is_free(port, self.spec.host):
                raise PortInUse(self.spec.name, self.spec.host, port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")
        self.boot_s = None
        self._launched = time.monotonic()
        self._process = Process(
            self.spec.name,
            self.spec.command(),
            self.log.resolve(),
            env=self.spec.environment(os.environ, self._cache.resolve()),
            grace_s=self._grace_s,
        )

    def is_ready(self) -> bool:
        """Whether it serves.

        Raises:
            EngineDied: it ended, or never ran.
        """
        self.check()
        if self.boot_s is None and _healthy(self.spec.host, self.spec.port):
            self.boot_s = time.monotonic() - self._launched
        return self.boot_s is not None

    def check(self) -> None:
        """Raise ``EngineDied`` unless its process runs."""
        process = self._running()
        if (ended := process.ended()) is not None:
            raise EngineDied(self.spec.name, ended.exit_code, self.log, process.tail())

    def pause(self) -> None:
        """Freeze all of its processes: it neither serves nor takes processor time."""
        self._running().pause()

    def resume(self) -> None:
        """Undo ``pause``."""
        self._running().resume()

    def kill(self) -> Ended:
        """End it without asking, as a crash does; ``launch`` starts it anew."""
        return self._running().kill()

    def ask_to_stop(self) -> None:
        """Begin to stop, without waiting."""
        if self._process is not None:
            self._process.ask_to_end()

    def stop(self) -> Ended | None:
        """Stop it and wait until every process of it is gone.  None if it never ran."""
        return None if self._process is None else self._process.end()

    def said(self) -> str:
        """The last line of its log."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


@contextmanager
def running(
    specs: Sequence[EngineSpec],
    directory: Path,
    *,
    cache: Path | None = None,
    timeout_s: float = START_TIMEOUT_S,
    progress: Progress = no_progress,
) -> Iterator[tuple[Engine, ...]]:
    """Start engines together, hand them over when all serve, stop them in the end.

    Raises:
        PortInUse, EngineDied, EngineStartTimeout: none of them is left running then.
    """
    engines = tuple(Engine(spec, directory, cache=cache) for spec in specs)
    try:
        for engine in engines:
            engine.launch()
        wait_ready(engines, timeout_s=timeout_s, progress=progress)
        yield engines
    finally:
        stop_all(engines)


def wait_ready(
    engines: Sequence[Engine],
    *,
    timeout_s: float = START_TIMEOUT_S,
    progress: Progress = no_progress,
) -> None:
    """Wait until all serve.

    Raises:
        EngineDied: one of them ended.
        EngineStartTimeout: one of them takes longer than ``timeout_s``.
    """
    began = shown = time.monotonic()
    while waiting := [engine for engine in engines if not engine.is_ready()]:
        now = time.monotonic()
        if now - began > timeout_s:
            late = waiting[0]
            raise EngineStartTimeout(late.spec.name, timeout_s, late.log, late._running().tail())
        if now - shown > _PROGRESS_S:
            shown = now
            for engine in waiting:
                progress(engine.spec.name, now - began, engine.said())
        time.sleep(_POLL_S)


def stop_all(engines: Sequence[Engine]) -> None:
    """Stop engines at once, all of them even if one cannot be stopped cleanly."""
    for engine in engines:
        engine.ask_to_stop()
    failures = []
    for engine in engines:
        try:
            engine.stop()
        except Exception as error:  # noqa: BLE001 - raised below, after the others' turn
            failures.append(error)
    if failures:
        raise failures[0]


def _healthy(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=2.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
