"""The six memory layouts of vLLM as references, and a naive walker to hold them to.

A layout's name is its memory order from outer to inner: L(ayer), B(lock), H(ead),
N (tokens), C(ontent of one token and head).  ``layout_memory`` describes a cache by
multiplying sizes; ``walked_bytes`` visits its bytes one after the other and writes down
what each one is; ``described_bytes`` asks the references.  The two must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from registration import AttentionChunk, KVCacheReferences, LayerMemory
from transport import HOST, Device, Memory

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")

Label = tuple[str, int, int, int, int, int]
"""What a byte is: layer, chunk, block, head, token, and which byte of that."""


def layout_memory(
    layout: str,
    *,
    base: int,
    num_blocks: int,
    layers: Sequence[str],
    num_heads: int,
    block_tokens: int,
    token_nbytes: int,
    first_head: int = 0,
    opaque: bool = False,
    page_padding: int = 0,
    row_layers: int | None = None,
    device: Device = HOST,
) -> tuple[LayerMemory, ...]:
    """One group's layers in one allocation at ``base``, laid out as ``layout`` says.

    ``token_nbytes`` is one token of one head, K and V fused.  ``opaque`` hides the
    tokens.  ``row_layers`` is the width that the group's rows have, in layers, when
    another group needs more than ``len(layers)``: as in vLLM, heads of this group are then no
    farther apart, and what is left of a row is at its end.  The bytes needed from ``base`` on
    are those of every ``LayerMemory.allocation``, or ``layout_nbytes``.

    Raises:
        ValueError: padding or opaque tokens that this layout cannot have.
    """
    sizes = {
        "L": len(layers),
        "B": num_blocks,
        "H": num_heads,
        "N": block_tokens,
        "C": token_nbytes,
    }
    strides = _strides(layout, sizes, page_padding)
    row_nbytes = _page_nbytes(sizes, page_padding) * (row_layers or len(layers))
    if layout[0] == "B":  # a narrower group is as dense, and the rest of its rows is free
        strides["B"] = row_nbytes
    if opaque and strides["N"] != token_nbytes:
        raise ValueError(f"{layout} with {num_heads} heads: an opaque head is not contiguous")
    allocation = Memory(base, row_nbytes * num_blocks, device)
    chunk = AttentionChunk(
        num_heads,
        block_tokens * token_nbytes,
        strides["H"],
        None if opaque else strides["N"],
        None if opaque else token_nbytes,
        first_head,
    )
    return tuple(
        LayerMemory(layer, allocation, index * strides["L"], strides["B"], num_blocks, (chunk,))
        for index, layer in enumerate(layers)
    )


def layout_nbytes(
    *,
    num_blocks: int,
    row_layers: int,
    num_heads: int,
    block_tokens: int,
    token_nbytes: int,
    page_padding: int = 0,
) -> int:
    """Bytes of the allocation that ``layout_memory`` describes, the same for all layouts."""
    page = num_heads * block_tokens * token_nbytes + page_padding
    return page * row_layers * num_blocks


def walked_bytes(
    layout: str,
    *,
    base: int,
    num_blocks: int,
    layers: Sequence[str],
    num_heads: int,
    block_tokens: int,
    token_nbytes: int,
    page_padding: int = 0,
    row_layers: int | None = None,
) -> dict[int, Label]:
    """What every byte that holds data is, by address, found by walking through memory."""
    sizes = {"L": len(layers), "B": num_blocks, "H": num_heads, "N": block_tokens}
    page = num_heads * block_tokens * token_nbytes + page_padding
    missing = ((row_layers or len(layers)) - len(layers)) * page
    found: dict[int, Label] = {}
    cursor = base
    for number, indices in enumerate(product(*(range(sizes[letter]) for letter in layout[:-1]))):
        at = dict(zip(layout, indices, strict=False))
        if layout[0] == "B" and number and not any(indices[1:]):
            cursor += missing  # the next block
        for byte in range(token_nbytes):
            found[cursor] = (layers[at["L"]], 0, at["B"], at["H"], at["N"], byte)
            cursor += 1
        if at["H"] == num_heads - 1 and at["N"] == block_tokens - 1:
            cursor += page_padding
    return found


def described_bytes(references: KVCacheReferences, group: int = 0) -> dict[int, Label]:
    """What the references say every byte of a group is, by address.

    An opaque head counts as one token.

    Raises:
        AssertionError: two references claim one byte, or one outside its allocation.
    """
    found: dict[int, Label] = {}
    for ref in references.groups[group].data:
        tensor = references.tensors[ref.tensor]
        nbytes = ref.head_nbytes if ref.token_nbytes is None else ref.token_nbytes
        for block, head, token in product(
            range(tensor.num_blocks), range(ref.num_heads), range(ref.num_rows or 1)
        ):
            start = (
                tensor.base
                + block * tensor.block_stride
                + ref.offset
                + head * ref.head_stride
                + token * (ref.token_stride or 0)
            )
            assert tensor.base <= start
            assert start + nbytes <= tensor.base + tensor.nbytes, f"{ref.layer} is out of bounds"
            for byte in range(nbytes):
                label = (ref.layer, ref.chunk, block, head, token, byte)
                assert start + byte not in found, f"{label} and {found[start + byte]} overlap"
                found[start + byte] = label
    return found


def _page_nbytes(sizes: dict[str, int], page_padding: int) -> int:
    return sizes["H"] * sizes["N"] * sizes["C"] + page_padding


def _strides(layout: str, sizes: dict[str, int], page_padding: int) -> dict[str, int]:
    if layout not in LAYOUTS:
        raise ValueError(f"no layout {layout}")
    strides: dict[str, int] = {}
    nbytes, padding = 1, page_padding
    for letter in reversed(layout):
        if padding and letter in "LB":
            nbytes, padding = nbytes + padding, 0
        elif page_padding and not padding and letter in "HN" and sizes[letter] > 1:
            raise ValueError(f"{layout} with {sizes['H']} heads cannot pad pages")
        strides[letter] = nbytes
        nbytes *= sizes[letter]
    return strides
