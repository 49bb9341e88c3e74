"""A real ``pdconn proxy`` under slow and silent connections, with few file descriptors.

Without admission these take every file descriptor.  Then no good client is accepted, and the
proxy cannot connect to its engines and takes them for dead: every request gets 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from pdconn.lab.proxy import running_proxy
from tests.fakes.fake_engine import MODEL, FakeEngine, Leases, in_loop, until
from tests.router.admission.crowd import (
    crowd,
    good_clients,
    half_head,
    silent,
    slow_body,
    slow_head,
)

MOST_NBYTES = 64 << 20
"""Above idle."""


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
        status = Path(f"/proc/{self.pid}/status").read_text()
        [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        return int(line.split()[1]) << 10

    @property
    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def engines_down(self) -> int:
        return self.log.read_text().count("engine down")


@contextmanager
def proxy_process(
    prefill: FakeEngine, decode: FakeEngine, directory: Path, files: int, *args: str
) -> Iterator[ProxyProcess]:
    """A proxy that may open so many files."""
    pid = directory / "pid"
    limited = ("bash", "-c", f'ulimit -n {files}; echo $$ > {pid}; exec "$@"', "--")
    with running_proxy([prefill.url], [decode.url], directory, args=args, within=limited) as url:
        yield ProxyProcess(url, int(pid.read_text()), directory / "proxy.log")


@asynccontextmanager
async def engines() -> AsyncIterator[tuple[FakeEngine, FakeEngine]]:
    leases = Leases()
    async with contextlib.AsyncExitStack() as stack:
        pair = FakeEngine(leases), FakeEngine(leases)
        for engine in pair:
            await engine.start()
            stack.push_async_callback(engine.stop)
        yield pair


@pytest.mark.parametrize("files", [64, 1024])
@in_loop
async def test_good_clients_are_served_beside_200_slow_and_200_silent_ones(
    files: int, tmp_path: Path
) -> None:
    """At most 64 MiB above idle, no engine marked down.  ``-s`` shows the figures."""
    async with engines() as (prefill, decode):
        with proxy_process(prefill, decode, tmp_path, files) as proxy:
            alone = await good_clients(proxy.url, 4, 2.0)
            idle_nbytes, most_nbytes, most_files = proxy.nbytes, 0, 0
            hostile = ((silent, 100), (half_head, 100), (slow_head, 100), (slow_body, 100))
            async with crowd(proxy.port, *hostile) as made:
                await until(lambda: made[0] >= 400)
                serving = asyncio.create_task(good_clients(proxy.url, 4, 8.0))
                while not serving.done():
                    await asyncio.sleep(0.1)
                    most_nbytes = max(most_nbytes, proxy.nbytes)
                    most_files = max(most_files, proxy.num_files)
                served = await serving
            assert not alone.failed
            print(
                f"\n{files} file descriptors, at most {most_files} used; "
                f"{made[0]} hostile connections; {len(served.took_s)} good requests, "
                f"{len(served.failed)} failed, median {1e3 * served.median_s:.1f} ms "
                f"(alone {1e3 * alone.median_s:.1f}), slowest {1e3 * served.slowest_s:.0f} ms "
                f"(alone {1e3 * alone.slowest_s:.0f}); memory idle {idle_nbytes / 2**20:.1f} MiB, "
                f"at most {(most_nbytes - idle_nbytes) / 2**20:.1f} MiB more"
            )
            assert not served.failed, served.failed[:3]
            assert len(served.took_s) >= 8
            assert most_nbytes - idle_nbytes < MOST_NBYTES
            assert proxy.engines_down == 0
            # The control: the same log names an engine that is down.
            await decode.stop()
            async with aiohttp.ClientSession() as session:
                await session.post(
                    f"{proxy.url}/v1/completions", json={"model": MODEL, "prompt": "x"}
                )
            await until(lambda: proxy.engines_down == 1)
