"""Loading UCX: what it must be and may be told, and what loading it leaves alone."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from transport.errors import BackendFailure, TransportUnavailable
from transport.ucx.library import load_library
from transport.ucx.transport import UcxTransport

if importlib.util.find_spec("ucxx") is None:
    pytest.skip("ucxx is not installed", allow_module_level=True)

pytestmark = [pytest.mark.ucx, pytest.mark.usefixtures("only_one_ucx")]


def test_ucx_without_a_registration_cache_is_not_used_and_the_text_says_why() -> None:
    make = (
        "from transport.ucx.transport import UcxTransport as T; T('x', options={'TLS': 'tcp,self'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", make],
        env={**os.environ, "UCX_MEM_EVENTS": "n"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "TransportUnavailable" in done.stderr
    assert "unset UCX_MEM_EVENTS" in done.stderr


def test_without_ucxx_the_text_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", None)
    with pytest.raises(TransportUnavailable, match=r"pdconn\[ucx\]"):
        load_library()


def test_options_that_ucx_does_not_know_or_cannot_follow_are_errors() -> None:
    with pytest.raises((TransportUnavailable, BackendFailure), match="NO_SUCH"):
        UcxTransport("x", options={"NO_SUCH": "1"})
    with pytest.raises(ValueError, match="RNDV_THRESH"):
        UcxTransport("x", options={"RNDV_THRESH": "inf"})
    with pytest.raises(ValueError, match="RCACHE_ENABLE"):
        UcxTransport("x", options={"RCACHE_ENABLE": "try"})


_ALONE = """
import os
from transport.ucx.transport import UcxTransport
before = dict(os.environ)
def ucx():
    return UcxTransport("u", options={"TLS": "tcp,self"}, huge_pages=False)
import numpy as np
from transport.types import Memory, Spans
ours, theirs = np.zeros(1 << 20, np.uint8), np.ones(1 << 20, np.uint8)
with ucx() as lender, ucx() as reader:
    lender.register([Memory(theirs.ctypes.data, 1 << 20)])
    reader.register([Memory(ours.ctypes.data, 1 << 20)])
    column = lambda value: np.array([value], np.uint64)
    spans = Spans(column(ours.ctypes.data), column(theirs.ctypes.data), column(1 << 20))
    read = reader.read(reader.connect(lender.address()), spans)
    while (settled := reader.poll(read)) is None:
        pass
    assert settled.ok and ours.all()
left = {k for k in set(os.environ) - set(before) if k.startswith("UCX_")}
assert not left, left
import sys
assert not {"rmm", "cupy", "librmm"} & set(sys.modules)
print("fine")
"""


def test_a_read_loads_no_gpu_library_and_leaves_the_environment_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _ALONE],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "fine" in done.stdout, done.stderr
