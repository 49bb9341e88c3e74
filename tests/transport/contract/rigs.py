"""Rigs for our own backends: an in-process one here, NIXL's with a lender in another process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transport.base import Transport
from transport.errors import BackendFailure
from transport.nixl.transport import NixlTransport
from transport.testing.contract import ARENA_BYTES, Arena, Rig
from transport.testing.inprocess.faults import Held
from transport.testing.inprocess.transport import InProcessNetwork, InProcessTransport
from transport.testing.rig import SETTLE_S
from transport.types import Memory


@contextmanager
def memory_rig(
    reader_type: Callable[[InProcessNetwork, str], Transport] = InProcessTransport,
    settle_s: float = SETTLE_S,
) -> Iterator[Rig]:
    """A rig on a network of its own; ``reader_type`` may be a broken or a wrapped one."""
    network = InProcessNetwork()
    lending, reading = Arena.patterned(), Arena.blank()
    lender = InProcessTransport(network, "lender")
    lender.register([lending.memory])
    reader = reader_type(network, "reader")
    reader.register([reading.memory])
    address = lender.address()

    def pause() -> None:
        network.script = lambda _: Held()

    def resume() -> None:
        network.script = None
        network.release_held()
        network.progress()

    yield Rig(
        reader,
        reader.connect(address),
        address,
        reading,
        lending.memory,
        pause,
        resume,
        kill=lambda: network.kill_peer(lender.peer_id),
        settle_s=settle_s,
    )
    resume()
    reader.close()
    lender.close()


class Lender:
    """The other process of a NIXL rig; it can be stopped, continued and killed."""

    def __init__(self) -> None:
        self._process = self._start()
        self._wait_for_answer()

    def open(self, name: str, boot: str | None, options: dict[str, Any]) -> tuple[bytes, Memory]:
        """A new transport there, and its address and registered memory."""
        answer = self._ask(do="open", name=name, boot=boot, options=options)
        return bytes.fromhex(answer["address"]), Memory(answer["base"], ARENA_BYTES)

    def close(self) -> None:
        """Close the transport there, if its process lives."""
        if self._process.poll() is None:
            self.resume()
            self._ask(do="close")

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        _await_state(self._process.pid, "T")

    def resume(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the process as a crash would."""
        self._process.kill()
        self._process.wait()
        self._hang_up()

    def end(self) -> None:
        """End the process, whatever state it is in."""
        self.kill()

    def _ask(self, **command: Any) -> dict[str, Any]:
        """Send a command to the process; to a new one if it was killed."""
        if self._process.poll() is not None:
            self._process = self._start()
            self._wait_for_answer()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._wait_for_answer()

    def _wait_for_answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                answer: dict[str, Any] = json.loads(line[1:])
                return answer
        raise AssertionError(f"the lender ended with {self._process.wait()}")

    def _hang_up(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _command(self) -> list[str]:
        return ["tests.transport.contract.lender_process", "nixl"]

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", *self._command()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )


def _await_state(pid: int, state: str) -> None:
    """Wait until the kernel reports ``state``: a signal takes effect a little later."""
    deadline = time.monotonic() + 20.0
    while (
        Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != state
    ):
        assert time.monotonic() < deadline, f"process {pid} did not reach state {state}"
        time.sleep(0.001)


@contextmanager
def nixl_rig(
    lender: Lender,
    *,
    tls: str | None = None,
    stalls: bool = False,
    boot: str | None = None,
    reader_type: Callable[..., Transport] = NixlTransport,
) -> Iterator[Rig]:
    """A reader here and a lender there; ``tls`` picks UCX's transport.

    ``stalls``: reads need the lender to run, so that stopping it stalls them.
    Over shared memory the reader copies by itself, and nothing stalls.
    """
    options = nixl_options(tls)
    address, remote = lender.open("lender", boot, options)
    arena = Arena.blank()
    reader = reader_type("reader", close_wait_s=0.2, **options)
    try:
        reader.register([arena.memory])
        yield Rig(
            reader,
            reader.connect(address),
            address,
            arena,
            remote,
            lender.pause if stalls else None,
            lender.resume if stalls else None,
            lender.kill,
        )
    finally:
        lender.resume()
        _close_patiently(reader)
        lender.close()


def _close_patiently(reader: Transport) -> None:
    """Close a reader whose last reads may still be landing on a busy machine."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        with suppress(BackendFailure):
            reader.close()
            return
    reader.close()


def nixl_options(tls: str | None) -> dict[str, Any]:
    """Options of a NixlTransport that is to use only ``tls``."""
    config = {} if tls is None else {"UCX": {"engine_config": f"TLS={tls}"}}
    return {"backend_options": config, "huge_pages": False}
