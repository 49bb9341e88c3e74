"""Laws of byte references, and the six layouts by offsets worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from registration import (
    AttentionChunk,
    AttentionKind,
    GroupMemory,
    KVCacheDataReference,
    KVCacheGroupReference,
    KVCacheReferences,
    KVCacheTensorReference,
    LayerMemory,
    RegistrationError,
    StateChunk,
    build_kv_cache_references,
)
from tests.fakes.layouts import LAYOUTS, layout_memory, layout_nbytes, walked_bytes
from transport import Device, Memory

BASE = 0x10000
LAYERS = ("layers.0", "layers.1", "layers.2")

# 3 layers, 5 blocks, 2 heads, 4 tokens, 8 bytes of one token and head:
# a head of a page is 32 bytes, a page 64, a row of pages 192, a layer 320, all 960.
BY_HAND = {
    # name: (block stride, head stride, token stride, offsets of the layers)
    "LBHNC": (64, 32, 8, (0, 320, 640)),
    "LBNHC": (64, 8, 16, (0, 320, 640)),
    "LHBNC": (32, 160, 8, (0, 320, 640)),
    "BLHNC": (192, 32, 8, (0, 64, 128)),
    "BLNHC": (192, 8, 16, (0, 64, 128)),
    "BHLNC": (192, 96, 8, (0, 32, 64)),
}


def full(*layers: LayerMemory, block_tokens: int = 4) -> GroupMemory:
    return GroupMemory(AttentionKind.FULL, None, block_tokens, layers)


def small(layout: str, **changes: int) -> tuple[LayerMemory, ...]:
    sizes = {"num_blocks": 5, "num_heads": 2, "block_tokens": 4, "token_nbytes": 8} | changes
    return layout_memory(layout, base=BASE, layers=LAYERS, **sizes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_has_the_offsets_and_strides_worked_out_by_hand(layout: str) -> None:
    block_stride, head_stride, token_stride, offsets = BY_HAND[layout]
    made = build_kv_cache_references([full(*small(layout))])
    assert made.tensors == (KVCacheTensorReference(BASE, 960, 5, block_stride),)
    assert made.groups[0].data == tuple(
        KVCacheDataReference(name, 0, 0, offset, 64, 2, 0, head_stride, token_stride, 8)
        for name, offset in zip(LAYERS, offsets, strict=True)
    )


def test_a_byte_in_each_layout_lies_where_counting_by_hand_puts_it() -> None:
    # layer 1, block 2, head 1, token 3, byte 5
    by_hand = {
        "LBHNC": 320 + 2 * 64 + 32 + 3 * 8 + 5,
        "LBNHC": 320 + 2 * 64 + 3 * 16 + 8 + 5,
        "LHBNC": 320 + 160 + 2 * 32 + 3 * 8 + 5,
        "BLHNC": 2 * 192 + 64 + 32 + 3 * 8 + 5,
        "BLNHC": 2 * 192 + 64 + 3 * 16 + 8 + 5,
        "BHLNC": 2 * 192 + 96 + 32 + 3 * 8 + 5,
    }
    for layout, offset in by_hand.items():
        walked = walked_bytes(
            layout,
            base=0,
            num_blocks=5,
            layers=LAYERS,
            num_heads=2,
            block_tokens=4,
            token_nbytes=8,
        )
        assert walked[offset] == ("layers.1", 0, 2, 1, 3, 5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_of_one_cache_are_as_large_as_each_other(layout: str) -> None:
    assert small(layout)[0].allocation.nbytes == 960
    sizes = {"num_blocks": 5, "num_heads": 2, "block_tokens": 4, "token_nbytes": 8}
    assert layout_nbytes(row_layers=3, **sizes) == 960


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_layouts_with_heads_outside_pages_can_pad_only_pages_of_one_head(layout: str) -> None:
    with pytest.raises(ValueError, match="cannot pad"):
        small(layout, page_padding=16)
    assert small(layout, page_padding=16, num_heads=1)[0].allocation.nbytes == 3 * 5 * 48


@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
def test_opaque_tokens_need_contiguous_heads(layout: str) -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        small(layout, opaque=True)
    assert small(layout, opaque=True, num_heads=1)[0].chunks[0].token_stride is None


def test_layers_of_one_allocation_and_stride_share_a_tensor_reference() -> None:
    window = GroupMemory(AttentionKind.SLIDING_WINDOW, 16, 4, small("BLHNC"))
    made = build_kv_cache_references([full(*small("BLHNC")), window])
    assert len(made.tensors) == 1
    assert [group.layers for group in made.groups] == [LAYERS, LAYERS]


def test_layers_of_one_allocation_with_two_strides_are_one_memory() -> None:
    narrow = LayerMemory("narrow", Memory(BASE, 960), 0, 32, 5, (StateChunk(32),))
    made = build_kv_cache_references([full(*small("BLHNC"), narrow)])
    assert [tensor.block_stride for tensor in made.tensors] == [192, 32]
    assert made.memories() == (Memory(BASE, 960),)


def test_memories_on_two_devices_are_two_memories() -> None:
    pages = (StateChunk(64),)
    made = build_kv_cache_references(
        [
            full(
                LayerMemory("a", Memory(BASE, 640, Device("cuda", 0)), 0, 64, 10, pages),
                LayerMemory("b", Memory(BASE, 640, Device("cuda", 1)), 0, 64, 10, pages),
            )
        ]
    )
    assert [memory.device.index for memory in made.memories()] == [0, 1]


def test_a_group_has_as_many_blocks_as_its_shortest_tensor() -> None:
    pages = (StateChunk(64),)
    made = build_kv_cache_references(
        [
            full(
                LayerMemory("a", Memory(BASE, 640), 0, 64, 10, pages),
                LayerMemory("b", Memory(BASE + 640, 448), 0, 64, 7, pages),
            )
        ]
    )
    assert made.num_blocks(0) == 7


def test_the_bytes_of_a_block_leave_padding_out() -> None:
    made = build_kv_cache_references([full(*small("BLHNC", page_padding=32))])
    assert made.groups[0].block_nbytes == 3 * 64
    assert made.tensors[0].block_stride == 3 * 96


def test_a_state_layer_has_a_whole_chunk_per_state() -> None:
    chunks = (StateChunk(24), StateChunk(16, offset=32))
    layer = LayerMemory("mamba.0", Memory(BASE, 480), 0, 48, 10, chunks)
    made = build_kv_cache_references([GroupMemory(AttentionKind.STATE, None, 16, (layer,))])
    first, second = made.groups[0].data
    assert (first.chunk, first.offset, first.nbytes) == (0, 0, 24)
    assert (second.chunk, second.offset, second.nbytes) == (1, 32, 16)
    assert first.num_rows is None
    assert made.groups[0].layers == ("mamba.0",)


def test_a_chunk_that_ends_outside_its_allocation_is_refused() -> None:
    layer = LayerMemory("last", Memory(BASE, 639), 0, 64, 10, (StateChunk(64),))
    with pytest.raises(RegistrationError, match="last: ends at byte 640 of 639"):
        build_kv_cache_references([full(layer)])


def test_a_layer_that_appears_twice_in_a_group_is_refused() -> None:
    layer = small("LBHNC")[0]
    with pytest.raises(RegistrationError, match="twice"):
        build_kv_cache_references([full(layer, layer)])


@pytest.mark.parametrize("head_stride", [0, 8, 31])
def test_heads_that_overlap_are_refused(head_stride: int) -> None:
    chunk = AttentionChunk(2, 32, head_stride, token_stride=8, token_nbytes=8)
    layer = LayerMemory("l", Memory(BASE, 640), 0, 64, 10, (chunk,))
    with pytest.raises(RegistrationError, match="heads overlap"):
        build_kv_cache_references([full(layer)])


def test_tokens_that_overlap_are_refused() -> None:
    chunk = AttentionChunk(2, 32, 32, token_stride=7, token_nbytes=8)
    layer = LayerMemory("l", Memory(BASE, 640), 0, 64, 10, (chunk,))
    with pytest.raises(RegistrationError, match="tokens overlap"):
        build_kv_cache_references([full(layer)])


@pytest.mark.parametrize("block_stride", [8, 63])
def test_blocks_that_overlap_are_refused(block_stride: int) -> None:
    layer = replace(small("LBHNC")[0], block_stride=block_stride)
    with pytest.raises(RegistrationError, match="blocks overlap"):
        build_kv_cache_references([full(layer)])


@pytest.mark.parametrize("field", ["base", "nbytes", "num_blocks", "block_stride"])
def test_a_tensor_reference_has_no_empty_field(field: str) -> None:
    with pytest.raises(RegistrationError, match=f"{field}: expected above 0, got 0"):
        replace(KVCacheTensorReference(BASE, 640, 10, 64), **{field: 0})


GOOD = KVCacheDataReference("l", 0, 0, 0, 64, 2, 0, 32, 8, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "64 bytes do not divide into 3 heads"),
        ({"nbytes": 0}, "0 bytes"),
        ({"offset": -1}, "negative"),
        ({"first_head": -1}, "negative"),
        ({"token_stride": None}, "go together"),
        ({"token_nbytes": None}, "go together"),
        ({"token_nbytes": 5}, "32 bytes per head do not divide into tokens of 5"),
        ({"token_nbytes": 0}, "do not divide"),
    ],
)
def test_a_data_reference_that_contradicts_itself_is_refused(
    change: dict[str, int | None], message: str
) -> None:
    with pytest.raises(RegistrationError, match=message):
        replace(GOOD, **change)


def test_a_data_reference_ends_after_its_last_token_of_its_last_head() -> None:
    assert GOOD.extent == 64
    assert replace(GOOD, head_stride=8, token_stride=16).extent == 64
    assert replace(GOOD, head_stride=100).extent == 132
    assert replace(GOOD, token_stride=None, token_nbytes=None, head_stride=40).extent == 72


@pytest.mark.parametrize(
    ("kind", "window", "block_tokens", "message"),
    [
        (AttentionKind.FULL, 16, 4, "does not fit the kind"),
        (AttentionKind.SLIDING_WINDOW, None, 4, "does not fit the kind"),
        (AttentionKind.CHUNKED_LOCAL, 0, 4, "window: expected above 0"),
        (AttentionKind.FULL, None, 0, "block_tokens: expected above 0"),
        (AttentionKind.FULL, None, 6, "4 rows do not divide 6 tokens"),
    ],
)
def test_a_group_that_contradicts_itself_is_refused(
    kind: AttentionKind, window: int | None, block_tokens: int, message: str
) -> None:
    with pytest.raises(RegistrationError, match=message):
        KVCacheGroupReference(kind, window, block_tokens, (GOOD,))


@pytest.mark.parametrize(
    ("kind", "window", "ratio", "message"),
    [
        (AttentionKind.SLIDING_WINDOW, 8, 0, "compress_ratio: 0 is out of range"),
        (AttentionKind.SLIDING_WINDOW, 8, 1 << 63, "is out of range"),
        (AttentionKind.CHUNKED_LOCAL, 8, 4, "a compress_ratio does not fit the kind"),
        (AttentionKind.FULL, None, 4, "a compress_ratio does not fit the kind"),
    ],
)
def test_only_a_sliding_window_has_a_compress_ratio(
    kind: AttentionKind, window: int | None, ratio: int, message: str
) -> None:
    assert KVCacheGroupReference(AttentionKind.SLIDING_WINDOW, 8, 4, (GOOD,), 4).window == 8
    with pytest.raises(RegistrationError, match=message):
        KVCacheGroupReference(kind, window, 4, (GOOD,), ratio)


def test_a_group_may_store_several_tokens_in_one_row() -> None:
    assert KVCacheGroupReference(AttentionKind.FULL, None, 256, (GOOD,)).data[0].num_rows == 4


def test_a_reference_to_a_tensor_that_is_not_there_is_refused() -> None:
    group = KVCacheGroupReference(AttentionKind.FULL, None, 4, (GOOD,))
    with pytest.raises(RegistrationError, match="no tensor 0"):
        KVCacheReferences((), (group,))
