"""Prefixes that go on from where they are: second turns, and prompts that another prefill knows.

Every engine lends and pulls.  ``decode`` has answered a first turn; ``other`` has never seen any
of it, and has another layout, ``wide`` another number of ranks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from pdconn.router.prefix.hashing import NOTHING
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.pulls.pull_outcome import PullEnd
from pdconn.router.router_server import Running, running_proxy
from pdconn.router.routing.routed_request import Outcome
from pdconn.tools.lab.compare_answers import compare, make_prompts
from pdconn.tools.lab.lab_client import Client, lend_prefix, prefill_only, prefill_then_decode
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.lab.spec import EngineSpec
from tests.vllm.engines.engines import PdPair
from tests.vllm.engines.families.handover import (
    COARSE,
    NUM_TOKENS,
    Handover,
    Prompt,
    engine,
    handing_over,
    lend_most,
)
from tests.vllm.engines.families.models import GPT_OSS, GRANITE_4_H, Family

pytestmark = pytest.mark.matrix

FIRST = {GPT_OSS.name: 7680, GRANITE_4_H.name: 15_360}
"""Tokens of the prompts whose hand-over is timed: so many that computing them takes a while."""

LEND_BACK = {"seconds": 10, "share": 0.3}
Events = dict[str, str]
"""Of engines by name: the words that follow their URLs on the router's command line."""


@pytest.fixture(scope="module", params=[GPT_OSS, GRANITE_4_H], ids=lambda one: one.name)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Handover, Events]]:
    family: Family = request.param
    work = tmp_path_factory.mktemp(family.name)
    model = family.write(work / "model")
    both: dict[str, Any] = {"prefix_caching": True, "max_model_len": FIRST[family.name] + 512}
    specs = [
        engine("prefill", family, model, "kv_both", **both),
        engine("decode", family, model, "kv_both", lend_back=LEND_BACK, **both),
    ]
    if family is GPT_OSS:
        specs.append(engine("careless", family, model, "kv_both", connector="Undigested", **both))
    if 2 in family.tensor_parallel:
        specs.append(engine("wide", family, model, "kv_both", ranks=2, **both))
    else:
        specs.append(engine("other", family, model, "kv_both", layout="BLHNC", **both))
    events: Events = {}
    specs = [publishing(spec, events) for spec in specs]
    with handing_over(family, work, specs, model, prefix_caching=True) as made:
        yield made, events


def publishing(spec: EngineSpec, events: Events) -> EngineSpec:
    """The same engine, telling what it caches."""
    told, replay = free_ports(2)
    config = (
        '{"enable_kv_cache_events": true, "publisher": "zmq", '
        f'"endpoint": "tcp://*:{told}", "replay_endpoint": "tcp://*:{replay}"}}'
    )
    hashing = ("--prefix-caching-hash-algo", "sha256_cbor")
    events[spec.name] = f",events=tcp://{{host}}:{told},replay=tcp://{{host}}:{replay}"
    more = ("--enable-prompt-tokens-details", *hashing, "--kv-events-config", config)
    return replace(spec, args=(*spec.args, *more))


def name_of_another(made: Handover) -> str:
    """The engine that has seen nothing."""
    return "wide" if "wide" in made.clients else "other"


def next_turn(made: Handover, first: Prompt, said: Prompt, num_answers: int) -> Prompt:
    """A first turn by prefill and decode; what is asked in the next one."""
    clients = made.clients
    answer = prefill_then_decode(clients["prefill"], clients["decode"], first, num_answers)
    return first + tuple(answer.tokens) + said


def right(made: Handover, prompt: Prompt, seen: Any) -> bool:
    """Whether an answer is that of one engine."""
    want = made.clients["alone"].complete(prompt, NUM_TOKENS)
    return compare(want, seen, COARSE) is None


def test_a_second_turn_goes_on_where_decode_ended(engines: tuple[Handover, Events]) -> None:
    """Windows are kept at the ends of answers.  States are not, so that decode has none to lend."""
    made, _ = engines
    name = name_of_another(made)
    decode, computing = made.clients["decode"], made.clients[name]
    block = made.family.block_tokens
    for seed, num_answers in enumerate((40, 3 * block)):
        first, said = make_prompts([700, 30], seed=70 + seed)
        prompt = next_turn(made, first, said, num_answers)
        if made.family is not GPT_OSS:
            asked = 640
            assert lend_prefix(decode, prompt, asked) == {"pdconn": {"lend": asked, "held": 0}}
            continue
        source, held = lend_most(decode, prompt)
        assert held == (len(first) + num_answers - 1) // block * block
        pulls = made.metric("pulls_total", name)
        ticket = prefill_only(computing, prompt, source)
        assert made.metric("pulls_total", name) > pulls
        seen = decode.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)
        assert right(made, prompt, seen)


@pytest.mark.parametrize("holder", ["prefill", "decode"])
def test_what_an_engine_holds_another_one_need_not_compute(
    engines: tuple[Handover, Events], holder: str
) -> None:
    """First tokens of the same prompts, pulled and computed, in turns; the first is a rehearsal.

    Prefill has computed the prompt's beginning for somebody else; decode has answered a first turn.
    """
    made, _ = engines
    if holder == "decode" and made.family is not GPT_OSS:
        pytest.skip("decode keeps no state at a boundary")
    holding, decode = made.clients[holder], made.clients["decode"]
    other = made.clients[name_of_another(made)]
    pulled, computed, held = [], [], 0
    first = FIRST[made.family.name]
    for seed in range(5):
        number = 80 + seed + 5 * (holder == "decode")
        shared, tail, fresh = make_prompts([first, 40, first + 40], number)
        if holder == "prefill":
            prefill_only(holding, shared)
            prompt = shared + tail
        else:
            prompt = next_turn(made, shared, tail, 3 * made.family.block_tokens)
        began = time.perf_counter()
        if seed == 0:
            source: Any
            source, held = lend_most(holding, prompt)
        else:
            source = lend_prefix(holding, prompt, held)
        ticket = prefill_only(other, prompt, source)
        pulled.append(time.perf_counter() - began)
        seen = decode.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)
        assert right(made, prompt, seen)
        began = time.perf_counter()
        prefill_only(other, fresh)
        computed.append(time.perf_counter() - began)
    assert held > first * 0.9
    print(f"{made.family.name}, {holder}: {sum(pulled[1:]) / sum(computed[1:]):.3f} of computing")
    assert sum(pulled[1:]) <= 0.4 * sum(computed[1:]), (pulled, computed)


def test_a_router_has_prefill_pull_what_a_busy_engine_holds(
    engines: tuple[Handover, Events],
) -> None:
    made, events = engines
    clients = made.clients
    shared, tail = make_prompts([3200, 40], seed=60)
    prompt = shared + tail
    prefill_only(clients["prefill"], shared)
    other = name_of_another(made)
    words = {name: clients[name].url + events[name] for name in events}
    config = ProxyConfig.from_options(
        [words["prefill"], words[other]], [words["decode"]], port=0, pull_above=64, alone_below=0
    )
    pulls = made.metric("pulls_total", other)

    async def scene() -> tuple[Any, Outcome]:
        async with running_proxy(config) as proxy:
            await learned(proxy, prompt, clients["prefill"].url)
            busy = proxy.router.loads.inflight.start_request(clients["prefill"].url, 1_000_000)
            through = Client(proxy.url)
            answer = await asyncio.to_thread(through.complete, prompt, NUM_TOKENS)
            busy.finish()
            return answer, next(proxy.router.decisions.newest())[1]

    seen, outcome = asyncio.run(scene())
    assert right(made, prompt, seen)
    assert outcome.prefill == clients[other].url
    assert outcome.pull is not None
    assert (outcome.pull.holder, outcome.pull.end) == (clients["prefill"].url, PullEnd.TAKEN)
    assert outcome.cached_tokens is not None
    assert outcome.cached_tokens >= outcome.pull.tokens >= 0.8 * len(prompt)
    assert made.metric("pulls_total", other) > pulls


async def learned(proxy: Running, prompt: Prompt, engine_url: str) -> None:
    """Wait until the router knows what an engine holds of a prompt."""
    async with asyncio.timeout(60):
        while True:
            found = proxy.router.caches.lookup(prompt, NOTHING).best(engine_url)
            if found is not None and found.hit.tokens:
                return
            await asyncio.sleep(0.02)


def test_a_ticket_for_another_history_is_not_used(engines: tuple[Handover, Events]) -> None:
    """A template that dropped some of it: everything is computed, and right."""
    made, _ = engines
    name = name_of_another(made)
    decode, other = made.clients["decode"], made.clients[name]
    holder = decode if made.family is GPT_OSS else made.clients["prefill"]
    first, said = make_prompts([700, 30], seed=90)
    prompt = next_turn(made, first, said, 40)
    source, held = lend_most(holder, prompt)
    assert held > 0
    edited = prompt[: held // 2] + prompt[held // 2 + 5 :]
    pulls = made.metric("pulls_total", name)
    ticket = prefill_only(other, edited, source)
    assert made.metric("pulls_total", name) == pulls
    assert right(made, edited, decode.complete(edited, NUM_TOKENS, kv_transfer_params=ticket))


# Tickets of prompt and answer, as a plain proxy passes them on


def answered(made: Handover, first: Prompt, num_answers: int) -> tuple[Prompt, Mapping[str, Any]]:
    """A first turn; the answer's tokens, and what comes with it for the next turn."""
    clients = made.clients
    answer = prefill_then_decode(clients["prefill"], clients["decode"], first, num_answers)
    assert answer.kv_transfer_params is not None
    return tuple(answer.tokens), answer.kv_transfer_params


def pulled_tokens(made: Handover, name: str, prompt: Prompt, params: Mapping[str, Any]) -> float:
    """Tokens that an engine pulls for a prompt that it computes; decode's answer must be right."""
    hits = "vllm:external_prefix_cache_hits_total"
    client, decode = made.clients[name], made.clients["decode"]
    before = client.metrics()[hits]
    ticket = client.complete(prompt, 1, kv_transfer_params=params).kv_transfer_params
    decode_params = {**(ticket or {}), "pdconn": {**(ticket or {})["pdconn"], "lend_back": False}}
    seen = decode.complete(prompt, NUM_TOKENS, kv_transfer_params=decode_params)
    assert seen.kv_transfer_params is None
    assert right(made, prompt, seen)
    return client.metrics()[hits] - before


def test_decode_lends_prompt_and_answer_for_the_next_turn(
    engines: tuple[Handover, Events],
) -> None:
    made, _ = engines
    name = name_of_another(made)
    for seed, num_answers in enumerate((1, 40, 3 * made.family.block_tokens + 1)):
        first, said = make_prompts([700, 30], seed=100 + seed)
        answer, params = answered(made, first, num_answers)
        # The last token was sampled, and nobody computed it.
        expected = len(first) + num_answers - 1
        assert params["pdconn"]["from"]["remote_num_tokens"] == expected
        assert pulled_tokens(made, name, first + answer + said, params) == expected


def test_a_template_that_drops_reasoning_cuts_what_is_used(
    engines: tuple[Handover, Events],
) -> None:
    """Windows are there at the prompt's last boundary, too; decode has pulled no state there."""
    made, _ = engines
    first, said = make_prompts([1200, 30], seed=110)
    answer, params = answered(made, first, 60)
    block = made.family.block_tokens
    expected = (len(first) - 1) // block * block if made.family is GPT_OSS else 0
    without_reasoning = first + answer[40:] + said
    assert pulled_tokens(made, name_of_another(made), without_reasoning, params) == expected


@pytest.mark.parametrize("edited", ["first token", "salt"])
def test_an_answer_of_another_conversation_is_not_pulled(
    engines: tuple[Handover, Events], edited: str
) -> None:
    made, _ = engines
    name = name_of_another(made)
    first, said = make_prompts([700, 30], seed=120)
    answer, params = answered(made, first, 40)
    prompt = first + answer + said
    more: dict[str, Any] = {"cache_salt": "tenant"} if edited == "salt" else {}
    prompt = prompt if more else ((prompt[0] + 1) % 500, *prompt[1:])
    pulls = made.metric("pulls_total", name)
    ticket = made.clients[name].complete(prompt, 1, kv_transfer_params=params, **more)
    assert made.metric("pulls_total", name) == pulls
    seen = made.clients["decode"].complete(
        prompt, NUM_TOKENS, kv_transfer_params=ticket.kv_transfer_params, **more
    )
    assert right(made, prompt, seen)


def test_without_the_digest_it_is_pulled_and_the_answer_is_wrong(
    engines: tuple[Handover, Events],
) -> None:
    """Negative control."""
    made, _ = engines
    if "careless" not in made.clients:
        pytest.skip("one family is enough")
    careless = made.clients["careless"]
    wrong = 0
    for seed in range(3):
        first, said = make_prompts([700, 30], seed=130 + seed)
        answer, params = answered(made, first, 40)
        edited = make_prompts([650], seed=140 + seed)[0] + first[650:] + answer + said
        pulling = {"pdconn": params["pdconn"]}
        seen = careless.complete(edited, NUM_TOKENS, kv_transfer_params=pulling)
        wrong += not right(made, edited, seen)
    assert wrong == 3


def test_nothing_stays_lent(engines: tuple[Handover, Events]) -> None:
    made, _ = engines
    for name, client in made.clients.items():
        assert PdPair.used(client, 40.0) == 0.0, name
