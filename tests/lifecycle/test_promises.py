"""Laws of promises, whatever order their events come in: ``python -m pytest tests/lifecycle``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdconn.lifecycle.promises import (
    TRANSITIONS,
    BreakReason,
    KeepRefused,
    Pin,
    PromiseBroken,
    PromiseEffect,
    PromiseLimits,
    Promises,
    PromiseState,
    Unpin,
)
from tests.property.scale import holds, notices

LIMITS = PromiseLimits(size=12, tenant_size=8, seconds=100.0, most=5)
LONG_S = 1000.0


@dataclass(frozen=True)
class Key:
    tenant: str
    session: str


A1, A2, A3 = (Key("a", name) for name in "123")
B1, C1 = Key("b", "1"), Key("c", "1")
KEYS = (A1, A2, A3, B1, C1, *(Key(tenant, name) for tenant in "ab" for name in "456"))


def whys(effects: list[PromiseEffect[int]]) -> list[BreakReason]:
    return [effect.why for effect in effects if isinstance(effect, PromiseBroken)]


def kept_of(*blocks_of: tuple[Key, int], limits: PromiseLimits = LIMITS) -> Promises[Key, int]:
    """Promises of so many blocks each, no two of which are the same."""
    promises, first = Promises[Key, int](limits), 1
    for key, count in blocks_of:
        promises.keep(key, range(first, first + count), LONG_S, 0.0)
        first += count
    return promises


def test_a_later_turn_is_pinned_before_the_earlier_one_is_unpinned() -> None:
    promises = kept_of((A1, 3))
    effects = promises.keep(A1, [1, 2, 3, 4], 10.0, 1.0)
    assert effects == [Pin(2, (1, 2, 3, 4), 11.0), Unpin(1)]
    assert (promises.size, len(promises.items_of(A1))) == (4, 4)


def test_a_promise_ends_when_its_time_is_up_and_no_longer_than_the_limit() -> None:
    promises = kept_of((A1, 3))
    assert promises.expire(LIMITS.seconds - 1) == []
    assert promises.expire(LIMITS.seconds) == [Unpin(1)]
    assert (len(promises), promises.size) == (0, 0)


def test_what_is_released_is_unpinned_once() -> None:
    promises = kept_of((A1, 3))
    assert promises.release(A1) == [Unpin(1)]
    assert promises.release(A1) == []


def test_a_block_that_two_sessions_share_is_kept_until_both_have_ended() -> None:
    promises = Promises[Key, int](LIMITS)
    promises.keep(A1, [1, 2, 3], LONG_S, 0.0)
    promises.keep(A2, [1, 2, 4], LONG_S, 0.0)
    assert promises.size == promises.size_of_tenant("a") == 4
    promises.release(A1)
    assert promises.size == 3


def test_the_oldest_promise_gives_way_and_those_whose_turns_are_here_come_last() -> None:
    promises = kept_of((A1, 3), (B1, 3), (C1, 3))
    assert promises.make_room(2, spared={A1}) == [Unpin(2), PromiseBroken(BreakReason.ROOM)]
    assert promises.make_room(4, spared={A1})[0::2] == [Unpin(3), Unpin(1)]
    assert promises.make_room(1) == [], "nothing is left"


def test_room_that_shared_blocks_do_not_make_is_made_by_further_promises() -> None:
    promises = Promises[Key, int](LIMITS)
    promises.keep(A1, [1, 2, 3], LONG_S, 0.0)
    promises.keep(A2, [1, 2, 3], LONG_S, 0.0)
    assert whys(promises.make_room(1)) == [BreakReason.ROOM] * 2


def test_a_broken_promise_is_told_once_and_forgotten_when_its_time_would_be_up() -> None:
    promises = kept_of((A1, 3), (B1, 3))
    promises.make_room(6)
    assert promises.tell(A1) is BreakReason.ROOM
    assert promises.tell(A1) is None
    assert len(promises) == 1
    promises.expire(LIMITS.seconds)
    assert (len(promises), promises.tell(B1)) == (0, None)


def test_a_broken_promise_is_reported_once_and_told_all_the_same() -> None:
    promises = kept_of((A1, 3), (B1, 3), (C1, 3))
    promises.make_room(9)
    assert promises.tell(B1) is BreakReason.ROOM
    assert promises.take_unreported(1) == [(A1, BreakReason.ROOM)]
    assert promises.take_unreported(9) == [(C1, BreakReason.ROOM)], "who was told needs no report"
    assert promises.take_unreported(9) == []
    assert promises.tell(A1) is BreakReason.ROOM


def test_promises_that_the_bound_of_their_number_ended_are_reported_as_many_as_there_may_be() -> (
    None
):
    most = 3
    limits = PromiseLimits(size=12, tenant_size=12, seconds=100.0, most=most)
    keys = [Key("a", str(number)) for number in range(8)]
    promises = kept_of(*((key, 1) for key in keys), limits=limits)
    assert [promises.tell(key) for key in keys] == [None] * len(keys)
    reported = [key for key, _ in promises.take_unreported(99)]
    assert reported == keys[:-most][-most:], "the last ones that were broken"


def test_a_promise_is_used_once_and_not_if_it_was_broken() -> None:
    promises = kept_of((A1, 3))
    assert [promises.use(A1), promises.use(A1), promises.use(B1)] == [True, False, False]
    promises.keep(A1, [1], LONG_S, 1.0)
    assert promises.use(A1)
    promises.drop_all()
    assert not promises.use(A1)


def test_a_session_above_the_bound_is_refused_and_keeps_its_earlier_turn() -> None:
    promises = kept_of((A1, 3))
    assert promises.keep(A1, range(1, 10), LONG_S, 1.0) == [KeepRefused(9, 8)]
    assert len(promises.items_of(A1)) == 3


def test_a_tenant_pushes_out_his_own_oldest_promise() -> None:
    promises = kept_of((B1, 3), (A1, 4), (A2, 4), (A3, 1))
    assert [len(promises.items_of(key)) for key in (B1, A1, A2, A3)] == [3, 0, 4, 1]


def test_a_tenant_within_his_share_loses_nothing_to_one_that_keeps_more() -> None:
    """The engine's bound: the oldest is B's, the one who keeps most is A."""
    limits = PromiseLimits(size=10, tenant_size=8, seconds=100.0)
    promises = kept_of((B1, 3), (A1, 4), (A2, 3), (C1, 2), limits=limits)
    assert [len(promises.items_of(key)) for key in (B1, A1, A2, C1)] == [3, 0, 3, 2]


def test_a_session_without_cached_blocks_changes_nothing() -> None:
    promises = kept_of((A1, 3))
    assert promises.keep(A1, [], LONG_S, 1.0) == []
    assert len(promises.items_of(A1)) == 3


def test_sizes_of_items_count_and_those_of_shared_ones_once() -> None:
    promises = Promises[Key, int](LIMITS, size_of=lambda item: item)
    promises.keep(A1, [1, 5], LONG_S, 0.0)
    promises.keep(A2, [2, 5], LONG_S, 0.0)
    assert promises.size == promises.size_of_tenant("a") == 8
    assert promises.keep(B1, [9], LONG_S, 0.0) == [KeepRefused(9, 8)]
    promises.keep(B1, [6], LONG_S, 0.0)
    # 14 of 12: the end of A1 makes 13, since A2 keeps the other item, so A2 ends as well.
    assert (promises.size, promises.size_of_tenant("a")) == (6, 0)


# Every order of events


class UnpinsFirst(Promises[Key, int]):
    """Unpins the earlier turn, whose blocks may be reused, before it pins the later one."""

    def keep(
        self, key: Key, blocks: Iterable[int], seconds: float, now: float
    ) -> list[PromiseEffect[int]]:
        effects = super().keep(key, blocks, seconds, now)
        return sorted(effects, key=lambda effect: isinstance(effect, Pin))


class ForgetsToTell(Promises[Key, int]):
    """Breaks promises silently."""

    def tell(self, key: Key) -> BreakReason | None:
        super().tell(key)
        return None


class NeverReports(Promises[Key, int]):
    """Tells sessions that come back, and no others."""

    def take_unreported(self, most: int) -> list[tuple[Key, BreakReason]]:
        return []


class ReportsAgain(Promises[Key, int]):
    """Reports what it has reported before."""

    def take_unreported(self, most: int) -> list[tuple[Key, BreakReason]]:
        before = dict(self._unreported)
        taken = super().take_unreported(most)
        self._unreported = before
        return taken


class KeepsWithoutEnd(Promises[Key, int]):
    """Has no bound for a tenant and the engine."""

    def _within_limits(self, new: Key) -> list[PromiseEffect[int]]:
        return []


class NeverExpires(Promises[Key, int]):
    """Leaves promises whose time is up."""

    def expire(self, now: float) -> list[PromiseEffect[int]]:
        return []


class StarvesOthers(Promises[Key, int]):
    """Breaks the oldest promise of all for a newcomer, whoever keeps most."""

    def _who_keeps_most(self, new: Key) -> str:
        return next(key.tenant for key, one in self if key != new and one.items)


class KeepsWhatIsGone(Promises[Key, int]):
    """Believes in items that are gone."""

    def note_gone(self, items: Iterable[int]) -> list[PromiseEffect[int]]:
        return []


class GivesNoRoom(Promises[Key, int]):
    """Keeps what requests lack."""

    def make_room(self, num_blocks: int, spared: Collection[Key] = ()) -> list[PromiseEffect[int]]:
        return []


@dataclass
class Pool:
    """References to blocks, and what sessions are owed."""

    pins: dict[int, tuple[int, ...]] = field(default_factory=dict)
    owed: dict[Key, float] = field(default_factory=dict)
    reported: set[Key] = field(default_factory=set)

    def held(self) -> set[int]:
        return {block for blocks in self.pins.values() for block in blocks}


class PromiseMachine(RuleBasedStateMachine):
    """Keeps, returns, releases, breaks, tells and waits in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = Pool()
        self.promises = Promises[Key, int](LIMITS)

    def perform(self, effects: list[PromiseEffect[int]]) -> int:
        """Returns how many promises were broken."""
        for effect in effects:
            if isinstance(effect, Pin):
                assert effect.number not in self.pool.pins, "pinned twice"
                self.pool.pins[effect.number] = effect.items
            elif isinstance(effect, Unpin):
                assert self.pool.pins.pop(effect.number), "unpinned twice"
        return len(whys(effects))

    def states(self) -> dict[Key, PromiseState]:
        return {key: one.state for key, one in self.promises}

    def settle(self, before: dict[Key, PromiseState], effects: list[PromiseEffect[int]]) -> None:
        """What was kept before is kept, has ended, or is owed to its session."""
        broken = self.perform(effects)
        after = self.states()
        newly = [
            key
            for key, state in after.items()
            if state is PromiseState.BROKEN and before.get(key) is not PromiseState.BROKEN
        ]
        assert broken >= len(newly), "broken, and not counted"
        for key in newly:
            self.pool.owed[key] = next(one.until for each, one in self.promises if each == key)
            self.pool.reported.discard(key)
        # Those that the bound of their number ended are counted, and owed nothing.
        self.pool.owed = {key: until for key, until in self.pool.owed.items() if key in after}

    @rule(
        key=st.sampled_from(KEYS),
        blocks=st.sets(st.integers(1, 30), max_size=10),
        seconds=st.sampled_from([1.0, 50.0, LONG_S]),
    )
    def keep(self, key: Key, blocks: set[int], seconds: float) -> None:
        before = self.states()
        mine = next((one for each, one in self.promises if each == key), None)
        shared = set() if mine is None or mine.until <= self.now else set(mine.items) & blocks
        effects = self.promises.keep(key, sorted(blocks), seconds, self.now)
        pins = [effect for effect in effects if isinstance(effect, Pin)]
        for effect in effects[: effects.index(pins[0])] if pins else ():
            if isinstance(effect, Unpin):
                assert not shared & set(self.pool.pins[effect.number]), "free in between"
        if pins:
            self.pool.owed.pop(key, None)
        self.settle(before, effects)
        if pins:
            assert len(self.promises.items_of(key)) == len(blocks) <= LIMITS.tenant_size

    @rule(key=st.sampled_from(KEYS))
    def release(self, key: Key) -> None:
        self.pool.owed.pop(key, None)
        before = self.states()
        self.settle(before, self.promises.release(key))
        assert key not in self.states()

    @rule(num_blocks=st.integers(0, 12), spared=st.sets(st.sampled_from(KEYS), max_size=3))
    def make_room(self, num_blocks: int, spared: set[Key]) -> None:
        before, had = self.states(), self.promises.size
        ages = {key: at for at, (key, _) in enumerate(self.promises)}
        effects = self.promises.make_room(num_blocks, spared)
        self.settle(before, effects)
        assert self.promises.size <= max(0, had - max(1, num_blocks)), "a request starves"
        kept = {key for key, state in self.states().items() if state is PromiseState.KEPT}
        broken = {key for key, state in before.items() if state is PromiseState.KEPT} - kept
        for one in broken:
            assert all(
                ages[one] < ages[other] for other in kept if (other in spared) == (one in spared)
            ), "a younger promise was broken first"
        assert not (broken & spared) or kept <= spared

    @rule(seconds=st.sampled_from([0.5, 10.0, 200.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        before = self.states()
        self.settle(before, self.promises.expire(self.now))
        assert all(one.until > self.now for _, one in self.promises), "its time is up"
        self.pool.owed = {key: at for key, at in self.pool.owed.items() if at > self.now}

    @rule(key=st.sampled_from(KEYS))
    def answer(self, key: Key) -> None:
        why, owed = self.promises.tell(key), self.pool.owed.pop(key, None)
        assert (why is not None) == (owed is not None), "a broken promise is told once"

    @rule(most=st.integers(1, 9))
    def report(self, most: int) -> None:
        taken = [key for key, _ in self.promises.take_unreported(most)]
        owed = {key for key in taken if key in self.pool.owed}
        assert not owed & self.pool.reported, "reported twice"
        self.pool.reported |= owed
        if len(taken) < most:
            assert self.pool.owed.keys() <= self.pool.reported, "broken, and not reported"

    @rule(gone=st.sets(st.integers(1, 30), max_size=3))
    def lose(self, gone: set[int]) -> None:
        """Items go all the same: whoever kept one is owed a word, and all else stays."""
        before = self.states()
        hit = {key for key, one in self.promises if gone & set(one.items)}
        self.settle(before, self.promises.note_gone(gone))
        assert not gone & self.pool.held(), "kept, and gone"
        stays = {key: state for key, state in before.items() if key not in hit}
        assert {key: self.states()[key] for key in stays} == stays

    @rule()
    def reset(self) -> None:
        before = self.states()
        self.settle(before, self.promises.drop_all())
        assert not self.pool.pins, "KV of before a reset"

    @invariant()
    def bounds_hold(self) -> None:
        assert self.pool.held() == {b for _, one in self.promises for b in one.items}
        assert len(self.pool.held()) == self.promises.size <= LIMITS.size
        assert len(self.promises) <= LIMITS.most
        for tenant in ("a", "b", "c"):
            his = {b for key, one in self.promises if key.tenant == tenant for b in one.items}
            assert len(his) == self.promises.size_of_tenant(tenant) <= LIMITS.tenant_size

    def teardown(self) -> None:
        """Whatever came: once every time is up, nothing is left."""
        self.perform(self.promises.expire(self.now + LONG_S))
        assert (len(self.promises), self.pool.pins) == (0, {})


@pytest.mark.hypothesis
def test_promises_are_kept_or_told_and_leave_nothing() -> None:
    holds(PromiseMachine, examples=150, steps=25)


@pytest.mark.parametrize(
    "broken",
    [
        UnpinsFirst,
        ForgetsToTell,
        NeverReports,
        ReportsAgain,
        KeepsWithoutEnd,
        NeverExpires,
        GivesNoRoom,
        KeepsWhatIsGone,
    ],
)
def test_those_laws_notice_promises_that_break_them(broken: type[Promises[Key, int]]) -> None:
    class BrokenMachine(PromiseMachine):
        def __init__(self) -> None:
            super().__init__()
            self.promises = broken(LIMITS)

    notices(BrokenMachine, examples=200, steps=25)


def test_one_that_breaks_the_oldest_of_all_starves_a_tenant_within_his_share() -> None:
    """Negative control of the engine's bound."""
    promises = StarvesOthers(PromiseLimits(size=10, tenant_size=8, seconds=100.0))
    for key, blocks in ((B1, range(3)), (A1, range(10, 14)), (A2, range(20, 23))):
        promises.keep(key, blocks, LONG_S, 0.0)
    promises.keep(C1, [30, 31], LONG_S, 0.0)
    assert len(promises.items_of(B1)) == 0


def test_every_state_is_reached_and_ends() -> None:
    reached = {PromiseState.KEPT} | set(TRANSITIONS.values())
    assert reached == set(PromiseState)
    assert {state for state, _ in TRANSITIONS} == reached - {PromiseState.OVER}
