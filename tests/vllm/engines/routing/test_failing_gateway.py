"""What dies behind a real Envoy: a picker, prefill, decode before its answer and in it.

One prefill and two decode engines; answers are compared with one engine alone.
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pdconn.tools.lab.compare_answers import make_prompts
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.lab.spec import SERVED_NAME
from tests.forked.engines import running
from tests.router.picker.gateway import BUFFERED, Filter, running_envoy
from tests.vllm.engines.engines import (
    MAX_TOKENS,
    Configuration,
    Expected,
    cache_beside,
    engine,
)

pytestmark = pytest.mark.matrix

SOON_S = 30.0


def until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.05)


@dataclass
class Fleet:
    """One prefill and two decode engines."""

    prefill: Engine
    decode: list[Engine]

    def pulls(self) -> float:
        """Pulls of both decode engines."""
        pages = [Client(one.url).metrics() for one in self.decode]
        return sum(page.get("pdconn:pulls_total", 0.0) for page in pages)

    def check(self, client: Client, expected: Expected, seed: int, number: int = 4) -> None:
        """Further requests are right, and pulled."""
        before = self.pulls()
        prompts = make_prompts([200] * number, seed=seed)
        answers = {one: client.complete(one, MAX_TOKENS) for one in prompts}
        assert expected.mismatches(answers) == []
        assert self.pulls() - before == number

    def check_nothing_is_lent(self) -> None:
        """After one more request, prefill uses no block."""
        client = Client(self.prefill.url)

        def is_free() -> bool:
            client.complete((5, 6, 7), 1)
            return client.metrics()["vllm:kv_cache_usage_perc"] == 0.0

        until(is_free)


@pytest.fixture(scope="module")
def fleet(model: Path, work: Path, expected: Expected) -> Iterator[Fleet]:
    del expected  # its engine starts first
    configuration = Configuration("LBHNC", False, one_process=True, policy="fail")
    specs = [
        engine("prefill", model, configuration, "kv_producer", 0),
        engine("one", model, configuration, "kv_consumer", 0),
        engine("other", model, configuration, "kv_consumer", 0),
    ]
    with running(specs, work / "gateway", cache=cache_beside(model)) as (prefill, one, other):
        yield Fleet(prefill, [one, other])


@contextmanager
def picker(fleet: Fleet, port: int, work: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``pdconn picker`` as a process that can be killed."""
    line = [sys.executable, "-m", "pdconn.tools.cli.main", "picker", "--port", str(port)]
    line += ["--admin-port", "0", "--policy", "round-robin", "--prefill", fleet.prefill.url]
    line += ["--decode", *(one.url for one in fleet.decode)]
    with (work / "picker.log").open("ab") as log:
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    try:
        assert b"pdconn picker on" in process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def gateway(fleet: Fleet, port: int, shape: Filter = Filter()) -> Iterator[Client]:  # noqa: B008
    with running_envoy(port, [one.url for one in fleet.decode], shape) as url:
        yield Client(url)


@contextmanager
def stream(client: Client, prompt: tuple[int, ...]) -> Iterator[http.client.HTTPResponse]:
    """A long answer, of which the first bytes have come."""
    parts = urlsplit(client.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=SOON_S)
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 900, "ignore_eos": True}
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps({**body, "stream": True, "temperature": 0}),
        {"Content-Type": "application/json"},
    )
    try:
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        yield response
    finally:
        connection.close()


def test_a_picker_that_is_killed_costs_no_request_where_the_gateway_fails_open(
    fleet: Fleet, expected: Expected, work: Path
) -> None:
    [port] = free_ports(1)
    [prompt] = make_prompts([300], seed=401)
    before = fleet.pulls()
    with gateway(fleet, port, Filter(BUFFERED, fails_open=True)) as client:
        with picker(fleet, port, work) as process, stream(client, prompt) as answer:
            fleet.prefill.pause()  # one request waits there for its ticket
            try:
                with ThreadPoolExecutor(1) as pool:
                    waiting = pool.submit(client.complete, prompt[:200], MAX_TOKENS)
                    time.sleep(0.5)
                    process.kill()
                    assert expected.mismatches({prompt[:200]: waiting.result(SOON_S)}) == []
            finally:
                fleet.prefill.resume()
            assert answer.read().endswith(b"data: [DONE]\n\n")  # the stream has gone on
        assert fleet.pulls() - before == 1
        answers = {prompt[:150]: client.complete(prompt[:150], MAX_TOKENS)}
        assert expected.mismatches(answers) == []
        with picker(fleet, port, work):
            until(lambda: client.complete(prompt[:10], 1) is not None)
            fleet.check(client, expected, seed=402)
    fleet.check_nothing_is_lent()


def test_a_picker_that_is_told_to_stop_lets_streams_go_on(
    fleet: Fleet, work: Path, expected: Expected
) -> None:
    [port] = free_ports(1)
    [prompt] = make_prompts([300], seed=403)
    with gateway(fleet, port) as client:  # which does not go on without a picker
        with picker(fleet, port, work) as process, stream(client, prompt) as answer:
            process.send_signal(signal.SIGTERM)
            assert process.wait(SOON_S) == 0
            assert answer.read().endswith(b"data: [DONE]\n\n")
        with picker(fleet, port, work):
            fleet.check(client, expected, seed=404)


def test_clients_that_leave_leave_nothing_lent(
    fleet: Fleet, work: Path, expected: Expected
) -> None:
    [port] = free_ports(1)
    prompts = make_prompts([600] * 6, seed=405)
    with gateway(fleet, port) as client, picker(fleet, port, work):
        for number, prompt in enumerate(prompts):
            if number % 2:
                with stream(client, prompt):
                    pass
            else:
                parts = urlsplit(client.url)
                connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80)
                body = json.dumps({"model": SERVED_NAME, "prompt": prompt, "max_tokens": 500})
                connection.request(
                    "POST", "/v1/completions", body, {"Content-Type": "application/json"}
                )
                time.sleep(0.02 * number)
                connection.close()
        fleet.check(client, expected, seed=406)
    fleet.check_nothing_is_lent()


def test_decode_computes_while_prefill_stands_still(
    fleet: Fleet, expected: Expected, work: Path
) -> None:
    [port] = free_ports(1)
    [prompt] = make_prompts([200], seed=407)
    with gateway(fleet, port) as client, picker(fleet, port, work):
        fleet.check(client, expected, seed=408, number=12)  # what it takes is learned
        before = fleet.pulls()
        fleet.prefill.pause()
        try:
            answers = {prompt: client.complete(prompt, MAX_TOKENS)}
        finally:
            fleet.prefill.resume()
        assert expected.mismatches(answers) == []
        assert fleet.pulls() == before


def test_a_decode_engine_that_dies_ends_its_streams_and_no_other_request(
    fleet: Fleet, expected: Expected, work: Path
) -> None:
    """The last test: one engine is gone after it."""
    [port] = free_ports(1)
    prompts = make_prompts([300] * 2, seed=409)
    with gateway(fleet, port) as client, picker(fleet, port, work):
        with stream(client, prompts[0]) as one, stream(client, prompts[1]) as other:
            fleet.decode[0].kill_command()
            ends = []
            for answer in (one, other):
                try:
                    ends.append(answer.read().endswith(b"data: [DONE]\n\n"))
                except (http.client.HTTPException, OSError):
                    ends.append(False)
            assert sorted(ends) == [False, True]
        gone = fleet.decode.pop(0)
        assert gone.url
        fleet.check(client, expected, seed=410)  # at the other one, each with its ticket
