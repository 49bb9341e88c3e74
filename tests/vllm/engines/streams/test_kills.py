"""An engine that is killed at each point in the life of a followed request.

Whichever side dies, and wherever: the survivor's answer is right, the leg of the killed engine ends
with its connection, requests of others go on, no block stays in use, and the killed engine follows
and is followed again once it was started anew.  What a survivor says is compared with what one
engine says alone; that a wrong byte is noticed is shown in ``test_requests``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
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
    is_killed,
)

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.parametrize("engines", ["plain"], indirect=True),
]

VICTIM, OTHER, GENERATING, LATER = make_prompts([8 * STEP_TOKENS + 1, 1500, 40, 60], seed=91)
"""The last is so short that decode learns no rates of its lender: it asks for blocks at once."""
NUM_GENERATED = 60
AHEAD_S = (0.0, 0.4, 3.0)
"""Of decode before prefill, in turn: on a busy machine its Follow comes when all is computed."""
FOLLOWED = "pdconn:pulls_followed_total"


@dataclass(frozen=True)
class Beside:
    """Requests of others: some after another, and ``legs`` of one, whose decode is ``follower``."""

    generated: list[Answer]
    legs: Legs
    follower: str
    followed: float


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


@contextmanager
def ask_beside(engines: Chunked, survivor: str) -> Iterator[Beside]:
    """The survivor generates, and is read by, or reads from, the engine beside."""
    others = ("beside", survivor) if survivor == "decode" else (survivor, "beside")
    like, client = engines.like(others[1], others[0]), engines.client(survivor)
    followed, over = engines.metric(FOLLOWED, others[1]), threading.Event()
    generated: list[Answer] = []

    def generate() -> None:
        while not over.is_set():
            generated.append(client.complete(GENERATING, NUM_GENERATED))

    with ThreadPoolExecutor(3) as pool:
        generating = pool.submit(generate)
        legs = ask_legs(pool, engines, OTHER, like, prefill=others[0], decode=others[1])
        try:
            yield Beside(generated, legs, others[1], followed)
        finally:
            over.set()
        generating.result()


def kill_at(engines: Chunked, like: Mapping[str, Any], point: KillPoint) -> Legs:
    """Have a request followed until an engine dies at ``point``; its legs, which have ended.

    Raises:
        AssertionError: it was answered each time, and the point was not reached.
    """
    path = file_of(engines.work, point.side)
    arm_engine(path, point)
    with ThreadPoolExecutor(2) as pool:
        for ahead_s in AHEAD_S[point.parks :]:
            legs = ask_legs(pool, engines, VICTIM, like, head_start_s=ahead_s)
            wait((legs.prefill, legs.decode))
            if is_killed(path):
                return legs
    disarm_engine(path)
    raise AssertionError(f"{point}: was not reached")


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


def check_beside(engines: Chunked, beside: Beside) -> None:
    """Requests of others were answered rightly."""
    alone = engines.client("alone").complete(GENERATING, NUM_GENERATED)
    assert [compare(alone, each) for each in beside.generated] == [None] * len(beside.generated)
    assert beside.legs.prefill.result().kv_transfer_params is not None
    assert engines.wrong([OTHER], [beside.legs.decode.result()]) == []
    assert engines.metric(FOLLOWED, beside.follower) > beside.followed


def check_follows(engines: Chunked) -> None:
    """Decode follows prefill, whichever of them was started anew."""
    like, followed = engines.like(), engines.metric(FOLLOWED, "decode")
    assert engines.wrong([LATER], answers_of(engines, [LATER], like)) == []
    assert engines.metric(FOLLOWED, "decode") == followed + 1


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_an_engine_that_is_killed_costs_others_nothing(engines: Chunked, point: KillPoint) -> None:
    like, survivor, victim = engines.like(), survivor_of(point), engines.engines[point.side]
    with ask_beside(engines, survivor) as beside:
        legs = kill_at(engines, like, point)
        num_before = len(beside.generated)
        victim.kill_command()  # it is dead: this takes note of it
        victim.launch()
        check_legs(engines, legs, point)
    check_beside(engines, beside)
    assert len(beside.generated) > num_before
    assert engines.used(survivor, "beside") == {}
    wait_ready([victim])
    check_follows(engines)


def test_a_point_that_is_not_reached_is_noticed(engines: Chunked) -> None:
    """Negative control: prefill hears of no blocks."""
    [point] = (one for one in POINTS if one.name == "first blocks received")
    like = engines.like()
    with pytest.raises(AssertionError, match="was not reached"):
        kill_at(engines, like, replace(point, side="prefill"))
    check_follows(engines)


def test_blocks_of_a_dead_reader_are_in_use_until_its_lease_ends(engines: Chunked) -> None:
    """Negative control: the above would find blocks of a lease that does not end."""
    [point] = (one for one in POINTS if str(one) == "decode: all read")
    like = engines.like()
    kill_at(engines, like, point)
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
        legs = kill_at(beside, beside.like(), point)
        assert len(engines.wrong([VICTIM], [legs.decode.result()])) == 1
