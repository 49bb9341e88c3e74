"""The holder of a prefix forgets it, stalls, dies or starts again between its ticket and the read.

``other`` computes what does not come, though vLLM's policy is its default, ``fail``; its reads are
late and over TCP, so that faults come while they run.  ``hasty`` takes every pull for received, and
shows what the comparisons notice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pdconn.tools.lab.compare_answers import Answer, compare, make_prompts
from pdconn.tools.lab.engine import Engine, wait_ready
from pdconn.tools.lab.lab_client import Client, lend_prefix, prefill_only
from pdconn.vllm.pulls.patience import LEAST_S
from tests.forked.engines import running
from tests.vllm.engines.engines import PdPair, cache_beside
from tests.vllm.engines.families.handover import COARSE, NUM_TOKENS, Prompt, engine
from tests.vllm.engines.families.models import GPT_OSS

pytestmark = pytest.mark.matrix

DELAY_S = 1.0
CLAIM_TIMEOUT_S = 2.0
PREFIX = 704


@dataclass(frozen=True)
class Scene:
    clients: Mapping[str, Client]
    holder: Engine

    def lent(self, seed: int) -> tuple[Prompt, Mapping[str, Any]]:
        """A prompt, and a ticket for its beginning."""
        shared, tail = make_prompts([PREFIX, 40], seed)
        holder = self.clients["holder"]
        prefill_only(holder, shared)
        told = lend_prefix(holder, shared + tail, PREFIX)
        assert told is not None
        assert told["remote_num_tokens"] == PREFIX
        return shared + tail, told

    def ask(self, prompt: Prompt, ticket: Mapping[str, Any], name: str = "other") -> Answer:
        params = {"pdconn": {"from": ticket}}
        return self.clients[name].complete(prompt, NUM_TOKENS, kv_transfer_params=params)

    def is_right(self, prompt: Prompt, seen: Answer) -> bool:
        want = self.clients["alone"].complete(prompt, NUM_TOKENS)
        return compare(want, seen, COARSE) is None

    def pulls(self) -> float:
        return self.clients["other"].metrics().get("pdconn:pulls_total", 0.0)

    def amid(self, fault: Callable[[], object], prompt: Prompt, ticket: Any, name: str) -> Answer:
        """The answer, when something happens while its read is late."""
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self.ask, prompt, ticket, name)
            time.sleep(DELAY_S / 2)
            fault()
            return asked.result(60.0)

    def relaunch(self) -> None:
        self.holder.launch()
        wait_ready([self.holder])


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    work = tmp_path_factory.mktemp("holder")
    model = GPT_OSS.write(work / "model")
    late = {"reads": {"delay": 1.0, "delay_s": DELAY_S}}

    def pulling(name: str, connector: str | None = None) -> Any:
        spec = engine(
            name, GPT_OSS, model, "kv_consumer", prefix_caching=True, connector=connector,
            debug_faults=late, claim_timeout=CLAIM_TIMEOUT_S, read_timeout=4.0,
        )  # fmt: skip
        return replace(spec, env={**spec.env, "UCX_TLS": "tcp"})

    specs = [
        engine("alone", GPT_OSS, model, None, prefix_caching=True),
        engine("holder", GPT_OSS, model, "kv_both", prefix_caching=True),
        pulling("other"),
        pulling("hasty", "Hasty"),
    ]
    with running(specs, work, cache=cache_beside(model)) as started:
        yield Scene({each.spec.name: Client(each.url) for each in started}, started[1])


def test_without_a_fault_it_is_pulled(scene: Scene) -> None:
    prompt, ticket = scene.lent(1)
    pulls = scene.pulls()
    assert scene.is_right(prompt, scene.ask(prompt, ticket))
    assert scene.pulls() == pulls + 1


def test_what_the_holder_has_forgotten_is_computed(scene: Scene) -> None:
    """It takes back what it has lent, and lends no more."""
    prompt, ticket = scene.lent(2)
    holder = scene.clients["holder"]
    assert holder.post_json("/reset_prefix_cache", {}) == {"success": True}
    told = lend_prefix(holder, prompt, PREFIX)
    assert told == {"pdconn": {"lend": PREFIX, "held": 0}}
    pulls = scene.pulls()
    assert scene.is_right(prompt, scene.ask(prompt, ticket))
    assert scene.pulls() == pulls


def test_a_holder_that_stalls_costs_a_bounded_time(scene: Scene) -> None:
    prompt, ticket = scene.lent(4)
    pulls = scene.pulls()
    scene.holder.pause()
    try:
        began = time.monotonic()
        seen = scene.ask(prompt, ticket)
        took_s = time.monotonic() - began
    finally:
        scene.holder.resume()
    assert scene.is_right(prompt, seen)
    assert scene.pulls() == pulls
    assert took_s < 3 * CLAIM_TIMEOUT_S + 10.0, "it would be 30 s of a lease otherwise"


def test_a_holder_that_freezes_after_it_has_granted_costs_little_more_than_computing(
    scene: Scene,
) -> None:
    """The read has not begun then, and hangs; the lease would last 15 s."""
    prompt, ticket = scene.lent(8)
    began = time.monotonic()
    try:
        seen = scene.amid(scene.holder.pause, prompt, ticket, "other")
        took_s = time.monotonic() - began
    finally:
        scene.holder.resume()
    print(f"a holder that froze cost {took_s:.1f} s")
    assert scene.is_right(prompt, seen)
    assert took_s < LEAST_S + 3.0


def test_a_holder_that_dies_or_starts_again_is_done_without(scene: Scene) -> None:
    amid, before, late = (scene.lent(seed) for seed in (5, 6, 7))
    seen = scene.amid(scene.holder.kill_command, *amid, "other")
    assert scene.is_right(amid[0], seen)
    assert scene.is_right(before[0], scene.ask(*before)), "it is gone"
    scene.relaunch()
    assert scene.is_right(late[0], scene.ask(*late)), "another boot knows no ticket of the first"
    told = lend_prefix(scene.clients["holder"], late[0], PREFIX)
    assert told == {"pdconn": {"lend": PREFIX, "held": 0}}
    pulls = scene.pulls()
    prompt, ticket = scene.lent(9)
    assert scene.is_right(prompt, scene.ask(prompt, ticket))
    assert scene.pulls() == pulls + 1


def test_one_that_takes_failed_pulls_for_received_is_wrong(scene: Scene) -> None:
    """Negative control."""
    prompt, ticket = scene.lent(10)
    seen = scene.amid(scene.holder.kill_command, prompt, ticket, "hasty")
    assert not scene.is_right(prompt, seen)
    scene.relaunch()


def test_nothing_stays_lent_or_lost(scene: Scene) -> None:
    for name in ("holder", "other"):
        assert PdPair.used(scene.clients[name], 40.0) == 0.0, name
