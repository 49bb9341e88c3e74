"""The KV cache group that ends a pod's hit, and where: for people to read.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdconn.router.prefix.groups import GroupSpec, Needs
from pdconn.router.prefix.index import POD_BITS, Index, Pod, alignment
from pdconn.router.prefix.score import Hit, Prompt, groups_that_count


@dataclass(frozen=True, slots=True)
class Cut:
    """Why a hit is not longer.

    Attributes:
        group: the group that cut it; None where its blocks are no multiple of the hash block.
        kind: of the group, as vLLM names it.
        missing_block: index, in the group's own blocks, of the one that a longer hit lacks.
        missing_token: where that block begins.
        why: a sentence.
    """

    group: int | None
    kind: str
    missing_block: int
    missing_token: int
    why: str


def explain(index: Index, prompt: Prompt, name: str, hit: Hit) -> Cut | None:
    """What cut the ``hit`` of a pod, or None if it is as long as the prompt allows.

    A hit could end at the longest prefix that full attention holds.  If the hit is shorter,
    another group lacks a block there and cut it; otherwise full attention cut it.
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
    align = alignment((spec for _, spec in whole + tails), unit)
    total = len(prompt.hashes) * unit
    lengths = [_whole_blocks(index, prompt, pod, group, spec) for group, spec in whole]
    prefixes = [
        max(0, blocks - spec.peeks) * spec.block_tokens
        for blocks, (_, spec) in zip(lengths, whole, strict=True)
    ]
    prefix = min(prefixes, default=total)
    end = prefix // align * align
    if hit.blocks * unit < end:
        cuts = (_tail_cut(index, prompt, pod, tail, end) for tail in tails)
        return next((cut for cut in cuts if cut is not None), None)
    if prefix >= total // align * align:
        return None
    shortest = prefixes.index(prefix)
    return _whole_cut(*whole[shortest], lengths[shortest])


def _whole_blocks(index: Index, prompt: Prompt, pod: Pod, group: int, spec: GroupSpec) -> int:
    held = _held(index, prompt, pod, group, spec)
    return next((i for i, there in enumerate(held) if not there), len(held))


def _whole_cut(group: int, spec: GroupSpec, missing: int) -> Cut:
    token = missing * spec.block_tokens
    behind = "; EAGLE needs one block more than the hit" if spec.peeks else ""
    why = f"full attention lacks the block at token {token} and holds all before{behind}"
    return Cut(group, spec.kind, missing, token, why)


def _tail_cut(
    index: Index, prompt: Prompt, pod: Pod, tail: tuple[int, GroupSpec], end: int
) -> Cut | None:
    group, spec = tail
    held = _held(index, prompt, pod, group, spec)
    behind = end // spec.block_tokens + spec.peeks
    if spec.needs is Needs.CHUNK:
        assert spec.window is not None
        first = end // spec.window * spec.window // spec.block_tokens
    else:
        first = max(0, behind - spec.tail_blocks)
    for block in range(behind - 1, first - 1, -1):
        if block >= len(held) or not held[block]:
            need = "its state" if spec.needs is Needs.STATE else f"blocks {first} to {behind - 1}"
            why = f"a hit that ends at token {end} needs {need}, and block {block} is missing"
            return Cut(group, spec.kind, block, block * spec.block_tokens, why)
    return None


def _held(index: Index, prompt: Prompt, pod: Pod, group: int, spec: GroupSpec) -> Sequence[bool]:
    """The group's blocks of the prompt that the pod holds."""
    every = spec.block_tokens // prompt.hash_block_tokens
    slots = index.slots_of(prompt.hashes)[every - 1 :: every]
    word, bit = pod.place // POD_BITS, np.uint64(1 << pod.place % POD_BITS)
    unnamed = spec.needs is Needs.WHOLE
    held = np.zeros(len(slots), bool)
    for plane in index.planes():
        if plane[0] == group or (unnamed and plane[0] is None):
            held |= (index.held(plane, word, slots) & bit) != 0
    return list(held)
