"""A prefill engine that stands still, as a stopped process or a frozen machine does.

What waits there goes to another engine, and nothing further goes there, while it is stopped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdconn.router.pulls.prefill_patience import LEARNS_EVERY_S, LEAST_SEEN
from pdconn.tools.lab.compare_answers import Answer, make_prompts
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.proxy import running_proxy
from tests.forked.engines import running
from tests.vllm.engines.engines import (
    MAX_TOKENS,
    Configuration,
    Expected,
    cache_beside,
    engine,
)

pytestmark = pytest.mark.matrix

PATIENCE_S = 30.0
"""Within which requests are answered by others; a limit is some 3 s here."""


@dataclass
class Fleet:
    """Two prefill engines, one of which is stopped now and then, and one decode engine."""

    stopped: Engine
    urls: list[str]
    decode: str
    work: Path

    def serve(self, expected: Expected, seed: int, *args: str) -> tuple[int, int]:
        """How many of eight requests are answered while an engine is stopped, and later."""
        prompts = make_prompts([300] * (4 * LEAST_SEEN + 8), seed=seed)
        with running_proxy(self.urls, [self.decode], self.work, args=args) as url:
            client = Client(url)
            for prompt in prompts[8:]:
                client.complete(prompt, 1)
                time.sleep(LEARNS_EVERY_S / 2)
            with ThreadPoolExecutor(8) as pool:
                self.stopped.pause()
                try:
                    asked = {
                        pool.submit(client.complete, one, MAX_TOKENS): one for one in prompts[:8]
                    }
                    done, late = wait(asked, PATIENCE_S if not args else 10.0)
                finally:
                    self.stopped.resume()
                wait(late, 60.0)
            self.check({asked[one]: one for one in (*done, *late)}, expected)
        return len(done), len(late)

    @staticmethod
    def check(answers: dict[tuple[int, ...], Future[Answer]], expected: Expected) -> None:
        """All are right."""
        seen = {prompt: answer.result(0.0) for prompt, answer in answers.items()}
        assert expected.mismatches(seen) == []


@pytest.fixture(scope="module")
def fleet(model: Path, work: Path, expected: Expected) -> Iterator[Fleet]:
    del expected  # its engine starts first
    configuration = Configuration("LBHNC", False, one_process=True, policy="fail")
    specs = [
        engine("first", model, configuration, "kv_producer", 0),
        engine("second", model, configuration, "kv_producer", 0),
        engine("decode", model, configuration, "kv_consumer", 0),
    ]
    with running(specs, work / "stopped", cache=cache_beside(model)) as (one, other, decode):
        yield Fleet(one, [one.url, other.url], decode.url, work)


def test_requests_do_not_wait_for_it(fleet: Fleet, expected: Expected) -> None:
    assert fleet.serve(expected, 91) == (8, 0)


def test_without_a_limit_they_do(fleet: Fleet, expected: Expected) -> None:
    """The control."""
    done, late = fleet.serve(expected, 92, "--prefill-timeout", "none")
    assert late > 0
    assert done + late == 8
