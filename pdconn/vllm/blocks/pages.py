"""A layer's pages: their strides, the pieces they consist of, and the engine's view.

A backend may split a block into consecutive kernel blocks; the engine's views have a row for each.
If tokens are outermost in a block, or there is one head, this moves no byte.  In other layouts
kernel blocks are described instead of blocks::

    LBNHC  | n0: h0 h1 | n1: h0 h1 || n2: h0 h1 | n3: h0 h1 |   as unsplit
    LBHNC  | h0: n0 n1 | h1: n0 n1 || h0: n2 n3 | h1: n2 n3 |   unsplit: h0: n0 n1 n2 n3, h1: ...

Sources: vLLM's ``create_kv_cache_views`` and ``prepare_kernel_block_sizes``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import KVCacheTensor, MambaSpec

from pdconn.vllm.blocks.arrangement import Unit
from registration.references import AttentionChunk, RegistrationError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """One layer's pages, of ``num_blocks`` blocks of the engine.

    ``view`` is the one that the engine has registered, ``[B, H, N, C]``.  ``parts`` in all methods
    is the number of equal parts in which a block is described: 1, or its kernel blocks.
    """

    layer: str
    spec: Any
    layout: str
    tensor: KVCacheTensor
    num_blocks: int
    view: torch.Tensor

    @property
    def kernel_blocks(self) -> int:
        """Kernel blocks of a block: 1 unless the backend splits blocks.

        Raises:
            RegistrationError: the view's rows are no multiple of the number of blocks.
        """
        if self.view.shape[0] % self.num_blocks:
            raise RegistrationError(
                f"{self.layer}: blocks: expected a multiple of {self.num_blocks}, "
                f"got {self.view.shape[0]}"
            )
        return int(self.view.shape[0]) // self.num_blocks

    @property
    def offset(self) -> int:
        """Bytes from the start of the allocation to the first page."""
        tensor = self.tensor
        return int(tensor.offset + tensor.layers.index(self.layer) * tensor.layer_stride)

    def num_rows(self, parts: int) -> int:
        """Stored rows of each part and head."""
        return int(self.spec.get_num_kernel_states(self.spec.block_size // parts))

    def strides(self, parts: int) -> dict[str, int]:
        """Byte stride of each letter of the layout."""
        tensor, spec = self.tensor, self.spec
        fixed = {"L": tensor.layer_stride, "B": tensor.block_stride // parts}
        sizes = {"L": len(tensor.layers), "B": self.num_blocks * parts, "H": spec.num_heads}
        sizes |= {"N": self.num_rows(parts), "C": spec.state_content_size_bytes}
        strides: dict[str, int] = {}
        dense = 1
        for letter in reversed(self.layout):
            strides[letter] = fixed.get(letter, dense)
            dense = strides[letter] * sizes[letter]
        return strides

    def is_as_unsplit(self, unit: Unit) -> bool:
        """Whether a split block has the bytes of an unsplit one."""
        parts = self.kernel_blocks
        if parts == 1:
            return True
        if unit in (Unit.HEAD, Unit.PAGE):
            return False  # packed by the kernel, in blocks of its own
        whole, split = self.strides(1), self.strides(parts)
        return (
            (self.spec.num_heads == 1 or whole["H"] == split["H"])
            and whole["N"] == split["N"]
            and split["B"] == self.num_rows(parts) * split["N"]
        )

    def block_chunks(self, unit: Unit, first_head: int, parts: int) -> tuple[AttentionChunk, ...]:
        """The chunks of a part of a block.

        Raises:
            RegistrationError: a part that only moves whole is not contiguous in this layout.
        """
        spec, strides, rows = self.spec, self.strides(parts), self.num_rows(parts)
        heads, content = spec.num_heads, spec.state_content_size_bytes
        if unit is Unit.PAGE:
            if set(self.layout[:2]) != {"L", "B"}:
                raise self._scattered("pages")
            nbytes = heads * rows * content
            shard = first_head // spec.num_kv_heads
            return (AttentionChunk(1, nbytes, nbytes, None, None, shard),)
        if unit is Unit.HEAD and strides["N"] != content:
            raise self._scattered("tokens of a head")
        if unit is Unit.PLANES:
            cell = content // spec.num_kv_heads
            plane = (spec.num_kv_heads, rows * cell, cell, strides["N"], cell, first_head)
            return tuple(AttentionChunk(*plane, slot * strides["H"]) for slot in range(heads))
        by_token = unit is Unit.TOKEN
        return (
            AttentionChunk(
                num_heads=heads,
                head_nbytes=rows * content,
                head_stride=strides["H"],
                token_stride=strides["N"] if by_token else None,
                token_nbytes=content if by_token else None,
                first_head=first_head,
            ),
        )

    def check_view(self) -> None:
        """Check our strides against those of the engine's view.

        Raises:
            RegistrationError: naming those that differ.
        """
        view, parts = self.view, self.kernel_blocks
        size = view.element_size()
        strides = {"B": self.tensor.block_stride // parts}
        if not isinstance(self.spec, MambaSpec):
            strides = self.strides(parts)
        expected, seen = {"offset": self.offset}, {"offset": self._seen_offset()}
        for dim, letter in enumerate("BHN"):
            if letter in strides and view.shape[dim] > 1:
                expected[letter], seen[letter] = strides[letter], view.stride(dim) * size
        if expected != seen:
            raise RegistrationError(
                f"{self.layer}: offset and strides in bytes, {self.layout}, "
                f"kernel blocks of a block {parts}: expected {expected}, got {seen}"
            )

    def _seen_offset(self) -> int:
        return self.view.data_ptr() - self.view.untyped_storage().data_ptr()

    def _scattered(self, what: str) -> RegistrationError:
        return RegistrationError(
            f"{self.layer}: layout: expected one in which {what} are contiguous, since the "
            f"attention backend packs them together, got {self.layout}"
        )
