"""A snapshot for ``pdconn score``: the blocks that pods hold, and a request.  Version 1, JSON.

::

    {"version": 1,
     "hash_block_tokens": 16,                    tokens that one hash of the request covers
     "weights": {"gpu": 1.0, "storage": 0.5},    by medium; others weigh 1.0; optional
     "pods": {"a": {
        "groups": {"0": {"kind": "full_attention", "window": null, "block_tokens": 16},
                   "1": {"kind": "sliding_window", "window": 128, "block_tokens": 16,
                         "eagle": false}},       "eagle" is optional; groups too
        "blocks": [{"group": 0, "medium": "gpu", "hashes": [1, 2, 3]},
                   {"group": null, "medium": "storage", "hashes": [1]}],
        "row_tokens": 256}},                    of a store, where there is one
     "request": {"hashes": [1, 2, 3], "num_tokens": 48}}

``kind`` is vLLM's ``kv_cache_spec_kind``.  A block of several hash blocks is stored under the hash
of its last one, as in vLLM.  A hash that is listed twice is held twice.  Of a hash the low 64 bits
count, as in the events.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Annotated

import msgspec

from pdconn.router.prefix.block_index import Index, Plane
from pdconn.router.prefix.explain import Cut, explain, stored_blocks
from pdconn.router.prefix.groups import KINDS, GroupSpec
from pdconn.router.prefix.kv_events import UNNAMED
from pdconn.router.prefix.score import DEFAULT_WEIGHTS, Hit, Prompt, Scorer
from transport.errors import FieldError

VERSION = 1
_LOW = (1 << 64) - 1

Count = Annotated[int, msgspec.Meta(ge=1)]
Weight = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
GroupIndex = Annotated[int, msgspec.Meta(ge=0, le=4096)]


class BadSnapshot(FieldError, ValueError):
    """A snapshot is invalid."""


class SnapshotGroup(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The description of a pod's group."""

    kind: str
    block_tokens: Count
    window: Count | None = None
    eagle: bool = False


class Blocks(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Blocks of one group on one medium."""

    group: GroupIndex | None
    medium: str
    hashes: list[int]


class PodState(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The groups and blocks of one pod."""

    groups: dict[str, SnapshotGroup] = {}
    blocks: list[Blocks] = []
    row_tokens: Count | msgspec.UnsetType = msgspec.UNSET


class Asked(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The request."""

    hashes: list[int]
    num_tokens: Annotated[int, msgspec.Meta(ge=0)]


class Snapshot(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The input of a score."""

    version: int
    hash_block_tokens: Count
    weights: dict[str, Weight] = msgspec.field(default_factory=lambda: dict(DEFAULT_WEIGHTS))
    pods: dict[str, PodState]
    request: Asked

    def __post_init__(self) -> None:
        for name, pod in self.pods.items():
            for number, group in pod.groups.items():
                self._check(f"pods.{name}.groups.{number}", number, group)

    def _check(self, field: str, number: str, group: SnapshotGroup) -> None:
        if not (number.isascii() and number.isdigit() and len(number) <= 4) or (
            str(int(number)) != number
        ):
            raise BadSnapshot(field, "the index of a group, such as '0'", repr(number))
        if group.kind not in KINDS:
            raise BadSnapshot(f"{field}.kind", f"one of {', '.join(KINDS)}", repr(group.kind))
        if group.block_tokens % self.hash_block_tokens:
            expected = f"a multiple of hash_block_tokens ({self.hash_block_tokens})"
            raise BadSnapshot(f"{field}.block_tokens", expected, group.block_tokens)


class MayPull(msgspec.Struct, frozen=True):
    """A possible pull from the memory of ``pod``, of ``tokens`` more than the puller's holds."""

    pod: str
    tokens: int


class Explained(msgspec.Struct, frozen=True):
    """A pod's hit, and what cut it; ``stored_blocks`` of it have to be loaded from a store.

    ``may_pull`` names the pod that holds most, if that is more; it is set where all pods are
    evaluated.
    """

    hit_blocks: int
    stored_blocks: int
    hit_tokens: int
    score: float
    cut_by: Cut | None
    may_pull: MayPull | None = None


def read_snapshot(raw: bytes) -> Snapshot:
    """Parse a snapshot from JSON.

    Raises:
        BadSnapshot: not JSON, another version, or an invalid field.
    """
    try:
        version = msgspec.json.decode(raw, type=_Versioned).version
        if version != VERSION:
            raise BadSnapshot("version", str(VERSION), version)
        return msgspec.json.decode(raw, type=Snapshot)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, BadSnapshot):
            raise error.__cause__ from None
        what, _, where = str(error).partition(" - at `$")
        raise BadSnapshot(
            where.strip("`.") or "snapshot", "version 1 of the format", what
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        seen = f"{len(raw)} bytes that are not ({error})"
        raise BadSnapshot("snapshot", "JSON", seen) from error


class _Versioned(msgspec.Struct):
    version: int


def index_of(snapshot: Snapshot) -> Index:
    """The index of a snapshot's pods."""
    index = Index(max_blocks=sys.maxsize)  # the file bounds it
    for name, pod in snapshot.pods.items():
        index.add_pod(name)
        for number, group in pod.groups.items():
            spec = GroupSpec(group.kind, group.window, group.block_tokens, group.eagle)
            index.learn_group(name, int(number), spec)
        for blocks in pod.blocks:
            hashes = [one & _LOW for one in blocks.hashes]
            index.store_blocks(name, blocks.group, blocks.medium.lower(), hashes)
        if isinstance(pod.row_tokens, int):
            index.learn_row(name, pod.row_tokens)
    return index


def prompt_of(snapshot: Snapshot) -> Prompt:
    """The request of a snapshot."""
    asked = snapshot.request
    hashes = [one & _LOW for one in asked.hashes]
    return Prompt(hashes, asked.num_tokens, snapshot.hash_block_tokens)


def explain_snapshot(snapshot: Snapshot) -> dict[str, Explained]:
    """Every pod's hit and what cut it, in the order of the file."""
    weights = {medium.lower(): weight for medium, weight in snapshot.weights.items()}
    return explain_all(index_of(snapshot), prompt_of(snapshot), weights)


def explain_all(index: Index, prompt: Prompt, weights: Mapping[str, float]) -> dict[str, Explained]:
    """Every pod's hit, what cut it, and what it could pull.

    Of pods that hold equally much the first one lends; stored blocks are not lent.
    """
    hits = Scorer(index, weights).score(prompt)
    found = {name: explained(index, prompt, name, hit) for name, hit in hits.items()}
    holder = max(hits, key=lambda name: hits[name].own_tokens, default="")
    for name, one in found.items():
        if (more := hits[holder].own_tokens - hits[name].own_tokens) > 0:
            found[name] = msgspec.structs.replace(one, may_pull=MayPull(holder, more))
    return found


def explained(index: Index, prompt: Prompt, name: str, hit: Hit) -> Explained:
    """A hit, with what cut it."""
    stored = stored_blocks(index, prompt, name, hit)
    cut = explain(index, prompt, name, hit)
    return Explained(hit.blocks, stored, hit.tokens, hit.score, cut)


def take_snapshot(
    index: Index, prompt: Prompt, weights: Mapping[str, float], names: Collection[str]
) -> Snapshot:
    """A snapshot of the prompt and its blocks in these pods, with equal scores."""
    hashes = list(prompt.hashes)
    pods = {}
    for name in names:
        pod = index.pods[name]
        groups = {
            str(number): SnapshotGroup(
                _kind(spec), spec.block_tokens, spec.window or None, spec.eagle
            )
            for number, spec in pod.groups.items()
            if spec.block_tokens % prompt.hash_block_tokens == 0
        }
        held: dict[Plane, list[int]] = {(group, UNNAMED): [] for group in sorted(pod.seen)}
        held |= index.held_by(name, hashes)
        blocks = [Blocks(group, medium, there) for (group, medium), there in held.items()]
        pods[name] = PodState(groups, blocks, pod.row_tokens or msgspec.UNSET)
    return Snapshot(
        version=VERSION,
        hash_block_tokens=prompt.hash_block_tokens,
        weights=dict(weights),
        pods=pods,
        request=Asked(hashes, prompt.num_tokens),
    )


def _kind(spec: GroupSpec) -> str:
    """A kind of the format; unknown kinds of newer engines become ``unknown``."""
    return spec.kind if spec.kind in KINDS else "unknown"
