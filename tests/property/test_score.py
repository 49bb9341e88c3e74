"""A hit is the largest length that every group can serve: against asking every length.

400 worlds by default, as many as ``PDCONN_EXAMPLES`` says if that is more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest

from pdconn.router.prefix import families
from pdconn.router.prefix import score as score_module
from pdconn.router.prefix.block_index import Index
from pdconn.router.prefix.ends import covered
from pdconn.router.prefix.explain import explain
from pdconn.router.prefix.groups import STORED, GroupSpec
from pdconn.router.prefix.score import Scorer
from pdconn.router.prefix.snapshot import explain_snapshot, read_snapshot, take_snapshot
from tests.property.held import MEDIA, NEAR, WEIGHTS, World, draw
from tests.property.scale import at_least

NUM_WORLDS = at_least(400)
PARTS = 10


def problems(seed: int) -> list[str]:
    """Where the scorer and the account differ."""
    world = draw(seed)
    found = []
    hits = Scorer(world.index, WEIGHTS).score(world.prompt)
    assert list(hits) == list(world.account)
    for name, hit in hits.items():
        blocks = world.longest(name, len(world.prompt.hashes))
        score, kept = pytest.approx(world.score(name, blocks)), world.kept(name)
        right = blocks, world.believed(name), score, kept, world.loaded(name)
        if (hit.blocks, hit.tokens, hit.score, hit.kept_tokens, hit.loaded_tokens) != right:
            found.append(f"seed {seed}, {name}: {hit}, expected {right}")
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_a_hit_is_the_largest_length_that_every_group_can_serve(part: int) -> None:
    for seed in range(part, NUM_WORLDS, PARTS):
        assert problems(seed) == []


def test_the_worlds_are_not_all_alike() -> None:
    """The law above is worth what is drawn for it."""
    kinds = {"no hit": 0, "whole": 0, "cut": 0, "weighed": 0, "capped": 0, "two words": 0}
    kinds |= {"within blocks": 0, "kept beside a pull": 0, "loaded": 0, "loaded in part": 0}
    for seed in range(300):
        world = draw(seed)
        total = len(world.prompt.hashes)
        hits = Scorer(world.index, WEIGHTS).score(world.prompt)
        kinds["two words"] += len(hits) > 64
        for name, hit in hits.items():
            specs = [spec for _, spec in world.counted(world.account[name])]
            unit = world.prompt.hash_block_tokens
            kinds["within blocks"] += any(hit.blocks * unit % spec.block_tokens for spec in specs)
            kinds["kept beside a pull"] += hit.kept_tokens > hit.tokens
            kinds["loaded"] += hit.loaded_tokens > 0
            kinds["loaded in part"] += 0 < hit.loaded_tokens < hit.tokens
            kinds["no hit"] += total > 0 and hit.blocks == 0
            kinds["whole"] += 0 < hit.blocks == total
            kinds["cut"] += 0 < hit.blocks < total
            kinds["weighed"] += hit.score < hit.blocks
            kinds["capped"] += hit.tokens < hit.blocks * world.prompt.hash_block_tokens
    assert min(kinds.values()) >= 20, kinds


def _every_end(held: score_module.Words, need: int) -> score_module.Words:
    del need
    return np.full(len(held), 2**64 - 1, np.uint64)


def _one_block_less(held: score_module.Words, need: int) -> score_module.Words:
    return TAIL_ENDS(held, max(1, need - 1))


def _not_from_the_beginning(held: score_module.Words, need: int) -> score_module.Words:
    ends = TAIL_ENDS(held, need)
    ends[: need - 1] = 0
    return ends


TAIL_ENDS = score_module.tail_ends


@pytest.mark.parametrize("wrong", [_every_end, _one_block_less, _not_from_the_beginning])
def test_a_scorer_that_is_careless_with_windows_is_noticed(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., score_module.Words]
) -> None:
    monkeypatch.setattr(score_module, "tail_ends", wrong)
    assert any(problems(seed) for seed in range(100))


def _by_whole_blocks(held: score_module.Words, every: int) -> score_module.Words:
    """Takes no part of a block for held."""
    whole = held[every - 1 :: every]
    spread = np.repeat(whole, every)
    return np.append(spread, np.zeros(len(held) - len(spread), np.uint64))


def _by_parts_alone(held: score_module.Words, every: int) -> score_module.Words:
    del every
    return np.bitwise_and.accumulate(held)


@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        ("ends_anywhere", lambda specs, unit: False),
        ("ends_anywhere", lambda specs, unit: True),
        ("covered", _by_whole_blocks),
        ("fine_ends", lambda held, every: np.bitwise_and.accumulate(_by_whole_blocks(held, every))),
        ("fine_ends", _by_parts_alone),
        ("fine_ends", covered),
    ],
)
def test_a_scorer_that_is_careless_with_parts_of_blocks_is_noticed(
    monkeypatch: pytest.MonkeyPatch, what: str, wrong: Callable[..., object]
) -> None:
    monkeypatch.setattr(families if what == "ends_anywhere" else score_module, what, wrong)
    assert any(problems(seed) for seed in range(200))


def test_a_scorer_that_takes_stored_blocks_for_its_own_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(made: object, **changes: object) -> object:
        return made if "with_stored" in changes else replace(made, **changes)  # type: ignore[type-var]

    monkeypatch.setattr(score_module, "replace", wrong)
    assert any(problems(seed) for seed in range(100))


@pytest.mark.parametrize("careless", ["stored too", "as if alone", "whatever else there is"])
def test_a_scorer_that_is_careless_with_what_a_pull_leaves_out_is_noticed(
    monkeypatch: pytest.MonkeyPatch, careless: str
) -> None:
    right = families.Family.beside_a_pull.fget
    assert right is not None

    def wrong(family: families.Family) -> families.Family | None:
        if careless == "whatever else there is":
            return replace(family, tails=(), alone=False, with_stored=False)
        made = right(family)
        if made is None:
            return None
        changed = {"with_stored": True} if careless == "stored too" else {"alone": True}
        return replace(made, **changed)

    monkeypatch.setattr(families.Family, "beside_a_pull", property(wrong))
    assert any(problems(seed) for seed in range(600))


def test_a_scorer_that_looks_beyond_the_last_token_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block that is full behind the end of a hit is not looked for there."""
    valid_ends = score_module._Pass._valid_ends
    monkeypatch.setattr(
        score_module._Pass, "_valid_ends", lambda one, limit=None: valid_ends(one)[:limit]
    )
    assert any(problems(seed) for seed in range(300))


def test_a_scorer_that_forgets_eagle_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupSpec, "peeks", property(lambda spec: False))
    assert any(problems(seed) for seed in range(200))


def test_an_index_that_counts_no_copies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One where a block of which an engine evicts a copy is gone."""
    monkeypatch.setattr("tests.property.held.Index", partial(Index, counts_copies=False))
    assert any(problems(seed) for seed in range(300))


class _MediaAsOne(Index):
    """Takes a block that leaves one medium for gone from all."""

    def remove_blocks(
        self, name: str, group: int | None, medium: str, hashes: Iterable[int]
    ) -> None:
        gone = list(hashes)
        for each in MEDIA:
            super().remove_blocks(name, group, each, gone)


class _StoredForGone(Index):
    """Takes a block that is stored for gone from the GPU."""

    def store_blocks(
        self, name: str, group: int | None, medium: str, hashes: Iterable[int]
    ) -> None:
        there = list(hashes)
        if medium == STORED:
            super().remove_blocks(name, group, "gpu", there)
        super().store_blocks(name, group, medium, there)


class _WithoutRows(Index):
    """Lets a hit on stored blocks end behind any block."""

    def learn_row(self, name: str, row_tokens: int) -> None: ...


@pytest.mark.parametrize("wrong", [_MediaAsOne, _StoredForGone, _WithoutRows])
def test_an_index_that_confuses_media_is_noticed(
    monkeypatch: pytest.MonkeyPatch, wrong: type[Index]
) -> None:
    monkeypatch.setattr("tests.property.held.Index", wrong)
    assert any(problems(seed) for seed in range(300))


@pytest.mark.parametrize("part", range(PARTS))
def test_what_cut_a_hit_is_not_there(part: int) -> None:
    """The group named as cutting a hit lacks the block that is named."""
    for seed in range(part, NUM_WORLDS // 5, PARTS):
        _check_cuts(draw(seed))


def _check_cuts(world: World) -> None:
    for name, hit in Scorer(world.index, WEIGHTS).score(world.prompt).items():
        cut = explain(world.index, world.prompt, name, hit)
        if cut is None:
            assert _could_not_be_longer(world, name, hit.blocks)
        elif cut.group is not None:
            held, spec = world.account[name], dict(world.counted(world.account[name]))[cut.group]
            media = NEAR if cut.why.endswith(" outside the store") else MEDIA
            if world.is_fine(name) and spec.kind == "mamba":
                unit = world.prompt.hash_block_tokens
                assert not world._at(held, cut.group, spec, cut.missing_token // unit, media)
                continue
            assert not world._block(held, cut.group, spec, cut.missing_block, media)
            assert cut.missing_token == cut.missing_block * spec.block_tokens


def _could_not_be_longer(world: World, name: str, blocks: int) -> bool:
    """No length behind the hit is a multiple of every group's block."""
    unit = world.prompt.hash_block_tokens
    if world.is_fine(name):
        return blocks == len(world.prompt.hashes)
    specs = [spec for _, spec in world.counted(world.account[name])]
    return not any(
        all(length * unit % spec.block_tokens == 0 for spec in specs)
        for length in range(blocks + 1, len(world.prompt.hashes) + 1)
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_a_snapshot_scores_as_the_index_it_was_taken_of(part: int) -> None:
    for seed in range(part, NUM_WORLDS // 5, PARTS):
        _check_snapshot(draw(seed))


def _check_snapshot(world: World) -> None:
    snapshot = take_snapshot(world.index, world.prompt, WEIGHTS, world.account)
    read = read_snapshot(msgspec.json.encode(snapshot))
    hits = Scorer(world.index, WEIGHTS).score(world.prompt)
    for name, explained in explain_snapshot(read).items():
        assert (explained.hit_blocks, explained.hit_tokens) == (
            hits[name].blocks,
            hits[name].tokens,
        )
        assert explained.score == pytest.approx(hits[name].score)
        assert explained.cut_by == explain(world.index, world.prompt, name, hits[name])
