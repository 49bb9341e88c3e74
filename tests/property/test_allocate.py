"""Allocations of random shape: what a view writes is what the references describe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from registration import AttentionKind, KVCacheDataReference, KVCacheReferences, RegistrationError
from registration.allocation import (
    AttentionTensor,
    Axis,
    GroupPages,
    HeadMajor,
    KVCacheAllocation,
    LayerPages,
    OpaqueTensor,
    StateTensor,
    StateTensors,
    allocate,
)
from registration.allocation.strided import StridedTensor
from tests.fakes.layouts import described_bytes

DTYPES = (torch.int8, torch.bfloat16, torch.float32)
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}

sizes = st.integers(1, 3)
inner_sizes = st.sampled_from([2, 3, 2, 1])


@dataclass(frozen=True)
class Asked:
    """What is asked of the allocator."""

    groups: tuple[GroupPages, ...]
    num_blocks: int
    head_major: HeadMajor
    overlay: bool
    layers_apart: bool = False

    def made(self) -> KVCacheAllocation:
        return allocate(
            self.groups,
            self.num_blocks,
            head_major=self.head_major,
            overlay=self.overlay,
            layers_apart=self.layers_apart,
        )


B, KV, H, N, C = Axis.BLOCK, Axis.KV, Axis.HEAD, Axis.TOKEN, Axis.CONTENT
MEMORY_ORDERS = st.one_of(
    st.sampled_from(
        [
            (B, H, N, C),
            (B, H, KV, N, C),
            (B, N, H, C),
            (B, KV, N, H, C),
            (KV, B, N, H, C),
            (KV, B, H, N, C),
            (H, B, N, C),
            (B, H, C, N, C),
            (B, N, C),
        ]
    ),
    st.lists(st.sampled_from([KV, H, N, C]), unique=True).flatmap(
        lambda inner: st.permutations([B, *inner]).map(tuple)
    ),
)


@st.composite
def attention_tensors(draw: st.DrawFn, num_blocks: int) -> AttentionTensor | OpaqueTensor:
    """Usual and unusual memory orders, viewed through axes in any order.

    Opaque where a head's bytes are scattered.
    """
    memory_order = draw(MEMORY_ORDERS)
    dims = draw(st.permutations(range(len(memory_order))))
    axes = tuple(memory_order[dims.index(dim)] for dim in range(len(dims)))
    shape = tuple(num_blocks if axis is B else draw(inner_sizes) for axis in axes)
    dtype = draw(st.sampled_from(DTYPES))
    try:
        return AttentionTensor(shape, axes, tuple(dims), dtype, draw(sizes))
    except RegistrationError:
        opaque = tuple(axis if axis is B else C for axis in axes)
        return OpaqueTensor(shape, opaque, tuple(dims), dtype)


@st.composite
def state_tensors(draw: st.DrawFn) -> StateTensors:
    shapes = st.lists(sizes, max_size=2).map(tuple)
    parts = st.builds(StateTensor, shapes, st.sampled_from(DTYPES))
    return StateTensors(tuple(draw(st.lists(parts, min_size=1, max_size=3))))


@st.composite
def layer_pages(draw: st.DrawFn, kind: AttentionKind, name: str, num_blocks: int) -> LayerPages:
    content = draw(
        state_tensors() if kind is AttentionKind.STATE else attention_tensors(num_blocks)
    )
    padding = 0
    if content.is_block_outermost and draw(st.booleans()):
        # now and then pad to a round size, so that unlike layers share rows
        padding = draw(st.sampled_from([4, max(0, 48 - content.page_nbytes)]))
    padding += -(content.page_nbytes + padding) % content.alignment
    return LayerPages(name, content, content.page_nbytes + padding, padding)


@st.composite
def questions(draw: st.DrawFn) -> Asked:
    num_blocks = draw(sizes)
    groups = []
    for number in range(draw(sizes)):
        kind = draw(st.sampled_from([AttentionKind.FULL] * 3 + [AttentionKind.STATE]))
        distinct = [
            draw(layer_pages(kind, f"{number}.{index}", num_blocks)) for index in range(draw(sizes))
        ]
        twins = [replace(layer, layer=layer.layer + ".twin") for layer in distinct]
        groups.append(GroupPages(kind, None, 6, (*distinct, *twins)))
    mode = draw(st.sampled_from([HeadMajor.PREFER, HeadMajor.PREFER, HeadMajor.NEVER]))
    apart = mode is HeadMajor.NEVER and draw(st.booleans())
    return Asked(tuple(groups), num_blocks, mode, draw(st.booleans()), apart)


def written(made: KVCacheAllocation, layer: str, content: object, at: dict[Axis, int]) -> set[int]:
    """Addresses of the bytes that change when ``layer``'s view is written at ``at``.

    The index is made of the layer's own axes: nothing is asked of strides or references.
    """
    view = made.views[layer]
    whole = slice(None)
    index: tuple[int | slice, ...] = (at[Axis.BLOCK],)
    if isinstance(content, StridedTensor):
        index = tuple(at.get(axis, whole) for axis in content.axes)
    parts = view if isinstance(view, list) else [view]
    cells = [part.view(INTEGERS[part.dtype.itemsize])[index] for part in parts]
    for cell in cells:
        cell.fill_(-1)
    changed: set[int] = set()
    for allocation in made.allocations:
        raw = allocation.tensor.view(-1).numpy()
        changed.update((np.flatnonzero(raw) + allocation.memory.base).tolist())
    for cell in cells:
        cell.fill_(0)
    return changed


def formula(
    references: KVCacheReferences, refs: list[KVCacheDataReference], at: dict[Axis, int]
) -> set[int]:
    """Addresses that the references give for one block, head and token of a layer."""
    found: set[int] = set()
    for ref in refs:
        tensor = references.tensors[ref.tensor]
        start = tensor.base + at[Axis.BLOCK] * tensor.block_stride + ref.offset
        start += at.get(Axis.HEAD, 0) * ref.head_stride
        start += at.get(Axis.TOKEN, 0) * (ref.token_stride or 0)
        found.update(range(start, start + (ref.token_nbytes or ref.head_nbytes)))
    return found


def places(
    content: object, refs: list[KVCacheDataReference], num_blocks: int
) -> Iterator[dict[Axis, int]]:
    """Every index that a layer can be written at: block, head, and token unless opaque."""
    counted = {Axis.BLOCK: num_blocks}
    if isinstance(content, AttentionTensor):
        counted[Axis.HEAD] = content.size(Axis.HEAD)
        if refs[0].num_rows is not None:
            counted[Axis.TOKEN] = content.size(Axis.TOKEN)
    for indices in product(*map(range, counted.values())):
        yield dict(zip(counted, indices, strict=True))


def data_nbytes(content: object) -> int:
    """Bytes of one block that hold data."""
    if isinstance(content, StateTensors):
        return sum(part.strided().page_nbytes for part in content.parts)
    assert isinstance(content, StridedTensor)
    return content.page_nbytes


def check(made: KVCacheAllocation, references: KVCacheReferences, asked: Asked) -> None:
    """The references describe all data, nothing twice, nothing else, where views put it."""
    of_groups = [described_bytes(references, number) for number in range(len(asked.groups))]
    if not asked.overlay:
        assert len(set().union(*of_groups)) == sum(map(len, of_groups))
    for number, (group, described) in enumerate(zip(asked.groups, of_groups, strict=True)):
        data = sum(data_nbytes(layer.content) for layer in group.layers)
        assert len(described) == data * asked.num_blocks
        for layer in group.layers:
            refs = [ref for ref in references.groups[number].data if ref.layer == layer.layer]
            for at in places(layer.content, refs, asked.num_blocks):
                assert written(made, layer.layer, layer.content, at) == formula(
                    references, refs, at
                )


@settings(max_examples=120)
@given(questions())
def test_what_a_view_writes_is_what_the_references_describe(asked: Asked) -> None:
    made = asked.made()
    check(made, made.references, asked)


@settings(max_examples=40)
@given(questions())
def test_allocations_are_distinct_and_hold_whole_rows(asked: Asked) -> None:
    made = asked.made()
    memories = {allocation.memory for allocation in made.allocations}
    assert set(made.references.memories()) == memories
    assert len(memories) == len(made.allocations)
    for allocation in made.allocations:
        assert allocation.tensor.is_contiguous()
        assert allocation.tensor.nbytes == allocation.memory.nbytes
        assert allocation.memory.nbytes % asked.num_blocks == 0


@settings(max_examples=40)
@given(questions())
def test_overlaid_memory_is_never_larger_and_describes_as_much(asked: Asked) -> None:
    apart = replace(asked, overlay=False).made()
    overlaid = replace(asked, overlay=True).made()
    assert [group.block_nbytes for group in apart.references.groups] == [
        group.block_nbytes for group in overlaid.references.groups
    ]
    apart_nbytes, overlaid_nbytes = (
        sum(allocation.memory.nbytes for allocation in made.allocations)
        for made in (apart, overlaid)
    )
    assert overlaid_nbytes <= apart_nbytes


def runs(addresses: set[int]) -> int:
    """Into how many contiguous runs ``addresses`` fall."""
    return sum(at - 1 not in addresses for at in addresses)


@settings(max_examples=30)
@given(sizes, sizes, sizes, sizes, st.sampled_from(DTYPES))
def test_head_major_memory_keeps_one_head_of_all_layers_in_one_run(
    num_blocks: int, num_heads: int, num_layers: int, num_tokens: int, dtype: torch.dtype
) -> None:
    shape = (num_blocks, num_heads, num_tokens, 2)
    content = AttentionTensor(shape, (B, H, N, C), (0, 1, 2, 3), dtype)
    layers = tuple(
        LayerPages(f"layers.{index}", content, content.page_nbytes) for index in range(num_layers)
    )
    group = GroupPages(AttentionKind.FULL, None, num_tokens, layers)
    for head_major, head_runs in ((HeadMajor.REQUIRE, 1), (HeadMajor.NEVER, num_layers)):
        made = allocate([group], num_blocks, head_major=head_major)
        described = described_bytes(made.references)
        for block in range(num_blocks):
            of_block = {at: label for at, label in described.items() if label[2] == block}
            assert runs(set(of_block)) == 1
            one_head = {at for at, label in of_block.items() if label[3] == num_heads - 1}
            assert runs(one_head) == (head_runs if num_heads > 1 else 1)


PADDED = AttentionTensor((3, 2, 4, 2), (B, H, N, C), (0, 1, 2, 3), torch.bfloat16)
PAGE_NBYTES = PADDED.page_nbytes + 8

Mutant = Callable[[KVCacheDataReference], dict[str, Any]]

MUTANTS: dict[str, Mutant] = {
    "padding before the page": lambda ref: {"offset": ref.offset + 8},
    "offset off by one page": lambda ref: {"offset": ref.offset + PAGE_NBYTES},
    "heads too far apart": lambda ref: {"head_stride": ref.head_stride + 4},
    "tokens and heads exchanged": lambda ref: {
        "head_stride": ref.token_stride,
        "token_stride": 8,
    },
    "heads of another rank": lambda ref: {"num_heads": 1, "nbytes": ref.nbytes // 2},
    "padding transferred": lambda _: {
        "num_heads": 1,
        "nbytes": PAGE_NBYTES,
        "token_stride": None,
        "token_nbytes": None,
    },
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_references_to_right_memory_are_caught(name: str) -> None:
    layers = tuple(LayerPages(f"layers.{index}", PADDED, PAGE_NBYTES, 8) for index in range(2))
    asked = Asked((GroupPages(AttentionKind.FULL, None, 4, layers),), 3, HeadMajor.NEVER, False)
    made = asked.made()
    right = made.references
    check(made, right, asked)

    (tensor,) = right.tensors
    (group,) = right.groups
    room_to_be_wrong = replace(tensor, nbytes=tensor.nbytes + 1000)
    data = tuple(replace(ref, **MUTANTS[name](ref)) for ref in group.data)
    wrong = KVCacheReferences((room_to_be_wrong,), (replace(group, data=data),))
    with pytest.raises(AssertionError):
        check(made, wrong, asked)
