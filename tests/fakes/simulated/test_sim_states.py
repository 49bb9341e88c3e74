"""The same of hybrids with recurrent states: what the router predicts is what vLLM finds."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pdconn.router.prefix.block_index import Index
from pdconn.router.prefix.groups import GroupSpec
from tests.fakes.simulated.test_sim_engine import NUM_SEEDS, World, once, world

pytest.importorskip("vllm.v1.core.kv_cache_manager")


def states() -> dict[str, dict[str, Any]]:
    """Hybrids with recurrent states, whose blocks are as wide as those of attention."""
    full, eagle = (16, None), (16, None, True)
    state = (16, None, False, True)
    return {
        "full, states": {"groups": [full, state], "num_blocks": 70},
        "states, full": {"groups": [state, full], "num_blocks": 70},
        "full, three states": {"groups": [full, state, state, state], "num_blocks": 90},
        "states in chunks": {"groups": [full, state], "num_blocks": 70, "chunk_tokens": 50},
        "states in narrow chunks": {"groups": [full, state], "num_blocks": 70, "chunk_tokens": 11},
        "eagle full, states": {"groups": [eagle, state, state], "num_blocks": 90},
        "states, retention 0": {"groups": [full, state], "num_blocks": 70, "retention": 0},
        "states, retention 64": {"groups": [full, state], "num_blocks": 70, "retention": 64},
        "full, window, states": {"groups": [full, (16, 40), state], "num_blocks": 110},
        "states, finer hashes": {
            "groups": [full, state], "num_blocks": 70, "hash_block_tokens": 4,
        },
        "eagle full, states, finer hashes": {
            "groups": [eagle, state], "num_blocks": 70, "hash_block_tokens": 4,
        },
        "three states in chunks, finer hashes": {
            "groups": [full, state, state, state], "num_blocks": 90, "hash_block_tokens": 4,
            "chunk_tokens": 50,
        },
        "window, states, finer hashes": {
            "groups": [full, (16, 40), state], "num_blocks": 110, "hash_block_tokens": 4,
        },
    }  # fmt: skip


class Stateless(Index):
    """An index that does not hear of states."""

    def learn_group(self, name: str, group: int, spec: GroupSpec) -> None:
        if spec.kind != "mamba":
            super().learn_group(name, group, spec)


@pytest.mark.parametrize("name", states())
def test_a_hit_is_what_vllm_finds(sim: Any, name: str) -> None:
    for seed in range(NUM_SEEDS):
        drawn = world(sim, states()[name], seed)
        assert list(drawn.differences()) == [], f"seed {seed}"
        assert all(drawn.asked.values()), f"seed {seed} asks too little: {drawn.asked}"
        assert not any(pod.unknown_removals for pod in drawn.index.pods.values())


@pytest.mark.parametrize("name", states())
def test_a_score_that_ignores_states_is_wrong(sim: Any, name: str) -> None:
    """Too long; or too short, where states are group 0 and count as full attention then."""
    wrong = list(world(sim, states()[name], index_kind=Stateless).differences())
    assert wrong
    assert all(one.predicted < one.found for one in wrong) is (name == "states, full")


@pytest.mark.parametrize("name", [name for name in states() if "finer" in name])
def test_a_score_that_knows_whole_blocks_only_is_wrong(
    sim: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where a window's blocks are as long: there vLLM itself has no hits within blocks."""
    monkeypatch.setattr("pdconn.router.prefix.families.ends_anywhere", lambda specs, unit: False)
    wrong = list(world(sim, states()[name]).differences())
    assert all(one.predicted < one.found for one in wrong)
    assert bool(wrong) is not name.startswith("window")


def test_a_report_of_a_hit_promises_no_other_state(
    sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In vLLM's ``full`` mode it names every block of the hit, of states those it skipped, too."""
    for name in ("full, states", "full, three states", "states in chunks"):
        plain = world(sim, states()[name])
        drawn = World(sim, plain.shape, random.Random(0), index_kind=once, reports_hits=True)
        assert all(one.predicted < one.found for one in drawn.differences())
        assert drawn.asked["hits"] > 20
    monkeypatch.setattr("pdconn.router.prefix.block_index._held", lambda event: event.hashes)
    drawn = World(sim, plain.shape, random.Random(0), index_kind=once, reports_hits=True)
    assert any(one.predicted > one.found for one in drawn.differences())
