"""Weights that may have changed under an engine prove nothing, and nor does KV of before."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pdconn.protocol.compat import DRAFT, UNPROVEN, WEIGHTS, trait_differences
from pdconn.vllm.identity.updates import EngineWeights
from tests.vllm.store.configured import config

LOADED = {"model": "m", WEIGHTS: "files:a", DRAFT + WEIGHTS: "files:b"}
KNOWN = {WEIGHTS: "files:a", DRAFT + WEIGHTS: "files:b"}


@pytest.fixture
def weights(tmp_path: Path) -> EngineWeights:
    (tmp_path / "model.safetensors").write_bytes(b"new" * 100)
    return EngineWeights(config(tmp_path), LOADED)


def is_proven(traits: dict[str, str]) -> bool:
    """Whether a peer with these very traits would agree with them."""
    return not trait_differences(traits, traits)


def test_weights_are_what_was_loaded_until_they_may_be_others(weights: EngineWeights) -> None:
    assert weights.of_engine == weights.of_kv == KNOWN
    weights.note_computed()
    weights.was_reset()
    weights.note_computed()
    assert weights.of_engine == weights.of_kv == KNOWN
    weights.changed("update_weights")
    for traits in (weights.of_engine, weights.of_kv):
        assert not is_proven(traits)
        assert all(text.startswith(f"{UNPROVEN}") for text in traits.values())
        assert "update_weights" in traits[WEIGHTS]


def test_a_version_proves_them_and_no_update_before_it_does(weights: EngineWeights) -> None:
    weights.named("1")
    first = weights.of_engine
    assert set(first[WEIGHTS].split()) > {"files:a"}
    weights.changed("update_weights")
    weights.named("2")
    other = EngineWeights(weights._config, LOADED)
    other.changed("update_weights")
    other.named("2")
    assert is_proven(weights.of_engine)
    assert weights.of_engine == other.of_engine != first
    other.named("3")
    assert trait_differences(weights.of_engine, other.of_engine)
    assert len(other.of_engine[WEIGHTS].split()) == 1, "2 is gone"


def test_what_is_read_from_files_is_known_again_and_the_drafter_is_not(
    weights: EngineWeights, tmp_path: Path
) -> None:
    weights.changed("reload_weights")
    weights.reloaded(None, time.time() + 1)
    traits = weights.of_engine
    assert traits[WEIGHTS].startswith("files:")
    assert traits[DRAFT + WEIGHTS].startswith(UNPROVEN)
    weights.reloaded(None, 0.0)
    assert weights.of_engine[WEIGHTS].startswith(UNPROVEN), "written while they were read"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_bytes(b"x")
    weights.reloaded(str(tmp_path / "other"), time.time() + 1)
    assert is_proven({WEIGHTS: weights.of_engine[WEIGHTS]})
    assert weights.of_engine[WEIGHTS] != traits[WEIGHTS]


def test_kv_of_before_proves_nothing_until_the_cache_is_reset(weights: EngineWeights) -> None:
    weights.note_computed()
    weights.changed("update_weights")
    weights.named("2")
    assert is_proven(weights.of_engine)
    assert not is_proven(weights.of_kv)
    weights.changed("update_weights")
    weights.named("3")
    assert not is_proven(weights.of_kv), "still that of the first ones"
    weights.was_reset()
    assert weights.of_kv == weights.of_engine


def test_an_engine_whose_cache_was_reset_before_keeps_nothing_of_before(
    weights: EngineWeights,
) -> None:
    weights.note_computed()
    weights.was_reset()
    weights.changed("update_weights")
    weights.named("2")
    assert is_proven(weights.of_kv)
