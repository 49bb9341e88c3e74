"""References against a walk through memory, byte by byte, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from registration import (
    AttentionKind,
    GroupMemory,
    KVCacheDataReference,
    KVCacheReferences,
    RegistrationError,
    build_kv_cache_references,
)
from tests.fakes.layouts import LAYOUTS, described_bytes, layout_memory, walked_bytes

BASE = 4096

PADDED = tuple(layout for layout in LAYOUTS if layout[:2] in ("LB", "BL"))
"""Layouts that can pad pages of several heads."""


@dataclass(frozen=True)
class Cache:
    """A small cache in one of the layouts."""

    layout: str
    num_blocks: int
    layers: tuple[str, ...]
    num_heads: int
    block_tokens: int
    token_nbytes: int
    page_padding: int
    row_layers: int

    def sizes(self) -> dict[str, Any]:
        names = ("num_blocks", "layers", "num_heads", "block_tokens", "token_nbytes")
        return {name: getattr(self, name) for name in (*names, "page_padding", "row_layers")} | {
            "base": BASE
        }

    def references(self, *, opaque: bool = False) -> KVCacheReferences:
        layers = layout_memory(self.layout, **self.sizes(), opaque=opaque)
        return build_kv_cache_references(
            [GroupMemory(AttentionKind.FULL, None, self.block_tokens, layers)]
        )


@st.composite
def caches(draw: st.DrawFn) -> Cache:
    layout = draw(st.sampled_from(LAYOUTS))
    num_heads = draw(st.integers(1, 3))
    num_layers = draw(st.integers(1, 3))
    may_pad = num_heads == 1 or layout in PADDED
    return Cache(
        layout,
        draw(st.integers(1, 4)),
        tuple(f"layers.{index}" for index in range(num_layers)),
        num_heads,
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        draw(st.integers(0, 5)) if may_pad else 0,
        num_layers + draw(st.integers(0, 2)),
    )


def check(references: KVCacheReferences, cache: Cache) -> None:
    """Every byte that holds data is described as what it is; no other byte is described."""
    assert described_bytes(references) == walked_bytes(cache.layout, **cache.sizes())


@settings(max_examples=150)
@given(caches())
def test_references_describe_each_byte_as_what_it_is_and_no_padding(cache: Cache) -> None:
    check(cache.references(), cache)


@settings(max_examples=60)
@given(caches().filter(lambda cache: cache.layout[-3:] != "NHC" or cache.num_heads == 1))
def test_opaque_references_describe_the_same_bytes_without_tokens(cache: Cache) -> None:
    described = described_bytes(cache.references(opaque=True))
    tokens = walked_bytes(cache.layout, **cache.sizes())
    assert {at: label[:4] for at, label in described.items()} == {
        at: label[:4] for at, label in tokens.items()
    }


Mutant = Callable[[KVCacheDataReference, Cache], dict[str, Any]]

MUTANTS: dict[str, Mutant] = {
    "padding before the page": lambda ref, cache: {"offset": ref.offset + cache.page_padding},
    "offset off by one page": lambda ref, cache: {
        "offset": ref.offset + ref.nbytes + cache.page_padding
    },
    "heads too far apart": lambda ref, _: {"head_stride": ref.head_stride + 1},
    "heads of another layout": lambda ref, _: {
        "head_stride": ref.token_stride,
        "token_stride": ref.head_stride,
    },
    "tokens too far apart": lambda ref, _: {"token_stride": ref.token_nbytes * ref.num_heads + 1},
    "layers swapped": lambda ref, _: {
        "layer": {"layers.0": "layers.1", "layers.1": "layers.0"}[ref.layer]
    },
    "padding transferred": lambda ref, cache: {
        "nbytes": ref.nbytes + cache.page_padding,
        "num_heads": 1,
        "token_stride": None,
        "token_nbytes": None,
    },
}


def check_mutant(
    right: KVCacheReferences, cache: Cache, *, data: Mutant | None = None, block_stride: int = 0
) -> None:
    """Build wrong references from right ones, with room to be wrong in, and check them."""
    (tensor,) = right.tensors
    (group,) = right.groups
    wrong_tensor = replace(
        tensor, nbytes=tensor.nbytes + 1000, block_stride=tensor.block_stride + block_stride
    )
    refs = [replace(ref, **(data(ref, cache) if data else {})) for ref in group.data]
    check(KVCacheReferences((wrong_tensor,), (replace(group, data=tuple(refs)),)), cache)


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, at) for name in MUTANTS for at in (PADDED if "padding" in name else LAYOUTS)],
)
def test_a_wrong_formula_is_caught(name: str, layout: str) -> None:
    padding = 3 if layout in PADDED else 0
    cache = Cache(layout, 3, ("layers.0", "layers.1"), 2, 4, 2, padding, 2)
    right = cache.references()
    check_mutant(right, cache)
    with pytest.raises((AssertionError, RegistrationError)):
        check_mutant(right, cache, data=MUTANTS[name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wrong_block_stride_is_caught(layout: str) -> None:
    cache = Cache(layout, 3, ("layers.0", "layers.1"), 2, 4, 2, 0, 2)
    for wrong in (-2, 2):
        with pytest.raises((AssertionError, RegistrationError)):
            check_mutant(cache.references(), cache, block_stride=wrong)
