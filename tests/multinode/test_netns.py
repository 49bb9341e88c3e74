"""Real engines on machines of their own: links that fail, lose and part, and no wrong token.

Each machine is a network namespace, and KV goes by TCP from one to the other, see
``topology``.  What was lent comes back whatever became of the cable in between.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from pdconn.tools.lab.compare_answers import Answer, spread_lengths
from pdconn.tools.lab.lab_client import Client, prefill_only
from pdconn.tools.lab.lab_errors import RequestRefused
from tests.multinode.namespaces import why_not
from tests.multinode.topology import (
    BLOCK,
    DECODE,
    MAX_TOKENS,
    PATIENCE_S,
    PREFILL,
    Cluster,
    Prompt,
    fresh_prompts,
    until,
)
from tests.project.docker.dashboard import asked, dashboard, expressions

_WHY_NOT = why_not()
pytestmark = [
    pytest.mark.engine,
    pytest.mark.multinode,
    pytest.mark.timeout(900),
    pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)),
]

FULL_NBYTES_A_TOKEN = 2 * 2 * 2 * 32 * 4
"""Of the full-attention layers: 2 layers, K and V, 2 heads, 32 numbers, 4 bytes each."""
CROWD = 16
_FAILED = re.compile(r"pull of \S+ failed: ")


@dataclass(frozen=True)
class Moved:
    """What came of an act, at a decode engine: in bytes."""

    pulled: float
    arrived: float
    by_loopback: float


def moved_by(machines: Cluster, decode: str, act: Callable[[], object]) -> Moved:
    """Do ``act``, and see what ``decode`` says that it pulled, and what its network card saw."""

    def now() -> tuple[float, int, int]:
        machine = machines.network[decode]
        counted = machines.count(decode, "vllm:nixl_bytes_transferred_sum")
        return counted, machine.received_nbytes(), machine.received_nbytes("lo")

    before = now()
    act()
    return Moved(*(a - b for a, b in zip(now(), before, strict=True)))


@pytest.mark.parametrize("prefill", PREFILL)
@pytest.mark.parametrize("decode", DECODE)
def test_every_byte_of_a_pull_crosses_the_cable(
    machines: Cluster, prefill: str, decode: str
) -> None:
    """The control is a prompt as long that decode computes itself."""
    handed, own = fresh_prompts([1500, 1500], seed=100 + PREFILL.index(prefill))
    pull = moved_by(machines, decode, lambda: machines.hands_over(prefill, decode, handed))
    assert pull.pulled >= 1499 * FULL_NBYTES_A_TOKEN
    assert pull.arrived >= pull.pulled
    none = moved_by(machines, decode, lambda: machines.client(decode).complete(own, MAX_TOKENS))
    assert none.pulled == 0
    assert none.arrived < pull.pulled / 10
    assert max(pull.by_loopback, none.by_loopback) < pull.pulled / 10


class Crowd:
    """Clients that ask the router, a few at a time."""

    def __init__(self, machines: Cluster, pool: ThreadPoolExecutor) -> None:
        self._router = machines.router
        self._pool = pool
        self._asked: dict[Prompt, Future[Answer]] = {}

    def ask(self, prompts: Sequence[Prompt]) -> None:
        """Without waiting for the answers."""
        for prompt in prompts:
            self._asked[prompt] = self._pool.submit(self._router.complete, prompt, MAX_TOKENS)

    def num_answered(self) -> int:
        """Answers so far, and errors."""
        return sum(future.done() for future in self._asked.values())

    def answers(self) -> dict[Prompt, Answer]:
        """All of them; raises what any of them met."""
        return {prompt: future.result(PATIENCE_S) for prompt, future in self._asked.items()}


def test_100_requests_are_answered_right_while_a_link_goes_down_and_comes_back(
    machines: Cluster,
) -> None:
    """Cables to decode are 5 ms long and lose a packet of 100; p1's is out for a while.

    It is pulled out amid requests: p1 computes for some, others are reading from it.
    """
    prompts = fresh_prompts(spread_lengths(100, 1200, seed=7, edges=(BLOCK, 64)), seed=8)
    machines.learn(prompts)
    pulled = sum(machines.count(name, "pdconn:pulls_total") for name in DECODE)
    before = machines.network.wire.be(delay_s=0.005, loss=0.01)
    with ThreadPoolExecutor(CROWD) as pool:
        crowd = Crowd(machines, pool)
        crowd.ask(prompts[:34])
        until(lambda: crowd.num_answered() >= 10, "10 answers")
        machines.network.unplug("p1")
        try:
            crowd.ask(prompts[34:67])
            until(lambda: not machines.up("p1"), "the router misses p1")
            missed = crowd.num_answered()
            until(lambda: crowd.num_answered() >= missed + 10, "10 answers without p1")
        finally:
            machines.network.plug("p1")
        until(lambda: machines.up("p1"), "the router finds p1 again")
        lent = machines.lent("p1")
        crowd.ask(prompts[67:])
        answers = crowd.answers()
    after = machines.network.wire.be()
    assert [wrong for each in answers.items() if (wrong := machines.wrong(*each))] == []
    assert len(answers) == 100
    assert after.lost > before.lost
    assert machines.lent("p1") > lent
    assert machines.routed("pdconn_router_retries_total") > 0
    pulled = sum(machines.count(name, "pdconn:pulls_total") for name in DECODE) - pulled
    assert pulled >= 50
    machines.await_free(*PREFILL, *DECODE)


def test_an_engine_that_cannot_reach_the_lender_computes_itself_and_both_get_their_blocks_back(
    machines: Cluster,
) -> None:
    """The answers come while the way is still closed: no pull waits for it to open."""
    prompts = fresh_prompts([300, 700, 1500], seed=9)
    machines.learn(prompts)
    tickets = [prefill_only(machines.client("p1"), prompt) for prompt in prompts]
    assert machines.used("p1") > 0.0
    news = News(machines, "d1")
    machines.network.part("p1", "d1")
    try:
        with ThreadPoolExecutor() as pool:
            d1 = machines.client("d1")
            answers = list(pool.map(lambda p, t: complete(d1, p, t), prompts, tickets))
        machines.await_free("d1", "p1")
        (elsewhere,) = fresh_prompts([400], seed=10)
        assert machines.hands_over("p1", "d2", elsewhere)
        assert machines.hands_over("p2", "d1", elsewhere)
    finally:
        machines.network.heal("p1", "d1")
    for prompt, answer in zip(prompts, answers, strict=True):
        machines.check(prompt, answer)
    assert len(_FAILED.findall(news())) == len(prompts)
    pulls_again(machines, "p1", "d1", seed=11)


def test_a_partition_amid_a_read_is_not_waited_for_and_its_late_data_harms_no_request(
    machines: Cluster,
) -> None:
    """The way to d1 is narrow, so the read is caught when a part of it has come.

    What is on its way then may come when the partition is over, into blocks that no
    request may have been given by then; the requests after it would notice.
    """
    (prompt,) = fresh_prompts([2000], seed=12)
    machines.learn([prompt])
    ticket, news = prefill_only(machines.client("p1"), prompt), News(machines, "d1")
    whole = 1999 * FULL_NBYTES_A_TOKEN
    arrived = machines.network["d1"].received_nbytes
    machines.network.narrow("d1", whole // 8)
    before = arrived()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(complete, machines.client("d1"), prompt, ticket)
        try:
            until(lambda: arrived() - before > whole // 4, "a quarter of the KV")
            machines.network.part("p1", "d1")
            came = arrived() - before
            machines.network.widen("d1")
            machines.check(prompt, asked.result(PATIENCE_S))
        finally:
            machines.network.heal("p1", "d1")
    assert came < whole
    assert _FAILED.search(news())
    pulls_again(machines, "p1", "d1", seed=13)
    machines.await_free("p1", "d1")


def test_what_a_prefill_took_before_it_was_cut_off_goes_to_the_other(machines: Cluster) -> None:
    """It has the request and confirmed it; nothing tells the router but its silence."""
    prompts = fresh_prompts([2000] * 8, seed=15)
    machines.learn(prompts)
    with ThreadPoolExecutor(len(prompts)) as pool:
        crowd = Crowd(machines, pool)
        crowd.ask(prompts)
        until(lambda: machines.used("p1") > 0.0, "p1 computes")
        machines.network.part("router", "p1")
        try:
            answers = crowd.answers()
        finally:
            machines.network.heal("router", "p1")
    assert [wrong for each in answers.items() if (wrong := machines.wrong(*each))] == []
    until(lambda: machines.up("p1"), "the router finds p1 again")
    machines.await_free(*PREFILL, *DECODE)


def test_requests_for_a_prefill_that_stays_away_go_to_the_other(machines: Cluster) -> None:
    """With both gone the router refuses, so that a pulled cable does keep requests out."""
    prompts = fresh_prompts([200] * 10, seed=14)
    machines.learn(prompts)
    lent = machines.lent("p1")
    machines.network.unplug("p2")
    try:
        with pytest.raises(OSError, match="timed out"):
            Client(machines.engines["p2"].url, timeout_s=1.0).get_text("/health")
        for prompt in prompts:
            machines.check(prompt, machines.router.complete(prompt, MAX_TOKENS))
        until(lambda: machines.lent("p1") == lent + len(prompts), "p1 has lent every prompt")
        assert not machines.up("p2")
        machines.network.unplug("p1")
        with pytest.raises(RequestRefused) as refused:
            machines.router.complete(prompts[0], MAX_TOKENS)
        assert refused.value.status == 503
    finally:
        for name in PREFILL:
            machines.network.plug(name)
    until(lambda: all(map(machines.up, PREFILL)), "the router finds both again")
    machines.await_free(*PREFILL, *DECODE)


def test_the_dashboards_queries_find_their_metrics_on_the_live_pages(machines: Cluster) -> None:
    """As ``test_compose`` says from the code; a page that lacks ours is the control."""
    pages = [machines.pages.get_text("/metrics")]
    pages += [machines.client(name).get_text("/metrics") for name in ("p1", "d1")]
    wanted = {name for each in expressions(dashboard()) for name in asked(each).names}
    assert wanted - shown(pages) == set()
    assert wanted - shown(pages[:1]) != set()


def shown(pages: Sequence[str]) -> set[str]:
    """Every series that pages for Prometheus can have."""
    kinds = [line.split()[2:4] for p in pages for line in p.splitlines() if line[:6] == "# TYPE"]
    endings = {"histogram": ("_bucket", "_sum", "_count")}
    return {name + ending for name, kind in kinds for ending in endings.get(kind, ("",))}


def complete(engine: Client, prompt: Prompt, ticket: object) -> Answer:
    return engine.complete(prompt, MAX_TOKENS, kv_transfer_params=ticket)  # type: ignore[arg-type]


def pulls_again(machines: Cluster, prefill: str, decode: str, seed: int) -> None:
    """Wait until a new prompt is pulled; those before that must be right all the same."""
    prompts = iter(fresh_prompts([300] * 500, seed))
    until(
        lambda: machines.hands_over(prefill, decode, next(prompts)),
        f"{decode} pulls from {prefill} again",
    )


class News:
    """What an engine has logged since this was made."""

    def __init__(self, machines: Cluster, name: str) -> None:
        self._machines, self._name = machines, name
        self._seen = len(machines.log(name))

    def __call__(self) -> str:
        return self._machines.log(self._name)[self._seen :]
