"""What model runner V2 finds of a connector: pulls beside its model, results once, in every path.

vLLM's own ``ActiveKVConnector`` runs; the model does not (:mod:`tests.vllm.runner.rig`).  So this
cannot tell what needs a GPU: whether a kernel that is still queued writes to memory that is
read or pulled, and whether a captured graph meets the connector at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.runner import rig as rigs
from tests.vllm.runner.rig import (
    DEFERS,
    EMPTY_MODEL_RUNNER_OUTPUT,
    PdconnConnector,
    Rig,
    Steps,
    rig,
)
from transport.testing.inprocess.faults import Held

Step = Callable[[Steps], object]


def eager(steps: Steps) -> object:
    return steps.forward(steps.scheduled(1))


def graph(steps: Steps) -> object:
    return steps.forward(steps.scheduled(1), full_graph=True)


def synchronous(steps: Steps) -> object:
    """Beside a request of another connector, whose loads are to precede the model."""
    return steps.forward(steps.scheduled(1, has_sync_kv_loads=True))


def drafting(steps: Steps) -> object:
    return steps.forward(steps.scheduled(1), drafter=lambda: None)


def idle(steps: Steps) -> object:
    return steps.idle(steps.scheduled(0))


needs_deferring = pytest.mark.skipif(not DEFERS, reason="vLLM defers finalizing from 0.33 on")
PATHS = [eager, graph, synchronous, idle, pytest.param(drafting, marks=needs_deferring)]
WITH_MODEL = [False, True]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with rig(monkeypatch) as made:
        yield made


class Late(PdconnConnector):
    """Begins pulls where the interface says that loads begin, which V2 calls after the model."""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super(PdconnConnector, self).bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._of_worker().bind_connector_metadata(self._get_connector_metadata())  # type: ignore[arg-type]


class Repeating(PdconnConnector):
    """Reports what it has reported."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        self._all: Any = getattr(self, "_all", results)
        self._all.finished_recving |= results.finished_recving
        self._all.failed_recving |= results.failed_recving
        return self._all


class Forgetful(PdconnConnector):
    """Loses stats and reports where a step computes nothing."""

    def build_connector_worker_meta(self) -> None:
        super().build_connector_worker_meta()

    def get_kv_connector_stats(self) -> None:
        super().get_kv_connector_stats()


class Keeping(PdconnConnector):
    """Keeps a step's metadata after it."""

    def clear_connector_metadata(self) -> None:
        pass


def reads_during_model(both: Rig, full_graph: bool, **fields: Any) -> bool:
    """Whether what a request asked for is being read while the model runs."""
    both.network.script = lambda _: Held()
    both.decode.ask(both.request("r"))
    seen: list[bool] = []
    output = both.decode.scheduled(1, **fields)
    both.decode.forward(output, lambda: seen.append(both.is_reading()), full_graph=full_graph)
    return seen[0]


@pytest.mark.parametrize("full_graph", WITH_MODEL, ids=["eager", "graph"])
def test_pulls_begin_before_the_model_ends(both: Rig, full_graph: bool) -> None:
    """Though V2 calls ``start_load_kv`` after it, unless another connector loads synchronously."""
    assert reads_during_model(both, full_graph)


@pytest.mark.parametrize("full_graph", WITH_MODEL, ids=["eager", "graph"])
def test_a_connector_that_begins_in_start_load_kv_is_late(
    monkeypatch: pytest.MonkeyPatch, full_graph: bool
) -> None:
    """The control of the test above; with a synchronous load V2 calls it in time."""
    with rig(monkeypatch, Late) as both:
        assert not reads_during_model(both, full_graph)
    with rig(monkeypatch, Late) as both:
        assert reads_during_model(both, full_graph, has_sync_kv_loads=True)


def pull(both: Rig, step: Step, lent: bool = True) -> None:
    """Pull for a request by steps of one path, and take some more when it is reported."""
    decode = both.decode
    decode.ask(both.request("r", lent))
    decode.until(lambda: decode.reported("finished_recving"), lambda: step(decode))
    for _ in range(3):
        step(decode)


@pytest.mark.parametrize("step", PATHS)
def test_a_pull_is_reported_once_with_its_bytes_and_counts(both: Rig, step: Step) -> None:
    assert not both.is_pulled()
    pull(both, step)
    assert both.is_pulled()
    assert both.decode.reported("finished_recving") == ["r"]
    assert both.decode.reported("failed_recving") == []
    assert both.decode.counted("pulls") == 1
    assert both.decode.counted("failed") == 0


@pytest.mark.parametrize("step", PATHS)
def test_a_failed_pull_is_reported_once_as_finished_and_as_failed(both: Rig, step: Step) -> None:
    pull(both, step, lent=False)
    assert not both.is_pulled()
    assert both.decode.reported("finished_recving") == ["r"]
    assert both.decode.reported("failed_recving") == ["r"]
    assert both.decode.counted("failed") == 1


@pytest.mark.parametrize("step", [eager, idle])
def test_a_connector_that_repeats_itself_is_noticed(
    monkeypatch: pytest.MonkeyPatch, step: Step
) -> None:
    """The control of the tests above."""
    with rig(monkeypatch, Repeating) as both:
        pull(both, step)
        assert len(both.decode.reported("finished_recving")) > 1


def test_stats_that_get_lost_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another control."""
    with rig(monkeypatch, Forgetful) as both:
        pull(both, idle)
        assert both.decode.counted("pulls") == 0


@pytest.mark.parametrize("step", PATHS)
def test_what_a_worker_reports_reaches_the_scheduler(both: Rig, step: Step) -> None:
    """Checksums of what a request lends, which prefill's next step makes, busy or idle."""
    prefill, terms = both.prefill, both.to_sum()
    producer: Any = prefill.scheduler._scheduler.parts.lending
    producer._to_sum.append(terms)
    step(prefill)
    (told,) = prefill.outputs
    assert told is not None
    (name, rank, sums), *others = told.kv_connector_worker_meta.sums  # type: ignore[union-attr]
    assert (name, rank, others) == ("r", 0, [])
    assert sums is not None
    step(prefill)
    later = prefill.outputs[-1]
    assert later is None or later.kv_connector_worker_meta is None


@pytest.mark.parametrize(("num_ranks", "waits"), [(1, True), (2, False)])
def test_an_idle_step_waits_for_a_pull_where_no_other_rank_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, waits: bool
) -> None:
    """Data-parallel ranks of a model with experts step together, those without work as well."""
    made = rigs._config

    def config(role: str) -> Any:
        found = made(role)
        found.parallel_config.data_parallel_size = num_ranks
        return found

    monkeypatch.setattr(rigs, "_config", config)
    with rig(monkeypatch) as both:
        puller = both.decode.worker._worker._puller
        waited: list[float] = []
        monkeypatch.setattr(puller, "wait_for_report", waited.append)
        idle(both.decode)
        assert bool(waited) is waits
        request = both.request("r")
        both.decode.ask(request)
        both.decode.until(
            lambda: both.decode.reported("finished_recving"), lambda: idle(both.decode)
        )
        assert both.is_pulled()


def test_an_idle_step_without_news_tells_nothing(both: Rig) -> None:
    output = both.decode.scheduled(0)
    assert both.decode.active.no_forward(output) is EMPTY_MODEL_RUNNER_OUTPUT


@pytest.mark.parametrize("step", PATHS)
def test_metadata_is_cleared_in_every_path(both: Rig, step: Step) -> None:
    """And applied once: however many steps, one read is under way."""
    both.network.script = lambda _: Held()
    both.decode.ask(both.request("r"))
    for _ in range(3):
        step(both.decode)
        assert not both.decode.worker.has_connector_metadata()
    assert both.is_reading(seconds=10.0)
    assert len(both.network.in_flight()) == 1


def test_metadata_that_stays_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    with rig(monkeypatch, Keeping) as both:
        eager(both.decode)
        assert both.decode.worker.has_connector_metadata()


def test_a_disabled_connector_is_left_alone_and_goes_on_afterwards(both: Rig) -> None:
    """V2 disables it in dummy runs: to profile memory, to capture graphs, to warm up."""
    decode = both.decode
    decode.ask(both.request("r"))
    output = decode.scheduled(1)
    decode.active.set_disabled(True)
    assert decode.forward(output) is None
    assert decode.idle(output) is None
    assert not decode.worker.has_connector_metadata()
    decode.active.set_disabled(False)
    decode.forward(output)
    decode.until(lambda: decode.reported("finished_recving"), lambda: idle(decode))
    assert both.is_pulled()


@pytest.mark.parametrize("step", PATHS)
def test_what_is_to_be_saved_is_saved_once_a_step(both: Rig, step: Step) -> None:
    saves: list[bool] = []
    worker: Any = both.prefill.worker
    worker.wait_for_save = lambda: saves.append(worker.has_connector_metadata())
    for _ in range(2):
        step(both.prefill)
    assert saves == [True, True]


@needs_deferring
def test_a_step_with_a_drafter_reports_before_it_and_saves_after_it(both: Rig) -> None:
    """Rows of the drafter's layers are there when the store reads them."""
    prefill, order = both.prefill, []
    worker: Any = prefill.worker
    worker.wait_for_save = lambda: order.append("save")
    results = worker.get_transfer_results

    def get_transfer_results(finished: set[str]) -> Any:
        order.append("results")
        return results(finished)

    worker.get_transfer_results = get_transfer_results

    def drafter() -> None:
        order.append("drafter")
        assert worker.has_connector_metadata()

    prefill.forward(prefill.scheduled(1), lambda: order.append("model"), drafter=drafter)
    assert order == ["model", "results", "drafter", "save"]
    assert not worker.has_connector_metadata()
    order.clear()
    prefill.forward(prefill.scheduled(1), lambda: order.append("model"))
    assert order == ["model", "save", "results"], "the control: a step without a drafter"
