"""The tuned contestant: NIXL's progress thread rests, and the stock agent's does not."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest

pytest.importorskip("nixl._api", reason="needs nixl")
pytest.importorskip("vllm", reason="needs vllm")

from transport.nixl.transport import NixlTransport

# That an agent of ours rests is held by tests/transport/contract/test_nixl.py.
pytestmark = pytest.mark.matrix

_IDLE = """
import resource, sys, time
import nixl._api as api
if sys.argv[1] == "tuned":
    from pdconn.tools.bench.serving import resting
    assert resting.NixlConnector.__module__.startswith("vllm."), "vLLM's own class"
agent = api.nixl_agent("idle", api.nixl_agent_config(num_threads=4, capture_telemetry=True))
before, began = time.process_time(), time.monotonic()
time.sleep(1.0)
print((time.process_time() - before) / (time.monotonic() - began))
"""


def idle_share(kind: str) -> float:
    """Of a core, that an idle agent made as vLLM makes it takes."""
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _IDLE, kind],
        env={**os.environ, "NIXL_LOG_LEVEL": "ERROR"}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return float(shown.stdout.split()[-1])


def test_an_idle_agent_rests_when_tuned_and_spins_as_it_comes() -> None:
    tuned, stock = idle_share("tuned"), idle_share("stock")
    assert tuned < 0.25 * stock, (tuned, stock)


def test_the_delay_is_the_one_that_our_own_agent_has() -> None:
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-c",
         "from pdconn.tools.bench.serving import resting; print(resting.PROGRESS_DELAY_US)"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    ours = inspect.signature(NixlTransport.__init__).parameters["progress_delay_us"].default
    assert int(shown.stdout.split()[-1]) == ours
