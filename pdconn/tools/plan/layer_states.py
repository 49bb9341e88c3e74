"""Recurrent states: the bytes of one, and its division by tensor parallelism.

A state layer keeps, for each request, a short window of its convolution's inputs, token by token,
and after it the recurrent state.  Both consist of parts that ranks divide::

    Mamba2             window  [ x: heads | B: groups | C: groups ]   state  [ heads ]
    gated delta net    window  [ q: heads | k: heads | v: heads ]     state  [ heads of v ]
    Mamba1             window  [ channels ]                           state  [ channels ]
    short convolution  window  [ channels ]

Sources: vLLM's ``MambaStateShapeCalculator`` and its default order of the window, tokens outermost
(``VLLM_SSM_CONV_STATE_LAYOUT=SD``).  Speculative decoding makes windows longer, and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from registration.references import StateChunk

_CHANNEL_PARTS = 960
"""Maximum parts of channels without heads: any usual number of ranks divides it."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Equal parts of the whole model's state.

    Attributes:
        count: heads, groups or bundles of channels.
        nbytes: bytes of one part.
        is_shared: every rank keeps all of them, such as a single group of B and C.
    """

    count: int
    nbytes: int
    is_shared: bool = False

    def divides_by(self, tp: int) -> bool:
        """Whether ``tp`` ranks can hold equal numbers."""
        return self.is_shared or self.count % tp == 0

    def held(self, tp_rank: int, tp: int) -> tuple[int, int]:
        """The first part that a rank holds, and the number of parts."""
        if self.is_shared:
            return 0, self.count
        each = self.count // tp
        return tp_rank * each, each


@dataclass(frozen=True, slots=True)
class LayerState:
    """The state of one layer for one request.

    Attributes:
        window: parts of one token in the convolution's window.
        window_tokens: tokens of the window.
        recurrent: parts of the state after it; None without one.
    """

    window: tuple[Parts, ...]
    window_tokens: int
    recurrent: Parts | None = None

    @property
    def parts(self) -> tuple[Parts, ...]:
        """Every kind of parts, once."""
        return self.window if self.recurrent is None else (*self.window, self.recurrent)

    def state_nbytes(self, tp: int) -> int:
        """Bytes on one of ``tp`` ranks, without padding."""
        return sum(chunk.nbytes for chunk in self.state_chunks(0, tp))

    def state_chunks(self, tp_rank: int, tp: int) -> tuple[StateChunk, ...]:
        """The pieces of a rank's page, in their order.

        >>> LayerState((Parts(4, 2),), 2, Parts(4, 8)).state_chunks(1, 2)[-1]
        StateChunk(nbytes=16, offset=8, num_heads=2, first_head=2)
        """
        made: list[StateChunk] = []
        at = 0
        for parts in self._pieces():
            first, count = parts.held(tp_rank, tp)
            made.append(StateChunk(count * parts.nbytes, at, count, first))
            at += count * parts.nbytes
        return tuple(made)

    def _pieces(self) -> Iterator[Parts]:
        for _ in range(self.window_tokens):
            yield from self.window
        if self.recurrent is not None:
            yield self.recurrent


@dataclass(frozen=True, slots=True)
class ItemSizes:
    """Bytes of one number of the window, and of the state after it."""

    window: int
    recurrent: int


def mamba2(
    values: tuple[int, int], groups: int, state_dim: int, kernel: int, sizes: ItemSizes
) -> LayerState:
    """Granite 4 H, Falcon-H1, Nemotron-H, Bamba.

    Args:
        values: heads of x, and their dimension.
        groups: number for B and C, each of ``state_dim``.
    """
    heads, head_dim = values
    x = Parts(heads, head_dim * sizes.window)
    b_or_c = Parts(groups, state_dim * sizes.window, is_shared=groups == 1)
    recurrent = Parts(heads, head_dim * state_dim * sizes.recurrent)
    return LayerState((x, b_or_c, b_or_c), kernel - 1, recurrent)


def gated_delta_net(
    keys: tuple[int, int], values: tuple[int, int], kernel: int, sizes: ItemSizes
) -> LayerState:
    """Qwen3-Next and Qwen3.5; Kimi's KDA, where keys are like values.

    Args:
        keys: heads of the queries and of the keys, and their dimension.
        values: heads of the values, and their dimension.
    """
    q_or_k = Parts(keys[0], keys[1] * sizes.window)
    v = Parts(values[0], values[1] * sizes.window)
    recurrent = Parts(values[0], values[1] * keys[1] * sizes.recurrent)
    return LayerState((q_or_k, q_or_k, v), kernel - 1, recurrent)


def mamba1(channels: int, state_dim: int, kernel: int, sizes: ItemSizes) -> LayerState:
    """Jamba."""
    bundles = gcd(channels, _CHANNEL_PARTS)
    each = channels // bundles
    window = Parts(bundles, each * sizes.window)
    return LayerState((window,), kernel - 1, Parts(bundles, each * state_dim * sizes.recurrent))


def short_convolution(channels: int, kernel: int, sizes: ItemSizes) -> LayerState:
    """LFM2: a window without a state."""
    bundles = gcd(channels, _CHANNEL_PARTS)
    return LayerState((Parts(bundles, channels // bundles * sizes.window),), kernel - 1)
