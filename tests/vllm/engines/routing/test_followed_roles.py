"""Roles that follow the load on three real engines: no request is lost, and no token is wrong.

The load is answers, then prompts, and the controller has short periods.  Targets are multiples of
what one request takes on this machine, however busy it is.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pdconn.tools.lab.compare_answers import Answer, make_prompts
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.proxy import admin_url, running_proxy
from tests.forked.engines import running
from tests.vllm.engines.engines import Configuration, Expected, Prompt, cache_beside, engine

pytestmark = pytest.mark.matrix

PERIOD_S = 3.0
CLIENTS = 12
PATIENCE_S = 120.0
ANSWER_TOKENS, PROMPT_TOKENS = 64, 1500


@dataclass
class Load:
    """Requests that are sent again and again, and what came of them."""

    client: Client
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    num_right: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def sent(self, prompts: list[Prompt], num_tokens: int, expected: Expected) -> Iterator[None]:
        """While the block runs, each of as many clients sends one prompt after the other."""
        expected.ask(prompts, num_tokens)
        ends = threading.Event()
        with ThreadPoolExecutor(len(prompts)) as pool:
            for prompt in prompts:
                pool.submit(self._send, prompt, num_tokens, expected, ends)
            try:
                yield
            finally:
                ends.set()

    def _send(
        self, prompt: Prompt, num_tokens: int, expected: Expected, ends: threading.Event
    ) -> None:
        while not ends.is_set():
            try:
                answer = self.client.complete(prompt, num_tokens)
            except Exception as error:  # noqa: BLE001 - each kind is a lost request
                with self._lock:
                    self.lost.append(repr(error))
                return
            self._judge(prompt, num_tokens, answer, expected)

    def _judge(self, prompt: Prompt, num_tokens: int, answer: Answer, expected: Expected) -> None:
        found = expected.mismatches({prompt: answer}, num_tokens)
        with self._lock:
            self.wrong += found
            self.num_right += not found


def roles_of(proxy: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{admin_url(proxy)}/debug/state", timeout=30) as answer:
        state: dict[str, Any] = json.loads(answer.read())
    roles: dict[str, Any] = state["roles"]
    return roles


def await_move(proxy: str, goal: str) -> dict[str, Any]:
    """The last change to this role, once there is one."""
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        roles = roles_of(proxy)
        for one in roles["changes"]:
            if one["to"] == goal and one["what"] == "changed":
                return dict(one)
        time.sleep(0.2)
    raise AssertionError(f"no engine was given to {goal}: {roles}")


@pytest.fixture(scope="module")
def engines(model: Path, work: Path, expected: Expected) -> Iterator[list[Engine]]:
    del expected  # its engine starts first
    configuration = Configuration("LBHNC", False, one_process=True, policy="recompute")
    specs = [engine(f"both-{n}", model, configuration, "kv_both", n) for n in range(3)]
    with running(specs, work / "roles", cache=cache_beside(model)) as started:
        yield started


def test_an_engine_is_given_to_the_role_that_lacks_one_and_back(
    engines: list[Engine], expected: Expected, work: Path
) -> None:
    answers = make_prompts([40] * CLIENTS, seed=71)
    prompts = make_prompts([PROMPT_TOKENS] * CLIENTS, seed=72)
    alone = Client(engines[0].url)
    alone.complete(prompts[0], 2)  # what is compiled at first use is not timed
    one = alone.stream(answers[0], ANSWER_TOKENS)
    itl_s = (one.last_token_s - one.first_token_s) / (ANSWER_TOKENS - 1)
    ttft_s = alone.stream(prompts[1], 2).first_token_s
    urls = [engine.url for engine in engines]
    args = [
        "--roles", "follow", "--role-period", str(PERIOD_S), "--role-drain", "20",
        "--itl-target", f"{1.5 * itl_s:.4f}", "--ttft-target", f"{2 * ttft_s:.4f}",
    ]  # fmt: skip
    with running_proxy(urls, urls, work, args=args) as proxy:
        load = Load(Client(proxy))
        assert roles_of(proxy)["changes"] == []  # an idle fleet stays as it is
        with load.sent(answers, ANSWER_TOKENS, expected):
            to_decode = await_move(proxy, "decode")
        with load.sent(prompts, 2, expected):
            to_prefill = await_move(proxy, "prefill")
        roles = roles_of(proxy)
    assert (load.lost, load.wrong) == ([], [])
    assert load.num_right >= 2 * CLIENTS
    assert to_prefill["at"] - to_decode["at"] > 0
    assert set(roles["serves"].values()) - {None} == {"prefill", "decode"}
