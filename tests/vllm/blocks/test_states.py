"""States on any number of ranks: every byte against the whole state, cut as vLLM cuts it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")


import torch
import vllm.config  # noqa: F401 - before its parts, which import each other
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from pdconn.planning.plan import Need, Pairing
from pdconn.planning.planning_errors import Incompatible
from pdconn.protocol.ticket import BlockList
from pdconn.vllm.blocks import recurrent_states
from pdconn.vllm.blocks.recurrent_states import state_chunks
from registration import (
    AttentionKind,
    GroupMemory,
    KVCacheReferences,
    LayerMemory,
    build_kv_cache_references,
)
from transport import HOST, Memory

KERNEL, HEADS, HEAD_DIM, STATE = 4, 8, 6, 10
CONV, SSM = torch.bfloat16, torch.float32
Whole = dict[str, np.ndarray]


@dataclass(frozen=True)
class Sort:
    """A kind of state layer: its shapes on a rank, and its parts of the whole model's state.

    ``conv`` names the pieces of the convolution's channels, each of so many heads of a width;
    a piece of one head is replicated.
    """

    name: str
    conv: tuple[tuple[int, int], ...]
    state: tuple[int, ...] | None
    num_groups: int | None = None

    def shapes(self, tp: int) -> tuple[tuple[int, ...], ...]:
        calculate = MambaStateShapeCalculator
        if self.name == "MAMBA2":
            groups = self.num_groups or 0
            return calculate.mamba2_state_shape(
                tp, HEADS * HEAD_DIM, groups, HEADS, HEAD_DIM, STATE, KERNEL
            )
        if self.name == "GDN_ATTN":
            keys = self.conv[0][0]
            return calculate.gated_delta_net_state_shape(tp, keys, HEADS, STATE, HEAD_DIM, KERNEL)
        if self.name == "MAMBA1":
            return calculate.mamba1_state_shape(tp, HEADS * HEAD_DIM, STATE, KERNEL)
        if self.name == "SHORT_CONV":
            return calculate.short_conv_state_shape(tp, HEADS * HEAD_DIM, KERNEL)
        return calculate.linear_attention_state_shape(HEADS, tp, HEAD_DIM)


X = (HEADS, HEAD_DIM)
SORTS = (
    Sort("MAMBA2", (X, (4, STATE), (4, STATE)), (HEADS, HEAD_DIM, STATE), 4),
    Sort("MAMBA2", (X, (1, STATE), (1, STATE)), (HEADS, HEAD_DIM, STATE), 1),
    Sort("GDN_ATTN", ((4, STATE), (4, STATE), X), (HEADS, HEAD_DIM, STATE)),
    Sort("MAMBA1", (X,), (HEADS * HEAD_DIM, STATE)),
    Sort("SHORT_CONV", (X,), None),
    Sort("LINEAR", (), (HEADS, HEAD_DIM, HEAD_DIM)),
)


def cut(pieces: Sequence[np.ndarray], rank: int, tp: int) -> np.ndarray:
    """A rank's rows of each piece, of shape (heads, width, ...), one piece behind the other."""
    rows = []
    for piece in pieces:
        heads = piece.shape[0]
        held = piece if heads == 1 else piece[rank * heads // tp : (rank + 1) * heads // tp]
        rows.append(held.reshape(-1, *held.shape[2:]))
    return np.concatenate(rows)


class Engine:
    """Ranks whose pages hold ``blocks`` states each, cut from whole ones; None leaves zeros."""

    def __init__(self, sort: Sort, tp: int, dim_first: bool, whole: Sequence[Any] | None) -> None:
        self.sort, self.tp, self.dim_first = sort, tp, dim_first
        shapes = sort.shapes(tp)
        dtypes = (CONV, SSM) if len(shapes) == 2 else (CONV,) if sort.conv else (SSM,)
        self.spec = MambaSpec(
            block_size=64,
            shapes=shapes,
            dtypes=dtypes,
            mamba_type=MambaAttentionBackendEnum[sort.name],
        )
        self.nbytes = self.spec.state_content_size_bytes
        self.stride = self.nbytes + 24  # padding, which is not moved
        self.pages = [np.zeros(3 * self.stride, np.uint8) for _ in range(tp)]
        for rank, pages in enumerate(self.pages):
            pages[:] = 0xEE
            for block, state in enumerate(whole or ()):
                at = block * self.stride
                pages[at : at + self.nbytes] = self.expected(state, rank)

    def expected(self, state: tuple[list[np.ndarray], np.ndarray | None], rank: int) -> np.ndarray:
        conv, ssm = state
        parts = []
        if conv:
            rows = cut(conv, rank, self.tp)  # (channels, window)
            parts.append(np.ascontiguousarray(rows if self.dim_first else rows.T))
        if ssm is not None:
            size = ssm.shape[0] // self.tp
            parts.append(np.ascontiguousarray(ssm[rank * size : (rank + 1) * size]))
        return np.concatenate([part.view(np.uint8).ravel() for part in parts])

    def references(self) -> list[KVCacheReferences]:
        made = []
        for rank, pages in enumerate(self.pages):
            chunks = state_chunks(
                self.spec, num_groups=self.sort.num_groups, tp_rank=rank, tp_size=self.tp
            )
            memory = Memory(pages.ctypes.data, pages.nbytes, HOST)
            layer = LayerMemory("layer", memory, 0, self.stride, 3, chunks)
            group = GroupMemory(AttentionKind.STATE, None, 64, (layer,))
            made.append(build_kv_cache_references([group]))
        return made


def whole_states(sort: Sort) -> Iterator[tuple[list[np.ndarray], np.ndarray | None]]:
    source = np.random.default_rng(5)
    for _ in range(3):
        conv = [
            source.integers(0, 1 << 16, (heads, width, KERNEL - 1), dtype=np.uint16)
            for heads, width in sort.conv
        ]
        ssm = None
        if sort.state is not None:
            ssm = source.integers(0, 1 << 32, sort.state, dtype=np.uint32)
        yield conv, ssm


def pulled(sort: Sort, lending: int, reading: int, dim_first: bool) -> list[bool]:
    """Whether each rank reads exactly its part of the state in block 2, into block 1."""
    whole = list(whole_states(sort))
    lender = Engine(sort, lending, dim_first, whole)
    reader = Engine(sort, reading, dim_first, None)
    theirs = lender.references()
    right = []
    for rank, ours in enumerate(reader.references()):
        pairing = Pairing.between(ours, theirs, rank)
        plan = pairing.plan(
            Need.for_range(0, 100, (BlockList(0, (1, 1)),)), (BlockList(0, (1, 2)),)
        )
        for _, spans in plan.reads:
            for local, remote, nbytes in zip(spans.local, spans.remote, spans.nbytes, strict=True):
                ctypes.memmove(int(local), int(remote), int(nbytes))
        expected = np.full(3 * reader.stride, 0xEE, np.uint8)
        expected[reader.stride : reader.stride + reader.nbytes] = reader.expected(whole[2], rank)
        right.append(bool((reader.pages[rank] == expected).all()))
    return right


@pytest.fixture(params=[False, True], ids=["SD", "DS"])
def dim_first(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("sort", SORTS, ids=lambda sort: f"{sort.name}-{sort.num_groups}")
def test_states_are_pulled_between_any_numbers_of_ranks(sort: Sort, dim_first: bool) -> None:
    for lending, reading in product((1, 2, 4), repeat=2):
        assert pulled(sort, lending, reading, dim_first) == [True] * reading, (lending, reading)


TRUE = state_chunks
MUTANTS = {
    "groups are divided": lambda spec, num_groups, tp_rank, tp_size: TRUE(
        spec, num_groups=4, tp_rank=tp_rank, tp_size=tp_size
    ),
    "every rank holds the first": lambda spec, num_groups, tp_rank, tp_size: TRUE(
        spec, num_groups=num_groups, tp_rank=0, tp_size=tp_size
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_parts_are_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [is_right(SORTS[1], *ranks) for ranks in ((1, 2), (2, 1), (2, 2))] == [True] * 3
    monkeypatch.setitem(globals(), "state_chunks", MUTANTS[mutant])
    assert not all(is_right(SORTS[1], *ranks) for ranks in ((1, 2), (2, 1), (2, 2)))


def is_right(sort: Sort, lending: int, reading: int) -> bool:
    try:
        return all(pulled(sort, lending, reading, False))
    except Incompatible:
        return False


def test_pieces_in_another_order_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sort, known = SORTS[2], recurrent_states._pieces

    def swapped(*args: Any) -> Any:
        (q, k, v), ssm = known(*args)
        return [v, k, q], ssm

    monkeypatch.setattr(recurrent_states, "_pieces", swapped)
    assert not all(pulled(sort, 1, 2, False))


def test_the_padding_of_a_page_is_not_described() -> None:
    engine = Engine(SORTS[0], 2, False, None)
    for references in engine.references():
        described = sum(ref.nbytes for ref in references.groups[0].data)
        assert described == engine.nbytes < engine.stride


@pytest.mark.parametrize(
    ("sort", "num_groups"), [(SORTS[0], None)], ids=["groups that are not known"]
)
def test_what_cannot_be_divided_is_exchanged_between_equal_sizes(
    sort: Sort, num_groups: int | None
) -> None:
    unknown = Sort(sort.name, sort.conv, sort.state, None)
    made = []
    for tp in (1, 2):
        engine = Engine(sort, tp, False, None)
        engine.sort = unknown
        made.append(engine.references())
    one, two = made
    assert len(two[0].groups[0].data) == 1
    Pairing.between(two[1], two, 1)
    for ours, theirs in ((one[0], two), (two[1], one)):
        with pytest.raises(Incompatible):
            Pairing.between(ours, theirs, 0)


def test_rows_of_replays_are_not_divided() -> None:
    """Engines that keep more than the two states: their bytes are exchanged as a whole."""
    spec = MambaSpec(
        block_size=64,
        shapes=((3, 20), (2, 4, 5), (2, 7)),
        dtypes=(CONV, SSM, SSM),
        mamba_type=MambaAttentionBackendEnum.MAMBA2,
    )
    (chunk,) = state_chunks(spec, num_groups=1, tp_rank=1, tp_size=2)
    assert (chunk.nbytes, chunk.num_heads, chunk.first_head) == (120 + 160 + 56, 1, 1)


def test_a_state_that_every_rank_holds_is_everyones() -> None:
    spec = MambaSpec(
        block_size=64,
        shapes=((3, 48),),
        dtypes=(CONV,),
        mamba_type=MambaAttentionBackendEnum.SHORT_CONV,
        tp_replicated=True,
    )
    made = [state_chunks(spec, num_groups=None, tp_rank=rank, tp_size=2) for rank in (0, 1)]
    assert made[0] == made[1]
    assert {chunk.first_head for chunk in made[0]} == {0}
