"""What a benchmark moves, and that it would notice if something else arrived."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdconn.tools.bench.bench_errors import BadOption
from pdconn.tools.bench.transfer.arena import BenchMemory, copy
from pdconn.tools.bench.transfer.methods import LayeredPairings, raw_reads
from pdconn.tools.bench.transfer.workload import Workload, extent, placed
from pdconn.tools.plan.engine_shape import EngineShape, parse_engine
from pdconn.tools.plan.model_shape import ModelShape, sorts_of
from pdconn.tools.plan.shapes import built_in
from pdconn.tools.plan.tables import RUN_BLOCKS, Ids, tables_of_requests
from registration.references import AttentionKind
from transport import Memory, Spans

MODEL = ModelShape("small", sorts_of([AttentionKind.FULL] * 4, None, 4, 64))


def engine(text: str = "", model: ModelShape = MODEL) -> EngineShape:
    return parse_engine(text, model)


def spans_of(*runs: tuple[int, int, int]) -> Spans:
    local, remote, nbytes = np.array(runs, dtype=np.uint64).T
    return Spans(local.copy(), remote.copy(), nbytes.copy())


# Arenas


@pytest.fixture
def lent() -> BenchMemory:
    with BenchMemory(1 << 20, huge_pages=False) as arena:
        arena.fill(seed=3)
        yield arena


def test_what_was_copied_is_right_and_one_flipped_byte_is_found(lent: BenchMemory) -> None:
    with BenchMemory(1 << 20, huge_pages=True) as ours:
        copy(ours.memory, lent.memory, 1 << 20)
        base, there = ours.memory.base, lent.memory.base
        runs = spans_of((base, there, 4096), (base + 5001, there + 5001, 777))
        assert ours.wrong_bytes(runs, lent.memory, seed=3) == 0
        copy(Memory(base + 5001 + 776, 1), Memory(there, 1), 1)
        assert ours.wrong_bytes(runs, lent.memory, seed=3) == 1


def test_nothing_copied_and_another_seed_are_wrong(lent: BenchMemory) -> None:
    with BenchMemory(1 << 20, huge_pages=False) as ours:
        runs = spans_of((ours.memory.base, lent.memory.base, 65536))
        assert ours.wrong_bytes(runs, lent.memory, seed=3) > 65000
        copy(ours.memory, lent.memory, 65536)
        assert ours.wrong_bytes(runs, lent.memory, seed=4) > 60000
        shifted = spans_of((ours.memory.base, lent.memory.base + 64, 4096))
        assert ours.wrong_bytes(shifted, lent.memory, seed=3) > 3000


def test_an_arena_begins_at_a_huge_page_and_can_be_closed_twice() -> None:
    arena = BenchMemory(12345, huge_pages=True)
    assert arena.memory.base % (2 << 20) == 0
    assert arena.memory.nbytes == 12345
    arena.close()
    arena.close()


# Block ids


def gaps(ids: Ids) -> list[int]:
    [tables] = tables_of_requests(engine().groups, 4096, ids, 1, 1)
    return np.diff(tables.lists[0].ids).tolist()


def test_ids_lie_as_they_are_asked_to() -> None:
    assert set(gaps("contiguous")) == {1}
    broken = [at for at, gap in enumerate(gaps("runs"), 1) if gap != 1]
    assert broken == list(range(RUN_BLOCKS, 256, RUN_BLOCKS))
    assert gaps("random").count(1) < 10


def test_requests_share_a_pool_and_no_block() -> None:
    tables = tables_of_requests(engine().groups, 1000, "runs", 2, 5)
    ids = [block for one in tables for block in one.lists[0].ids]
    assert len(set(ids)) == len(ids) == 5 * 63
    assert 0 not in ids
    assert {one.num_blocks for one in tables} == {tables[0].num_blocks}
    assert max(ids) < tables[0].num_blocks


# Workloads


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt_tokens", 1, "prompt: expected 2 to"),
        ("requests", 0, "concurrency: expected 1 to"),
        ("rank", 1, "rank: expected 0 to 0, got 1"),
        ("ids", "sorted", "ids: expected random, runs, contiguous, got sorted"),
    ],
)
def test_a_case_that_cannot_be_is_refused(field: str, value: object, message: str) -> None:
    good = Workload(engine(), engine(), 100)
    with pytest.raises(BadOption, match=message):
        replace(good, **{field: value})


@pytest.mark.parametrize(
    ("prefill", "decode", "rank", "sources"),
    [("", "", 0, (0,)), ("tp=4", "tp=2", 1, (2, 3)), ("tp=2", "tp=4", 3, (1,))],
)
def test_a_rank_reads_from_the_ranks_that_hold_its_heads(
    prefill: str, decode: str, rank: int, sources: tuple[int, ...]
) -> None:
    assert Workload(engine(prefill), engine(decode), 100, rank=rank).sources() == sources


def test_memory_that_is_too_small_is_refused() -> None:
    references = engine().references(10)[0]
    with pytest.raises(BadOption, match="memory: expected"):
        placed(references, Memory(1 << 21, extent(references) - 1))


def moved(reads: tuple[tuple[int, Spans], ...]) -> set[tuple[int, int, int]]:
    """Which byte of which rank goes where."""
    return {
        (rank, int(local) + byte, int(remote) + byte)
        for rank, spans in reads
        for local, remote, nbytes in zip(spans.local, spans.remote, spans.nbytes, strict=True)
        for byte in range(int(nbytes))
    }


@pytest.mark.parametrize("layout", ["BLHNC", "LBHNC", "BHLNC"])
def test_layer_by_layer_moves_the_same_bytes_to_the_same_places(layout: str) -> None:
    workload = Workload(engine(f"tp=2,layout={layout}"), engine(f"layout={layout}"), 70)
    ours, theirs = workload.ours(), workload.theirs()
    [need], lent = workload.needs(), workload.lent[0].lists
    plan = workload.pairing(ours, theirs).plan(need, lent)
    layered = LayeredPairings.of_layers(ours, theirs).plan(need, lent)
    assert moved(plan.reads) == moved(layered)
    assert sum(len(spans) for _, spans in layered) >= plan.num_runs


def test_a_layered_cache_needs_a_run_per_layer_and_block() -> None:
    layered = Workload(engine(), engine(), 160).layered()
    ours, theirs = layered.ours(), layered.theirs()
    reads = LayeredPairings.of_layers(ours, theirs).plan(layered.needs()[0], layered.lent[0].lists)
    assert sum(len(spans) for _, spans in reads) == 4 * 10
    assert extent(ours) == extent(Workload(engine(), engine(), 160).ours())


def test_pages_of_unequal_size_have_no_layered_cache() -> None:
    hybrid = parse_engine("", built_in("deepseek-v4"))
    workload = Workload(hybrid, hybrid, 100)
    assert workload.layered() is workload


def test_raw_reads_bring_as_many_bytes_side_by_side() -> None:
    workload = Workload(engine("tp=2"), engine(), 70)
    ours, theirs = workload.ours(), workload.theirs()
    reads = workload.pairing(ours, theirs).plan(workload.needs()[0], workload.lent[0].lists).reads
    raw = raw_reads(reads, Memory(4096, 1 << 20), {0: Memory(8192, 1), 1: Memory(16384, 1)})
    assert [(rank, len(spans)) for rank, spans in raw] == [(0, 1), (1, 1)]
    assert [s.total_bytes for _, s in raw] == [s.total_bytes for _, s in reads]
    assert int(raw[1][1].local[0]) == 4096 + raw[0][1].total_bytes
