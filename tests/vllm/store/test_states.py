"""Attention and states: what vLLM's own manager keeps at boundaries is saved and loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdconn.store.format.row import Layer, RowKind, RowLayout, Section, StoreLayout
from pdconn.store.store_errors import FormatError
from registration.references import AttentionKind
from tests.fakes.memory_shelf import MemoryRows

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from pdconn.vllm.store import storing as storing_module
    from pdconn.vllm.store.boundary_states import StateGroups
    from pdconn.vllm.store.events import event_groups
    from pdconn.vllm.store.storing import SavePins
    from tests.vllm.store.state_rig import BLOCK, StateEngine, StateShape

LENGTHS = (5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 4 * BLOCK, 5 * BLOCK + 3, 9 * BLOCK, 200)
SHAPES = {
    "one chunk": StateShape(chunk_tokens=512),
    "chunks": StateShape(),
    "exports": StateShape(exports=True, chunk_tokens=512),
    "chunks and exports": StateShape(exports=True),
    "chunks of part of a block": StateShape(chunk_tokens=BLOCK - 5),
    "sparse": StateShape(retention=0),
    "fine hashes": StateShape(hash_block_tokens=4),
    "fine hashes, sparse": StateShape(hash_block_tokens=4, retention=0, chunk_tokens=512),
}


def prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(10, 50_000, length)]


@contextmanager
def engine(rows: MemoryRows, shape: StateShape | None = None, **more: Any) -> Iterator[StateEngine]:
    made = StateEngine(rows, shape, **more)
    try:
        yield made
    finally:
        made.close()


def last_boundary(length: int) -> int:
    return (length - 1) // BLOCK * BLOCK


def cold_and_warm(shape: StateShape, lengths: Sequence[int] = LENGTHS) -> tuple[int, list[int]]:
    """How often an engine, or one that loads what it saved, met wrong bytes; and tokens loaded."""
    rows, wrong, loaded = MemoryRows(), 0, []
    prompts = [prompt(length, length) for length in lengths]
    with engine(rows, shape) as cold:
        wrong += sum(cold.run(tokens, num_answers=2 * BLOCK).wrong for tokens in prompts)
    with engine(rows, shape) as warm:
        for tokens in prompts:
            ran = warm.run(tokens, num_answers=3)
            wrong += ran.wrong
            loaded.append(ran.loaded)
    return wrong, loaded


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_another_engine_resumes_at_the_last_boundary(shape: StateShape) -> None:
    assert cold_and_warm(shape) == (0, [last_boundary(length) for length in LENGTHS])


EXPORTS_WITHIN = StateShape(hash_block_tokens=4, exports=True)
"""Passes export the state in the middle of a block, into the place of the block before."""


def test_a_state_within_a_block_is_not_taken_for_one_at_its_end() -> None:
    wrong, loaded = cold_and_warm(EXPORTS_WITHIN)
    assert wrong == 0
    assert 0 < sum(loaded) < sum(map(last_boundary, LENGTHS))


def _as_the_table_says(
    self: StateGroups, ids: list[list[int]], passed: range, offers: Any, prompt_tokens: int
) -> None:
    """Any block at a boundary's place is taken."""


def _rounded(
    self: StateGroups, ids: list[list[int]], passed: range, offers: Any, prompt_tokens: int
) -> None:
    """What is offered of a block is taken for its end."""
    offers = [(group, block, end // BLOCK * BLOCK) for group, block, end in offers]
    KEEP(self, ids, passed, offers, prompt_tokens)


KEEP = StateGroups.keep_boundary_states


@pytest.mark.parametrize("mutant", [_as_the_table_says, _rounded])
def test_other_blocks_are_noticed(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., None]
) -> None:
    """Negative control."""
    monkeypatch.setattr(StateGroups, "keep_boundary_states", mutant)
    assert cold_and_warm(EXPORTS_WITHIN)[0] > 0


def behind_a_hit_within_a_block() -> tuple[int, int, list[tuple[int, int]]]:
    """Wrong bytes and tokens loaded of a prompt that an engine saved behind such a hit.

    And the passes over it: the first begins within a block, where an answer's prompt ended.
    """
    rows, shared, rest = MemoryRows(), prompt(9, 8 * BLOCK - 3), prompt(10, 3 * BLOCK)
    with engine(rows, StateShape(hash_block_tokens=4, exports=True, chunk_tokens=512)) as cold:
        assert cold.run(shared, num_answers=1).wrong == 0
        ran = cold.run([*shared, *rest])
        assert ran.wrong == 0
    with engine(rows, StateShape(hash_block_tokens=4, chunk_tokens=512)) as warm:
        loaded = warm.run([*shared, *rest][: 8 * BLOCK + 1])
    return loaded.wrong, loaded.loaded, ran.passes


def test_the_state_that_a_pass_began_with_is_not_taken_for_one_at_the_end_of_its_block() -> None:
    """vLLM offers the block of the hit as if it held the state at its end."""
    wrong, loaded, passes = behind_a_hit_within_a_block()
    start, stop = passes[0]
    assert start % BLOCK
    assert start < 8 * BLOCK < stop
    assert wrong == 0
    assert loaded < 8 * BLOCK


FEW = StateShape(num_blocks=20, chunk_tokens=BLOCK)
"""So small a pool that a request computes into blocks that it has left."""


def every_boundary() -> tuple[int, int]:
    """How often what is loaded at one of a prompt's boundaries is wrong; and tokens loaded."""
    rows, tokens, wrong, loaded = MemoryRows(), prompt(8, 12 * BLOCK), 0, 0
    with engine(rows, FEW) as cold:
        assert cold.run(tokens).wrong == 0
    for blocks in range(1, 12):
        with engine(rows, FEW) as warm:
            ran = warm.run(tokens[: blocks * BLOCK + 1])
            wrong, loaded = wrong + ran.wrong, loaded + ran.loaded
    return wrong, loaded


def test_states_are_pinned_until_they_are_copied() -> None:
    wrong, loaded = every_boundary()
    assert wrong == 0
    assert loaded


def test_states_that_are_not_pinned_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(SavePins, "pin_blocks", lambda self, number, ids: None)
    assert every_boundary()[0] > 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_longer_prompt_resumes_where_the_shorter_one_or_its_answer_ended(is_async: bool) -> None:
    tokens, num_answers = prompt(1, 3 * BLOCK), 40
    answered = [*tokens, *(7 + at for at in range(len(tokens), len(tokens) + num_answers))]
    for save, expected in (("prompt", 3 * BLOCK), ("all", 5 * BLOCK)):
        rows = MemoryRows()
        with engine(rows, StateShape(is_async=is_async), save=save) as cold:
            assert cold.run(tokens, num_answers).wrong == 0
        with engine(rows) as warm:
            ran = warm.run([*answered, *prompt(2, 50)])
            assert (ran.loaded, ran.wrong) == (expected, 0)


def of_three_prompts() -> list[tuple[int, int]]:
    """Tokens loaded, and wrong ones, of prompts that begin alike, each by an engine of its own."""
    rows, shared = MemoryRows(), prompt(5, 4 * BLOCK)
    found = []
    for number in range(3):
        with engine(rows, StateShape(chunk_tokens=512)) as made:
            ran = made.run([*shared, *prompt(6 + number, 3 * BLOCK + number)])
            found.append((ran.loaded, ran.wrong))
    return found


def test_where_two_prompts_part_a_third_resumes() -> None:
    assert of_three_prompts() == [(0, 0), (0, 0), (4 * BLOCK, 0)]


def test_without_a_pass_that_ends_there_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(storing_module, "end_pass_at", lambda request, junction: None)
    assert of_three_prompts() == [(0, 0), (0, 0), (0, 0)]


def test_rows_of_several_blocks_are_resumed_where_a_pass_ended_at_one() -> None:
    rows, row_tokens = MemoryRows(), 4 * BLOCK
    lengths = [4 * BLOCK, 4 * BLOCK + 1, 6 * BLOCK, 9 * BLOCK]
    with engine(rows, row_tokens=row_tokens) as cold:
        for length in lengths:
            cold.run(prompt(length, length))
    with engine(rows, row_tokens=row_tokens) as warm:
        for length in lengths:
            ran = warm.run(prompt(length, length))
            assert (ran.loaded, ran.wrong) == ((length - 1) // row_tokens * row_tokens, 0)


# What an engine's configuration says of its groups


def config(**changes: Any) -> Any:
    made = StateShape().config()
    group = made.kv_cache_groups[1]
    group.kv_cache_spec = replace(group.kv_cache_spec, **changes)
    return made


@pytest.mark.parametrize("mode", ["none", "all"])
def test_states_that_are_kept_at_no_boundary_are_refused_by_name(mode: str) -> None:
    with pytest.raises(FormatError) as raised:
        StateGroups.from_kv_cache_config(config(mamba_cache_mode=mode))
    assert raised.value.field == "layers.1: mamba_cache_mode"
    assert raised.value.seen == mode


@pytest.mark.parametrize(
    ("start", "stop", "kept"),
    [
        (BLOCK + 4, 4 * BLOCK + 1, [0, 0, 7, 0]),  # the second block holds what it began with
        (BLOCK + 4, 2 * BLOCK, [0, 6, 7, 0]),  # it ends there
        (BLOCK, 4 * BLOCK + 1, [5, 6, 7, 0]),
    ],
)
def test_offers_of_the_block_that_a_pass_began_within(
    start: int, stop: int, kept: list[int]
) -> None:
    groups, ids = StateGroups.from_kv_cache_config(config()), [[1], [5, 6, 0, 8]]
    groups.keep_boundary_states(
        ids, range(start, stop), [(1, 6, 2 * BLOCK), (1, 7, 3 * BLOCK)], 100
    )
    assert ids[1] == kept


@pytest.mark.parametrize(("drafts", "kept"), [(0, [0, 0, 7]), (2, [0, 0, 0])])
def test_with_drafts_only_states_of_the_prompt_are_kept(drafts: int, kept: list[int]) -> None:
    groups = StateGroups.from_kv_cache_config(config(num_speculative_blocks=drafts))
    offers = [(1, 7, 3 * BLOCK), (0, 9, BLOCK)]
    within, behind = [[5], [0, 4, 6]], [[5], [0, 4, 6]]
    groups.keep_boundary_states(within, range(2 * BLOCK, 3 * BLOCK), offers, 3 * BLOCK)
    assert within == [[5], [0, 4, 7]]
    groups.keep_boundary_states(behind, range(3 * BLOCK + 2, 3 * BLOCK + 5), offers, 3 * BLOCK - 1)
    assert behind == [[5], kept]


def test_events_name_the_last_block_of_states_in_a_row() -> None:
    section = Section(
        AttentionKind.STATE, None, 4 * BLOCK, 1, True, 0, 2, (Layer("layers.1", 0, 8),)
    )
    full = Section(AttentionKind.FULL, None, 1, 4 * BLOCK, False, 0, 1, (Layer("layers.0", 0, 8),))
    layout = StoreLayout(
        RowLayout(RowKind.FA, 4 * BLOCK, (full,)), RowLayout(RowKind.WA, 4 * BLOCK, (section,))
    )
    attention, states = event_groups(config(), layout, BLOCK)
    assert (attention.row, attention.num_blocks()) == (RowKind.FA, 4)
    assert (states.kind, states.row, states.num_blocks()) == ("mamba", RowKind.WA, 1)


def test_attention_is_left_as_it_is() -> None:
    assert not StateGroups()
    groups, ids = StateGroups.from_kv_cache_config(config()), [[5, 6], [8, 9]]
    groups.keep_boundary_states(ids, range(3, BLOCK + 3), [], 100)
    assert ids == [[5, 6], [0, 0]]
