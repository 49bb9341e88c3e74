"""Two commits of one branch: what one computes is neither loaded nor pulled by the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pdconn.tools.lab.compare_answers import compare
from pdconn.tools.lab.engine import Engine, running
from pdconn.tools.lab.lab_client import Client, prefill_then_decode
from tests.forked.engines import PRELOADED, ForkedProcess
from tests.vllm.engines.engines import cache_beside
from tests.vllm.engines.store.stores import (
    NUM_TOKENS,
    TOKENS,
    hit_tokens,
    num_rows,
    prompts,
    resumable,
    store_engine,
    wait_for_rows,
)
from tests.vllm.identity.hub import NEW, OLD, tuned
from tests.vllm.identity.hub_server import REPO, Hub, hub

pytestmark = pytest.mark.matrix


class ForkedWithHub(ForkedProcess):
    """Forked from a process that has imported vLLM with the hub's variables: they are read then."""

    preloaded = (*PRELOADED, "huggingface_hub")


@contextmanager
def started(name: str, role: str, served: Hub, model: Path, work: Path) -> Iterator[Engine]:
    """An engine of the branch as it is now, with the one store, and vLLM's default policy."""
    spec = store_engine(name, model, work / "store", role=role)
    env = {"HF_ENDPOINT": served.url, "HF_HUB_CACHE": str(work / "hub"), "HF_HUB_DISABLE_XET": "1"}
    spec = replace(spec, model=REPO, env={**spec.env, **env})
    start = ForkedWithHub
    with running([spec], work / name, cache=cache_beside(model), start=start) as (engine,):
        assert isinstance(engine._process, ForkedProcess)
        assert engine._process.forked
        yield engine


def test_a_branch_that_moves_during_a_rolling_update(model: Path, tmp_path: Path) -> None:
    newer = tmp_path / "newer"
    newer.mkdir()
    for path in model.iterdir():
        (newer / path.name).write_bytes(tuned(model).get(path.name, path.read_bytes()))
    stored, handed_over = prompts(71, (3 * TOKENS + 1, 300))
    with hub() as served:
        served.push(OLD, model)
        with started("prefill", "kv_both", served, model, tmp_path) as prefill:
            old = Client(prefill.url)
            answers = {each: old.complete(each, NUM_TOKENS) for each in (stored, handed_over)}
            wait_for_rows(tmp_path / "store", num_rows([stored, handed_over]))

            served.push(NEW, newer)
            with started("updated", "kv_consumer", served, model, tmp_path) as updated:
                new = Client(updated.url)
                assert compare(answers[stored], new.complete(stored, NUM_TOKENS)), "other weights"
                assert hit_tokens(new) == 0
                answer = prefill_then_decode(old, new, handed_over, NUM_TOKENS)
                assert compare(answers[handed_over], answer), "computed by the new weights"
                counts = new.metrics()
                assert counts.get("pdconn:pulls_total", 0) == 0
                assert counts["pdconn:tickets_gone_total"] == 1
                log = updated.log.read_text(encoding="utf-8")
                assert f"weights: theirs commit:{OLD} files:" in log
                assert f"ours commit:{NEW} files:" in log

            served.push(OLD, model)
            with started("again", "kv_consumer", served, model, tmp_path) as again:
                same = Client(again.url)
                assert compare(answers[stored], same.complete(stored, NUM_TOKENS)) is None
                assert hit_tokens(same) == resumable(stored)
                answer = prefill_then_decode(old, same, handed_over, NUM_TOKENS)
                assert compare(answers[handed_over], answer) is None
                assert same.metrics()["pdconn:pulls_total"] == 1
