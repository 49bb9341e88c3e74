"""Which blocks hold the state at a boundary, in the step that computes it.

With prefix caching (``align``) vLLM keeps a state in a block of its own where a pass ends, and
leaves holes elsewhere.  A pass ends at a multiple of the block wherever it can; on a GPU the last
one of a prompt goes to the end, and the layer exports the state at the last multiple before::

    pass          [ 0 ......... 2B )[ 2B ..... 3B )[ 3B .. N )
    blocks          -   7             -  -   4       -  -  4  9
    state at            2B                   3B            3B N

So the block at a boundary's place holds its state if a pass ends there, or has ended there just
before, and vLLM offers others with their boundary (``boundary_state_offloads``).  Any other
block may hold a state of other tokens, and is treated as a hole.

A pass also ends where prompts part, as vLLM's own cache or the store has seen it: there the
second prompt of several leaves a state for the third.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pdconn.store.store_errors import FormatError
from pdconn.vllm.blocks.kinds import is_state, layer_spec

Offer = tuple[int, int, int]
"""vLLM's: number of the group, block, boundary in tokens."""


@dataclass(frozen=True, slots=True)
class _StateGroup:
    """Place among the groups transferred, vLLM's number, tokens of a block."""

    place: int
    number: int
    block_tokens: int
    speculates: bool


@dataclass(frozen=True, slots=True)
class StateGroups:
    """The groups of an engine that keep states."""

    groups: tuple[_StateGroup, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.groups)

    @classmethod
    def from_kv_cache_config(cls, config: Any) -> StateGroups:
        """From vLLM's ``KVCacheConfig``.

        Raises:
            FormatError: states that are kept at no boundary.
        """
        found = []
        for place, number in enumerate(config.transfer_group_ids):
            group = config.kv_cache_groups[number]
            name = group.layer_names[0]
            spec = layer_spec(group.kv_cache_spec, name)
            if not is_state(spec):
                continue
            if spec.mamba_cache_mode != "align":
                raise FormatError(
                    f"{name}: mamba_cache_mode",
                    "align (prefix caching), for states to be kept at boundaries",
                    spec.mamba_cache_mode,
                )
            speculates = spec.num_speculative_blocks > 0
            found.append(_StateGroup(place, number, spec.block_size, speculates))
        return cls(tuple(found))

    def keep_boundary_states(
        self, ids: list[list[int]], passed: range, offers: Sequence[Offer], prompt_tokens: int
    ) -> None:
        """Keep blocks of ``ids`` that certainly hold the state at their end; the rest become holes.

        Args:
            ids: the request's blocks by group, changed in place.
            passed: the tokens of this step's pass, drafts among them.
            offers: vLLM's of this step and request.
            prompt_tokens: the prompt's.
        """
        for group in self.groups:
            # A pass that begins within a block, behind a hit within it, and ends behind the block
            # leaves the state that it began with in that block, and exports its own to a later one.
            # vLLM offers the former as if it were the state at the block's end: it is ignored.
            table = ids[group.place]
            ends = [(end, None) for end in (passed.start, passed.stop)]
            begun = -(-passed.start // group.block_tokens) * group.block_tokens
            wrong = begun if passed.start < begun < passed.stop else None
            mine = [
                (end, block)
                for number, block, end in offers
                if number == group.number and end != wrong
            ]
            # Passes with drafts end at tokens that may be rejected: behind the prompt of an engine
            # that speculates there are only holes.
            most = prompt_tokens if group.speculates else None
            ids[group.place] = _kept(table, group.block_tokens, [*ends, *mine], most)


def _kept(
    table: Sequence[int],
    block_tokens: int,
    ends: Iterable[tuple[int, int | None]],
    most: int | None,
) -> list[int]:
    """Blocks that hold the state at one of ``ends``, at their places; None is that of the table.

    >>> _kept([0, 7, 0, 4, 9], 16, [(32, None), (64, None), (48, 8)], None)
    [0, 7, 8, 4, 0]
    >>> _kept([0, 7, 0, 4, 9], 16, [(32, None), (70, None), (64, 4)], 48)
    [0, 7, 0, 0, 0]
    """
    kept = [0] * len(table)
    for end, block in ends:
        place, rest = divmod(end, block_tokens)
        if not rest and 0 < place <= len(table) and (most is None or end <= most):
            kept[place - 1] = table[place - 1] if block is None else block
    return kept
