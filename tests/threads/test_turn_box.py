"""A box whose items are taken by class and tenant, and what wakes its owners."""

from __future__ import annotations

import threading
import time

import pytest

from pdconn.lifecycle.turns import MOST_WAIT_S, TurnKey, Urgency
from pdconn.threads import RightOfWay, TurnBox

PATIENCE_S = 20.0


def box_of(way: RightOfWay) -> TurnBox[Urgency]:
    return TurnBox(TurnKey, way)


@pytest.fixture
def way() -> RightOfWay:
    return RightOfWay()


def test_the_most_urgent_is_taken_first(way: RightOfWay) -> None:
    box = box_of(way)
    box.put_all([Urgency.SAVE, Urgency.LOAD])
    box.put_quietly(Urgency.PULL)
    box.put_first([Urgency.PREFETCH])
    assert (len(box), box.first_item()) == (4, Urgency.PULL)
    assert [box.take_one(0.0) for _ in range(5)] == [*Urgency, None]
    box.put_all([Urgency.SAVE, Urgency.LOAD])
    assert box.take_back(lambda item: item is Urgency.LOAD) == [Urgency.LOAD]
    assert box.take_all() == [Urgency.SAVE]


@pytest.mark.parametrize("wakes", ["put", "way", "due", "closed"])
def test_a_sleeping_owner_wakes(
    wakes: str, way: RightOfWay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an item, a way that is free, the end of its wait, and the end of the box."""
    most_s = 0.05 if wakes == "due" else 2 * PATIENCE_S
    monkeypatch.setitem(MOST_WAIT_S, Urgency.PREFETCH, most_s)
    box, taken = box_of(way), list[Urgency | None]()
    way.set_most_urgent(Urgency.PULL)
    if wakes in ("way", "due"):
        box.put(Urgency.PREFETCH)
        assert box.take_one(0.0) is None
    owner = threading.Thread(target=lambda: taken.append(box.take_one(PATIENCE_S)))
    owner.start()
    time.sleep(0.02)
    if wakes == "put":
        box.put(Urgency.LOAD)
    elif wakes == "way":
        way.set_most_urgent(Urgency.PREFETCH)
    elif wakes == "closed":
        box.close()
    owner.join(PATIENCE_S / 2)
    expected = {"put": Urgency.LOAD, "closed": None}.get(wakes, Urgency.PREFETCH)
    assert taken == [expected]
    assert box.take_overdue() == (wakes == "due")


def test_an_item_is_taken_once_by_one_of_many_owners(way: RightOfWay) -> None:
    box: TurnBox[int] = TurnBox(lambda number: TurnKey(Urgency.LOAD, bytes([number % 5]), 1), way)
    taken: list[list[int]] = [[] for _ in range(4)]

    def own(mine: list[int]) -> None:
        while (item := box.take_one()) is not None:
            mine.append(item)

    owners = [threading.Thread(target=own, args=(mine,)) for mine in taken]
    for owner in owners:
        owner.start()
    for number in range(2000):
        box.put(number)
    until = time.monotonic() + PATIENCE_S
    while len(box) and time.monotonic() < until:
        time.sleep(0.001)
    box.close()
    for owner in owners:
        owner.join(PATIENCE_S)
    assert sorted(item for mine in taken for item in mine) == list(range(2000))


def test_work_gives_way_to_more_urgent_work_alone(
    way: RightOfWay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MOST_WAIT_S, Urgency.SAVE, 0.01)
    assert way.give_way(Urgency.SAVE)
    for moved in (Urgency.PULL, Urgency.LOAD, Urgency.PREFETCH):
        way.set_most_urgent(moved)
        assert not way.give_way(Urgency.SAVE)
    way.set_most_urgent(Urgency.SAVE)
    assert way.give_way(Urgency.SAVE)
