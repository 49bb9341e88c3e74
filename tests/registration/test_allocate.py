"""Cross-layer allocation: where layers lie, what is refused, and what views guarantee."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from registration import (
    AttentionKind,
    GroupMemory,
    RegistrationError,
    StateChunk,
    build_kv_cache_references,
)
from registration.allocation import (
    AttentionTensor,
    GroupPages,
    HeadMajor,
    HeadMajorRefused,
    LayerPages,
    LayerRefused,
    LayerView,
    OpaqueTensor,
    RowOrder,
    StateTensor,
    StateTensors,
    allocate,
)
from registration.allocation.allocate import HUGE_PAGE_NBYTES
from tests.registration.layer_pages import (
    BLOCKS,
    KV,
    B,
    C,
    H,
    N,
    attention,
    full,
    latent,
    pages,
    shapes,
    window,
)

NHD = AttentionTensor((BLOCKS, 2, 4, 3), (B, H, N, C), (0, 2, 1, 3), torch.float16)
FLASH = AttentionTensor((2, BLOCKS, 4, 3), (KV, B, N, C), (0, 1, 2, 3), torch.float16)
UNKNOWN = OpaqueTensor((BLOCKS, 24), (B, C), (0, 1), torch.float16)


def one(view: LayerView) -> torch.Tensor:
    assert isinstance(view, torch.Tensor)
    return view


def test_layers_of_equal_pages_share_one_tensor_of_blocks_then_layers() -> None:
    made = allocate([full(*(pages(f"l{i}", attention()) for i in range(3)))], BLOCKS)
    assert shapes(made) == [(BLOCKS, 3, 48)]
    assert made.allocations[0].tensor.dtype == torch.int8
    assert made.allocations[0].order is RowOrder.ROWS
    assert [ref.offset for ref in made.references.groups[0].data] == [0, 48, 96]
    assert {tensor.block_stride for tensor in made.references.tensors} == {144}


def test_pages_of_unequal_sizes_lie_side_by_side_in_one_row() -> None:
    made = allocate(
        [full(pages("a", attention()), pages("b", attention(dim=4)), pages("c", attention()))],
        BLOCKS,
    )
    assert shapes(made) == [(BLOCKS, 48 + 64 + 48)]
    assert [ref.offset for ref in made.references.groups[0].data] == [0, 48, 48 + 64]
    assert made.references.groups[0].layers == ("a", "b", "c")
    assert list(made.views) == ["a", "b", "c"]


def test_pages_of_several_dtypes_leave_gaps_so_that_each_is_aligned() -> None:
    odd, even = attention(1, 1, 3, torch.int8), attention(1, 1, 1, torch.float32)
    made = allocate([full(pages("odd", odd), pages("even", even), pages("last", odd))], BLOCKS)
    assert [ref.offset for ref in made.references.groups[0].data] == [0, 4, 8]
    assert shapes(made) == [(BLOCKS, 12)], "a row ends where the next may begin"


def test_head_major_each_page_size_has_an_allocation_of_its_own() -> None:
    layers = (pages("a", attention()), pages("b", attention(dim=4)), pages("c", attention()))
    made = allocate([full(*layers)], BLOCKS, head_major=HeadMajor.PREFER)
    assert shapes(made) == [(BLOCKS, 2, 2, 24), (BLOCKS, 2, 1, 32)]


def test_layers_apart_have_an_allocation_each_which_groups_may_share() -> None:
    groups = [full(pages("f0", attention()), pages("f1", NHD)), window(pages("w0", attention()))]
    for overlay, expected in ((False, [(BLOCKS, 1, 48)] * 3), (True, [(BLOCKS, 1, 48)] * 2)):
        made = allocate(groups, BLOCKS, overlay=overlay, layers_apart=True)
        assert shapes(made) == expected
        assert {one.order for one in made.allocations} == {RowOrder.OWN}
        [first, _], [of_window] = (group.data for group in made.references.groups)
        assert (first.tensor == of_window.tensor) is overlay


def test_scattered_pages_overlay_only_those_that_are_scattered_alike() -> None:
    twin, other = pages("twin", FLASH), pages("other", attention(2, 4, 3))
    groups = [full(pages("flash", FLASH)), window(twin, other)]
    made = allocate(groups, BLOCKS, overlay=True, layers_apart=True)
    assert shapes(made) == [(BLOCKS * 48,), (BLOCKS, 1, 48)]
    assert made.groups[0].layers[0].allocation == made.groups[1].layers[0].allocation


@pytest.mark.parametrize("head_major", [HeadMajor.PREFER, HeadMajor.REQUIRE])
def test_layers_apart_are_not_head_major(head_major: HeadMajor) -> None:
    expected = f"head_major: expected never for layers apart, got {head_major.value}"
    with pytest.raises(RegistrationError, match=expected):
        allocate([full(pages("a", attention()))], BLOCKS, head_major=head_major, layers_apart=True)


def test_an_engine_may_bring_the_memory() -> None:
    arena = torch.arange(1000, dtype=torch.int16).view(torch.int8)
    taken = [0]

    def empty(nbytes: int) -> torch.Tensor:
        taken.append(taken[-1] + nbytes)
        return arena[taken[-2] : taken[-1]]

    layers = (pages("a", attention()), pages("b", attention(dim=4)))
    made = allocate([full(*layers)], BLOCKS, layers_apart=True, empty=empty)
    assert taken == [0, BLOCKS * 48, BLOCKS * (48 + 64)]
    bases = [one.memory.base - arena.data_ptr() for one in made.allocations]
    assert bases == taken[:2]
    assert one(made.views["b"]).data_ptr() == arena.data_ptr() + BLOCKS * 48


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(BLOCKS * 48 + 1, dtype=torch.int8),
        torch.zeros(BLOCKS * 48, dtype=torch.uint8),
        torch.zeros(2 * BLOCKS * 48, dtype=torch.int8)[::2],
    ],
)
def test_memory_of_another_kind_than_was_asked_for_is_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(RegistrationError, match=f"empty: expected {BLOCKS * 48} contiguous int8"):
        allocate([full(pages("a", attention()))], BLOCKS, empty=lambda _: wrong)


def test_head_major_memory_is_blocks_then_heads_then_layers() -> None:
    layers = [pages(f"l{i}", attention()) for i in range(3)]
    made = allocate([full(*layers)], BLOCKS, head_major=HeadMajor.REQUIRE)
    assert shapes(made) == [(BLOCKS, 2, 3, 24)]
    assert made.allocations[0].order is RowOrder.HEAD_MAJOR
    first, second, _ = made.references.groups[0].data
    assert (first.offset, second.offset) == (0, 24)
    assert first.head_stride == 72
    assert one(made.views["l1"]).stride() == (72, 36, 3, 1)


def test_a_view_has_the_layers_own_shape_dtype_and_memory_order() -> None:
    nhd = AttentionTensor((BLOCKS, 2, 4, 3), (B, H, N, C), (0, 2, 1, 3), torch.bfloat16)
    made = allocate([full(pages("a", nhd), pages("b", attention()))], BLOCKS)
    view = one(made.views["a"])
    assert (view.shape, view.dtype) == ((BLOCKS, 2, 4, 3), torch.bfloat16)
    assert view.stride() == (48, 3, 6, 1)
    assert view.data_ptr() == made.allocations[0].memory.base
    assert one(made.views["b"]).stride() == (48, 12, 3, 1)


def test_views_share_their_allocations_storage_and_start_as_zeros() -> None:
    made = allocate([full(pages("a", attention()), pages("b", attention()))], BLOCKS)
    (allocation,) = made.allocations
    for view in made.views.values():
        storage = one(view).untyped_storage()
        assert storage.data_ptr() == allocation.tensor.untyped_storage().data_ptr()
    assert not allocation.tensor.any()


def test_references_are_those_of_the_described_groups() -> None:
    made = allocate([full(pages("a", attention())), window(pages("b", latent()))], BLOCKS)
    assert all(isinstance(group, GroupMemory) for group in made.groups)
    assert made.references == build_kv_cache_references(made.groups)
    assert [group.kind for group in made.references.groups] == [
        AttentionKind.FULL,
        AttentionKind.SLIDING_WINDOW,
    ]
    assert made.references.groups[1].window == 8


def test_groups_have_columns_of_their_own_without_overlay() -> None:
    made = allocate(
        [full(*(pages(f"f{i}", attention()) for i in range(3))), window(pages("w", attention()))],
        BLOCKS,
    )
    assert shapes(made) == [(BLOCKS, 4, 48)]
    assert made.references.groups[1].data[0].offset == 144


def test_overlaid_groups_share_rows_as_wide_as_the_widest() -> None:
    made = allocate(
        [window(pages("w", attention())), full(*(pages(f"f{i}", attention()) for i in range(3)))],
        BLOCKS,
        overlay=True,
    )
    assert shapes(made) == [(BLOCKS, 3, 48)]
    assert [ref.offset for ref in made.references.groups[0].data] == [0]
    assert [ref.offset for ref in made.references.groups[1].data] == [0, 48, 96]
    assert made.references.groups[0].block_nbytes == 48  # the tail of 96 is not described


def test_overlay_works_head_major_too() -> None:
    made = allocate(
        [window(pages("w", attention())), full(*(pages(f"f{i}", attention()) for i in range(3)))],
        BLOCKS,
        overlay=True,
        head_major=HeadMajor.REQUIRE,
    )
    assert shapes(made) == [(BLOCKS, 2, 3, 24)]
    narrow, wide = (group.data[0] for group in made.references.groups)
    assert (narrow.head_stride, wide.head_stride) == (24, 72), "as close as its layers allow"
    assert {tensor.block_stride for tensor in made.references.tensors} == {144}


def test_a_latent_is_one_head_that_starts_at_zero() -> None:
    made = allocate([full(pages("a", latent()), pages("b", latent()))], BLOCKS)
    ref = made.references.groups[0].data[1]
    assert (ref.num_heads, ref.first_head, ref.num_rows, ref.token_nbytes) == (1, 0, 4, 6)


def test_the_first_head_of_a_rank_is_passed_on() -> None:
    part = AttentionTensor((BLOCKS, 2, 4, 3), (B, H, N, C), (0, 1, 2, 3), torch.float16, 6)
    made = allocate([full(pages("a", part))], BLOCKS)
    assert made.references.groups[0].data[0].first_head == 6


def test_keys_first_tensors_are_alone_and_have_a_chunk_of_keys_and_one_of_values() -> None:
    flash = AttentionTensor((2, BLOCKS, 4, 2, 3), (KV, B, N, H, C), (0, 1, 2, 3, 4), torch.float16)
    # its page is as large as the others', and still it is not laid among them
    made = allocate([full(pages("a", attention(dim=6)), pages("flash", flash))], BLOCKS)
    assert shapes(made) == [(BLOCKS, 1, 96), (BLOCKS * 96,)]
    assert made.allocations[1].order is RowOrder.OWN
    _, keys, values = made.references.groups[0].data
    assert (keys.chunk, keys.offset, keys.nbytes) == (0, 0, 48)
    assert (values.chunk, values.offset, values.nbytes) == (1, BLOCKS * 48, 48)
    assert (keys.head_stride, keys.token_stride, keys.token_nbytes) == (6, 12, 6)
    assert made.references.tensors[keys.tensor].block_stride == 48
    assert one(made.views["flash"]).is_contiguous()


def test_a_layer_of_unknown_kind_is_alone_and_moves_whole() -> None:
    unknown = OpaqueTensor((BLOCKS, 24), (B, C), (0, 1), torch.float16)
    made = allocate(
        [full(pages("a", attention()), pages("unknown", unknown), pages("b", attention()))], BLOCKS
    )
    assert shapes(made) == [(BLOCKS, 2, 48), (BLOCKS, 1, 48)]
    assert made.groups[0].layers[1].chunks == (StateChunk(48),)
    assert one(made.views["unknown"]).shape == (BLOCKS, 24)


def test_an_unknown_layer_with_inner_blocks_has_a_chunk_per_outer_index() -> None:
    unknown = OpaqueTensor((2, 3, BLOCKS, 4), (C, C, B, C), (1, 0, 2, 3), torch.float16)
    made = allocate([full(pages("unknown", unknown))], BLOCKS)
    chunks = made.groups[0].layers[0].chunks
    assert [(chunk.nbytes, chunk.offset) for chunk in chunks if isinstance(chunk, StateChunk)] == [
        (8, i * BLOCKS * 8) for i in range(6)
    ]


def test_states_are_packed_into_a_page_each_aligned_to_its_elements() -> None:
    states = StateTensors((StateTensor((3, 3), torch.int8), StateTensor((2, 2), torch.float32)))
    assert states.page_nbytes == 12 + 16
    layer = LayerPages("mamba", states, 32, page_padding=4)
    made = allocate([GroupPages(AttentionKind.STATE, None, 4, (layer,))], BLOCKS)
    assert made.groups[0].layers[0].chunks == (StateChunk(9), StateChunk(16, offset=12))
    conv, ssm = made.views["mamba"]
    assert (conv.shape, conv.dtype, conv.stride()) == ((BLOCKS, 3, 3), torch.int8, (32, 3, 1))
    assert (ssm.shape, ssm.dtype, ssm.stride()) == ((BLOCKS, 2, 2), torch.float32, (8, 2, 1))
    assert ssm.data_ptr() == conv.data_ptr() + 12


def test_state_and_attention_pages_of_one_size_share_rows() -> None:
    states = StateTensors((StateTensor((5,), torch.float32),))
    mamba = GroupPages(AttentionKind.STATE, None, 4, (LayerPages("mamba", states, 48, 28),))
    made = allocate([full(pages("a", attention())), mamba], BLOCKS, overlay=True)
    assert shapes(made) == [(BLOCKS, 1, 48)]
    assert [group.block_nbytes for group in made.references.groups] == [48, 20]


def test_large_allocations_start_at_a_huge_page() -> None:
    large = AttentionTensor((BLOCKS, 2, 4, 1 << 16), (B, H, N, C), (0, 1, 2, 3), torch.int8)
    made = allocate([full(pages("a", large), pages("b", large))], BLOCKS)
    (allocation,) = made.allocations
    assert allocation.memory.nbytes == allocation.tensor.nbytes == BLOCKS * 2 * large.page_nbytes
    assert allocation.memory.base == allocation.tensor.data_ptr()
    assert allocation.memory.base % HUGE_PAGE_NBYTES == 0


def test_a_layer_in_two_groups_is_refused() -> None:
    with pytest.raises(LayerRefused, match="a: appearances: expected one, as in group 0"):
        allocate([full(pages("a", attention())), window(pages("a", attention()))], BLOCKS)


def test_a_layer_that_counts_other_blocks_is_refused() -> None:
    with pytest.raises(LayerRefused, match="a: blocks in its shape: expected 6, got 5"):
        allocate([full(pages("a", attention()))], 6)


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_there_is_at_least_one_block(num_blocks: int) -> None:
    with pytest.raises(RegistrationError, match="num_blocks: expected above 0"):
        allocate([full()], num_blocks)


def test_memory_that_no_transport_can_register_is_refused() -> None:
    with pytest.raises(RegistrationError, match="expected cpu or cuda, got meta"):
        allocate([full(pages("a", attention()))], BLOCKS, device=torch.device("meta"))


CANNOT = {
    "heads": (pages("odd", attention(heads=4, tokens=2)), "2 as first has", "4"),
    "tokens in a block": (pages("odd", attention(tokens=2, dim=6)), "4 as first has", "2"),
    "page bytes": (pages("odd", attention(dim=4)), "48 as first has", "64"),
    "padding of 2 heads": (pages("odd", attention(), padding=8), "0", "8"),
    "memory order": (pages("odd", NHD), "block, head", r"\(block, token, head, content\)"),
    "content": (pages("odd", UNKNOWN), "attention heads", "none that are known"),
}


@pytest.mark.parametrize("what", CANNOT)
def test_required_head_major_names_the_layer_what_was_expected_and_what_came(what: str) -> None:
    odd, expected, got = CANNOT[what]
    groups = [full(pages("first", attention())), window(odd)]
    with pytest.raises(HeadMajorRefused, match=f"odd: {what}: expected {expected}.*, got {got}"):
        allocate(groups, BLOCKS, head_major=HeadMajor.REQUIRE)


@pytest.mark.parametrize(
    ("what", "first", "odd"),
    [
        ("heads", RowOrder.ROWS, RowOrder.ROWS),
        ("tokens in a block", RowOrder.ROWS, RowOrder.ROWS),
        ("page bytes", RowOrder.HEAD_MAJOR, RowOrder.HEAD_MAJOR),
        ("padding of 2 heads", RowOrder.HEAD_MAJOR, RowOrder.ROWS),
        ("memory order", RowOrder.ROWS, RowOrder.ROWS),
        ("content", RowOrder.HEAD_MAJOR, RowOrder.OWN),
    ],
)
def test_preferred_head_major_falls_back_only_for_the_page_size_that_cannot(
    what: str, first: RowOrder, odd: RowOrder
) -> None:
    groups = [
        full(pages("first", attention()), pages("good", attention(dim=9))),
        window(CANNOT[what][0]),
    ]
    made = allocate(groups, BLOCKS, head_major=HeadMajor.PREFER)
    orders = {allocation.memory: allocation.order for allocation in made.allocations}
    got = {layer.layer: orders[layer.allocation] for group in made.groups for layer in group.layers}
    assert got == {"first": first, "good": RowOrder.HEAD_MAJOR, "odd": odd}


def test_scattered_pages_cannot_be_head_major() -> None:
    with pytest.raises(HeadMajorRefused, match="flash: memory order"):
        allocate([full(pages("flash", FLASH))], BLOCKS, head_major=HeadMajor.REQUIRE)


def test_padded_pages_of_one_head_can_be_head_major() -> None:
    layers = [pages(name, latent(), padding=8) for name in ("a", "b")]
    made = allocate([full(*layers)], BLOCKS, head_major=HeadMajor.REQUIRE)
    assert shapes(made) == [(BLOCKS, 1, 2, 32)]
    assert made.references.groups[0].block_nbytes == 48


def test_registration_is_imported_without_torch() -> None:
    code = "import registration, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
