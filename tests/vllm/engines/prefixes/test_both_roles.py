"""Two engines that compute and decode for each other, with few blocks: everybody is answered.

The pool holds some nine of the prompts at once, and sixteen clients ask.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pdconn.tools.lab.compare_answers import Answer, compare, make_prompts
from pdconn.tools.lab.lab_client import Client, prefill_then_decode
from pdconn.tools.lab.model import write_model
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.lab.proxy import running_proxy
from pdconn.tools.lab.spec import EngineSpec
from tests.forked.engines import running
from tests.vllm.engines.engines import Configuration, Prompt, cache_beside
from tests.vllm.engines.engines import engine as pair_engine
from tests.vllm.engines.prefixes.test_prefixes import Events, publishing

pytestmark = pytest.mark.matrix

BLOCKS, LONGEST, BATCHED = 190, 4096, 512
CLIENTS, ANSWER = 16, 4
CONFIGURATION = Configuration("LBHNC", True, one_process=True, policy="fail", verify="off")
PATIENCE_S = 30.0


@dataclass
class Load:
    """What clients were answered, and after how many seconds; None where nothing came in time."""

    answers: list[Answer | None]
    took_s: list[float]

    def missing(self) -> int:
        return sum(answer is None for answer in self.answers)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Client], Events]]:
    work = tmp_path_factory.mktemp("both")
    model, events = write_model(work), Events()
    specs = [publishing(_engine(name, model, core), events) for core, name in enumerate("ab")]
    specs += [_engine(name, model, core, "Unyielding") for core, name in enumerate("cd")]
    [port] = free_ports(1)
    alone = EngineSpec("alone", model, port, one_process=True, max_model_len=LONGEST)
    with running([alone, *specs], work, cache=cache_beside(model)) as started:
        yield {each.spec.name: Client(each.url, PATIENCE_S) for each in started}, events


def _engine(name: str, model: Path, core: int, connector: str | None = None) -> EngineSpec:
    spec = pair_engine(name, model, CONFIGURATION, "kv_both", core)
    transfer: dict[str, Any] = dict(spec.kv_transfer_config or {})
    if connector is not None:
        transfer["kv_connector"] = connector
        transfer["kv_connector_module_path"] = "tests.vllm.engines.families.controls"
    return replace(
        spec,
        num_blocks=BLOCKS,
        max_model_len=LONGEST,
        kv_transfer_config=transfer,
        cpus=None,
        args=(*spec.args, "--max-num-batched-tokens", str(BATCHED)),
    )


def load_of(count: int, seed: int) -> list[Prompt]:
    """Prompts of 200 to 900 tokens, which share nothing."""
    rng = Random(seed)
    return make_prompts([rng.randint(200, 900) for _ in range(count)], seed=seed)


def ask(
    prompts: Sequence[Prompt], pairs: Sequence[tuple[Client, Client]], clients: int = CLIENTS
) -> Load:
    """All prompts by so many clients, each by the next pair of prefill and decode."""

    def one(asked: tuple[Prompt, tuple[Client, Client]]) -> tuple[Answer | None, float]:
        prompt, (prefill, decode) = asked
        began = time.monotonic()
        try:
            answer = prefill_then_decode(prefill, decode, prompt, ANSWER)
        except TimeoutError:
            return None, time.monotonic() - began
        return answer, time.monotonic() - began

    with ThreadPoolExecutor(clients) as pool:
        came = list(pool.map(one, zip(prompts, cycle(pairs), strict=False)))
    return Load([answer for answer, _ in came], [took_s for _, took_s in came])


def wrong(alone: Client, prompts: Sequence[Prompt], answers: Sequence[Answer | None]) -> list[int]:
    """Lengths of the prompts whose answers are not those of one engine."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        want = alone.complete(prompt, ANSWER)
        if answer is None or compare(want, answer) is not None:
            found.append(len(prompt))
    return found


def test_engines_in_both_roles_answer_all_and_none_much_later_than_in_one(
    engines: tuple[dict[str, Client], Events],
) -> None:
    clients, _ = engines
    a, b = clients["a"], clients["b"]
    prompts = load_of(150, seed=12)
    one_way = ask(load_of(150, seed=13), [(a, b)])
    both = ask(prompts, [(a, b), (b, a)])
    slowest = [max(load.took_s) for load in (one_way, both)]
    print(f"slowest, in s: one way, and both: {slowest}")
    assert (one_way.missing(), both.missing()) == (0, 0)
    assert wrong(clients["alone"], prompts, both.answers) == []
    assert max(slowest) <= 2 * slowest[0]


def test_an_engine_that_is_chosen_for_both_legs_answers_from_its_own_cache(
    engines: tuple[dict[str, Client], Events],
) -> None:
    """It cannot read from itself; such requests were answered 500 under the policy fail."""
    clients, _ = engines
    prompts = load_of(8, seed=16)
    load = ask(prompts, [(clients["a"], clients["a"])])
    assert load.missing() == 0
    assert wrong(clients["alone"], prompts, load.answers) == []


def test_engines_that_give_nothing_up_wait_for_each_other(
    engines: tuple[dict[str, Client], Events],
) -> None:
    """Negative control: much of what is asked at once is not answered while clients wait."""
    clients, _ = engines
    c, d = clients["c"], clients["d"]
    load = ask(load_of(2 * CLIENTS, seed=15), [(c, d), (d, c)], clients=2 * CLIENTS)
    print(f"{load.missing()} of {len(load.answers)} are not answered")
    assert load.missing() >= CLIENTS // 2


def test_a_second_turn_that_prefill_pulls_beside_a_new_prompt_is_answered(
    engines: tuple[dict[str, Client], Events], tmp_path: Path
) -> None:
    """Each alone takes most of the blocks of an engine."""
    clients, events = engines
    words = {name: clients[name].url + events[name] for name in "ab"}
    first, said, new = make_prompts([3100, 40, 3000], seed=16)
    args = ("--pull-above", "256")
    with running_proxy([words["a"]], [words["b"]], tmp_path, args=args) as url:
        through = Client(url, PATIENCE_S)
        answer = through.complete(first, 300)
        second = first + tuple(answer.tokens) + said
        time.sleep(1.0)  # until the router has heard of what is cached
        with ThreadPoolExecutor(2) as pool:
            load = list(pool.map(lambda prompt: through.complete(prompt, ANSWER), (second, new)))
    assert wrong(clients["alone"], (second, new), load) == []
