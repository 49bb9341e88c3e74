"""What ``bench transfer`` allocates lies where ``pdconn plan`` says, for every model and layout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import astuple, replace

import pytest
import torch

from pdconn.planning.layouts import LAYOUTS
from pdconn.tools.bench.bench_errors import BenchError
from pdconn.tools.bench.transfer import workload
from pdconn.tools.bench.transfer.arena import BenchMemory
from pdconn.tools.bench.transfer.bench_pages import allocate_rank
from pdconn.tools.bench.transfer.workload import extent, placed
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.model_shape import ModelShape
from pdconn.tools.plan.plan_errors import ShapeError
from pdconn.tools.plan.shapes import SHAPES
from registration.references import KVCacheReferences
from transport import Memory

NUM_BLOCKS = 3


def shapes_of(model: ModelShape) -> Iterator[EngineShape]:
    """A model in every layout that it can have, alone and on two ranks."""
    for layout in LAYOUTS:
        for tp, pp in ((1, 1), (2, 1), (1, 2)):
            try:
                yield EngineShape(model, layout, tp=tp, pp=pp)
            except ShapeError:
                continue


def lies_at(references: KVCacheReferences, base: int) -> list[tuple[object, ...]]:
    """Where every chunk lies, whatever the allocations; strides between one thing are left out."""
    found: list[tuple[object, ...]] = []
    for group in references.groups:
        found.append(astuple(replace(group, data=())))
        for ref in group.data:
            tensor = references.tensors[ref.tensor]
            stride = None if ref.num_rows == 1 else ref.token_stride
            at = tensor.base - base + ref.offset
            heads = (ref.num_heads, ref.first_head, ref.num_heads > 1 and ref.head_stride)
            blocks = (tensor.num_blocks, tensor.block_stride)
            rows = (ref.nbytes, ref.token_nbytes, stride)
            found.append((ref.layer, ref.chunk, at, heads, blocks, rows))
    return found


def allocated(shape: EngineShape, rank: int) -> tuple[KVCacheReferences, Memory]:
    """A rank's memory in one piece as large as its plan says, of which no page is touched."""
    nbytes = extent(shape.references(NUM_BLOCKS)[rank])
    whole = torch.empty(nbytes, dtype=torch.int8)
    used = [0]

    def empty(some: int) -> torch.Tensor:
        used.append(used[-1] + some)
        return whole[used[-2] : used[-1]]

    made = allocate_rank(shape, rank, NUM_BLOCKS, empty)
    assert used[-1] == nbytes
    return made.references, Memory(whole.data_ptr(), nbytes)


@pytest.mark.parametrize("model", SHAPES, ids=lambda model: model.name)
def test_memory_lies_where_the_plan_says(model: ModelShape) -> None:
    shapes = list(shapes_of(model))
    assert len(shapes) >= 2
    for shape in shapes:
        for rank, described in enumerate(shape.references(NUM_BLOCKS)):
            references, memory = allocated(shape, rank)
            expected = lies_at(placed(described, memory), memory.base)
            assert lies_at(references, memory.base) == expected, f"{shape}, rank {rank}"


def test_another_layout_lies_elsewhere() -> None:
    """Negative control."""
    [model] = (one for one in SHAPES if one.name == "gpt-oss-20b")
    lie = [
        lies_at(references, memory.base)
        for layout in LAYOUTS
        for references, memory in [allocated(EngineShape(model, layout), 0)]
    ]
    assert all(lie.count(one) == 1 for one in lie)


def test_without_torch_one_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pdconn.tools.bench.transfer.bench_pages", None)
    shape = EngineShape(SHAPES[0])
    with (
        BenchMemory(1 << 12, huge_pages=False) as arena,
        pytest.raises(BenchError, match="torch, which allocates memory, cannot be imported"),
    ):
        workload.allocated(shape, 0, 1, arena)


def test_an_arena_gives_no_more_than_it_has() -> None:
    with BenchMemory(1 << 12, huge_pages=False) as arena:
        assert arena.take_tensor(4000).data_ptr() == arena.memory.base
        assert arena.take_tensor(96).data_ptr() == arena.memory.base + 4000
        with pytest.raises(BenchError, match="memory: expected at most 0 bytes more, got 1"):
            arena.take_tensor(1)
