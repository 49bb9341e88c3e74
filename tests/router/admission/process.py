"""A real ``pdconn proxy`` before fake engines, with a limit of its file descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdconn.tools.lab.proxy import running_proxy
from tests.fakes.fake_engine import FakeEngine, Leases


@dataclass(frozen=True)
class ProxyProcess:
    """A ``pdconn proxy`` of its own."""

    url: str
    pid: int
    log: Path

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def nbytes(self) -> int:
        """Memory that is resident now."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
        [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        return int(line.split()[1]) << 10

    @property
    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def engines_down(self) -> int:
        """How often an engine was marked as down."""
        return self.log.read_text(encoding="utf-8").count("engine down")

    def limit_files(self, files: int) -> None:
        """No file descriptor of this number or above from now on; open ones stay."""
        _, hard = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (files, hard))


@contextmanager
def proxy_process(
    prefill: FakeEngine, decode: FakeEngine, directory: Path, files: int, *args: str
) -> Iterator[ProxyProcess]:
    """A proxy that may open so many files."""
    pid = directory / "pid"
    limited = ("bash", "-c", f'ulimit -n {files}; echo $$ > {pid}; exec "$@"', "--")
    with running_proxy([prefill.url], [decode.url], directory, args=args, within=limited) as url:
        yield ProxyProcess(url, int(pid.read_text(encoding="utf-8")), directory / "proxy.log")


@asynccontextmanager
async def engines() -> AsyncIterator[tuple[FakeEngine, FakeEngine]]:
    """A prefill and a decode engine."""
    leases = Leases()
    async with contextlib.AsyncExitStack() as stack:
        pair = FakeEngine(leases), FakeEngine(leases)
        for engine in pair:
            await engine.start()
            stack.push_async_callback(engine.stop)
        yield pair
