"""Memory in each layout that vLLM names lies byte by byte as a naive walker of that name says."""

from __future__ import annotations

import pytest
import torch

from pdconn.planning.layouts import LAYOUTS
from registration import AttentionKind, RegistrationError
from registration.allocation import (
    GroupPages,
    KVCacheAllocation,
    LayerPages,
    allocate_in,
    attention_in,
)
from registration.allocation.named import STRIDE_ORDERS
from tests.fakes.layouts import described_bytes, walked_bytes

BLOCKS, HEADS, TOKENS, CONTENT = 5, 2, 4, 3
WIDEST, NARROW = ("a", "b", "c"), ("d", "e")


def made_in(layout: str, *, overlay: bool, heads: int = HEADS) -> KVCacheAllocation:
    """A group of three layers and one of two, in one piece of memory."""
    content = attention_in(layout, (BLOCKS, heads, TOKENS, CONTENT), torch.int8, first_head=2)
    arena = torch.zeros(len(WIDEST + NARROW) * BLOCKS * content.page_nbytes, dtype=torch.int8)
    used = [0]

    def empty(nbytes: int) -> torch.Tensor:
        used.append(used[-1] + nbytes)
        return arena[used[-2] : used[-1]]

    wide, narrow = (
        tuple(LayerPages(name, content, content.page_nbytes) for name in names)
        for names in (WIDEST, NARROW)
    )
    groups = [
        GroupPages(AttentionKind.FULL, None, TOKENS, wide),
        GroupPages(AttentionKind.SLIDING_WINDOW, 8, TOKENS, narrow),
    ]
    return allocate_in(layout, groups, BLOCKS, overlay=overlay, empty=empty)


def test_every_layout_is_known() -> None:
    assert tuple(sorted(STRIDE_ORDERS)) == tuple(sorted(LAYOUTS))


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_lies_as_its_name_says(layout: str, heads: int) -> None:
    made = made_in(layout, overlay=True, heads=heads)
    base = made.allocations[0].memory.base
    for number, names in enumerate((WIDEST, NARROW)):
        walked = walked_bytes(
            layout,
            base=base,
            num_blocks=BLOCKS,
            layers=names,
            num_heads=heads,
            block_tokens=TOKENS,
            token_nbytes=CONTENT,
            row_layers=len(WIDEST),
        )
        assert described_bytes(made.references, number) == walked
        assert {ref.first_head for ref in made.references.groups[number].data} == {2}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_two_layouts_lie_alike(layout: str) -> None:
    """Negative control."""
    lie = {}
    for name in LAYOUTS:
        described = described_bytes(made_in(name, overlay=True).references)
        lie[name] = {at - min(described): label for at, label in described.items()}
    assert list(lie.values()).count(lie[layout]) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_that_do_not_overlay_share_no_byte(layout: str) -> None:
    made = made_in(layout, overlay=False)
    full, window = (set(described_bytes(made.references, number)) for number in (0, 1))
    assert not full & window
    overlaid = made_in(layout, overlay=True).references
    assert set(described_bytes(overlaid, 1)) < set(described_bytes(overlaid, 0))


@pytest.mark.parametrize("layout", ["", "blhnc", "HBLNC"])
def test_a_layout_that_is_not_there_is_named(layout: str) -> None:
    with pytest.raises(RegistrationError, match=f"layout: expected one of LBHNC, .* got {layout}"):
        allocate_in(layout, [], 1)
    with pytest.raises(RegistrationError, match="layout: expected one of LBHNC"):
        attention_in(layout, (1, 1, 1, 1), torch.int8)
