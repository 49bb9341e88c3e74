"""What tensors and pages of a layer say of themselves: their chunks, and what cannot be."""

from __future__ import annotations

import pytest
import torch

from registration import AttentionChunk, AttentionKind, RegistrationError, StateChunk
from registration.allocation.allocate import LayerRefused
from registration.allocation.contents import (
    AttentionTensor,
    OpaqueTensor,
    StateTensor,
    StateTensors,
)
from registration.allocation.layers import GroupPages, LayerPages
from registration.allocation.strided import Axis
from tests.registration.layer_pages import BLOCKS, KV, B, C, H, N, attention, full, pages


def test_keys_and_values_inside_a_token_are_one_chunk() -> None:
    fused = AttentionTensor((BLOCKS, 4, 2, 2, 3), (B, N, H, KV, C), (0, 2, 1, 3, 4), torch.int8)
    assert fused.page_chunks({B: 48}) == (AttentionChunk(2, 24, 24, 6, 6),)


def test_keys_and_values_that_lie_apart_in_a_page_are_two_chunks() -> None:
    apart = AttentionTensor((BLOCKS, 2, 4, 2, 3), (B, KV, N, H, C), (0, 1, 2, 3, 4), torch.int8)
    assert apart.page_chunks({B: 48}) == (
        AttentionChunk(2, 12, 3, 6, 3),
        AttentionChunk(2, 12, 3, 6, 3, offset=24),
    )


def test_a_head_whose_content_the_tokens_cut_through_is_opaque() -> None:
    paged = AttentionTensor((BLOCKS, 2, 3, 4, 8), (B, H, C, N, C), (0, 1, 2, 3, 4), torch.int8)
    assert paged.page_chunks({B: 192}) == (AttentionChunk(2, 96, 96, None, None),)


def test_a_head_without_a_token_axis_is_opaque() -> None:
    packed = AttentionTensor((BLOCKS, 2, 12), (B, H, C), (0, 1, 2), torch.int8)
    assert packed.page_chunks({B: 24}) == (AttentionChunk(2, 12, 12, None, None),)


def test_heads_whose_bytes_are_scattered_are_refused() -> None:
    with pytest.raises(RegistrationError, match=r"\(block, content, head, content\).*opaque"):
        AttentionTensor((BLOCKS, 2, 3, 8), (B, H, C, C), (0, 2, 1, 3), torch.int8)


def test_dimensions_of_one_do_not_decide_a_memory_order() -> None:
    odd = AttentionTensor((1, BLOCKS, 1, 4, 3), (KV, B, H, N, C), (0, 1, 4, 2, 3), torch.int8)
    single = AttentionTensor((1, BLOCKS, 4, 3), (KV, B, N, C), (0, 1, 2, 3), torch.int8)
    assert single.shares_rows
    assert single.page_chunks({B: 12}) == (AttentionChunk(1, 12, 12, 3, 3),)
    assert odd.page_chunks({B: 12}) == (AttentionChunk(1, 12, 12, None, None),)


def test_an_opaque_tensor_has_no_axis_with_a_meaning() -> None:
    with pytest.raises(RegistrationError, match="no axis 'head'"):
        OpaqueTensor((BLOCKS, 2, 24), (B, H, C), (0, 1, 2), torch.float16)


@pytest.mark.parametrize("page_nbytes", [47, 49])
def test_a_page_size_that_its_content_does_not_explain_is_refused(page_nbytes: int) -> None:
    with pytest.raises(LayerRefused, match=f"a: page bytes: expected 48 and .*{page_nbytes}"):
        LayerPages("a", attention(), page_nbytes)


def test_a_page_that_would_misalign_its_elements_is_refused() -> None:
    with pytest.raises(LayerRefused, match="a: page bytes: expected a multiple of 2, got 51"):
        LayerPages("a", attention(), 51, page_padding=3)


def test_padding_where_pages_are_scattered_is_refused() -> None:
    flash = AttentionTensor((2, BLOCKS, 4, 2), (KV, B, N, C), (0, 1, 2, 3), torch.int8)
    with pytest.raises(LayerRefused, match="flash: padding of scattered pages: expected 0, got 4"):
        LayerPages("flash", flash, 20, page_padding=4)


def test_a_state_layer_belongs_to_a_state_group_only() -> None:
    states = LayerPages("s", StateTensors((StateTensor((4,), torch.int8),)), 4)
    with pytest.raises(LayerRefused, match="s: kind of group: expected mamba, got full_attention"):
        full(states)
    with pytest.raises(LayerRefused, match=r"a: kind of group: .* got mamba"):
        GroupPages(AttentionKind.STATE, None, 4, (pages("a", attention()),))


@pytest.mark.parametrize(
    ("shape", "axes", "order"),
    [
        ((BLOCKS, 2), (B, H, C), (0, 1)),
        ((BLOCKS, 2), (B, C), (0, 0)),
        ((BLOCKS, 2), (B, C), (0,)),
        ((BLOCKS, 0), (B, C), (0, 1)),
        ((BLOCKS, 2), (H, C), (0, 1)),
        ((BLOCKS, 2), (B, B), (0, 1)),
        ((BLOCKS, 2, 2), (B, H, H), (0, 1, 2)),
        ((), (), ()),
    ],
)
def test_axes_that_do_not_fit_their_tensor_are_refused(
    shape: tuple[int, ...], axes: tuple[Axis, ...], order: tuple[int, ...]
) -> None:
    with pytest.raises(RegistrationError, match="axes"):
        AttentionTensor(shape, axes, order, torch.int8)


def test_empty_states_and_negative_heads_are_refused() -> None:
    with pytest.raises(RegistrationError, match="at least one state"):
        StateTensors(())
    with pytest.raises(RegistrationError, match="do not fit"):
        StateTensor((2, 0), torch.int8)
    with pytest.raises(RegistrationError, match="first_head"):
        AttentionTensor((BLOCKS, 2), (B, C), (0, 1), torch.int8, -1)
    with pytest.raises(RegistrationError, match="first_head"):
        StateTensor((2,), torch.int8, 2, -1)
    with pytest.raises(RegistrationError, match="num_heads: expected a divisor of 4, got 3"):
        StateTensor((4, 2), torch.int8, 3)


def test_the_parts_of_a_state_that_ranks_divide_are_heads_of_its_chunk() -> None:
    states = StateTensors((StateTensor((4, 3), torch.int8, 4, 8), StateTensor((2,), torch.int8)))
    assert states.page_chunks({B: 14}) == (StateChunk(12, 0, 4, 8), StateChunk(2, 12))
