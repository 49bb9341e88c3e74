"""One tenant floods a store that has room for some rows at a time, and another's are saved."""

from __future__ import annotations

import pytest

from pdconn.store.budget.fair_room import FairRoom
from pdconn.store.format.footer import row_nbytes
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.budget.test_fair_room import FirstCome
from tests.store.joined.budgets import GrantedBudget
from tests.store.joined.rig import FakeEngine, Model
from tests.store.joined.test_joined import SETTINGS, prompt

MODEL = Model(windowed=(), token_nbytes=16)
ROUNDS, FLOODS, ROWS = 8, 6, 3


def hit_share(floods: int) -> float:
    """Share of our prompts' tokens that are loaded, asked again after rounds of a flood."""
    rows, budget = MemoryRows(), GrantedBudget()
    made = FakeEngine(SETTINGS, MODEL, shelf=lambda: MemoryShelf(rows), budget=budget)
    each = row_nbytes(made.layout.fa)
    loaded = asked = 0
    try:
        for round_ in range(ROUNDS):
            # Room for two prompts: ours comes last, when the flood has asked for six.
            budget.room.add_amount(2 * ROWS * each - budget.room.amount)
            for number in range(floods):
                made.run(prompt(1000 + 10 * round_ + number, 64 * ROWS + 10), salt="theirs")
            ours = prompt(round_, 64 * ROWS + 10)
            made.run(ours, salt="ours")
            made.settle()
            if round_:  # none of the flood could know of us before
                outcome = made.run(ours, salt="ours")
                assert outcome.wrong == 0
                loaded, asked = loaded + outcome.loaded, asked + 64 * ROWS
    finally:
        made.close()
    return loaded / asked


def test_a_flood_of_one_tenant_costs_another_none_of_its_saves() -> None:
    alone, beside = hit_share(0), hit_share(FLOODS)
    assert alone == 1.0
    assert alone - beside <= 0.02


def test_first_come_first_served_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(FairRoom, "admits", FirstCome.admits)
    assert hit_share(FLOODS) < 0.5
