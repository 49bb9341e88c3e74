"""Whatever is lost, repeated or restarted: what a tracker calls whole is the engine's truth."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pdconn.router.events.tracker import (
    Apply,
    Effects,
    NeedReplay,
    Numbered,
    Reset,
    ResetReason,
    State,
    Tracker,
)
from pdconn.router.prefix.kv_events import Batch, Cleared, Event, Removed, Stored


def stored(block: int) -> Event:
    return Stored([block], 0, "gpu", 16)


def removed(block: int) -> Event:
    return Removed([block], 0, "gpu")


def carry_out(events: list[Event], blocks: set[int]) -> None:
    for event in events:
        match event:
            case Stored(hashes=hashes):
                blocks.update(hashes)
            case Removed(hashes=hashes):
                blocks.difference_update(hashes)
            case Cleared():
                blocks.clear()


def item(seq: int, *events: Event, life: int = 0, bad: bool = False) -> Numbered:
    return Numbered(seq, hash((life, seq)), None if bad else Batch(0.0, list(events)))


# --- a world in which much goes wrong -----------------------------------------------------


@dataclass
class Engine:
    """A publisher: its cache, its numbers, its short memory."""

    life: int
    memory: deque[Numbered]
    blocks: set[int] = field(default_factory=set)
    seq: int = 0

    def publish(self, events: list[Event], bad: bool) -> Numbered:
        carry_out(events, self.blocks)
        sent = item(self.seq, *events, life=self.life, bad=bad)
        self.memory.append(sent)
        self.seq += 1
        return sent


class World:
    """An engine, a tracker, the line between them, and what has been applied."""

    def __init__(self, tracker: Any, memory: int) -> None:
        self.tracker, self.memory = tracker, memory
        self.engine = Engine(0, deque(maxlen=memory))
        self.blocks: set[int] = set()
        self.asked: int | None = None
        self.answers: deque[Numbered] | None = None
        self.up = False
        self.bad = 0

    def do(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Apply(batch):
                    carry_out(batch.events, self.blocks)
                case Reset():
                    self.blocks.clear()
                case NeedReplay(start):
                    self.asked, self.answers = start, None

    def connect(self) -> None:
        if not self.up:
            self.up = True
            self.do(self.tracker.connected())

    def cut(self) -> None:
        self.up = False
        self.asked = self.answers = None
        self.tracker.disconnected()

    def restart(self) -> None:
        self.cut()
        self.engine = Engine(self.engine.life + 1, deque(maxlen=self.memory))

    def publish(self, event: Event, fate: str) -> None:
        sent = self.engine.publish([event], bad=fate == "bad")
        if self.up and fate != "lost":
            for _ in range(2 if fate == "twice" else 1):
                self.do(self.tracker.live(sent))

    def serve(self, seed: int) -> None:
        """The engine answers now, with holes once its socket is full: not at the beginning."""
        if self.asked is not None and self.answers is None:
            kept = [old for old in self.engine.memory if old.seq >= self.asked]
            rng = random.Random(seed)
            rest = [old for old in kept[2:] if not seed or rng.random() < 0.8]
            self.answers = deque(kept[:2] + rest)

    def deliver(self, count: int) -> None:
        for _ in range(count):
            if self.answers:
                self.do(self.tracker.replayed(self.answers.popleft()))
        if self.answers is not None and not self.answers:
            self.asked = self.answers = None
            self.do(self.tracker.replay_ended())

    def fail(self) -> None:
        if self.asked is not None:
            self.asked = self.answers = None
            self.do(self.tracker.replay_failed())

    def quiesce(self) -> None:
        """Nothing more goes wrong; one more batch arrives, and all questions are answered."""
        self.connect()
        for _ in range(2):
            for _ in range(1000):
                if self.asked is None:
                    break
                self.serve(0)
                self.deliver(10_000)
            assert self.asked is None, "asks for replay without end"
            self.publish(stored(99), "arrives")


BLOCK = st.integers(0, 5)
EVENT = st.builds(stored, BLOCK) | st.builds(removed, BLOCK) | st.just(Cleared())
FATE = st.sampled_from(["arrives", "arrives", "arrives", "lost", "twice", "bad"])
STEP: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    st.tuples(st.just("publish"), EVENT, FATE),
    st.tuples(st.just("publish"), EVENT, FATE),
    st.tuples(st.just("publish"), EVENT, FATE),
    st.tuples(st.just("serve"), st.integers(0, 50)),
    st.tuples(st.just("deliver"), st.integers(0, 6)),
    st.tuples(st.sampled_from(["fail", "cut", "restart"])),
    st.tuples(st.just("connect")),
    st.tuples(st.just("connect")),
)
STEPS = st.lists(STEP, max_size=60)


def law(make: Callable[[], Any], steps: list[tuple[Any, ...]], memory: int) -> State:
    """What is known is true, and what is called whole is whole."""
    world = World(make(), memory)
    for name, *values in steps:
        getattr(world, name)(*values)
    world.quiesce()
    state: State = world.tracker.state
    assert state in (State.LIVE, State.INCOMPLETE)
    assert world.blocks <= world.engine.blocks
    if state is State.LIVE:
        assert world.blocks == world.engine.blocks
    return state


@settings(max_examples=400)
@given(STEPS, st.integers(1, 12), st.integers(1, 4))
def test_what_is_known_is_true_and_whole_when_it_is_called_so(
    steps: list[tuple[Any, ...]], memory: int, held: int
) -> None:
    law(lambda: Tracker(held), steps, memory)


@given(STEPS)
def test_an_engine_that_remembers_all_and_is_readable_is_always_known_whole(
    steps: list[tuple[Any, ...]],
) -> None:
    """Failed replays may cost it, bad batches do; losses, cuts and restarts do not."""
    readable = [step for step in steps if step[0] != "fail" and "bad" not in step]
    assert law(Tracker, readable, memory=1000) is State.LIVE


class Unchecked(Tracker):
    """Takes what comes, as if nothing were ever lost."""

    def connected(self) -> Effects:
        self._connected, self._complete = True, True
        return ()

    def live(self, item: Numbered) -> Effects:
        return () if item.batch is None else (Apply(item.batch),)


class Unanchored(Tracker):
    """Believes that the engine is the one from before."""

    def _request_replay(self) -> Effects:
        super()._request_replay()
        assert self._replay is not None
        self._replay.anchored = True
        return (NeedReplay(self._next),)


@pytest.mark.parametrize("broken", [Unchecked, Unanchored])
def test_the_law_catches_trackers_without(broken: type[Tracker]) -> None:
    @settings(
        max_examples=2000,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(STEPS)
    def run(steps: list[tuple[Any, ...]]) -> None:
        law(broken, steps, memory=1000)

    with pytest.raises(AssertionError):
        run()


# --- one thing at a time ------------------------------------------------------------------


def synced(num_batches: int) -> Tracker:
    """A tracker that has taken so many batches and is LIVE."""
    tracker = Tracker()
    assert tracker.connected() == (NeedReplay(0),)
    for seq in range(num_batches):
        assert tracker.replayed(item(seq)) == (Apply(Batch(0.0, [])),)
    assert tracker.replay_ended() == ()
    assert tracker.state is State.LIVE
    return tracker


APPLIED = Apply(Batch(0.0, []))


def test_live_batches_wait_for_the_first_replay_and_are_taken_once() -> None:
    tracker = Tracker()
    assert tracker.state is State.AWAY
    tracker.connected()
    assert tracker.state is State.SYNCING
    assert tracker.live(item(1)) == () == tracker.live(item(2))
    assert tracker.replayed(item(0)) == (APPLIED,)
    assert tracker.replayed(item(1)) == (APPLIED,)
    assert tracker.replay_ended() == (APPLIED,)
    assert tracker.live(item(2)) == ()
    assert tracker.live(item(3)) == (APPLIED,)
    assert (tracker.state, tracker.gaps) == (State.LIVE, 0)


def test_a_late_joiner_whose_engine_forgot_the_beginning_is_incomplete_until_a_clear() -> None:
    tracker = Tracker()
    tracker.connected()
    assert tracker.replayed(item(40)) == (APPLIED,)
    assert tracker.replay_ended() == ()
    assert tracker.state is State.INCOMPLETE
    tracker.live(item(41, Cleared()))
    assert tracker.state is State.LIVE


def test_a_gap_is_filled_from_one_batch_before_it() -> None:
    tracker = synced(3)
    assert tracker.live(item(4)) == (NeedReplay(2),)
    assert tracker.state is State.STALE
    assert tracker.replayed(item(2)) == ()
    assert tracker.replayed(item(3)) == (APPLIED,)
    assert tracker.replayed(item(4)) == (APPLIED,)
    assert tracker.replay_ended() == ()
    assert (tracker.state, tracker.gaps, tracker.restarts) == (State.LIVE, 1, 0)


def test_a_gap_that_the_engine_forgot_costs_all_and_leaves_incomplete() -> None:
    tracker = synced(3)
    tracker.live(item(9))
    assert tracker.replayed(item(7)) == (Reset(ResetReason.GAP), APPLIED)
    tracker.replayed(item(8))
    tracker.replayed(item(9))
    tracker.replay_ended()
    assert tracker.state is State.INCOMPLETE


def test_a_gap_without_replay_costs_all_and_goes_on_from_the_live_batch() -> None:
    tracker = synced(3)
    tracker.live(item(9))
    assert tracker.replay_failed() == (Reset(ResetReason.GAP), NeedReplay(0))
    assert tracker.replay_failed() == (APPLIED,)
    assert tracker.state is State.INCOMPLETE


def test_a_hole_in_an_answer_is_asked_for_again_after_progress() -> None:
    tracker = synced(1)
    tracker.live(item(9))
    tracker.replayed(item(0))
    tracker.replayed(item(1))
    assert tracker.replayed(item(3)) == ()
    assert tracker.replay_ended() == (NeedReplay(1),)
    tracker.replayed(item(1))
    assert tracker.replayed(item(3)) == (Reset(ResetReason.GAP), APPLIED)


def test_numbers_that_go_back_are_an_engine_that_started_anew() -> None:
    tracker = synced(3)
    tracker.live(item(3))
    assert tracker.live(item(0, life=1)) == (Reset(ResetReason.RESTARTED), APPLIED)
    assert (tracker.state, tracker.restarts) == (State.LIVE, 1)
    tracker.live(item(1, life=1))
    assert tracker.live(item(1, life=2)) == (Reset(ResetReason.RESTARTED), NeedReplay(0))
    assert tracker.state is State.SYNCING


def test_an_engine_that_starts_anew_during_a_replay_is_asked_from_the_start() -> None:
    tracker = synced(3)
    tracker.live(item(9))
    assert tracker.live(item(2, life=1)) == (Reset(ResetReason.RESTARTED), NeedReplay(0))
    assert [tracker.replayed(item(seq, life=1)) for seq in range(3)] == [(APPLIED,)] * 3
    assert tracker.replay_ended() == ()
    assert tracker.state is State.LIVE


@pytest.mark.parametrize("answer", [[], [item(2, life=1)]], ids=["shorter", "other"])
def test_a_replay_of_another_engine_is_recognized_by_its_first_batch(
    answer: list[Numbered],
) -> None:
    tracker = synced(3)
    tracker.disconnected()
    assert tracker.state is State.AWAY
    assert tracker.connected() == (NeedReplay(2),)
    effects: Effects = ()
    for one in answer:
        effects += tracker.replayed(one)
    if not answer:
        effects += tracker.replay_ended()
    assert effects == (Reset(ResetReason.RESTARTED), NeedReplay(0))


def test_an_unreadable_batch_is_replayed_once_and_then_costs_all() -> None:
    tracker = synced(3)
    assert tracker.live(item(3, bad=True)) == (NeedReplay(2),)
    tracker.replayed(item(2))
    assert tracker.replayed(item(3, bad=True)) == (Reset(ResetReason.UNREADABLE),)
    tracker.replay_ended()
    assert tracker.state is State.INCOMPLETE
    assert tracker.live(item(4)) == (APPLIED,)


def test_a_batch_with_unreadable_events_is_taken_and_not_called_whole() -> None:
    tracker = synced(0)
    skipped = Numbered(0, 0, Batch(0.0, [], num_undecodable=1))
    assert tracker.live(skipped) == (Apply(Batch(0.0, [], num_undecodable=1)),)
    assert tracker.state is State.INCOMPLETE


def test_waiting_batches_are_bounded_and_what_falls_out_is_a_gap() -> None:
    tracker = Tracker(held_limit=2)
    tracker.connected()
    for seq in range(5):
        tracker.live(item(seq))
    assert tracker.replay_ended() == (NeedReplay(0),)
    assert [tracker.replayed(item(seq)) for seq in range(5)] == [(APPLIED,)] * 5
    assert tracker.replay_ended() == ()
    assert tracker.state is State.LIVE
