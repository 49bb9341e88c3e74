"""An engine that is killed at each point in the life of a followed request.

Whichever side dies, and wherever: the survivor's answer is right, the leg of the killed engine ends
with its connection, requests of others go on, no block stays in use, and the killed engine follows
and is followed again once it was started anew.  What a survivor says is compared with what one
engine says alone; that a wrong byte is noticed is shown in ``test_requests``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from pdconn.tools.lab.compare_answers import Answer, compare, make_prompts
from pdconn.tools.lab.engine import Engine, wait_ready
from pdconn.tools.lab.lab_errors import EngineDied
from pdconn.tools.lab.ports import free_ports
from tests.forked.engines import running
from tests.vllm.engines.engines import cache_beside
from tests.vllm.engines.streams.chunked import (
    STEP_TOKENS,
    Chunked,
    Legs,
    answers_of,
    ask_legs,
    ends,
)
from tests.vllm.engines.streams.points import (
    POINTS,
    KillPoint,
    arm_engine,
    disarm_engine,
    file_of,
    killed_at,
)

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.parametrize("engines", ["plain"], indirect=True),
]

VICTIM, OTHER, GENERATING, LATER = make_prompts([8 * STEP_TOKENS + 1, 1500, 40, 60], seed=91)
"""The last is so short that decode learns no rates of its lender: it asks for blocks at once."""
NUM_GENERATED = 250
AHEAD_S = 0.4
"""Of decode before prefill, where its Follow must come before prefill's request."""
FOLLOWED = "pdconn:pulls_followed_total"


@dataclass(frozen=True)
class Beside:
    """Requests of others, which were there before the kill: ``legs`` between ``others``."""

    generating: Future[tuple[Answer, float]]
    legs: Legs
    others: tuple[str, str]


@pytest.fixture(autouse=True)
def alive(engines: Chunked) -> Iterator[None]:
    """Every engine runs, also after a test that has failed."""
    yield
    for engine in engines.engines.values():
        if not is_alive(engine):
            engine.launch()
    wait_ready(tuple(engines.engines.values()))


def is_alive(engine: Engine) -> bool:
    try:
        engine.check_alive()
    except EngineDied:
        return False
    return True


def survivor_of(point: KillPoint) -> str:
    return "decode" if point.side == "prefill" else "prefill"


def ask_beside(engines: Chunked, pool: ThreadPoolExecutor, survivor: str) -> Beside:
    """The survivor generates, and is read by, or reads from, the engine beside."""
    others = ("beside", survivor) if survivor == "decode" else (survivor, "beside")
    like = engines.like(others[1], others[0])

    def generate() -> tuple[Answer, float]:
        answer = engines.client(survivor).complete(GENERATING, NUM_GENERATED)
        return answer, time.time()

    generating = pool.submit(generate)
    legs = ask_legs(pool, engines, OTHER, like, prefill=others[0], decode=others[1])
    return Beside(generating, legs, others)


def kill_at(
    engines: Chunked, pool: ThreadPoolExecutor, like: Mapping[str, Any], point: KillPoint
) -> tuple[Legs, float]:
    """Have a request followed until an engine dies at ``point``; its legs, and when that was.

    Raises:
        AssertionError: the request was answered, and the point was not reached.
    """
    path = file_of(engines.work, point.side)
    arm_engine(path, point)
    ahead_s = AHEAD_S if point.parks else 0.0
    legs = ask_legs(pool, engines, VICTIM, like, head_start_s=ahead_s)
    for leg in (legs.prefill, legs.decode):
        leg.exception()
    disarm_engine(path)
    killed = killed_at(path)
    assert killed is not None, f"{point}: was not reached"
    return legs, killed


def check_legs(engines: Chunked, legs: Legs, point: KillPoint) -> None:
    """The survivor answers rightly; the other leg does so too, or loses its connection."""
    of_prefill, of_decode = ends(legs.prefill), ends(legs.decode)
    if point.side == "decode":
        assert isinstance(of_decode, OSError | HTTPException), of_decode
        assert isinstance(of_prefill, Answer), of_prefill
        assert of_prefill.kv_transfer_params is not None
    else:
        assert isinstance(of_prefill, OSError | HTTPException | Answer), of_prefill
        assert isinstance(of_decode, Answer), of_decode
        assert engines.wrong([VICTIM], [of_decode]) == []


def check_beside(engines: Chunked, beside: Beside, killed: float) -> None:
    """Requests of others were answered rightly, one of them after the kill."""
    generated, ended = beside.generating.result()
    assert ended > killed, "nothing was in flight beside the kill"
    alone = engines.client("alone").complete(GENERATING, NUM_GENERATED)
    assert compare(alone, generated) is None
    assert beside.legs.prefill.result().kv_transfer_params is not None
    assert engines.wrong([OTHER], [beside.legs.decode.result()]) == []


def check_follows(engines: Chunked) -> None:
    """Decode follows prefill, whichever of them was started anew."""
    like, followed = engines.like(), engines.metric(FOLLOWED, "decode")
    assert engines.wrong([LATER], answers_of(engines, [LATER], like)) == []
    assert engines.metric(FOLLOWED, "decode") == followed + 1


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_an_engine_that_is_killed_costs_others_nothing(engines: Chunked, point: KillPoint) -> None:
    like, survivor, victim = engines.like(), survivor_of(point), engines.engines[point.side]
    with ThreadPoolExecutor(8) as pool:
        beside = ask_beside(engines, pool, survivor)
        followed = engines.client(beside.others[1]).metrics().get(FOLLOWED, 0.0)
        legs, killed = kill_at(engines, pool, like, point)
        victim.kill_command()  # it is dead: this takes note of it
        victim.launch()
        check_legs(engines, legs, point)
        check_beside(engines, beside, killed)
    assert engines.metric(FOLLOWED, beside.others[1]) > followed
    assert engines.used(survivor, "beside") == {}
    wait_ready([victim])
    check_follows(engines)


def test_a_point_that_is_not_reached_is_noticed(engines: Chunked) -> None:
    """Negative control: prefill hears of no blocks."""
    [point] = (one for one in POINTS if one.name == "first blocks received")
    like = engines.like()
    with ThreadPoolExecutor(2) as pool, pytest.raises(AssertionError, match="was not reached"):
        kill_at(engines, pool, like, replace(point, side="prefill"))
    check_follows(engines)


def test_blocks_of_a_dead_reader_are_in_use_until_its_lease_ends(engines: Chunked) -> None:
    """Negative control: the above would find blocks of a lease that does not end."""
    [point] = (one for one in POINTS if str(one) == "decode: all read")
    like = engines.like()
    with ThreadPoolExecutor(2) as pool:
        kill_at(engines, pool, like, point)
        assert engines.client("prefill").metrics()["vllm:kv_cache_usage_perc"] > 0
    assert engines.used("prefill") == {}


def test_a_survivor_that_believes_what_it_has_read_is_noticed(
    engines: Chunked, tmp_path: Path
) -> None:
    """Negative control: a decode engine that takes a pull that has failed for received."""
    [point] = (one for one in POINTS if str(one) == "prefill: ticket written")
    spec = engines.engines["decode"].spec
    believing = {
        **(spec.kv_transfer_config or {}),
        "kv_connector": "Hasty",
        "kv_connector_module_path": "tests.vllm.engines.families.controls",
    }
    [port] = free_ports(1)
    hasty = replace(spec, name="hasty", port=port, kv_transfer_config=believing)
    with running([hasty], tmp_path, cache=cache_beside(Path(spec.model))) as (started,):
        beside = Chunked({**engines.engines, "decode": started}, engines.work)
        like = beside.like()
        with ThreadPoolExecutor(2) as pool:
            legs, _ = kill_at(beside, pool, like, point)
        assert len(engines.wrong([VICTIM], [legs.decode.result()])) == 1
