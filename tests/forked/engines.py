"""``running`` for tests: :func:`pdconn.tools.lab.engine.running`, with engines that are forked."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import IO

from pdconn.tools.lab import engine as lab
from pdconn.tools.lab.process import Process, RunningKeeper
from tests.forked.server import MESSAGE_NBYTES

API_SERVER = "vllm.entrypoints.openai.api_server"
PRELOADED = (
    API_SERVER,
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.serve.dev.rpc.api_router",
    "model_hosting_container_standards.sagemaker",
    "prometheus_fastapi_instrumentator",
    "vllm.collect_env",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.openai.completion.api_router",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.renderers.hf",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "pdconn.vllm.connector",
    "tests.forked.kernels",
)
"""What every engine imports.  NIXL and UCX are not among it: they take hold of devices."""

LIBRARIES = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "LD_", "PYTHON")
"""Prefixes of variables that libraries or the interpreter read, and not Python code."""
READ_AGAIN = {"VLLM_SERVER_DEV_MODE", "TMPDIR"}
"""Variables that vLLM reads while it is imported (what errors it logs), and again when it uses
them; and where temporary files are, which is looked up anew in each engine."""

ENGINES_OWN = ("VLLM_", "PDCONN_", "UCX_", "OTEL_", "PYTEST_")
"""Prefixes of variables that the server is started without.  Some code copies the whole environment
while it is imported, which then does not count as reading them."""


class ForkServer:
    """One process that has imported modules with a given environment."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._env = {k: v for k, v in env.items() if not k.startswith(ENGINES_OWN)}
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked.server", str(theirs.fileno()), *modules],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=self._env,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._read: set[str] | None = None

    def suits(self, env: Mapping[str, str]) -> bool:
        """Whether what was read while it imported is the same in ``env``."""
        return not self.differing(env)

    def differing(self, env: Mapping[str, str]) -> set[str]:
        """The variables that forbid an engine with this environment."""
        changed = {
            name
            for name in self._env.keys() | env.keys()
            if self._env.get(name) != env.get(name) and name not in READ_AGAIN
        }
        return {name for name in changed if name in self.read or name.startswith(LIBRARIES)}

    @property
    def read(self) -> set[str]:
        """The variables that its imports read; waits for them."""
        with self._lock:
            if self._read is None:
                self._read = set(json.loads(self._receive()))
            return self._read

    def fork(self, request: Mapping[str, object], files: Sequence[int]) -> int:
        """Have it fork a keeper and its command; the keeper's pid file.

        Raises:
            RuntimeError: it has ended.
        """
        assert self.read is not None
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(dict(request)).encode()], list(files))
            return int(self._receive())

    def close(self) -> None:
        """End it; what it has forked goes on."""
        self._socket.close()
        self._process.wait()

    def _receive(self) -> bytes:
        if not (packet := self._socket.recv(MESSAGE_NBYTES)):
            raise RuntimeError(f"the process that forks engines ended: {self._process.wait()}")
        return packet


class ForkedKeeper:
    """A keeper that is another process's child: what ``Process`` needs of it."""

    def __init__(self, server: ForkServer, request: Mapping[str, object]) -> None:
        read, write = os.pipe()
        answers, answer = os.pipe()
        self.stdin: IO[bytes] = os.fdopen(write, "wb", buffering=0)
        self.stdout: IO[bytes] = os.fdopen(answers, "rb")
        try:
            self.pid = server.fork(request, [read, answer])
        finally:
            os.close(read)
            os.close(answer)
        self._pidfd: int | None = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """0 once it has ended: its exit status is its parent's to know."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        if self._pidfd is not None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("keeper", timeout or 0.0)
            os.close(self._pidfd)
            self._pidfd = None
        return 0

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self._pidfd is not None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


_servers: dict[Sequence[str], ForkServer] = {}


def fork_server(modules: Sequence[str], env: Mapping[str, str]) -> ForkServer:
    """This process's server for ``modules``, started with ``env`` at the first call."""
    if modules not in _servers:
        _servers[modules] = ForkServer(modules, env)
        atexit.register(_servers[modules].close)
    return _servers[modules]


class ForkedProcess(Process):
    """A process that is forked if it is vLLM's server, with an environment that allows it.

    Attributes:
        module: what is forked instead of run by ``python -m``.
        preloaded: what the process that it is forked from has imported.
    """

    module = API_SERVER
    preloaded: tuple[str, ...] = PRELOADED

    @property
    def forked(self) -> bool:
        """Whether it was."""
        return isinstance(self._keeper, ForkedKeeper)

    def _start_keeper(self, command: Sequence[str], env: dict[str, str] | None) -> RunningKeeper:
        interpreter = [sys.executable, "-m", self.module]
        if env is None or list(command[:3]) != interpreter:
            return super()._start_keeper(command, env)
        server = fork_server(self.preloaded, env)
        if not server.suits(env):
            return super()._start_keeper(command, env)
        request = {
            "module": self.module,
            "arguments": list(command[3:]),
            "env": env,
            "log": str(self.log),
            "grace_s": self._grace_s,
        }
        return ForkedKeeper(server, request)


running = partial(lab.running, start=ForkedProcess)
