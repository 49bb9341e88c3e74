"""Engines whose tenants share a root: one floods it, and another's prefixes stay."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from pdconn.store.format.row_names import RowNames
from pdconn.store.settings import StoreSettings, read_store_settings
from pdconn.store.store_errors import StoreSettingError
from tests.store.joined.rig import FakeEngine, Model, until_ready
from tests.store.joined.test_joined import SETTINGS, prompt

CAPACITY, QUOTA = 2 << 20, 1 << 20
MODEL = Model(token_nbytes=16)
OURS = [prompt(seed, 200) for seed in (1, 2, 3)]
"""About half a quota."""


def hit_share(given: StoreSettings, floods: int) -> float:
    """Share of our prompts' tokens that are loaded, in rounds between which another one saves."""
    made = FakeEngine(given, MODEL, budget=None)
    loaded = asked = 0
    try:
        until_ready(made)
        for round_ in range(7):
            for tokens in OURS:
                outcome = made.run(tokens, salt="ours")
                assert outcome.wrong == 0
                made.settle()
                if round_:
                    loaded, asked = loaded + outcome.loaded, asked + 192
            for number in range(floods):
                made.run(prompt(1000 + 100 * round_ + number, 330), salt="theirs")
                made.settle()
                until_ready(made)
    finally:
        made.close()
    return loaded / asked


def settings(root: Path, quota: int | None) -> StoreSettings:
    return replace(SETTINGS, root=str(root), capacity=CAPACITY, tenant_quota=quota)


@pytest.mark.matrix  # test_quotas.py simulates it
def test_a_flood_of_one_tenant_costs_another_none_of_its_hits(tmp_path: Path) -> None:
    alone = hit_share(settings(tmp_path / "alone", QUOTA), floods=0)
    beside = hit_share(settings(tmp_path / "beside", QUOTA), floods=9)
    assert alone > 0.95
    assert alone - beside <= 0.02


@pytest.mark.matrix
def test_without_a_quota_it_does(tmp_path: Path) -> None:
    """The control."""
    assert hit_share(settings(tmp_path / "beside", None), floods=9) < 0.5


def test_hits_are_counted_by_tenant(tmp_path: Path) -> None:
    made = FakeEngine(settings(tmp_path, None), MODEL, budget=None)
    counts: Counter[str] = Counter()
    try:
        until_ready(made)
        for _ in range(20):
            for salt in ("ours", None):
                made.run(OURS[0], salt=salt)
                made.settle()
            counts.update(made.store.take_store_counts())
    finally:
        made.close()
    hits = {name.partition("/")[2]: n for name, n in counts.items() if "tenant_hits/" in name}
    assert hits.keys() == {RowNames().tenant("ours").hex(), "none", "others"}
    assert sum(hits.values()) == counts["store_hits"] == 38
    assert hits["none"] == 19
    tokens = [n for name, n in counts.items() if "tenant_hit_tokens/" in name]
    assert sum(tokens) == counts["store_hit_tokens"]
    asked = [n for name, n in counts.items() if "tenant_lookups/" in name]
    assert sum(asked) == counts["store_lookups"] == 40


@pytest.mark.parametrize("bad", ["0", "many", True, None])
def test_a_quota_is_a_size(bad: object) -> None:
    with pytest.raises(StoreSettingError, match=r"store\.tenant_quota: expected a size"):
        read_store_settings({"root": "/r", "capacity": "1GiB", "tenant_quota": bad})
