"""Where every layer's pages go, decided before a byte is allocated.

Layers share one allocation, side by side in its block rows, or have one each::

    rows         (num_blocks, layers, page)             [b0: L0 L1 L2 pad][b1: ...]
    head-major   (num_blocks, heads, layers, page / heads)
                                                        [b0: h0(L0 L1 L2) h1(L0 L1 L2)]...
    own          one layer, in whatever memory order it has

Rows make a block of all layers one run, also of layers whose pages differ in size;
head-major makes a block of all layers and one head one run, which is what a peer of
another tensor-parallel size asks for.

Every layer has a place of its own, unless groups *overlay*: where one pool of block ids
serves all groups, an id belongs to one group at a time, so every group may start at
byte 0 of a row.  A row is then as wide as the widest group; the part that a narrower group
does not use is never described, hence never transferred.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from registration.allocation.layers import GroupPages, Heads, LayerPages, LayerRefused
from registration.allocation.strided import Axis
from registration.references import RegistrationError


class HeadMajorRefused(LayerRefused):
    """Head-major memory was required, and this layer cannot be part of it."""


class HeadMajor(Enum):
    """Whether heads lie outside layers in memory.

    ``PREFER`` falls back to rows for every page size whose layers cannot.  Other than rows,
    head-major memory holds pages of one size, so each size has an allocation then.
    """

    NEVER = "never"
    PREFER = "prefer"
    REQUIRE = "require"


class RowOrder(StrEnum):
    """The order of axes in one allocation, from the outermost."""

    ROWS = "block, layer"
    HEAD_MAJOR = "block, head, layer"
    OWN = "the layer's own"


@dataclass(frozen=True, slots=True)
class PlacedLayer:
    """A layer's place: byte ``offset`` of its page in block 0, and its strides."""

    pages: LayerPages
    offset: int
    steps: Mapping[Axis, int]


@dataclass(frozen=True, slots=True)
class AllocationPlan:
    """One allocation: an int8 tensor of ``shape``, and the layers that lie in it."""

    order: RowOrder
    shape: tuple[int, ...]
    layers: tuple[PlacedLayer, ...]


@dataclass(frozen=True, slots=True)
class _Column:
    """A layer among those of equal page size, and which of ``of`` columns it gets.

    ``of`` counts those of its own group where groups overlay, else those of all.
    """

    pages: LayerPages
    index: int
    of: int


def plan_allocations(
    groups: Sequence[GroupPages],
    num_blocks: int,
    head_major: HeadMajor,
    *,
    overlay: bool,
    layers_apart: bool = False,
) -> tuple[AllocationPlan, ...]:
    """Place every layer: shared allocations first, then layers that cannot share one.

    With ``layers_apart`` none is shared, but for layers of several groups that overlay.

    Raises:
        LayerRefused: a layer appears twice, or counts other blocks than ``num_blocks``.
        HeadMajorRefused: ``HeadMajor.REQUIRE``, and a layer cannot be head-major.
        RegistrationError: ``num_blocks`` is not above 0, or ``layers_apart`` and head-major.
    """
    _check_layers(groups, num_blocks)
    if layers_apart:
        if head_major is not HeadMajor.NEVER:
            wanted = HeadMajor.NEVER.value
            raise RegistrationError(
                f"head_major: expected {wanted} for layers apart, got {head_major.value}"
            )
        return tuple(_apart(groups, num_blocks, overlay=overlay))
    if head_major is HeadMajor.REQUIRE:
        check_head_major([layer for group in groups for layer in group.layers])
    if head_major is HeadMajor.NEVER:
        shared = [_rows([_sharing(group) for group in groups], num_blocks, overlay=overlay)]
    else:
        shared = [
            _shared(columns, num_blocks, head_major)
            for columns in _columns_by_page_size(groups, overlay=overlay)
        ]
    alone = [
        _alone([layer], num_blocks)
        for group in groups
        for layer in group.layers
        if not layer.content.shares_rows
    ]
    return (*(plan for plan in shared if plan.layers), *alone)


def check_head_major(layers: Sequence[LayerPages]) -> None:
    """Refuse layers that cannot share an allocation with heads outside of layers.

    They need equal page bytes, heads and tokens; a memory order of block, then head; and
    no padding unless they have one head, as it would lie inside a head.

    Raises:
        HeadMajorRefused: for the first layer that does not fit.
    """
    first: LayerPages | None = None
    for layer in layers:
        heads = _outermost_heads(layer)
        if heads.num_heads > 1 and layer.page_padding:
            raise HeadMajorRefused(
                f"{layer.layer}: padding of {heads.num_heads} heads", 0, layer.page_padding
            )
        first = first or layer
        for what, expected, got in zip(
            ("heads", "tokens in a block", "page bytes"),
            _head_shape(first),
            _head_shape(layer),
            strict=True,
        ):
            if expected != got:
                wanted = f"{expected} as {first.layer} has"
                raise HeadMajorRefused(f"{layer.layer}: {what}", wanted, got)


def _outermost_heads(layer: LayerPages) -> Heads:
    heads = layer.content.heads
    if heads is None:
        raise HeadMajorRefused(f"{layer.layer}: content", "attention heads", "none that are known")
    if not heads.are_outermost:
        raise HeadMajorRefused(
            f"{layer.layer}: memory order", "block, head, ...", f"({heads.memory_axes})"
        )
    return heads


def _head_shape(layer: LayerPages) -> tuple[int | None, int | None, int]:
    heads = layer.content.heads
    assert heads is not None
    return heads.num_heads, heads.num_rows, layer.page_nbytes


def _check_layers(groups: Sequence[GroupPages], num_blocks: int) -> None:
    if num_blocks <= 0:
        raise RegistrationError(f"num_blocks: expected above 0, got {num_blocks}")
    seen: dict[str, int] = {}
    for number, group in enumerate(groups):
        for layer in group.layers:
            if layer.layer in seen:
                wanted = f"one, as in group {seen[layer.layer]}"
                raise LayerRefused(
                    f"{layer.layer}: appearances", wanted, f"another in group {number}"
                )
            seen[layer.layer] = number
            counted = layer.content.num_blocks
            if counted not in (None, num_blocks):
                raise LayerRefused(f"{layer.layer}: blocks in its shape", num_blocks, counted)


def _sharing(group: GroupPages) -> list[LayerPages]:
    return [layer for layer in group.layers if layer.content.shares_rows]


def _rows(
    groups: Sequence[Sequence[LayerPages]], num_blocks: int, *, overlay: bool
) -> AllocationPlan:
    """Every page of a group side by side, and groups behind or over each other.

    Gaps of less than an element are left where pages of several dtypes meet: a view counts in
    elements, from the first page and from row to row.
    """
    placed: list[tuple[LayerPages, int]] = []
    width = 0
    for layers in groups:
        end = 0 if overlay else width
        for layer in layers:
            offset = end + -end % layer.content.alignment
            placed.append((layer, offset))
            end = offset + layer.page_nbytes
        width = max(width, end)
    width += -width % max((layer.content.alignment for layer, _ in placed), default=1)
    shape: tuple[int, ...] = (num_blocks, width)
    if len(sizes := {layer.page_nbytes for layer, _ in placed}) == 1:
        [page] = sizes
        shape = (num_blocks, width // page, page)
    layers_at = tuple(PlacedLayer(layer, offset, {Axis.BLOCK: width}) for layer, offset in placed)
    return AllocationPlan(RowOrder.ROWS, shape, layers_at)


def _apart(
    groups: Sequence[GroupPages], num_blocks: int, *, overlay: bool
) -> Iterator[AllocationPlan]:
    """An allocation for each layer, or for each n-th layer of all groups where they overlay."""
    made: dict[tuple[int, int, int], list[LayerPages]] = {}
    for group in groups:
        used: Counter[tuple[int, int]] = Counter()
        for layer in group.layers:
            # Pages of one size and one distance divide an allocation alike, so that a block
            # of one layer is made of the same bytes as that of another.
            step = layer.content.packed_steps(layer.page_nbytes)[Axis.BLOCK]
            alike = (layer.page_nbytes, step)
            index = used[alike] if overlay else len(made)
            used[alike] += 1
            made.setdefault((*alike, index), []).append(layer)
    for layers in made.values():
        yield _alone(layers, num_blocks)


def _columns_by_page_size(
    groups: Sequence[GroupPages], *, overlay: bool
) -> Iterator[list[_Column]]:
    layers: dict[int, dict[int, list[LayerPages]]] = {}
    for number, group in enumerate(groups):
        for layer in _sharing(group):
            by_group = layers.setdefault(layer.page_nbytes, {})
            by_group.setdefault(number if overlay else 0, []).append(layer)
    for by_group in layers.values():
        yield [
            _Column(layer, index, len(some))
            for some in by_group.values()
            for index, layer in enumerate(some)
        ]


def _shared(columns: Sequence[_Column], num_blocks: int, head_major: HeadMajor) -> AllocationPlan:
    order, num_heads = _order([column.pages for column in columns], head_major)
    num_columns = max(column.of for column in columns)
    cell = columns[0].pages.page_nbytes // num_heads
    block = {Axis.BLOCK: num_heads * num_columns * cell}
    placed = []
    for column in columns:
        # Heads of a narrower group lie as close as its own layers allow, as in vLLM: all of its
        # block is one run then, and what is left of the row is behind it.
        head = {Axis.HEAD: column.of * cell} if order is RowOrder.HEAD_MAJOR else {}
        placed.append(PlacedLayer(column.pages, column.index * cell, {**block, **head}))
    shape: tuple[int, ...] = (num_blocks, num_columns, cell)
    if order is RowOrder.HEAD_MAJOR:
        shape = (num_blocks, num_heads, num_columns, cell)
    return AllocationPlan(order, shape, tuple(placed))


def _order(layers: Sequence[LayerPages], head_major: HeadMajor) -> tuple[RowOrder, int]:
    """The order of layers of equal page size, and how many heads it splits a page into."""
    assert head_major is not HeadMajor.NEVER
    try:
        check_head_major(layers)
    except HeadMajorRefused:
        return RowOrder.ROWS, 1  # REQUIRE was checked for all layers before
    return RowOrder.HEAD_MAJOR, _outermost_heads(layers[0]).num_heads


def _alone(layers: Sequence[LayerPages], num_blocks: int) -> AllocationPlan:
    """An allocation of one layer, or of layers whose pages lie alike and overlay."""
    first = layers[0]
    shape: tuple[int, ...] = (num_blocks, 1, first.page_nbytes)
    if not first.content.is_block_outermost:
        shape = (num_blocks * first.page_nbytes,)
    return AllocationPlan(
        RowOrder.OWN,
        shape,
        tuple(
            PlacedLayer(layer, 0, layer.content.packed_steps(layer.page_nbytes)) for layer in layers
        ),
    )
