"""The plugin for engines on a CPU: what each variable asks for, and processes that are forked."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.tools.lab.cpu_engines import plugin
from pdconn.tools.lab.cpu_engines.forks import fork_engines, leave_to_parent
from tests.project.structure.__main__ import ROOT

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform
    from vllm.utils.ompmultiprocessing import OMPProcessManager

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def test_vllm_loads_it_beside_the_connectors_plugin() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    group = "vllm.general_plugins"
    named = tomllib.loads(text)["project"]["entry-points"][group]
    assert set(named) == {"pdconn", "pdconn-cpu"}
    loaded = {name: EntryPoint(name, value, group).load() for name, value in named.items()}
    assert loaded["pdconn-cpu"] is plugin.register
    assert all(map(callable, loaded.values()))


@pytest.mark.parametrize("asked", [(), *((name,) for name in plugin.CHANGES), (*plugin.CHANGES,)])
def test_vllm_is_changed_as_variables_ask_and_not_otherwise(
    asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    changes = {name: (lambda name=name: made.append(name)) for name in plugin.CHANGES}
    monkeypatch.setattr(plugin, "CHANGES", changes)
    plugin.register({**dict.fromkeys(plugin.CHANGES, "0"), **dict.fromkeys(asked, "1")})
    assert made == list(asked)


@pytest.fixture
def at_fork(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """``fork_engines`` was called; what it runs in forked processes.  Undone afterwards."""
    hooks: list[Any] = []

    def spawning(cls: type, config: Any) -> None:
        os.environ[METHOD] = "spawn"

    monkeypatch.setenv(METHOD, "")
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(spawning))
    with_variables = OMPProcessManager.configure_omp_envs
    monkeypatch.setattr(OMPProcessManager, "configure_omp_envs", with_variables)
    monkeypatch.setattr(registry, "_run_in_subprocess", registry._run_in_subprocess)
    monkeypatch.setattr(
        os, "register_at_fork", lambda *, after_in_child: hooks.append(after_in_child)
    )
    fork_engines()
    return hooks


@pytest.mark.parametrize(("num_threads", "method"), [(1, "fork"), (2, "spawn")])
def test_vllm_forks_if_it_computes_with_one_thread(
    at_fork: list[Any], monkeypatch: pytest.MonkeyPatch, num_threads: int, method: str
) -> None:
    """More threads would be lost in the fork, and OpenMP would wait for them."""
    monkeypatch.setattr("torch.get_num_threads", lambda: num_threads)
    CpuPlatform.check_and_update_config(SimpleNamespace())
    assert os.environ[METHOD] == method
    assert at_fork == [leave_to_parent]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, as the model is imported
def test_a_models_class_is_looked_at_where_it_is_used(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Elsewhere vLLM is imported once more.  The control: vLLM starts a process for it."""
    model = registry._LazyRegisteredModel("vllm.model_executor.models.llama", "LlamaForCausalLM")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    started: list[object] = []

    def run(*words: Any, **options: Any) -> Any:
        started.append(words)
        raise OSError("no processes here")

    monkeypatch.setattr(registry, "subprocess", SimpleNamespace(run=run))
    with pytest.raises(OSError, match="no processes here"):
        model.inspect_model_cls()
    assert len(started) == 1
    request.getfixturevalue("at_fork")
    assert model.inspect_model_cls().is_text_generation_model
    assert len(started) == 1


@pytest.mark.usefixtures("at_fork")
@pytest.mark.parametrize("bound", [True, False])
def test_a_worker_is_forked_on_its_cores(bound: bool) -> None:
    own = os.sched_getaffinity(0)
    core = max(own)
    manager = SimpleNamespace(
        skip_setup=not bound, cpu_lists=[[core]], use_iomp=False, use_gomp=False
    )
    with OMPProcessManager.configure_omp_envs(manager, rank=0, local_rank=0):
        assert os.sched_getaffinity(0) == ({core} if bound else own)
    assert os.sched_getaffinity(0) == own


_FORKING = """
import os, signal, socket, sys
from pdconn.tools.lab.cpu_engines.forks import leave_to_parent

if sys.argv[1] == "leaves":
    os.register_at_fork(after_in_child=leave_to_parent)
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
bound = socket.socket()
bound.bind(("127.0.0.1", 0))
client = socket.create_connection(("127.0.0.1", port))
served, _ = listener.accept()
told, wakeup = socket.socketpair()
wakeup.setblocking(False)
signal.set_wakeup_fd(wakeup.fileno())
signal.signal(signal.SIGUSR1, lambda *_: None)
go, gone = os.pipe()
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGUSR1)
    served.sendall(b"from the child")  # a connection is still whole
    os.close(gone)
    os.read(go, 1)
    os._exit(0)
assert client.recv(100) == b"from the child"
told.setblocking(False)
try:
    heard = bool(told.recv(100))
except BlockingIOError:
    heard = False
bound.listen()
ports = [port, bound.getsockname()[1]]
listener.close()
bound.close()
opened = 0
for each in ports:
    try:
        socket.create_connection(("127.0.0.1", each)).close()
        opened += 1
    except ConnectionRefusedError:
        pass
os.close(gone)
os.waitpid(child, 0)
print(heard, opened)
"""


@pytest.mark.parametrize(("how", "seen"), [("leaves", "False 0"), ("keeps", "True 2")])
def test_a_forked_process_keeps_no_port_open_and_tells_its_parent_of_no_signal(
    how: str, seen: str
) -> None:
    """The control: what a fork does by itself.  ``bound`` listens after the fork, as vLLM does."""
    done = subprocess.run(
        [sys.executable, "-c", _FORKING, how],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stderr, done.stdout.strip()) == ("", seen)
