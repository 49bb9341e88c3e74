"""The KV cache of a model: the rows that layers store, and for how many tokens.

Layers that store the same kind of rows are a *sort*.  A uniform model has one sort, a hybrid model
several, and a layer may belong to more than one: DeepSeek-V4 has a window, a compressed history and
a compressor's state, with different ``part``::

    Gemma 3 27B    52 layers  sliding window 1024   16 heads   512 bytes a row
                   10 layers  full attention        16 heads   512 bytes a row
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import msgspec
from msgspec import structs

from pdconn.tools.plan.layer_states import LayerState
from pdconn.tools.plan.plan_errors import ShapeError
from registration.references import AttentionKind

MAX_LAYERS = 4096


class LayerSort(msgspec.Struct, frozen=True, tag=True):
    """Layers with one kind of KV cache.

    Attributes:
        layers: indices of the layers in the model, ascending.
        kind: full attention, a sliding window or chunked local attention.
        window: tokens of the window or chunk; None for full attention.
        heads: KV heads of the whole model.  1 for an MLA latent, which every
            tensor-parallel rank keeps whole.
        row_nbytes: bytes of one stored row of one head, K and V together.
        row_tokens: tokens that share a stored row: a compression ratio, usually 1.
        block_tokens: tokens per block if the model fixes them; None to use the engine's.
        part: name of this part of the layer, unique within the layer.
        compress_ratio: above 1 for rows that a compressor keeps of tokens not compressed yet, in a
            sliding window that it reads once per so many tokens.
        is_latent: whether rows are MLA latents.

    Raises:
        ShapeError: a value is invalid.
    """

    layers: tuple[int, ...]
    kind: AttentionKind
    window: int | None
    heads: int
    row_nbytes: int
    row_tokens: int = 1
    block_tokens: int | None = None
    part: str = "attn"
    compress_ratio: int = 1
    is_latent: bool = False

    def __post_init__(self) -> None:
        if self.kind is AttentionKind.STATE:
            raise ShapeError("kind", "attention of some kind", self.kind)
        if self.kind.is_windowed != (self.window is not None):
            raise ShapeError(f"window of {self.kind}", _window_rule(self.kind), self.window)
        if self.compress_ratio != 1 and self.kind is not AttentionKind.SLIDING_WINDOW:
            raise ShapeError(f"compress_ratio of {self.kind}", "1", self.compress_ratio)
        positive = ("heads", "row_nbytes", "row_tokens", "window", "block_tokens", "compress_ratio")
        for field in positive:
            value = getattr(self, field)
            if value is not None and value <= 0:
                raise ShapeError(field, "a number above 0", value)
        _check_layers(self.layers)

    def layer_name(self, layer: int) -> str:
        """The name by which peers match layer ``layer``.

        >>> LayerSort((0,), AttentionKind.FULL, None, 8, 512).layer_name(0)
        'layers.0.attn'
        """
        return f"layers.{layer}.{self.part}"


class StateSort(msgspec.Struct, frozen=True, tag=True):
    """Layers that keep a recurrent state per request.

    Attributes:
        layers, part: as in :class:`LayerSort`.
        state: the state of one layer.

    Raises:
        ShapeError: a value is invalid.
    """

    layers: tuple[int, ...]
    state: LayerState
    part: str = "state"

    kind: ClassVar[AttentionKind] = AttentionKind.STATE
    window: ClassVar[None] = None
    compress_ratio: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_layers(self.layers)

    def layer_name(self, layer: int) -> str:
        """The name by which peers match layer ``layer``."""
        return f"layers.{layer}.{self.part}"


Sort = LayerSort | StateSort


KV_DTYPES: Mapping[str, int] = MappingProxyType(
    {"bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
)
"""Bytes of a number in the KV cache, by the names of vLLM's ``--kv-cache-dtype``."""


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes of a token in the KV cache of the whole model, each head once.

    ``windows`` count only while the token is in a window; ``states`` once for a request of any
    length.
    """

    full: float
    windows: float
    states: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's name and its sorts of layers.

    ``item_nbytes`` are the bytes of a number in the KV cache, None if rows are packed in a format
    of the model; ``kv_dtype`` is the requested type.  ``stored_as`` is the type itself, and
    ``asked_by`` the key of a checkpoint that requests it under ``auto``, if any.
    ``numbers_heads``: vLLM reports for each layer the heads of the whole model; without that pdconn
    refuses tensor parallelism if layers differ in them.

    Raises:
        ShapeError: no sorts, or a layer whose part is in two of them.
    """

    name: str
    sorts: tuple[Sort, ...]
    item_nbytes: int | None = 2
    kv_dtype: str = "auto"
    stored_as: str = "bfloat16"
    asked_by: str = ""
    numbers_heads: bool = True

    def __post_init__(self) -> None:
        if not self.sorts:
            raise ShapeError("sorts", "at least one sort of layers", "none")
        names = [sort.layer_name(layer) for sort in self.sorts for layer in sort.layers]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ShapeError("sorts", "each layer's part once", f"{twice} twice")

    @property
    def num_layers(self) -> int:
        """Layers of the model, up to the last one with a KV cache."""
        return 1 + max(sort.layers[-1] for sort in self.sorts)

    @property
    def attention(self) -> tuple[LayerSort, ...]:
        """The sorts that keep rows of tokens."""
        return tuple(sort for sort in self.sorts if isinstance(sort, LayerSort))

    @property
    def token_bytes(self) -> TokenBytes:
        """Bytes of a token, on all ranks together and without replicas."""
        full = windows = 0.0
        for sort in self.attention:
            nbytes = len(sort.layers) * sort.heads * sort.row_nbytes / sort.row_tokens
            if sort.kind.is_windowed:
                windows += nbytes
            else:
                full += nbytes
        states = sum(len(sort.layers) * sort.state.state_nbytes(1) for sort in self.states)
        return TokenBytes(full, windows, states)

    @property
    def states(self) -> tuple[StateSort, ...]:
        """The sorts that keep states."""
        return tuple(sort for sort in self.sorts if isinstance(sort, StateSort))


def in_kv_dtype(model: ModelShape, dtype: str) -> ModelShape:
    """The model with another type of keys and values; states keep their own.

    Raises:
        ShapeError: an unknown type, or rows in a format with a fixed type.

    >>> from pdconn.tools.plan.shapes import built_in
    >>> in_kv_dtype(built_in("llama-3.1-8b"), "fp8").token_bytes.full
    65536.0
    """
    if dtype == "auto":
        return model
    if dtype not in KV_DTYPES:
        raise ShapeError("dtype", f"auto, {', '.join(KV_DTYPES)}", dtype)
    before, after = model.item_nbytes, KV_DTYPES[dtype]
    if before is None:
        raise ShapeError("dtype", f"auto for {model.name}, whose rows have one format", dtype)
    sorts = tuple(
        structs.replace(sort, row_nbytes=sort.row_nbytes // before * after)
        if isinstance(sort, LayerSort)
        else sort
        for sort in model.sorts
    )
    return replace(
        model, sorts=sorts, item_nbytes=after, kv_dtype=dtype, stored_as=dtype, asked_by=""
    )


def sorts_of(
    kinds: Sequence[AttentionKind], window: int | None, heads: int, row_nbytes: int
) -> tuple[LayerSort, ...]:
    """Sorts of a model whose layers differ only in their kind.

    Args:
        kinds: of layer 0, 1, 2 and so on.
        window: tokens of the window or chunk of all windowed layers.

    Returns:
        One sort per kind, in order of its first layer.
    """
    return tuple(
        LayerSort(
            tuple(layer for layer, other in enumerate(kinds) if other is kind),
            kind,
            window if kind.is_windowed else None,
            heads,
            row_nbytes,
        )
        for kind in dict.fromkeys(kinds)
    )


def _check_layers(layers: tuple[int, ...]) -> None:
    if not layers or list(layers) != sorted(set(layers)):
        raise ShapeError("layers", "ascending layer indices, at least one", layers)
    if layers[0] < 0 or layers[-1] >= MAX_LAYERS:
        raise ShapeError("layers", f"indices from 0 to {MAX_LAYERS - 1}", layers)


def _window_rule(kind: AttentionKind) -> str:
    return "a number of tokens" if kind.is_windowed else "none"
