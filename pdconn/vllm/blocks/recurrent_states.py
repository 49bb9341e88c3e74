"""Recurrent states in the pieces that tensor parallelism divides.

A page of a state layer contains its states one after the other: first a short window of the
convolution's inputs, then the recurrent state (SSM, delta rule).  Ranks divide both by heads, and
the convolution's channels belong to several projections, each divided separately::

    Mamba2   conv  [ x: heads | B: groups | C: groups ]      ssm  [ heads ]
    GDN      conv  [ q: heads | k: heads | v: heads ]        ssm  [ heads of v ]
    Mamba1   conv  [ x ]                                     ssm  [ channels ]
    short convolution, linear attention: one of the two

So each piece is a chunk of ``num_heads`` parts, which ranks of another number divide as they divide
heads of attention.  With ``VLLM_SSM_CONV_STATE_LAYOUT=SD``, vLLM's default, the channels of one
token of the window are contiguous, and each token's are a chunk; with ``DS`` each piece is a chunk.

A state that cannot be divided so is one chunk, for engines with the same tensor parallelism.

Sources: vLLM's ``MambaStateShapeCalculator``; its ``MambaMixer2`` gives every rank the only
group of B and C where there is one, and divides groups otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING, Any

from pdconn.vllm.blocks.kinds import is_state, layer_spec
from registration.references import StateChunk

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import MambaSpec

_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")
_PARTS = 960
"""Channels without heads are divided into at most so many parts, for any usual number of ranks."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Parts of a rank, of ``width`` elements each; the first is part ``first`` of the model."""

    parts: int
    width: int
    first: int

    @property
    def channels(self) -> int:
        return self.parts * self.width


class _Undivided(Exception):
    """The state cannot be divided into pieces."""


def without_scratch(
    groups: Sequence[Any], ids: Sequence[Sequence[int]], num_tokens: int
) -> tuple[list[int], ...]:
    """Block ids of each group; for states up to the block of the state after ``num_tokens``."""
    # Behind it vLLM has blocks for the states after each drafted token.
    specs = [layer_spec(group.kv_cache_spec, group.layer_names[0]) for group in groups]
    return tuple(
        list(of_group[: -(-num_tokens // spec.block_size)] if is_state(spec) else of_group)
        for spec, of_group in zip(specs, ids, strict=True)
    )


def num_groups(config: Any) -> int | None:
    """Groups of B and C in the whole model, from its ``transformers`` configuration."""
    found = [getattr(config, name, None) for name in _GROUPS]
    return next((int(value) for value in found if value is not None), None)


def state_chunks(
    spec: MambaSpec, *, num_groups: int | None, tp_rank: int, tp_size: int
) -> tuple[StateChunk, ...]:
    """The chunks of a state layer's page on one rank.

    Args:
        spec: shapes and dtypes of the layer's states on this rank.
        num_groups: groups of B and C in the model; None where they are not known.
        tp_rank: the rank, of ``tp_size`` that divide the state, unless it is replicated.
    """
    if spec.tp_replicated:
        tp_rank, tp_size = 0, 1
    try:
        conv, states = _pieces(spec, num_groups, tp_rank, tp_size)
    except _Undivided:
        return (StateChunk(spec.state_content_size_bytes, first_head=tp_rank),)
    chunks: list[StateChunk] = []
    at = 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        if conv and not chunks:
            chunks += _conv_chunks(shape, conv, dtype.itemsize)
        else:
            chunks.append(_chunk(states, dtype.itemsize, at))
        at += prod(shape) * dtype.itemsize
    return tuple(chunks)


def _pieces(
    spec: MambaSpec, num_groups: int | None, tp_rank: int, tp_size: int
) -> tuple[list[_Piece], _Piece]:
    """The pieces of the convolution's window, and the parts of the state behind it."""
    kind, shapes = spec.mamba_type.name, spec.shapes
    if kind == "LINEAR" and len(shapes) == 1:
        return [], _heads(shapes[0], tp_rank)
    if kind == "SHORT_CONV" and len(shapes) == 1:
        whole = _channels(_conv_dim(shapes[0]), 1, tp_rank, tp_size)
        return [whole], whole
    if len(shapes) != 2 or kind not in ("MAMBA1", "MAMBA2", "GDN_ATTN"):
        raise _Undivided
    dim = _conv_dim(shapes[0])
    if kind == "MAMBA1":
        states = _channels(shapes[1][0], shapes[1][1], tp_rank, tp_size)
        return [_channels(dim, 1, tp_rank, tp_size)], states
    heads, head_dim, state_dim = shapes[1]
    of_heads = _Piece(heads, head_dim, heads * tp_rank)
    other = _pair(dim - of_heads.channels, state_dim)
    states = _heads(shapes[1], tp_rank)
    if kind == "GDN_ATTN":
        keys = _Piece(other, state_dim, other * tp_rank)
        return [keys, keys, of_heads], states
    if num_groups is None and tp_size > 1:
        raise _Undivided
    is_replicated = num_groups == 1
    groups = _Piece(other, state_dim, 0 if is_replicated else other * tp_rank)
    return [of_heads, groups, groups], states


def _conv_dim(shape: Sequence[int]) -> int:
    """Channels of the window; its other dimension is tokens."""
    return int(shape[0] if _is_dim_first() else shape[1])


def _is_dim_first() -> bool:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return bool(is_conv_state_dim_first())


def _heads(shape: Sequence[int], tp_rank: int) -> _Piece:
    return _Piece(shape[0], prod(shape[1:]), shape[0] * tp_rank)


def _channels(local: int, width: int, tp_rank: int, tp_size: int) -> _Piece:
    """Channels without heads, in as many parts as every usual number of ranks divides."""
    total = gcd(local * tp_size, _PARTS)
    if total % tp_size:
        raise _Undivided
    parts = total // tp_size
    return _Piece(parts, local // parts * width, parts * tp_rank)


def _pair(channels: int, width: int) -> int:
    """The parts of each of two equal pieces that fill ``channels``."""
    if channels <= 0 or channels % (2 * width):
        raise _Undivided
    return channels // (2 * width)


def _conv_chunks(shape: Sequence[int], pieces: Sequence[_Piece], itemsize: int) -> list[StateChunk]:
    chunks = []
    rows, dim = (1, shape[0] * shape[1]) if _is_dim_first() else (shape[0], shape[1])
    depth = shape[1] if _is_dim_first() else 1
    for row in range(rows):
        at = row * dim
        for piece in pieces:
            each = _Piece(piece.parts, piece.width * depth, piece.first)
            chunks.append(_chunk(each, itemsize, at * itemsize))
            at += each.channels
    return chunks


def _chunk(piece: _Piece, itemsize: int, at: int) -> StateChunk:
    return StateChunk(piece.channels * itemsize, at, piece.parts, piece.first)
