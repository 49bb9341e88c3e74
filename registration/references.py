"""KV memory as byte references: where every head and token of a block lies.

An engine's KV cache is one or more allocations.  Each is a *tensor reference*:
a run of ``num_blocks`` block rows, ``block_stride`` bytes apart.  Inside a row,
every layer's share is a *data reference*: an offset, the heads it holds, and the
strides between heads and between tokens::

    address(block, head, token) = tensor.base + block * tensor.block_stride
                                + data.offset + head * data.head_stride
                                + token * data.token_stride

That one formula covers every layout, so no other module needs to know a
layout by name.  Layer-outermost caches have a small block stride and large data
offsets, cross-layer ones a large stride and small offsets:

    LBHNC   [L0: b0 b1 b2 ...][L1: b0 b1 b2 ...]   stride = page, offset = l * plane
    BLHNC   [b0: L0 L1 L2 ...][b1: L0 L1 L2 ...]   stride = row,  offset = l * page
    BHLNC   [b0: h0(L0 L1 ..) h1(L0 L1 ..)][b1 ..] head_stride = L * page / H

Bytes that no data reference covers (the padding of a page, the unused tail of a row
whose group has fewer layers than the widest one) are never transferred.

Layout vocabulary: vLLM's KV cache layout RFC 42082 and its ``KVCacheTensor``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from transport import HOST, Device, Memory

_ADDRESS_LIMIT = 1 << 62
"""Sums of two such numbers fit 63 bits, so that no address computed from them wraps."""


class RegistrationError(ValueError):
    """A description of KV memory is inconsistent."""


class AttentionKind(StrEnum):
    """What a KV cache group keeps, by vLLM's names (``kv_cache_spec_kind``)."""

    FULL = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local_attention"
    STATE = "mamba"

    @property
    def is_windowed(self) -> bool:
        """Whether only the blocks near the last token are still needed."""
        return self in (AttentionKind.SLIDING_WINDOW, AttentionKind.CHUNKED_LOCAL)


@dataclass(frozen=True, slots=True)
class KVCacheTensorReference:
    """One way to address an allocation in block rows.

    ``base`` is the allocation's first address and ``nbytes`` its whole size, so
    references with equal ``base`` and ``nbytes`` share one registered region
    whatever their strides.
    """

    base: int
    nbytes: int
    num_blocks: int
    block_stride: int
    device: Device = HOST

    def __post_init__(self) -> None:
        for name in ("base", "nbytes", "num_blocks", "block_stride"):
            if getattr(self, name) <= 0:
                raise RegistrationError(f"{name}: expected above 0, got {getattr(self, name)}")
            if getattr(self, name) >= _ADDRESS_LIMIT:
                raise RegistrationError(f"{name}: expected below 2^62, got {getattr(self, name)}")

    @property
    def memory(self) -> Memory:
        """The allocation, as the transport registers it."""
        return Memory(self.base, self.nbytes, self.device)


@dataclass(frozen=True, slots=True)
class KVCacheDataReference:
    """One layer's chunk of a block row.

    Attributes:
        layer: the model's name of the layer; peers are matched by it.
        chunk: index among the layer's chunks (a state layer may have several).
        tensor: index of the tensor reference it lies in.
        offset: bytes from the start of a block row to head 0, token 0.
        nbytes: unpadded bytes of the chunk in one block, all heads.
        num_heads: heads held here, or parts of a state; 1 for MLA.
        first_head: the model-wide index of the first of them.
        head_stride: bytes from one head to the next.
        token_stride: bytes from one stored token to the next within a head, or
            None when the block is opaque in tokens and moves whole (a packed CPU
            page, SSM state).
        token_nbytes: bytes of one stored token of one head; None when opaque.
    """

    layer: str
    chunk: int
    tensor: int
    offset: int
    nbytes: int
    num_heads: int
    first_head: int
    head_stride: int
    token_stride: int | None
    token_nbytes: int | None

    def __post_init__(self) -> None:
        for name in ("offset", "nbytes", "num_heads", "first_head", "head_stride"):
            if getattr(self, name) >= _ADDRESS_LIMIT:
                raise RegistrationError(f"{self.layer}: {name} {getattr(self, name)} is too large")
        if max(self.token_stride or 0, self.token_nbytes or 0) >= _ADDRESS_LIMIT:
            raise RegistrationError(f"{self.layer}: token stride {self.token_stride} is too large")
        if self.nbytes <= 0 or self.num_heads <= 0 or self.nbytes % self.num_heads:
            raise RegistrationError(
                f"{self.layer}: {self.nbytes} bytes do not divide into {self.num_heads} heads"
            )
        if self.offset < 0 or self.first_head < 0 or self.chunk < 0 or self.tensor < 0:
            raise RegistrationError(f"{self.layer}: a negative offset or index")
        if (self.token_stride is None) != (self.token_nbytes is None):
            raise RegistrationError(f"{self.layer}: token stride and token bytes go together")
        if self.token_stride is not None and self.token_nbytes is not None:
            if self.token_nbytes <= 0 or self.head_nbytes % self.token_nbytes:
                raise RegistrationError(
                    f"{self.layer}: {self.head_nbytes} bytes per head do not divide into "
                    f"tokens of {self.token_nbytes}"
                )
            if self.token_stride < self.token_nbytes:
                raise RegistrationError(f"{self.layer}: tokens overlap")
        if _overlap(self._run_nbytes, self._steps):
            raise RegistrationError(f"{self.layer}: heads overlap")

    @property
    def _run_nbytes(self) -> int:
        """Bytes that are certainly contiguous: a token of a head, or an opaque head."""
        return self.head_nbytes if self.token_nbytes is None else self.token_nbytes

    @property
    def _steps(self) -> tuple[tuple[int, int], ...]:
        """(stride, count) of heads and tokens."""
        return (self.head_stride, self.num_heads), (self.token_stride or 0, self.num_rows or 1)

    @property
    def head_nbytes(self) -> int:
        """Bytes of one head's tokens in one block."""
        return self.nbytes // self.num_heads

    @property
    def num_rows(self) -> int | None:
        """Stored tokens per block and head, or None when opaque."""
        return None if self.token_nbytes is None else self.head_nbytes // self.token_nbytes

    @property
    def extent(self) -> int:
        """Bytes from ``offset`` to the end of the last byte of the chunk."""
        within = self.head_nbytes
        if self.token_stride is not None and self.token_nbytes is not None:
            rows = self.head_nbytes // self.token_nbytes
            within = (rows - 1) * self.token_stride + self.token_nbytes
        return (self.num_heads - 1) * self.head_stride + within


@dataclass(frozen=True, slots=True)
class KVCacheGroupReference:
    """Layers that share a block table.

    ``window`` is the sliding window or the chunk in tokens, None for full
    attention and state.  ``block_tokens`` counts tokens of the sequence, also
    where the engine stores several of them in one row.  ``compress_ratio`` is above 1
    for what a compressor keeps of tokens that it has yet to compress: every so many
    tokens it reads its window, and at no other.
    """

    kind: AttentionKind
    window: int | None
    block_tokens: int
    data: tuple[KVCacheDataReference, ...]
    compress_ratio: int = 1

    def __post_init__(self) -> None:
        if self.block_tokens <= 0:
            raise RegistrationError(f"block_tokens: expected above 0, got {self.block_tokens}")
        if self.kind.is_windowed != (self.window is not None):
            raise RegistrationError(f"{self.kind}: window {self.window} does not fit the kind")
        if self.window is not None and self.window <= 0:
            raise RegistrationError(f"window: expected above 0, got {self.window}")
        if self.compress_ratio <= 0 or self.compress_ratio >= _ADDRESS_LIMIT:
            raise RegistrationError(f"compress_ratio: {self.compress_ratio} is out of range")
        if self.compress_ratio > 1 and self.kind is not AttentionKind.SLIDING_WINDOW:
            raise RegistrationError(f"{self.kind}: a compress_ratio does not fit the kind")
        if max(self.block_tokens, self.window or 0) >= _ADDRESS_LIMIT:
            raise RegistrationError(f"block_tokens: expected below 2^62, got {self.block_tokens}")
        keys = [(ref.layer, ref.chunk) for ref in self.data]
        if len(set(keys)) != len(keys):
            raise RegistrationError("a layer's chunk is described twice in one group")
        for ref in self.data:
            if ref.num_rows is not None and self.block_tokens % ref.num_rows:
                raise RegistrationError(
                    f"{ref.layer}: {ref.num_rows} rows do not divide {self.block_tokens} tokens"
                )

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the group's layers, each once, in order."""
        return tuple(dict.fromkeys(ref.layer for ref in self.data))

    @property
    def block_nbytes(self) -> int:
        """Unpadded bytes of one block, all layers."""
        return sum(ref.nbytes for ref in self.data)


@dataclass(frozen=True, slots=True)
class KVCacheReferences:
    """All KV memory of one worker: its allocations and its groups."""

    tensors: tuple[KVCacheTensorReference, ...]
    groups: tuple[KVCacheGroupReference, ...]

    def __post_init__(self) -> None:
        for index, group in enumerate(self.groups):
            for ref in group.data:
                if ref.tensor >= len(self.tensors):
                    raise RegistrationError(f"group {index}: no tensor {ref.tensor}")
                tensor = self.tensors[ref.tensor]
                last = (tensor.num_blocks - 1) * tensor.block_stride + ref.offset + ref.extent
                if last > tensor.nbytes:
                    raise RegistrationError(
                        f"group {index}, {ref.layer}: ends at byte {last} of {tensor.nbytes}"
                    )
                blocks = (tensor.block_stride, tensor.num_blocks)
                if _overlap(ref._run_nbytes, (*ref._steps, blocks)):
                    raise RegistrationError(f"group {index}, {ref.layer}: blocks overlap")

    def memories(self) -> tuple[Memory, ...]:
        """The distinct allocations, one region each, in order of first use."""
        return tuple(dict.fromkeys(tensor.memory for tensor in self.tensors))

    def without_addresses(self) -> KVCacheReferences:
        """The same shapes, with every allocation at a made-up base."""
        return replace(self, tensors=tuple(replace(t, base=1 << 12) for t in self.tensors))

    def num_blocks(self, group: int) -> int:
        """Block rows that every tensor of ``group`` has."""
        return min((self.tensors[r.tensor].num_blocks for r in self.groups[group].data), default=0)


@dataclass(frozen=True, slots=True)
class AttentionChunk:
    """Keys and values (or one of the two, or an MLA latent) inside a layer's page.

    ``offset`` counts from the start of the page.  ``head_nbytes`` are the unpadded
    bytes of one head in one block.  ``token_stride`` and ``token_nbytes`` as in
    :class:`KVCacheDataReference`.
    """

    num_heads: int
    head_nbytes: int
    head_stride: int
    token_stride: int | None
    token_nbytes: int | None
    first_head: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class StateChunk:
    """A recurrent state inside a layer's page, or a piece of it: moved whole or not at all.

    What tensor parallelism divides consists of ``num_heads`` parts of equal size, one behind the
    other; the first is the model's part ``first_head``.  ``nbytes`` are those of all parts.
    """

    nbytes: int
    offset: int = 0
    num_heads: int = 1
    first_head: int = 0


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """One layer's pages: block b starts at ``allocation.base + offset + b * block_stride``."""

    layer: str
    allocation: Memory
    offset: int
    block_stride: int
    num_blocks: int
    chunks: tuple[AttentionChunk | StateChunk, ...]


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """The layers of one KV cache group, before references are made of them."""

    kind: AttentionKind
    window: int | None
    block_tokens: int
    layers: tuple[LayerMemory, ...]
    compress_ratio: int = 1


def build_kv_cache_references(groups: Sequence[GroupMemory]) -> KVCacheReferences:
    """Describe per-layer memory by byte references.

    Layers that lie in one allocation with one block stride share a tensor
    reference, so a cross-layer cache has one tensor per stride however many
    layers it holds.

    Args:
        groups: the engine's KV cache groups in its own order.

    Returns:
        References whose groups are in the order given, and whose layers are in
        the order given within each group.

    Raises:
        RegistrationError: a chunk reaches outside its allocation, overlaps
            itself, or is described twice.

    Example:
        >>> pages = Memory(0x1000, 4 * 64)
        >>> chunk = AttentionChunk(2, 32, head_stride=32, token_stride=8, token_nbytes=8)
        >>> layer = LayerMemory("layers.0", pages, 0, 64, 4, (chunk,))
        >>> made = build_kv_cache_references(
        ...     [GroupMemory(AttentionKind.FULL, None, 4, (layer,))])
        >>> made.groups[0].data[0].head_nbytes
        32
    """
    tensors: dict[KVCacheTensorReference, int] = {}
    built = []
    for group in groups:
        data = []
        for layer in group.layers:
            tensor = KVCacheTensorReference(
                layer.allocation.base,
                layer.allocation.nbytes,
                layer.num_blocks,
                layer.block_stride,
                layer.allocation.device,
            )
            index = tensors.setdefault(tensor, len(tensors))
            data += [
                _reference(layer, number, index, chunk) for number, chunk in enumerate(layer.chunks)
            ]
        built.append(
            KVCacheGroupReference(
                group.kind, group.window, group.block_tokens, tuple(data), group.compress_ratio
            )
        )
    return KVCacheReferences(tuple(tensors), tuple(built))


def _overlap(run_nbytes: int, steps: Iterable[tuple[int, int]]) -> bool:
    """Whether a run repeated at every (stride, count) overlaps itself, or interleaves.

    In every real layout one step's repetitions end before the next larger step begins.
    """
    for stride, count in sorted(step for step in steps if step[1] > 1):
        if stride < run_nbytes:
            return True
        run_nbytes += (count - 1) * stride
    return False


def _reference(
    layer: LayerMemory, number: int, tensor: int, chunk: AttentionChunk | StateChunk
) -> KVCacheDataReference:
    offset = layer.offset + chunk.offset
    if isinstance(chunk, StateChunk):
        heads, each = chunk.num_heads, chunk.nbytes // chunk.num_heads
        where = (layer.layer, number, tensor, offset)
        return KVCacheDataReference(*where, chunk.nbytes, heads, chunk.first_head, each, None, None)
    return KVCacheDataReference(
        layer.layer,
        number,
        tensor,
        offset,
        chunk.num_heads * chunk.head_nbytes,
        chunk.num_heads,
        chunk.first_head,
        chunk.head_stride,
        chunk.token_stride,
        chunk.token_nbytes,
    )
