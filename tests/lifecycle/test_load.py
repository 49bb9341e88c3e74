"""Laws of a load, whatever order its events come in: ``python -m pytest tests/lifecycle``."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from pdconn.lifecycle.load import (
    FETCH_S,
    LOOKUP_S,
    TRANSITIONS,
    AnsweredInTime,
    CopyRows,
    DistrustRows,
    DropRows,
    Effect,
    FailRequest,
    FreeRoom,
    LoadBeside,
    LoadState,
    StoreLoad,
)
from tests.property.scale import holds, notices

ROWS = ("a", "b", "c")
HELD, BOUNDARY, RANKS = 16, 64, 2


def fetching(num_ranks: int = RANKS, now: float = 0.0) -> StoreLoad[str]:
    load = StoreLoad[str]()
    load.begin_lookup(now)
    load.found(BOUNDARY, HELD, ROWS)
    load.place(7, num_ranks, now)
    return load


def fetched() -> StoreLoad[str]:
    load = fetching(1)
    assert load.answered((), ()) == [AnsweredInTime()]
    return load


def test_what_every_rank_has_verified_is_offered_taken_and_its_room_freed_once() -> None:
    load = fetching()
    assert load.answered((), ()) == []
    assert load.offer(HELD) is None, "a rank is still reading"
    assert load.answered((), ()) == [AnsweredInTime()]
    assert load.offer(HELD) == BOUNDARY - HELD
    assert load.take_blocks(BOUNDARY - HELD) == [CopyRows(range(HELD, BOUNDARY))]
    assert load.leave() == [], "what the engine waits for ends by its report"
    assert load.reported() == [FreeRoom()]
    assert (load.state, load.reported()) == (LoadState.OVER, [])


@pytest.mark.parametrize(("missing", "damaged"), [(("a",), ()), ((), ("b",)), (("a", "b"), ("b",))])
def test_rows_that_are_not_what_was_saved_are_not_offered(
    missing: tuple[str, ...], damaged: tuple[str, ...]
) -> None:
    load = fetching()
    load.answered(missing, damaged)
    distrusted = DistrustRows(frozenset(missing) - set(damaged), frozenset(damaged))
    assert load.answered((), ()) == [AnsweredInTime(), distrusted]
    assert load.offer(HELD) is None
    assert load.take_blocks(BOUNDARY - HELD) == [DropRows(), FreeRoom()]


@pytest.mark.parametrize(("num_local", "offered"), [(0, None), (15, None), (16, 48), (40, 24)])
def test_rows_reach_from_what_was_held_to_the_boundary(num_local: int, offered: int | None) -> None:
    assert fetched().offer(num_local) == offered


@pytest.mark.parametrize("num_external", [0, 47, 49])
def test_what_was_not_offered_is_not_taken(num_external: int) -> None:
    load = fetched()
    assert load.offer(HELD) == 48
    assert load.take_blocks(num_external) == [DropRows(), FreeRoom()]
    assert load.is_over


def test_a_load_that_is_left_while_ranks_read_keeps_its_room_until_they_have_answered() -> None:
    load = fetching()
    assert load.leave() == [DropRows()]
    assert load.is_over
    assert load.answered((), ()) == []
    assert load.answered((), ()) == [FreeRoom()], "and no request waited for the shelf"


def test_a_look_up_goes_on_when_its_request_gets_blocks() -> None:
    """Its keys are those of the rows that are saved."""
    load = StoreLoad[str]()
    load.begin_lookup(0.0)
    assert load.take_blocks(0) == []
    assert load.is_looking


def test_what_was_promised_and_is_gone_is_reported_failed() -> None:
    failing = StoreLoad[str]()
    assert failing.fail_request() == [FailRequest()]
    assert failing.fail_request() == []
    assert failing.reported() == []
    assert failing.state is LoadState.OVER


def beside(num_ranks: int = RANKS) -> StoreLoad[str]:
    load = StoreLoad[str]()
    load.begin_lookup(0.0)
    load.found(BOUNDARY, HELD, ROWS, is_beside=True)
    load.place(7, num_ranks, 0.0)
    return load


def test_rows_of_full_attention_alone_are_not_offered_as_a_prompt() -> None:
    load = beside(1)
    load.answered((), ())
    assert load.offer(HELD) is None
    assert load.take_blocks(BOUNDARY - HELD) == [DropRows(), FreeRoom()]


def test_a_load_joins_a_pull_while_ranks_read_and_ends_once_all_have_ended() -> None:
    load = beside()
    assert load.join_pull(HELD + 16, 2.0) == [LoadBeside(range(HELD + 16, BOUNDARY))]
    assert load.seconds_waited(5.0) == 3.0, "since the pull waits for it"
    assert load.leave() == [], "it ends by itself"
    load.answered(("a",), ())
    assert load.answered((), ("b",)) == [
        AnsweredInTime(), DistrustRows(frozenset("a"), frozenset("b"))
    ]  # fmt: skip
    assert load.give_up_beside() == [DropRows()]
    assert load.ended_beside() == []
    assert load.ended_beside() == [FreeRoom()]
    assert (load.state, load.ended_beside()) == (LoadState.OVER, [])


@pytest.mark.parametrize("num_local", [HELD - 1, BOUNDARY])
def test_a_load_that_has_nothing_for_a_pull_is_left(num_local: int) -> None:
    """Behind what the engine has lost its rows do not begin; with more they are of no use."""
    load = beside(1)
    load.answered((), ())
    assert load.join_pull(num_local, 0.0) == [DropRows(), FreeRoom()]


def test_each_step_has_its_own_patience() -> None:
    load = StoreLoad[str]()
    load.begin_lookup(1.0)
    assert (load.seconds_waited(3.0), load.most_s) == (2.0, LOOKUP_S)
    load.found(BOUNDARY, HELD, ROWS)
    assert (load.seconds_waited(4.0), load.most_s) == (3.0, LOOKUP_S), "with the wait for room"
    load.place(1, RANKS, 5.0)
    assert (load.seconds_waited(6.0), load.most_s) == (1.0, FETCH_S)


# Every order of events


class FreesWhileRead(StoreLoad[str]):
    """Frees its room when it is left, though ranks still read into it."""

    def leave(self) -> list[Effect[str]]:
        effects = super().leave()
        return [*effects, FreeRoom()] if effects == [DropRows()] else effects


class OffersDamaged(StoreLoad[str]):
    """Takes every answer of a rank for a good one."""

    def answered(self, missing: object, damaged: object) -> list[Effect[str]]:
        return super().answered((), ())


class TakesAnything(StoreLoad[str]):
    """Brings what it was asked for, whatever it has offered."""

    def take_blocks(self, num_external: int) -> list[Effect[str]]:
        self._local = self.boundary - num_external
        return super().take_blocks(num_external)


class ForgetsItsRoom(StoreLoad[str]):
    """Keeps its room when it has been reported."""

    def reported(self) -> list[Effect[str]]:
        super().reported()
        return []


class OffersHalves(StoreLoad[str]):
    """Takes rows of full attention alone for all of a prompt."""

    def found(
        self, boundary: int, held: int, rows: tuple[str, ...], *, is_beside: bool = False
    ) -> None:
        super().found(boundary, held, rows)


class EndsWithTheFirst(StoreLoad[str]):
    """Frees its room once one rank has loaded what it could."""

    def ended_beside(self) -> list[Effect[str]]:
        self._left_beside = 1
        return super().ended_beside()


@dataclass
class Room:
    """The world of one load: its room, ranks that read, and what was promised to the engine."""

    left: int = 0
    is_taken: bool = False
    is_spoiled: bool = False
    is_beside: bool = False
    joined: int = 0
    offered: int | None = None
    copies: list[range] = field(default_factory=list)


class LoadMachine(RuleBasedStateMachine):
    """Asks, finds, places, answers, offers, takes, leaves and reports in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = Room()
        self.load = StoreLoad[str]()

    def perform(self, effects: list[Effect[str]]) -> None:
        world = self.world
        for effect in effects:
            if isinstance(effect, FreeRoom):
                assert world.is_taken, "freed twice, or without room"
                assert not world.left, "freed while a rank reads into it"
                assert not world.joined, "freed while a rank copies from it"
                world.is_taken = False
            elif isinstance(effect, CopyRows):
                assert not world.is_spoiled, "rows that were not verified"
                assert not world.is_beside, "windows and states are missing"
                assert world.offered == len(effect.tokens), "what was not promised"
                assert effect.tokens.stop == BOUNDARY
                world.copies.append(effect.tokens)
            elif isinstance(effect, LoadBeside):
                assert world.is_beside, "for a request without a pull"
                assert HELD <= effect.tokens.start < effect.tokens.stop == BOUNDARY
                world.copies.append(effect.tokens)
                world.joined = RANKS

    @precondition(lambda self: not self.load.is_over)
    @rule(
        steps=st.integers(1, 8), missing=st.sampled_from([(), (), ("a",)]), is_pulled=st.booleans()
    )
    def go_on(self, steps: int, missing: tuple[str, ...], is_pulled: bool) -> None:
        """What comes next where nothing comes between; a pull may be lost on the way."""
        for _ in range(steps):
            self.step(missing, is_pulled)

    def step(self, missing: tuple[str, ...], is_pulled: bool) -> None:
        match self.load.state:
            case LoadState.NEW:
                self.ask()
            case LoadState.LOOKING:
                self.found(is_pulled)
            case LoadState.FOUND:
                self.place()
            case LoadState.FETCHING:
                self.answer(missing, ())
            case LoadState.FETCHED if is_pulled and self.world.offered is None:
                self.join(HELD)
            case LoadState.FETCHED if self.world.offered is None:
                self.offer(HELD)
            case LoadState.FETCHED:
                self.take(0, as_offered=True)
            case LoadState.LOADING:
                self.report()
            case LoadState.BESIDE if self.world.left:
                self.answer(missing, ())
            case LoadState.BESIDE:
                self.end_beside()

    @precondition(lambda self: self.load.state is LoadState.NEW)
    @rule()
    def ask(self) -> None:
        self.load.begin_lookup(0.0)

    @precondition(lambda self: self.load.state is LoadState.LOOKING)
    @rule(is_beside=st.booleans())
    def found(self, is_beside: bool) -> None:
        self.load.found(BOUNDARY, HELD, ROWS, is_beside=is_beside)
        self.world.is_beside = is_beside

    @precondition(lambda self: self.load.state is LoadState.FOUND)
    @rule()
    def place(self) -> None:
        self.load.place(1, RANKS, 0.0)
        self.world.left, self.world.is_taken = RANKS, True

    @precondition(lambda self: self.world.left)
    @rule(missing=st.sampled_from([(), ("a",)]), damaged=st.sampled_from([(), ("b",)]))
    def answer(self, missing: tuple[str, ...], damaged: tuple[str, ...]) -> None:
        self.world.left -= 1
        self.world.is_spoiled = self.world.is_spoiled or bool(missing or damaged)
        self.perform(self.load.answered(missing, damaged))

    @precondition(lambda self: self.world.is_taken)
    @rule(num_local=st.integers(0, BOUNDARY + 8))
    def offer(self, num_local: int) -> None:
        offered = self.load.offer(num_local)
        if offered is not None:
            assert num_local >= HELD, "blocks that it held are gone"
            self.world.offered = offered

    @precondition(lambda self: self.world.is_taken)
    @rule(num_external=st.one_of(st.just(0), st.integers(1, BOUNDARY)), as_offered=st.booleans())
    def take(self, num_external: int, as_offered: bool) -> None:
        offered = self.world.offered or 0
        self.perform(self.load.take_blocks(max(0, offered) if as_offered else num_external))

    @precondition(lambda self: self.world.is_taken)
    @rule(num_local=st.integers(0, BOUNDARY + 8))
    def join(self, num_local: int) -> None:
        self.perform(self.load.join_pull(num_local, 0.0))

    @precondition(lambda self: self.world.joined and not self.world.left)
    @rule()
    def end_beside(self) -> None:
        """A rank has ended; it has answered before."""
        self.world.joined -= 1
        self.perform(self.load.ended_beside())

    @rule()
    def give_up(self) -> None:
        self.perform(self.load.give_up_beside())

    @precondition(lambda self: not self.load.is_over)
    @rule()
    def leave(self) -> None:
        self.perform(self.load.leave())

    @precondition(lambda self: self.load.state is LoadState.NEW)
    @rule()
    def fail(self) -> None:
        self.perform(self.load.fail_request())

    @rule()
    def report(self) -> None:
        self.perform(self.load.reported())

    @invariant()
    def brings_rows_once(self) -> None:
        assert len(self.world.copies) <= 1

    def teardown(self) -> None:
        """Whatever came: once ranks have answered and the request is reported, nothing is left."""
        self.perform(self.load.leave())
        while self.world.left:
            self.world.left -= 1
            self.perform(self.load.answered((), ()))
        while self.world.joined:
            self.end_beside()
        self.perform(self.load.reported())
        assert self.load.is_over
        assert not self.world.is_taken, "room of no load"


@pytest.mark.hypothesis
def test_a_load_brings_what_was_promised_and_verified_and_leaves_nothing() -> None:
    holds(LoadMachine, examples=100, steps=16)


@pytest.mark.parametrize(
    "broken",
    [
        FreesWhileRead, OffersDamaged, TakesAnything, ForgetsItsRoom, OffersHalves,
        EndsWithTheFirst,
    ],
)  # fmt: skip
def test_those_laws_notice_a_machine_that_breaks_them(broken: type[StoreLoad[str]]) -> None:
    class BrokenMachine(LoadMachine):
        def __init__(self) -> None:
            super().__init__()
            self.load = broken()

    notices(BrokenMachine, examples=1000, steps=16)


def test_every_state_is_reached_and_ends() -> None:
    """OVER from anywhere, by some events."""
    reached, frontier = {LoadState.NEW}, [LoadState.NEW]
    while frontier:
        state = frontier.pop()
        for (before, _), after in TRANSITIONS.items():
            if before is state and after not in reached:
                reached.add(after)
                frontier.append(after)
    assert reached == set(LoadState)
    ends = {LoadState.OVER}
    for _ in LoadState:
        ends |= {before for (before, _), after in TRANSITIONS.items() if after in ends}
    assert ends == set(LoadState)
