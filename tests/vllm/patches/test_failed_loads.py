"""No request fails because of a store, or of a prefix lent, whatever vLLM's policy says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from pdconn.protocol.ticket import BlockList, Ticket
from pdconn.puller.commands import (
    AbandonPull,
    ClaimOutcome,
    ClaimTicket,
    Command,
    FailedPull,
    FailPull,
    ReadBlocks,
)
from pdconn.puller.thread import NO_RESULTS, PullResults
from pdconn.store.rank.copies import HostCopies
from pdconn.tools.lab.ports import free_ports
from pdconn.vllm.config import ConfigError
from pdconn.vllm.lends.lending import Lending
from pdconn.vllm.prompt import prefix_digest, prompt_digest
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.joined.rig import FakeEngine, Model, Shape
from tests.store.joined.test_joined import SETTINGS
from tests.vllm.patches.vllm_scheduler import (
    BLOCK_TOKENS,
    Engine,
    KVConnectorOutput,
    KVOutputAggregator,
    ModelRunnerOutput,
    PdWorker,
    Request,
    Scheduler,
    cache_config,
    engine_config,
    failed_loads,
    our_scheduler,
    store_in,
    transfer_config,
)
from transport.streams import StreamPoint

PROMPT = 6 * BLOCK_TOKENS + 1
STORED = 4 * BLOCK_TOKENS
FIRST = 5000
NUM_FREE = 8
STEPS = 2000
WHERE = [
    (role, num_ranks, is_async)
    for role in ("kv_producer", "kv_consumer")
    for num_ranks, is_async in ((2, True), (1, True), (1, False))
]


class Puller:
    """A rank's puller that does as the test says."""

    def __init__(self) -> None:
        self.asked: list[Command] = []
        self.results = NO_RESULTS

    def post_command(self, command: Command, after: StreamPoint | None = None) -> None:
        self.asked.append(command)

    def take_results(self) -> PullResults:
        results, self.results = self.results, NO_RESULTS
        return results

    def wait_for_report(self, seconds: float) -> None: ...

    def take_pull_counts(self) -> dict[str, int]:
        return {}


class Ranks:
    """Our workers of an engine, whose reports vLLM's aggregator joins.

    With asynchronous scheduling a step is scheduled before the one before it has run.
    """

    def __init__(self, engine: Engine, config: Any, count: int) -> None:
        settings = engine.connector._scheduler._settings
        self.engine = engine
        self.workers: list[Any] = [PdWorker(settings, config, cache_config()) for _ in range(count)]
        self.aggregator = KVOutputAggregator(count)
        self.answers: list[Any] = []
        self.computed: dict[str, list[int]] = {}
        if config.scheduler_config.async_scheduling:
            engine.schedule()

    def step(self) -> None:
        """A step is scheduled, the oldest one runs, and every rank reports."""
        self.engine.schedule()
        step = self.engine.in_flight[0]
        for new in step.scheduled_new_reqs:
            self.computed.setdefault(new.req_id, []).append(new.num_computed_tokens)
        outputs: list[Any] = []
        for worker in self.workers:
            worker.bind_connector_metadata(step.kv_connector_metadata)
            worker.wait_for_save()
            results = worker.get_transfer_results()
            made = KVConnectorOutput(
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            outputs.append(ModelRunnerOutput([], {}, kv_connector_output=made))
        joined = self.aggregator.aggregate(outputs)
        assert joined is not None
        self.answers += self.engine.process(joined.kv_connector_output)

    def until(self, is_so: Callable[[], Any]) -> None:
        """Step until it is so."""
        for _ in range(STEPS):
            if is_so():
                return
            self.step()
        raise AssertionError("it never was")

    def of(self, name: str) -> list[Any]:
        """What a client got."""
        return [one for one in self.answers if one.request_id == name]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    engines: list[Engine] = []
    [port] = free_ports(1)

    def start(role: str, policy: str, *, ranks: int = 1, **how: Any) -> Ranks:
        extra = {"side_channel_host": "127.0.0.1", "side_channel_port": port}
        stored = store_in(tmp_path / "store")
        config = engine_config(transfer_config(role, policy=policy, store=stored, **extra), **how)
        engines.append(Engine(config))
        return Ranks(engines[-1], config, ranks)

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def stored() -> Iterator[Callable[[Ranks], FakeEngine]]:
    """Puts a real store with the prompt's rows, and real ranks of it, into an engine."""
    made: list[FakeEngine] = []

    def put(ranks: Ranks) -> FakeEngine:
        rows = MemoryRows()
        for writer in ("before", "now"):
            made.append(
                FakeEngine(
                    SETTINGS,
                    Model(windowed=()),
                    Shape(tp=len(ranks.workers), block_tokens=BLOCK_TOKENS, num_blocks=9),
                    writer=writer,
                    shelf=lambda: MemoryShelf(rows),
                )
            )
            if writer == "before":
                made[-1].run(range(FIRST, FIRST + PROMPT))
                made[-1].settle()
        store = ranks.engine.connector._scheduler.parts.storing
        store._store, store._namespace = made[-1].store, "ns"
        for worker, rank in zip(ranks.workers, made[-1].rank_stores, strict=True):
            worker._store = rank
        return made[-1]

    yield put
    for one in made:
        one.close()


def cached(ranks: Ranks) -> int:
    """Tokens of the prompt that a request would find in the engine's own cache."""
    engine = ranks.engine
    twin = Request(
        "twin", list(range(FIRST, FIRST + PROMPT)), engine.sampling(), None,
        block_hasher=engine._hasher,
    )  # fmt: skip
    return int(engine.scheduler.kv_cache_manager.get_computed_blocks(twin)[1])


def finish(ranks: Ranks, name: str) -> None:
    """The request goes to its end, and nothing is left of it."""
    ranks.until(lambda: ranks.of(name) and ranks.of(name)[-1].finish_reason is not None)
    for _ in range(3):
        ranks.step()
    pool = ranks.engine.scheduler.kv_cache_manager.block_pool
    ours = ranks.engine.connector._scheduler
    ranks.until(lambda: not len(ours.parts.storing._pins))
    assert pool.get_num_free_blocks() == NUM_FREE
    assert not ours.is_load_optional(name)
    assert not ours.parts.pulling or len(ours.parts.pulling) == 0


def breaks(patch: pytest.MonkeyPatch) -> list[str]:
    """The first rank's copy that is made writes all, and then finds no memory; named when so."""
    copying, broken = HostCopies.copy_in, list[str]()

    def copy_in(self: Any, spans: Any) -> None:
        copying(self, spans)
        if not broken:
            broken.append("CUDA out of memory")
            raise RuntimeError(*broken)

    patch.setattr(HostCopies, "copy_in", copy_in)
    return broken


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("where", WHERE, ids=str)
def test_a_load_that_fails_on_a_rank_is_computed(
    started: Callable[..., Ranks],
    stored: Callable[[Ranks], FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    where: tuple[str, int, bool],
    policy: str,
) -> None:
    role, count, is_async = where
    ranks = started(role, policy, ranks=count, is_async=is_async)
    store = stored(ranks)
    broken = breaks(monkeypatch)
    name = ranks.engine.add(PROMPT, first=FIRST)
    ours = ranks.engine.connector._scheduler
    ranks.until(lambda: broken and not ours.is_load_optional(name))
    assert cached(ranks) == 0, "what was written in part is not found"
    finish(ranks, name)
    assert str(ranks.of(name)[-1].finish_reason) == "length"
    assert ranks.computed[name] == [0], "every token is computed"
    assert sum(len(one.new_token_ids) for one in ranks.of(name)) == 8
    assert not len(store.store.loads)
    assert cached(ranks) == PROMPT - 1


@pytest.mark.parametrize(("policy", "end"), [("fail", "error"), ("recompute", "length")])
def test_such_a_load_would_end_as_the_policy_says_without_us(
    started: Callable[..., Ranks],
    stored: Callable[[Ranks], FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    end: str,
) -> None:
    """Negative control: vLLM's scheduler decides alone."""
    monkeypatch.setattr(our_scheduler, "recompute_failed_loads", lambda is_optional: None)
    ranks = started("kv_producer", policy)
    stored(ranks)
    breaks(monkeypatch)
    name = ranks.engine.add(PROMPT, first=FIRST)
    finish(ranks, name)
    assert str(ranks.of(name)[-1].finish_reason) == end


def test_a_load_that_does_not_fail_is_used(
    started: Callable[..., Ranks], stored: Callable[[Ranks], FakeEngine]
) -> None:
    """Control."""
    ranks = started("kv_producer", "fail")
    stored(ranks)
    name = ranks.engine.add(PROMPT, first=FIRST)
    finish(ranks, name)
    assert ranks.computed[name] == [STORED]


def lent(num_tokens: int, *, is_prefix: bool) -> Ticket:
    """What another engine has lent of the prompt."""
    tokens = list(range(FIRST, FIRST + PROMPT))
    of = Request("of", tokens, Engine.sampling(), None)
    digest = prefix_digest(of, num_tokens) if is_prefix else prompt_digest(of)
    blocks = BlockList(0, tuple(range(1, 1 + -(-num_tokens // BLOCK_TOKENS))))
    return Ticket("h", "boot", "lend", "localhost", 5600, num_tokens, digest, (blocks,))


def pulling(ranks: Ranks, ticket: dict[str, Any]) -> tuple[str, Puller]:
    """A request whose ticket every rank is granted, and that has blocks."""
    [worker] = ranks.workers
    worker._puller = puller = Puller()
    name = ranks.engine.add(PROMPT, first=FIRST, **ticket)
    granted(ranks, puller, name)
    ranks.until(lambda: any(isinstance(one, ReadBlocks) for one in puller.asked))
    return name, puller


def granted(ranks: Ranks, puller: Puller, name: str) -> None:
    """The lender grants the claim."""
    ranks.until(lambda: any(isinstance(one, ClaimTicket) for one in puller.asked))
    [claim] = [one for one in puller.asked if isinstance(one, ClaimTicket)]
    puller.results = PullResults.from_reports([ClaimOutcome(name, claim.pull, 0)])


def prefix() -> dict[str, Any]:
    ticket = lent(STORED, is_prefix=True).to_params(1, 1)
    return {"do_remote_prefill": False, "pdconn": {"from": ticket}}


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("is_late", [False, True], ids=["failed", "late"])
def test_a_prefix_that_is_not_pulled_is_computed(
    started: Callable[..., Ranks], policy: str, is_late: bool, is_async: bool
) -> None:
    ranks = started("kv_consumer", policy, is_async=is_async)
    name, puller = pulling(ranks, prefix())
    if is_late:
        ranks.engine.connector._scheduler.parts.pulling.abandon(name)
        ranks.until(lambda: AbandonPull(name) in puller.asked)
    puller.results = PullResults.from_reports([FailedPull(name, "the holder is gone")])
    finish(ranks, name)
    assert str(ranks.of(name)[-1].finish_reason) == "length"
    assert ranks.computed[name] == [0]


def test_a_prefix_that_is_lost_between_promise_and_blocks_is_computed(
    started: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 names the blocks of a load only when the steps in flight are over."""
    ranks = started("kv_consumer", "fail")
    ours = ranks.engine.connector._scheduler
    allocated = ours.update_state_after_alloc

    def lost(request: Any, *args: Any) -> None:
        ours.parts.pulling.abandon(request.request_id)
        allocated(request, *args)

    monkeypatch.setattr(ours, "update_state_after_alloc", lost)
    [worker] = ranks.workers
    worker._puller = puller = Puller()
    name = ranks.engine.add(PROMPT, first=FIRST, **prefix())
    granted(ranks, puller, name)
    ranks.until(lambda: any(isinstance(one, FailPull) for one in puller.asked))
    puller.results = PullResults.from_reports([FailedPull(name, "no ticket")])
    finish(ranks, name)
    assert str(ranks.of(name)[-1].finish_reason) == "length"
    assert ranks.computed[name] == [0]


@pytest.mark.parametrize(("policy", "end"), [("fail", "error"), ("recompute", "length")])
def test_a_whole_prompts_pull_ends_as_the_policy_says(
    started: Callable[..., Ranks], policy: str, end: str
) -> None:
    """The control: what vLLM does with a load that fails."""
    ranks = started("kv_consumer", policy)
    name, puller = pulling(ranks, lent(PROMPT, is_prefix=False).to_params(1, 1))
    puller.results = PullResults.from_reports([FailedPull(name, "prefill is gone")])
    finish(ranks, name)
    assert str(ranks.of(name)[-1].finish_reason) == end


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("is_prefix", [False, True])
def test_an_engines_own_ticket_is_taken_back_and_its_prompt_computed(
    started: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, policy: str, is_prefix: bool
) -> None:
    """Nothing is promised for it, so neither policy is asked."""
    taken: list[Ticket] = []
    monkeypatch.setattr(Lending, "take_back_own", lambda _, ticket: taken.append(ticket))
    ranks = started("kv_both", policy)
    boot = ranks.engine.connector._scheduler.parts.pulling._rules.incarnation
    ticket = replace(lent(STORED if is_prefix else PROMPT, is_prefix=is_prefix), incarnation=boot)
    given = ticket.to_params(1, 1)
    params = {"do_remote_prefill": False, "pdconn": {"from": given}} if is_prefix else given
    name = ranks.engine.add(PROMPT, first=FIRST, **params)
    finish(ranks, name)
    assert str(ranks.of(name)[-1].finish_reason) == "length"
    assert ranks.computed[name] == [0]
    assert taken == [ticket]


def test_an_offer_that_is_gone_when_there_are_blocks_is_computed(
    started: Callable[..., Ranks],
    stored: Callable[[Ranks], FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reset of the prefix cache comes between; vLLM 0.33 leaves time for it."""
    ranks = started("kv_producer", "fail")
    stored(ranks)
    ours = ranks.engine.connector._scheduler
    allocated = ours.update_state_after_alloc

    def cleared(request: Any, blocks: Any, num_external: int) -> None:
        if num_external:
            ours.parts.storing.drop_rows()
        allocated(request, blocks, num_external)

    monkeypatch.setattr(ours, "update_state_after_alloc", cleared)
    name = ranks.engine.add(PROMPT, first=FIRST)
    finish(ranks, name)
    assert str(ranks.of(name)[-1].finish_reason) == "length"
    assert ranks.computed[name] == [0]


# A vLLM that decides in another way


def other(self: Any, failed_req_ids: set[str], policy: str) -> set[str]:
    return failed_req_ids


def unread(self: Any, failed_req_ids: set[str]) -> set[str]:
    return failed_req_ids


@pytest.mark.parametrize(
    ("changed", "seen"), [(other, "of self, failed_req_ids, policy"), (unread, "does not use")]
)
def test_a_scheduler_that_decides_in_another_way_is_refused(
    started: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, changed: Any, seen: str
) -> None:
    assert failed_loads.missing(Scheduler) is None
    monkeypatch.setattr(Scheduler, "_handle_failed_recving", changed)
    with pytest.raises(ConfigError, match=seen):
        started("kv_producer", "fail")


class Calls(Scheduler):
    """Decides as vLLM's does, and something else besides."""

    def _handle_failed_recving(self, failed_req_ids: set[str]) -> set[str]:
        return super()._handle_failed_recving(failed_req_ids)


class Replaces(Scheduler):
    """Decides by itself."""

    def _handle_failed_recving(self, failed_req_ids: set[str]) -> set[str]:
        return failed_req_ids


def test_an_override_counts_by_whether_it_calls_the_method_that_it_overrides() -> None:
    assert failed_loads.missing(Calls) is None
    seen = "Replaces._handle_failed_recving does not use recompute_kv_load_failures"
    assert failed_loads.missing(Replaces) == seen


def test_a_policy_that_is_not_known_yet_is_refused(
    started: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failed_loads, "_POLICY", "recompute")
    monkeypatch.setattr(failed_loads, "_USES", ())
    with pytest.raises(ConfigError, match="has not set it when it binds connectors"):
        started("kv_producer", "fail")
