"""The process that has imported vLLM, and forks a keeper and an engine at each request.

    python -m tests.forked.server FD MODULE…

``FD`` is a socket; the modules are imported.  A request is one packet with two files, the keeper's
input and output; the answer is the keeper's pid.  Before the first request it tells which variables
of the environment were read while it imported, since engines that need others cannot come from
here.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from pdconn.tools.lab import process_keeper

MESSAGE_NBYTES = 1 << 20
_LAST_MESSAGES_S = 0.1


@dataclass(frozen=True)
class ForkedCommand:
    """The engine as the keeper's child."""

    pid: int

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


@contextmanager
def variables_read() -> Iterator[set[str]]:
    """The names of variables that Python code looks up within the block."""
    kind: Any = type(os.environ)
    look_up, names = kind.__getitem__, set()

    def noting(self: Any, name: Any) -> Any:
        names.add(os.fsdecode(name))
        return look_up(self, name)

    kind.__getitem__ = noting
    try:
        yield names
    finally:
        kind.__getitem__ = look_up


def preload(modules: Sequence[str]) -> set[str]:
    """Import what engines need; returns the variables that it depended on."""
    with variables_read() as names, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each engine would say them, of vLLM's own code
        for name in modules:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else each fork would copy it all at its first collection
    return names


def serve(requests: socket.socket, modules: Sequence[str]) -> None:
    """Fork at each request, until the other side is gone."""
    requests.send(json.dumps(sorted(preload(modules))).encode())
    while True:
        packet, files, _, _ = socket.recv_fds(requests, MESSAGE_NBYTES, 2)
        if not packet:
            return
        pid = os.fork()
        if pid == 0:
            requests.close()
            _become_keeper(json.loads(packet), files)
        for file in files:
            os.close(file)
        requests.send(str(pid).encode())
        with suppress(ChildProcessError):  # after the answer, so that its pid is still its own
            while _is_another(os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT), pid):
                os.waitpid(-1, os.WNOHANG)


def _is_another(ended: Any, pid: int) -> bool:
    return ended is not None and ended.si_pid != pid


def _become_keeper(request: dict[str, Any], files: list[int]) -> NoReturn:
    """In the first fork: what ``process_keeper.py`` does, but for how the command starts."""
    os.setsid()
    with open(request["log"], "ab", buffering=0) as log:
        for file, number in ((files[0], 0), (files[1], 1), (log.fileno(), 2)):
            os.dup2(file, number)
    for file in files:
        os.close(file)
    try:
        code = process_keeper.keep(
            request["grace_s"], lambda scratch: _fork_engine(request, scratch)
        )
    except Exception:  # noqa: BLE001 - the outermost place of a process
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def _fork_engine(request: dict[str, Any], scratch: str) -> ForkedCommand:
    """In the keeper.  The second fork does not return."""
    pid = os.fork()
    if pid:
        return ForkedCommand(pid)
    code: int | str | None = 1
    try:
        _take_place(request, scratch)
        sys.modules.pop(request["module"], None)  # it runs as ``__main__``
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - as Python ends a script
        traceback.print_exc()
    _end(code)


def _end(code: int | str | None) -> NoReturn:
    """As Python ends, and :mod:`multiprocessing` a fork: all but freeing each object.

    Most are what was imported; to free them, a fork would first have to copy them.
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code or 0)


def _keep_frozen() -> None:
    """Leave what was imported out of all collections.

    vLLM undoes its own ``gc.freeze`` as an engine ends, and collects twice: half a second each
    over objects of which none is garbage.  An engine's last messages are read in that time.
    """
    time.sleep(_LAST_MESSAGES_S)


def _take_place(request: dict[str, Any], scratch: str) -> None:
    """Session, signals, files, environment and arguments of a process that was just started."""
    os.setsid()
    process_keeper.die_with_parent()
    os.close(signal.set_wakeup_fd(-1))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    os.environ.clear()
    os.environ.update(request["env"])
    os.environ["TMPDIR"] = scratch
    tempfile.tempdir = None
    gc.unfreeze = _keep_frozen
    sys.argv = [request["module"], *request["arguments"]]


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as ours:
        serve(ours, sys.argv[2:])
    os._exit(0)  # it only has what its forks use, and says so at length
