"""Sessions of real engines behind the router: kept over a flood, given up for requests, prefetched.

Prefill has few blocks, so that a flood of one-off prompts replaces all that is not kept.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import pytest

from pdconn.tools.lab.compare_answers import compare, make_prompts
from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.proxy import admin_url, running_proxy
from pdconn.tools.lab.spec import SERVED_NAME
from tests.vllm.engines.families.handover import COARSE, Handover, Prompt, engine, handing_over
from tests.vllm.engines.families.models import GPT_OSS, GRANITE_4_H, Family

pytestmark = pytest.mark.matrix

BLOCKS = {GPT_OSS.name: (170, 32), GRANITE_4_H.name: (85, 64)}
"""Of prefill, and the tokens of one; vLLM raises them until a block holds a state."""
ANSWER = 8
FLOOD = 700
"""Tokens of a one-off prompt."""


@dataclass
class Service:
    """A router over one prefill and one decode engine."""

    made: Handover
    url: str

    @property
    def cache_tokens(self) -> int:
        """Tokens of full attention that prefill's blocks would hold, if all were for that."""
        num_blocks, block_tokens = BLOCKS[self.made.family.name]
        return num_blocks * block_tokens

    def post(self, path: str, **body: Any) -> tuple[dict[str, str], dict[str, Any]]:
        """Headers and body of an answer."""
        raw = json.dumps({"model": SERVED_NAME, **body}).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(self.url + path, raw, headers)
        with urllib.request.urlopen(asked, timeout=300) as reply:
            return dict(reply.headers), json.loads(reply.read())

    def turn(self, prompt: Prompt, **fields: Any) -> tuple[dict[str, str], int]:
        """The headers of an answer, and the tokens that prefill had cached."""
        headers, _ = self.post(
            "/v1/completions",
            prompt=list(prompt), max_tokens=ANSWER, temperature=0, ignore_eos=True, **fields,
        )  # fmt: skip
        newest = self.state()["decisions"][0]
        return headers, int(newest["cached_tokens"])

    def state(self) -> dict[str, Any]:
        """``/debug/state``."""
        with urllib.request.urlopen(admin_url(self.url) + "/debug/state", timeout=30) as reply:
            return dict(json.loads(reply.read()))

    def num_prefetched(self) -> float:
        """Prefetches that have ended well."""
        name = 'pdconn_router_prefetches_total{outcome="done"}'
        with urllib.request.urlopen(admin_url(self.url) + "/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        [value] = [line.split()[-1] for line in lines if line.startswith(name)]
        return float(value)

    def flood(self, seed: int) -> None:
        """One-off prompts of twice the cache."""
        count = 2 * self.cache_tokens // FLOOD + 1
        for prompt in make_prompts([FLOOD] * count, seed):
            self.turn(prompt)

    def prefill(self) -> Client:
        """The engine that keeps prompts."""
        return self.made.clients["prefill"]


@pytest.fixture(scope="module", params=[GPT_OSS, GRANITE_4_H], ids=lambda one: one.name)
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    family: Family = request.param
    work = tmp_path_factory.mktemp(family.name)
    model = family.write(work / "model")
    details = ("--enable-prompt-tokens-details",)
    how: dict[str, Any] = {"prefix_caching": True, "args": details}
    shares = {"share": 0.8, "tenant_share": 0.8}
    small = engine("prefill", family, model, "kv_both", keep=shares, **how)
    specs = [
        replace(small, num_blocks=BLOCKS[family.name][0]),
        engine("decode", family, model, "kv_both", **how),
    ]
    with handing_over(family, work, specs, model, prefix_caching=True) as made:
        urls = [made.clients[name].url for name in ("prefill", "decode")]
        with running_proxy(urls[:1], urls[1:], work, args=("--policy", "round-robin")) as url:
            yield Service(made, url)


def becomes(true: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait until something is so."""
    give_up = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.05)


FIRST, MORE = 1600, 72
"""Tokens of a first prompt, and of what a later turn adds."""


def test_a_kept_session_hits_after_a_flood_and_one_that_is_not_kept_does_not(
    service: Service,
) -> None:
    kept, control, added = make_prompts([FIRST, FIRST, MORE], 7)
    service.turn(kept, session_id="kept", keep=600)
    service.turn(control, session_id="control")
    service.flood(8)
    headers, hit = service.turn(kept + added, session_id="kept", keep=600)
    _, missed = service.turn(control + added, session_id="control")
    print(f"{service.made.family.name}: kept {hit} and without {missed} of {len(kept)} tokens")
    assert hit >= 0.95 * len(kept)
    assert missed <= 0.1 * len(control)
    assert int(headers["X-Session-Kept"]) >= hit
    assert service.prefill().metrics()["pdconn:promises_used_total"] == 1
    # What is computed from kept blocks is what one engine computes.
    prompt = kept + added
    want = service.made.clients["alone"].complete(prompt, ANSWER)
    seen = Client(service.url).complete(prompt, ANSWER)
    assert compare(want, seen, COARSE) is None


def test_a_request_that_needs_the_blocks_is_admitted_and_the_session_is_told(
    service: Service,
) -> None:
    family = service.made.family
    before = service.prefill().metrics()["pdconn:promises_broken_room_total"]
    prompts = make_prompts([service.cache_tokens // 6] * 3, 17)
    for number, prompt in enumerate(prompts):
        service.turn(prompt, session_id=f"told {number}", keep=600)
    [large] = make_prompts([1900], 18)
    service.turn(large)
    broken = service.prefill().metrics()["pdconn:promises_broken_room_total"] - before
    told = [service.turn(p, session_id=f"told {n}", keep=600)[0] for n, p in enumerate(prompts)]
    reasons = [headers.get("X-Session-Broken") for headers in told]
    print(f"{family.name}: broken {broken:g}, told {reasons}")
    assert broken >= 1
    assert "room" in reasons


def test_a_session_that_is_released_holds_no_blocks(service: Service) -> None:
    for one in service.state()["sessions"]:
        service.post("/v1/kv/release", session_id=one["session"])
    becomes(lambda: not service.prefill().metrics()["pdconn:kept_blocks"])
    [prompt] = make_prompts([FIRST], 27)
    service.turn(prompt, session_id="released", keep=600)
    assert service.prefill().metrics()["pdconn:kept_blocks"] > 0
    _, body = service.post("/v1/kv/release", session_id="released")
    assert body["engines"] == 2
    becomes(lambda: not service.prefill().metrics()["pdconn:kept_blocks"])


def test_what_was_prefetched_is_hit(service: Service) -> None:
    [prompt] = make_prompts([FIRST], 37)
    _, body = service.post("/v1/kv/prefetch", prompt=list(prompt), session_id="fetched", keep=60)
    assert body["action"] == "prefill"
    becomes(lambda: service.prefill().metrics()["pdconn:kept_blocks"] > 0)
    _, hit = service.turn(prompt, session_id="fetched")
    assert hit >= 0.9 * len(prompt)


def _is_more(read: Callable[[], float], before: float) -> bool:
    return read() > before


def seconds_of(service: Service, prompt: Prompt, **fields: Any) -> float:
    """Until an answer of one token, through both engines."""
    began = time.perf_counter()
    service.post("/v1/completions", prompt=list(prompt), max_tokens=1, temperature=0, **fields)
    return time.perf_counter() - began


def test_a_later_turn_takes_a_part_of_the_time_that_it_takes_without_keep(
    service: Service,
) -> None:
    """In turns; with prefetch, the first turn after a flood is like one that was never away."""
    kept, without, prefetched, hot = list[float](), list[float](), list[float](), list[float]()
    for seed in range(4):
        *prompts, more = make_prompts([FIRST, FIRST, FIRST, MORE], 50 + seed)
        for number, prompt in enumerate(prompts):
            keep = {"keep": 600} if number == 0 else {}
            service.turn(prompt, session_id=f"timed {seed} {number}", **keep)
        service.flood(60 + seed)
        mine, control, fetched = (prompt + more for prompt in prompts)
        kept.append(seconds_of(service, mine, session_id=f"timed {seed} 0"))
        hot.append(seconds_of(service, mine))
        without.append(seconds_of(service, control))
        before = service.num_prefetched()
        service.post("/v1/kv/prefetch", prompt=list(fetched))
        becomes(partial(_is_more, service.num_prefetched, before))
        prefetched.append(seconds_of(service, fetched))
        service.post("/v1/kv/release", session_id=f"timed {seed} 0")
    keeps, fetches = median(kept) / median(without), median(prefetched) / median(hot)
    print(f"{service.made.family.name}: kept {keeps:.2f}, prefetched {fetches:.2f} of a hot turn")
    assert keeps <= 0.8  # of a prompt of 25 blocks, beside what a request takes in any case
    assert fetches <= 2.0
