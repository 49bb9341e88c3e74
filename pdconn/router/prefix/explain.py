"""The KV cache group that ends a pod's hit, and where, as a sentence.  Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdconn.router.prefix.block_index import Index, Pod, alignment
from pdconn.router.prefix.ends import covered
from pdconn.router.prefix.families import groups_that_count
from pdconn.router.prefix.groups import OUTSIDE, GroupSpec, Needs, ends_anywhere
from pdconn.router.prefix.held_blocks import POD_BITS
from pdconn.router.prefix.score import Hit, Prompt


@dataclass(frozen=True, slots=True)
class Cut:
    """Why a hit is not longer.

    Attributes:
        group: the group that cut it; None where no single group did.
        kind: vLLM's kind of the group; ``stored`` if the hit has to end at a whole stored row.
        missing_block: index, in the group's own blocks, of the first block that a longer hit needs.
        missing_token: first token of that block.
        why: a sentence.
    """

    group: int | None
    kind: str
    missing_block: int
    missing_token: int
    why: str


def explain(index: Index, prompt: Prompt, name: str, hit: Hit) -> Cut | None:
    """The reason for the end of a pod's ``hit``; None if it is as long as the prompt allows.

    A hit could end at the longest prefix that full attention holds or, if that prefix needs stored
    blocks, at the end of its last whole row.  If the hit is shorter, another group lacks a block
    there and cut it; otherwise full attention or the row cut it.
    """
    pod = index.pods[name]
    unit = prompt.hash_block_tokens
    whole, tails = groups_that_count(pod, unit)
    for group, spec in whole + tails:
        if spec.block_tokens % unit:
            why = f"its blocks of {spec.block_tokens} tokens are no multiple of {unit}"
            return Cut(group, spec.kind, 0, 0, why)
    if not whole and not tails:
        return Cut(None, "unknown", 0, 0, "none of its described groups counts")
    specs = [spec for _, spec in whole + tails]
    is_fine = ends_anywhere(specs, unit)
    align = unit if is_fine else alignment(specs, unit)
    total = len(prompt.hashes) * unit
    on_any = _Holding(index, prompt, pod, with_stored=True, is_fine=is_fine)
    near = _Holding(index, prompt, pod, with_stored=False, is_fine=is_fine)
    prefix = min(on_any.prefixes(whole), default=total)
    step = math.lcm(align, pod.row_tokens or 1)
    end_of_row, end_near = prefix // step * step, prefix // align * align
    if pod.row_tokens is not None:
        end_near = min(near.prefixes(whole), default=total) // align * align
    end = max(end_of_row, end_near)
    if hit.blocks * unit < end:
        holding = on_any if end_of_row >= end_near else near
        cuts = (_tail_cut(holding, tail, end) for tail in tails)
        return next((cut for cut in cuts if cut is not None), None)
    if prefix // align * align > end:
        why = f"a hit on stored blocks ends at a multiple of {pod.row_tokens} tokens, a stored row"
        return Cut(None, "stored", 0, end, why)
    if prefix >= total // align * align:
        return None
    shortest = on_any.prefixes(whole).index(prefix)
    return _whole_cut(*whole[shortest], on_any.whole_blocks(*whole[shortest]))


def stored_blocks(index: Index, prompt: Prompt, name: str, hit: Hit) -> int:
    """Leading hash blocks of a hit whose full attention is in a store only."""
    pod = index.pods[name]
    unit = prompt.hash_block_tokens
    whole, tails = groups_that_count(pod, unit)
    if not hit.blocks or not whole:
        return 0
    is_fine = ends_anywhere([spec for _, spec in whole + tails], unit)
    near = _Holding(index, prompt, pod, with_stored=False, is_fine=is_fine)
    found = np.zeros(hit.blocks, bool)
    for group, spec in whole:
        found |= ~near.hash_blocks(group, spec)[: hit.blocks]
    return int(found.sum())


@dataclass(frozen=True, slots=True)
class _Holding:
    """The blocks of a prompt that a pod holds, with or without those in a store.

    ``is_fine``: a partial block counts as far as it was filled.
    """

    index: Index
    prompt: Prompt
    pod: Pod
    with_stored: bool
    is_fine: bool = False

    def group_blocks(self, group: int, spec: GroupSpec) -> NDArray[np.bool_]:
        """For each of the group's blocks, whether the pod holds it."""
        return self._at(group, spec, spec.block_tokens // self.prompt.hash_block_tokens)

    def hash_blocks(self, group: int, spec: GroupSpec) -> NDArray[np.bool_]:
        """For each hash block, whether a block that the pod holds covers it."""
        every = spec.block_tokens // self.prompt.hash_block_tokens
        if not self.is_fine:
            return np.repeat(self.group_blocks(group, spec), every)
        found: NDArray[np.bool_] = covered(self._at(group, spec, 1).astype(np.uint64), every) != 0
        return found

    def ends_with(self, group: int, spec: GroupSpec, block: int) -> bool:
        """Whether the pod holds a block that ends with hash block ``block``."""
        at = self._at(group, spec, 1)
        return block < len(at) and bool(at[block])

    def _at(self, group: int, spec: GroupSpec, every: int) -> NDArray[np.bool_]:
        index, pod = self.index, self.pod
        slots = index.slots_of(self.prompt.hashes)[every - 1 :: every]
        word, bit = pod.place // POD_BITS, np.uint64(1 << pod.place % POD_BITS)
        unnamed = spec.needs is Needs.WHOLE
        held = np.zeros(len(slots), bool)
        for plane in index.planes():
            counts = self.with_stored or plane[1] not in OUTSIDE
            if counts and (plane[0] == group or (unnamed and plane[0] is None)):
                held |= (index.held(plane, word, slots) & bit) != 0
        return held

    def whole_blocks(self, group: int, spec: GroupSpec) -> int:
        """Number of leading blocks of the group that the pod holds."""
        held = self.group_blocks(group, spec)
        return len(held) if held.all() else int(held.argmin())

    def prefixes(self, whole: Sequence[tuple[int, GroupSpec]]) -> list[int]:
        """For each full attention group, the tokens after which it allows a hit to end."""
        if self.is_fine:
            unit = self.prompt.hash_block_tokens
            runs = [np.append(self.hash_blocks(*one), False).argmin() for one in whole]
            return [
                max(0, int(run) - spec.peeks) * unit
                for run, (_, spec) in zip(runs, whole, strict=True)
            ]
        return [
            max(0, self.whole_blocks(group, spec) - spec.peeks) * spec.block_tokens
            for group, spec in whole
        ]


def _whole_cut(group: int, spec: GroupSpec, missing: int) -> Cut:
    token = missing * spec.block_tokens
    behind = "; EAGLE needs one block more than the hit" if spec.peeks else ""
    why = f"full attention lacks the block at token {token} and holds all before{behind}"
    return Cut(group, spec.kind, missing, token, why)


def _tail_cut(holding: _Holding, tail: tuple[int, GroupSpec], end: int) -> Cut | None:
    group, spec = tail
    if holding.is_fine and spec.needs is Needs.STATE:
        return _state_cut(holding, tail, end)
    held = holding.group_blocks(group, spec)
    outside = "" if holding.with_stored else " outside the store"
    behind = end // spec.block_tokens + spec.peeks
    if spec.needs is Needs.CHUNK:
        assert spec.window is not None
        first = end // spec.window * spec.window // spec.block_tokens
    else:
        first = max(0, behind - spec.tail_blocks)
    for block in range(behind - 1, first - 1, -1):
        if block >= len(held) or not held[block]:
            need = "its state" if spec.needs is Needs.STATE else f"blocks {first} to {behind - 1}"
            missing = f"block {block} is missing{outside}"
            why = f"a hit that ends at token {end} needs {need}, and {missing}"
            return Cut(group, spec.kind, block, block * spec.block_tokens, why)
    return None


def _state_cut(holding: _Holding, tail: tuple[int, GroupSpec], end: int) -> Cut | None:
    """The cut by a missing state; states are held where the engine kept them, at any hash block."""
    group, spec = tail
    unit = holding.prompt.hash_block_tokens
    if end == 0 or holding.ends_with(group, spec, end // unit - 1):
        return None
    outside = "" if holding.with_stored else " outside the store"
    why = f"a hit that ends at token {end} needs its state, and it is missing{outside}"
    return Cut(group, spec.kind, (end - 1) // spec.block_tokens, end - unit, why)
