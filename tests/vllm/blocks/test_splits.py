"""Split blocks: what is described, byte by byte, against vLLM's own views of the memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
import vllm.config  # noqa: F401 - before its parts, which import each other
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout

from pdconn.planning.plan import Need, Pairing
from pdconn.planning.planning_errors import Incompatible, PlanningError
from pdconn.protocol.ticket import BlockList, trimmed
from pdconn.store.format.row import store_layout
from pdconn.vllm.blocks import geometry
from pdconn.vllm.blocks.arrangement import Unit
from pdconn.vllm.blocks.geometry import kv_cache_references
from pdconn.vllm.blocks.pages import Pages
from pdconn.vllm.blocks.splits import UNSPLIT, Splits
from registration import KVCacheReferences, RegistrationError

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
LAYERS, BLOCKS, TOKENS = 2, 5, 8
NAMES = [f"layers.{i}" for i in range(LAYERS)]
HELD = (3, 1, 4)
"""Blocks of the request, which has two and a half of them."""
UNTIL = 20


class Engine:
    """One engine of vLLM's own views over one buffer, of blocks of ``tokens`` tokens."""

    def __init__(self, layout: str, heads: int, ratio: int = 1, *, tokens: int = TOKENS) -> None:
        self.layout, self.heads, self.ratio, self.tokens = layout, heads, ratio, tokens
        self.num_blocks = BLOCKS * TOKENS // tokens
        self.spec = FullAttentionSpec(
            block_size=tokens, num_kv_heads=heads, head_size=2, dtype=torch.int16
        )
        page = self.spec.page_size_bytes
        cell = self.spec.state_content_size_bytes
        strides = {
            "LB": (self.num_blocks * page, page),
            "LH": (self.num_blocks * page, tokens * cell),
            "BL": (page, LAYERS * page),
            "BH": (tokens * cell, LAYERS * page),
        }
        layer_stride, block_stride = strides[layout[:2]]
        self.tensor = KVCacheTensor(
            size=LAYERS * self.num_blocks * page,
            layers=NAMES,
            layer_stride=layer_stride,
            block_stride=block_stride,
        )
        self.buffer = torch.zeros(self.tensor.size, dtype=torch.int8)
        views = create_kv_cache_views(
            self.buffer, self.spec, self.num_blocks, KVCacheLayout[layout], self.tensor,
            kernel_block_size=tokens // ratio,
        )  # fmt: skip
        self.views = dict(zip(NAMES, views, strict=True))

    @property
    def config(self) -> Any:
        return SimpleNamespace(
            kv_cache_tensors=[self.tensor],
            transfer_groups=[SimpleNamespace(kv_cache_spec=self.spec, layer_names=NAMES)],
            num_blocks_of=lambda tensor: self.num_blocks,
        )

    def references(self, unit: Unit = Unit.TOKEN, layout: str | None = None) -> KVCacheReferences:
        return kv_cache_references(
            self.config,
            self.views,
            layout=layout or self.layout,
            total_kv_heads=lambda layer: self.heads,
            states=lambda spec: (),
            units=lambda layer, spec: unit,
            tp_rank=0,
            tp_size=1,
        )

    def splits(self, references: KVCacheReferences) -> Splits:
        return Splits.from_ranks(self.config.transfer_groups, [references])

    def cells(self, blocks: Sequence[int]) -> Iterator[tuple[tuple[int, int, int], torch.Tensor]]:
        """(layer, head, token) and the cell of each token, as the backend's kernels find it."""
        size = self.tokens // self.ratio
        for layer, head, token in itertools.product(range(LAYERS), range(self.heads), range(UNTIL)):
            block = blocks[token // self.tokens]
            row = block * self.ratio + token % self.tokens // size
            yield (layer, head, token), self.views[NAMES[layer]][row, head, token % size]

    def fill(self, blocks: Sequence[int]) -> None:
        for (layer, head, token), cell in self.cells(blocks):
            first = ((layer * self.heads + head) * 100 + token) * 4 + 1
            cell.copy_(torch.arange(first, first + 4, dtype=torch.int16))

    def content(self, blocks: Sequence[int]) -> dict[tuple[int, int, int], list[int]]:
        return {where: cell.tolist() for where, cell in self.cells(blocks)}


def can_split(layout: str, heads: int, ratio: int) -> bool:
    """Whether vLLM splits such blocks; it stops the engine otherwise."""
    if ratio == 1:
        return True
    return layout in ("LBHNC", "LBNHC") or (layout == "LHBNC" and heads == 1)


ENGINES = [
    (layout, heads, ratio)
    for layout, heads, ratio in itertools.product(LAYOUTS, (1, 2, 3), (1, 2, 4))
    if can_split(layout, heads, ratio)
]


def listed(ids: Sequence[int], splits: Splits) -> tuple[BlockList, ...]:
    return tuple(trimmed(group) for group in splits.described([ids]))


def pull(theirs: Engine, ours: Engine, **changes: Any) -> Engine:
    """Fill ``theirs``, and carry out a pull into ``ours``, which takes other blocks."""
    ids: Callable[[Sequence[int], Splits], tuple[BlockList, ...]] = changes.get("ids", listed)
    unit = changes.get("unit", Unit.TOKEN)
    there, here = theirs.references(unit), ours.references(unit)
    per_block = TOKENS // ours.tokens
    mine = [block * per_block + i for block in HELD[::-1] for i in range(per_block)]
    lent = [b * (TOKENS // theirs.tokens) + i for b in HELD for i in range(TOKENS // theirs.tokens)]
    theirs.fill(lent)
    need = Need.for_range(0, UNTIL, ids(mine, ours.splits(here)))
    plan = Pairing.between(here, [there]).plan(need, ids(lent, theirs.splits(there)))
    source, target = theirs.buffer.numpy(), ours.buffer.numpy()
    for _, spans in plan.reads:
        for local, remote, nbytes in zip(spans.local, spans.remote, spans.nbytes, strict=True):
            at, origin = int(local) - target.ctypes.data, int(remote) - source.ctypes.data
            target[at : at + int(nbytes)] = source[origin : origin + int(nbytes)]
    expected, seen = theirs.content(lent), ours.content(mine)
    assert seen == expected
    return ours


@pytest.mark.parametrize(("layout", "heads", "ratio"), ENGINES)
def test_split_blocks_pair_with_unsplit_ones_both_ways(layout: str, heads: int, ratio: int) -> None:
    for other in LAYOUTS:
        pull(Engine(layout, heads, ratio), Engine(other, heads))
        pull(Engine(other, heads), Engine(layout, heads, ratio))


@pytest.mark.parametrize("ratios", list(itertools.product((1, 2, 4), repeat=2)))
@pytest.mark.parametrize("layouts", list(itertools.product(("LBHNC", "LBNHC"), repeat=2)))
def test_blocks_split_differently_pair(layouts: tuple[str, str], ratios: tuple[int, int]) -> None:
    theirs, ours = (Engine(layout, 2, ratio) for layout, ratio in zip(layouts, ratios, strict=True))
    pull(theirs, ours)


@pytest.mark.parametrize("tokens", [2, 4])
def test_split_blocks_pair_with_smaller_ones(tokens: int) -> None:
    for ratio in (2, 4):
        pull(Engine("LBHNC", 2, ratio), Engine("LBHNC", 2, tokens=tokens))
        pull(Engine("LBHNC", 2, tokens=tokens), Engine("LBHNC", 2, ratio))


@pytest.mark.parametrize(("layout", "heads", "ratio"), ENGINES)
def test_blocks_are_taken_as_they_are_where_no_byte_lies_elsewhere(
    layout: str, heads: int, ratio: int
) -> None:
    engine = Engine(layout, heads, ratio)
    made = engine.references()
    parts = ratio if layout == "LBHNC" and heads > 1 else 1
    assert made.groups[0].block_tokens == TOKENS // parts
    assert made.num_blocks(0) == BLOCKS * parts
    assert engine.splits(made) == (Splits((ratio,)) if parts > 1 else UNSPLIT)
    if parts == 1:
        unsplit = Engine(layout, heads).references()
        assert made.without_addresses() == unsplit.without_addresses()


@pytest.mark.parametrize("ratio", [2, 4])
def test_what_a_kernel_packs_is_its_own_block(ratio: int) -> None:
    """The CPU's kernels pack a head's kernel block: one of another size is another packing."""
    made = Engine("LBHNC", 1, ratio).references(Unit.HEAD)
    assert made.groups[0].block_tokens == TOKENS // ratio
    assert made.groups[0].data[0].num_rows is None
    pull(
        Engine("LBHNC", 1, ratio),
        Engine("LBHNC", 1, tokens=TOKENS // ratio),
        unit=Unit.HEAD,
    )


def unexpanded(ids: Sequence[int], splits: Splits) -> tuple[BlockList, ...]:
    """The engine's ids, as if they were those of kernel blocks."""
    return (trimmed(ids),)


def unrounded(ids: Sequence[int], splits: Splits) -> tuple[BlockList, ...]:
    """Kernel blocks a block apart, as if parts lay behind all blocks."""
    ratio = splits.ratios[0] if splits.ratios else 1
    return (trimmed([b + part * BLOCKS for b in ids for part in range(ratio)]),)


@pytest.mark.parametrize("ids", [unexpanded, unrounded])
def test_the_oracle_catches_ids_that_were_not_translated(ids: Any) -> None:
    with pytest.raises((AssertionError, PlanningError)):
        pull(Engine("LBHNC", 2, 2), Engine("LBNHC", 2), ids=ids)


def test_the_oracle_catches_kernel_blocks_taken_for_a_block(monkeypatch: Any) -> None:
    """LBHNC with several heads, described as if it were not split: other bytes."""
    monkeypatch.setattr(geometry, "_parts", lambda pages, units: 1)
    with pytest.raises(AssertionError):
        pull(Engine("LBHNC", 2, 2), Engine("LBNHC", 2))


def test_packed_kernel_blocks_are_not_taken_for_a_block(monkeypatch: Any) -> None:
    """A kernel packs 4 tokens together on one side and 8 on the other.  Control: one head alone
    would pass for contiguous."""
    split, unsplit = Engine("LBHNC", 1, 2), Engine("LBHNC", 1)
    with pytest.raises(Incompatible, match=r"blocks that only move whole: theirs 4, ours 8"):
        pull(split, unsplit, unit=Unit.HEAD)
    as_by_token = Pages.is_as_unsplit
    monkeypatch.setattr(Pages, "is_as_unsplit", lambda self, unit: as_by_token(self, Unit.TOKEN))
    pull(split, unsplit, unit=Unit.HEAD)


def test_a_view_of_other_strides_is_refused() -> None:
    engine = Engine("LBHNC", 2, 2)
    with pytest.raises(RegistrationError, match=r"layers.0: offset and strides .* got"):
        engine.references(layout="LBNHC")
    engine.views[NAMES[1]] = engine.views[NAMES[0]]
    with pytest.raises(RegistrationError, match=r"layers.1: offset and strides"):
        engine.references()


def test_layers_of_a_group_that_are_split_differently_are_refused() -> None:
    engine, other = Engine("LBHNC", 2, 2), Engine("LBHNC", 2, 4)
    engine.views[NAMES[1]] = other.views[NAMES[1]]
    with pytest.raises(RegistrationError, match=r"kernel blocks of a block: .*layers.1 4"):
        engine.references()


def test_views_of_a_fraction_of_a_block_are_refused() -> None:
    engine = Engine("LBHNC", 2)
    engine.views = {name: view[:3] for name, view in engine.views.items()}
    with pytest.raises(RegistrationError, match="expected a multiple of 5, got 3"):
        engine.references()


def test_ranks_that_describe_other_blocks_are_refused() -> None:
    """One pipeline stage splits, the other does not: one id would mean two places."""
    stages = [Engine("LBHNC", 2, ratio) for ratio in (2, 1)]
    ranks = [stage.references() for stage in stages]
    with pytest.raises(RegistrationError, match=r"on all ranks, got \[4, 8\]"):
        Splits.from_ranks(stages[0].config.transfer_groups, ranks)


def test_a_stage_without_layers_of_a_group_has_no_say() -> None:
    engine = Engine("LBHNC", 2, 2)
    made = engine.references()
    empty = replace(made, groups=(replace(made.groups[0], data=(), block_tokens=TOKENS),))
    assert Splits.from_ranks(engine.config.transfer_groups, [empty, made]) == Splits((2,))


def test_holes_are_holes_for_every_kernel_block() -> None:
    splits = Splits((2, 1))
    found = splits.described([[0, 0, 5, 0, 2], [0, 7]])
    assert found == ([0, 0, 0, 0, 10, 11, 0, 0, 4, 5], [0, 7])
    assert trimmed(found[0]) == BlockList(4, (10, 11, 0, 0, 4, 5))
    assert splits.of_engine([trimmed(ids) for ids in found]) == [5, 2, 7]


@pytest.mark.parametrize("ratio", [2, 3, 16])
def test_no_kernel_block_of_a_block_is_another_blocks(ratio: int) -> None:
    (found,) = Splits((ratio,)).described([list(range(50))])
    kernel = [block for block in found if block]
    assert len(set(kernel)) == len(kernel) == 49 * ratio
    assert min(kernel) == ratio, "those of the null block are never listed"
    assert Splits((ratio,)).of_engine([trimmed(found)]) == list(range(1, 50))


def test_ids_of_an_unsplit_engine_are_passed_as_they_are() -> None:
    ids = ([1, 0], [2])
    assert all(a is b for a, b in zip(UNSPLIT.described(ids), ids, strict=True))


def test_stores_hold_the_same_rows_of_split_and_unsplit_blocks() -> None:
    """Engines of which one splits share rows, as those of different block sizes do."""
    layouts = {
        store_layout([Engine(*engine).references()], 2 * TOKENS).encoded()
        for engine in (("LBHNC", 2, 1), ("LBHNC", 2, 2), ("LBNHC", 2, 4), ("LHBNC", 2, 1))
    }
    assert len(layouts) == 1


def test_a_held_prefix_is_not_pulled_again() -> None:
    """What is held counts tokens, not blocks of either size."""
    theirs, ours = Engine("LBHNC", 2, 2), Engine("LBHNC", 2, 4)
    there, here = theirs.references(), ours.references()
    theirs.fill(HELD)
    need = Need.for_range(TOKENS, UNTIL, listed(HELD, ours.splits(here)))
    plan = Pairing.between(here, [there]).plan(need, listed(HELD, theirs.splits(there)))
    each = LAYERS * 2 * theirs.spec.state_content_size_bytes
    assert plan.moved.full == (UNTIL - TOKENS) * each
    assert plan.moved.saved_by_hits == TOKENS * each
    assert np.all([len(spans) for _, spans in plan.reads])
