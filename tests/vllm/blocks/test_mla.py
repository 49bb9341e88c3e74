"""MLA beside an indexer and windows of MLA, from blocks of one size to another: every byte."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from pdconn.planning.plan import Need, Pairing
from pdconn.protocol.ticket import BlockList
from pdconn.vllm.blocks.arrangement import Unit
from pdconn.vllm.blocks.geometry import kv_cache_references

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports

TOKENS, WINDOW = 224, 70
NBYTES = {"latent": 656, "indexer": 132, "window": 584}
"""Of a token, by layer: DeepSeek V3.2's in 8 bits, its indexer, and windows like V4's."""


class Engine:
    """The one copy of three layers' rows that each rank has, in blocks of ``size`` tokens."""

    def __init__(self, size: int, descending: bool) -> None:
        self.size = size
        count = TOKENS // size
        ids = range(count, 0, -1) if descending else range(1, count + 1)
        self.ids = list(ids)
        self.views = {
            name: torch.zeros(count + 1, 1, size, nbytes, dtype=torch.uint8)
            for name, nbytes in NBYTES.items()
        }
        tensors = [
            KVCacheTensor(
                size=view.numel(),
                layers=[name],
                layer_stride=view.numel(),
                block_stride=view[0].numel(),
            )
            for name, view in self.views.items()
        ]
        cache: Any = SimpleNamespace(
            kv_cache_tensors=tensors,
            transfer_groups=_groups(size),
            num_blocks_of=lambda tensor: count + 1,
        )
        self.references = kv_cache_references(
            cache,
            self.views,
            layout="LBNHC",
            total_kv_heads=lambda layer: 1,
            states=lambda spec: (),
            units=lambda layer, spec: Unit.TOKEN,
            tp_rank=0,
            tp_size=1,
        )

    def row(self, name: str, token: int) -> torch.Tensor:
        """The row of a token."""
        return self.views[name][self.ids[token // self.size], 0, token % self.size]


def _groups(size: int) -> list[Any]:
    common: dict[str, Any] = {"block_size": size, "num_kv_heads": 1, "dtype": torch.uint8}
    full = {
        name: MLAAttentionSpec(**common, head_size=NBYTES[name]) for name in ("latent", "indexer")
    }
    window = SlidingWindowMLASpec(**common, head_size=NBYTES["window"], sliding_window=WINDOW)
    return [
        SimpleNamespace(
            kv_cache_spec=UniformTypeKVCacheSpecs(block_size=size, kv_cache_specs=full),
            layer_names=list(full),
        ),
        SimpleNamespace(kv_cache_spec=window, layer_names=["window"]),
    ]


def wrong(their_size: int, our_size: int, until: int, shift: int = 0) -> list[tuple[str, int]]:
    """Tokens that a pull of ``until`` tokens left wrong, by layer; ``shift``: of ids lent."""
    theirs, ours = Engine(their_size, descending=False), Engine(our_size, descending=True)
    source = torch.Generator().manual_seed(3)
    for view in theirs.views.values():
        view.copy_(torch.randint(1, 255, view.shape, generator=source).to(torch.uint8))
    pairing = Pairing.between(ours.references, [theirs.references])
    lent = BlockList(0, tuple(theirs.ids[shift:] + theirs.ids[:shift]))
    need = Need.for_range(0, until, (BlockList(0, tuple(ours.ids)),) * 2)
    for _, spans in pairing.plan(need, (lent, lent)).reads:
        for local, remote, nbytes in zip(spans.local, spans.remote, spans.nbytes, strict=True):
            _at(ours, int(local))[: int(nbytes)] = _at(theirs, int(remote))[: int(nbytes)]
    return [
        (name, token)
        for name in NBYTES
        for token in range(max(0, until - WINDOW + 1) if name == "window" else 0, until)
        if not torch.equal(ours.row(name, token), theirs.row(name, token))
    ]


def _at(engine: Engine, address: int) -> torch.Tensor:
    for view in engine.views.values():
        if 0 <= address - view.data_ptr() < view.numel():
            return view.view(-1)[address - view.data_ptr() :]
    raise AssertionError("outside the engine's memory")


@pytest.mark.parametrize("until", [1, 31, 32, 33, 100, TOKENS])
@pytest.mark.parametrize(("theirs", "ours"), [(16, 32), (32, 16), (16, 16), (32, 32)])
def test_blocks_of_one_card_are_read_into_those_of_another(
    theirs: int, ours: int, until: int
) -> None:
    """Hopper's MLA has blocks of 16 tokens, Blackwell's of 32."""
    assert wrong(theirs, ours, until) == []


@pytest.mark.parametrize(("theirs", "ours"), [(16, 32), (32, 16)])
def test_blocks_in_another_order_are_noticed(theirs: int, ours: int) -> None:
    """Negative control."""
    found = wrong(theirs, ours, 100, shift=1)
    assert {name for name, _ in found} == set(NBYTES)
