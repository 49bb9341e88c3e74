"""The simulated curve is that of a real store, and follows the laws of its budget."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdconn.store.budget.row_tree import RowTree
from pdconn.store.format.footer import row_sizes
from pdconn.store.format.row import RowKind, StoreLayout
from pdconn.store.settings import StoreSettings
from pdconn.tools.plan.plan_errors import ShapeError
from pdconn.tools.plan.store.cost import LoadSizes, StoredShapes
from pdconn.tools.plan.store.curve import (
    Curve,
    Rates,
    TracedRequest,
    simulate,
)
from pdconn.tools.plan.store.simulated_store import SimulatedRoot, SimulatedSettings
from pdconn.tools.plan.store.trace_sample import TraceSample, TraceSurvey
from tests.tools.plan.curve.drawn import ENGINES, ROW_TOKENS, branches, conversations, settings_of
from tests.tools.plan.curve.real_store import replay

UNKNOWN = Rates(LoadSizes(0, 0), 1.0, None)
POINTS = 2.0
Patch = pytest.MonkeyPatch


def capacities(of: SimulatedSettings, requests: Sequence[TracedRequest]) -> list[int]:
    """Five, from a twelfth of what the trace would take with a WA row for each FA row."""
    row = sum(row_sizes(of.layout).values())
    nbytes = TraceSurvey.of(requests).distinct_tokens / of.layout.block_tokens * row
    return [int(nbytes * share) for share in (1 / 12, 1 / 6, 1 / 3, 2 / 3, 1.3)]


def curve_of(of: SimulatedSettings, requests: Sequence[TracedRequest], sizes: list[int]) -> Curve:
    return simulate(requests, of, sizes, UNKNOWN)


def replayed(
    name: str, requests: Sequence[TracedRequest], capacity: int, **more: Any
) -> tuple[float, int]:
    """What a real store of a model loads, and the most bytes that it held."""
    engine, size = ENGINES[name], settings_of(ENGINES[name]).layout.block_tokens
    with tempfile.TemporaryDirectory() as root:
        given = StoreSettings(f"{root}/kv", capacity, block_tokens=size, min_tokens=1, **more)
        return replay(given, engine, requests)


@cache
def real_curve(name: str) -> tuple[list[TracedRequest], list[int], list[float]]:
    """A trace, five capacities, and what real stores of them load of it."""
    of = settings_of(ENGINES[name])
    requests = list(conversations(1, 100))
    sizes, shares = capacities(of, requests), []
    for size in sizes:
        share, most = replayed(name, requests, size)
        assert most <= size
        shares.append(share)
    return requests, sizes, shares


def points_apart(name: str, of: SimulatedSettings) -> float:
    """The most points between the curve and real stores."""
    requests, sizes, shares = real_curve(name)
    curve = curve_of(of, requests, sizes)
    pairs = zip(curve.points, shares, strict=True)
    return 100 * max(abs(curve.hit_share(point) - share) for point, share in pairs)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "windows" else [pytest.mark.matrix])
        for name in ENGINES
    ],
)
def test_the_curve_is_a_real_stores_at_five_capacities(name: str) -> None:
    _, _, shares = real_curve(name)
    assert shares[-1] - shares[0] > 0.15, "the control: capacity counts"
    assert points_apart(name, settings_of(ENGINES[name])) <= POINTS


@pytest.mark.matrix
def test_the_curve_of_saved_answers_is_a_real_stores() -> None:
    of = settings_of(ENGINES["windows"], saves_answers=True)
    requests = list(conversations(2, 50, answer=150))
    sizes = capacities(of, requests)
    curve = curve_of(of, requests, sizes)
    prompts_alone = curve_of(replace(of, saves_answers=False), requests, sizes)
    gained = curve.hit_share(curve.points[-1]) - prompts_alone.hit_share(prompts_alone.points[-1])
    assert 100 * gained > POINTS, "the control: answers count"
    for at in (0, 2, 4):
        real, _ = replayed("windows", requests, sizes[at], save="all")
        assert 100 * abs(curve.hit_share(curve.points[at]) - real) <= POINTS


def first_in_first_out(patch: Patch) -> None:
    patch.setattr(SimulatedRoot, "note_uses", lambda self, names, at_s: None)
    patch.setattr(RowTree, "_is_leaf", lambda self, place: True)


def windows_take_no_bytes(patch: Patch) -> None:
    def sizes(layout: StoreLayout) -> dict[RowKind, int]:
        return {**row_sizes(layout), RowKind.WA: 1}

    patch.setattr("pdconn.tools.plan.store.simulated_store.row_sizes", sizes)


def every_boundary_can_be_resumed(patch: Patch) -> None:
    patch.setattr("pdconn.store.format.prompt_rows.pieces", lambda layout, boundary: range(0))


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        pytest.param(first_in_first_out, "full", marks=pytest.mark.matrix),
        (windows_take_no_bytes, "windows"),
        (every_boundary_can_be_resumed, "windows"),
        pytest.param(windows_take_no_bytes, "states", marks=pytest.mark.matrix),
    ],
)
def test_a_wrong_rule_leaves_the_two_points(wrong: Callable[[Patch], None], name: str) -> None:
    """The control: each is further from a real store than the curve may be, at some capacity."""
    of = settings_of(ENGINES[name])
    real_curve(name)
    with pytest.MonkeyPatch.context() as patch:
        wrong(patch)
        assert points_apart(name, of) > POINTS


@st.composite
def traces(draw: st.DrawFn) -> list[TracedRequest]:
    """Requests that go on from drawn prefixes of earlier ones, of any length."""
    requests: list[TracedRequest] = []
    fresh = iter(range(1, 1 << 30))
    for number in range(draw(st.integers(1, 40))):
        block = 32
        before = draw(st.sampled_from(requests)).ids if requests and draw(st.booleans()) else ()
        shared = before[: draw(st.integers(0, len(before)))]
        tokens = len(shared) * block + draw(st.integers(1, 600))
        ids = [*shared, *(next(fresh) for _ in range(-(-tokens // block) - len(shared)))]
        said = draw(st.integers(0, 200))
        requests.append(TracedRequest(tokens, said, ids, block, at_s=100.0 * number))
    return requests


@pytest.mark.parametrize("name", ENGINES)
@settings(deadline=None, max_examples=40)
@given(requests=traces(), rows=st.integers(1, 120), answers=st.booleans(), engine=st.booleans())
def test_a_store_never_holds_more_than_its_capacity(
    name: str, requests: list[TracedRequest], rows: int, answers: bool, engine: bool
) -> None:
    """Rows are committed from what was reserved within it: nothing is above it in flight."""
    of = settings_of(ENGINES[name], saves_answers=answers)
    row = sum(row_sizes(of.layout).values())
    sizes = [rows * row, 3 * rows * row]
    curve = simulate(requests, of, sizes, UNKNOWN, engine_nbytes=20 * row * engine)
    tokens = sum(request.num_tokens for request in requests)
    for point in curve.points:
        assert point.most_nbytes <= point.capacity
        assert 0 <= point.counts.hit_tokens <= tokens - curve.held_tokens
        assert point.counts.saved - point.counts.evicted >= 0
    assert curve.prompt_tokens == tokens


def test_capacity_that_is_not_reserved_would_be_exceeded(monkeypatch: Patch) -> None:
    """The control."""
    monkeypatch.setattr(SimulatedRoot, "reserve", lambda self, nbytes: nbytes if nbytes > 0 else 0)
    of = settings_of(ENGINES["full"])
    size = 8 * row_sizes(of.layout)[RowKind.FA]
    curve = curve_of(of, list(conversations(3, 20, turn=2000)), [size])
    assert curve.points[0].most_nbytes > size


def whole_prompts(requests: list[TracedRequest]) -> list[TracedRequest]:
    """The same, a token longer than whole rows: a hit uses all rows of a prompt that are there."""
    return [
        replace(one, num_tokens=max(1, one.num_tokens // ROW_TOKENS) * ROW_TOKENS + 1)
        for one in requests
    ]


def rising(requests: list[TracedRequest], spare: int) -> Curve:
    """Stores for twice the longest prompt and more, of full attention, saved row by row."""
    of = replace(settings_of(ENGINES["full"]), pass_tokens=ROW_TOKENS)
    row, whole = row_sizes(of.layout)[RowKind.FA], whole_prompts(requests)
    rows = 2 * max(one.num_tokens for one in whole) // ROW_TOKENS + spare
    return curve_of(of, whole, [int(row * rows * times) for times in (1, 1.3, 2, 3)])


@settings(deadline=None, max_examples=60)
@given(requests=traces(), spare=st.integers(32, 64))
def test_full_attention_alone_never_hits_less_in_a_larger_store(
    requests: list[TracedRequest], spare: int
) -> None:
    """Every request uses all rows of its prompt at once: what a store holds, a larger one holds.

    Prompts fit into each, and what a pass saves is never more than what may be written.
    """
    curve = rising(requests, spare)
    assert all(point.counts.skipped == 0 for point in curve.points)
    shares = [curve.hit_share(point) for point in curve.points]
    assert shares == sorted(shares)


def test_stores_of_that_law_evict() -> None:
    """The control: it is not for want of eviction."""
    curve = rising(list(conversations(7, 120)), 32)
    shares = [curve.hit_share(point) for point in curve.points]
    assert curve.points[-2].counts.evicted > 100
    assert shares == sorted(shares)
    assert shares[-1] > shares[0] + 0.05


def test_with_windows_a_larger_store_may_hit_less_by_little() -> None:
    """The control: it is no law there, so one simulation does not do for all capacities."""
    of = settings_of(ENGINES["windows"], window_every="last")
    row = sum(row_sizes(of.layout).values())
    lost = []
    for seed in range(8):
        curve = curve_of(of, list(branches(seed)), [row * rows for rows in range(16, 100, 7)])
        shares = [100 * curve.hit_share(point) for point in curve.points]
        lost.append(max(max(shares[: at + 1]) - share for at, share in enumerate(shares)))
    assert 0 < max(lost) <= POINTS


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("seed", range(3))
def test_windows_and_states_hit_hardly_less_in_a_larger_store(name: str, seed: int) -> None:
    """A larger store uses other windows; the noise of that is within two points."""
    of = settings_of(ENGINES[name])
    requests = list(conversations(seed, 300))
    smallest, *_ = capacities(of, requests)
    curve = curve_of(of, requests, [int(smallest * 1.3**step) for step in range(10)])
    shares = [100 * curve.hit_share(point) for point in curve.points]
    assert all(share >= max(shares[: at + 1]) - POINTS for at, share in enumerate(shares))
    assert shares[-1] > shares[0] + 5, "the control"


def test_what_the_engine_holds_is_no_hit_of_the_store() -> None:
    of = settings_of(ENGINES["windows"])
    requests = list(conversations(4, 200))
    size = capacities(of, requests)[-1]
    alone = simulate(requests, of, [size], UNKNOWN)
    row = sum(row_sizes(of.layout).values())
    behind = simulate(requests, of, [size], UNKNOWN, engine_nbytes=60 * row)
    (one,), (other,) = alone.points, behind.points
    assert 0.1 < behind.held_share < 0.9 * alone.hit_share(one)
    assert 0 < behind.hit_share(other) < alone.hit_share(one)
    both = behind.held_share + behind.hit_share(other)
    assert abs(both - alone.hit_share(one)) < 0.05, "together they hold what the store holds alone"


def test_what_a_trace_says_of_the_engines_cache_counts_instead() -> None:
    of = settings_of(ENGINES["full"])
    one = TracedRequest(641, 0, list(range(21)), 32)
    again = replace(one, held=256)
    curve = simulate([one, again], of, [1 << 30], UNKNOWN, engine_nbytes=1 << 30)
    assert (curve.held_tokens, curve.points[0].counts.hit_tokens) == (256, 384)


def test_seconds_are_those_of_computing_less_those_of_loading() -> None:
    of = settings_of(ENGINES["full"])
    rows = StoredShapes.of_engine(ENGINES["full"], ROW_TOKENS)
    one = TracedRequest(641, 0, list(range(21)), 32)
    rates = Rates(rows.load, 1e6, 1000.0, fixed_s=0.01)
    (point,) = simulate([one, one, one], of, [1 << 30], rates).points
    read = 10 * (2 * 4096 + 4096)  # two layers' slabs and a footer, whole pages
    assert point.saved_s == pytest.approx(2 * (640 / 1000 - read / 1e6 - 0.01))


def test_distinct_tokens_of_a_long_trace_are_estimated() -> None:
    requests = list(conversations(5, 600))
    exact = TraceSurvey.of(requests).distinct_tokens
    seen = {tuple(one.ids[: at + 1]) for one in requests for at in range(len(one.ids))}
    assert exact == len(seen) * 32
    few = TraceSurvey.of(requests, most_kept=256).distinct_tokens
    assert few == pytest.approx(exact, rel=0.3)


class EachAlone(TraceSample):
    """Requests are chosen one by one, whatever prefix they share."""

    def _has(self, request: TracedRequest) -> bool:
        return hash((7, request.at_s)) % self.every == 0


@pytest.mark.matrix
def test_an_eighth_of_the_prefixes_gives_the_curve_of_all() -> None:
    of = settings_of(ENGINES["windows"])
    requests = list(conversations(6, 5000, at_once=250, spoken=80))
    sizes = capacities(of, requests)[::2]
    sample = TraceSurvey.of(requests).sample(625)
    assert sample.every == 8
    every = curve_of(of, requests, sizes)

    def apart(chosen: TraceSample) -> float:
        some, part = list(chosen.choose(requests)), chosen.part(requests)
        assert 1 / 12 < len(some) / len(requests) < 1 / 5
        curve = simulate(some, of, sizes, UNKNOWN, part=part)
        pairs = zip(every.points, curve.points, strict=True)
        return 100 * max(abs(every.hit_share(a) - curve.hit_share(b)) for a, b in pairs)

    assert apart(sample) <= 2 * POINTS
    alone = EachAlone(sample.every, sample.counts, sample.few)
    assert apart(alone) > 4 * POINTS, "the control: prefixes are chosen together"


@pytest.mark.parametrize("wrong", [[], [0], [2, 2], [3, 1]])
def test_capacities_that_do_not_rise_are_refused(wrong: list[int]) -> None:
    with pytest.raises(ShapeError, match="each larger than the one before"):
        simulate([], settings_of(ENGINES["full"]), wrong, UNKNOWN)
