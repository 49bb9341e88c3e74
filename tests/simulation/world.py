"""Virtual time, drawn faults, and the wires between simulated engines.

Everything that happens is an event at a virtual time, and everything drawn comes from one
seeded generator, so a seed replays a run event by event::

    world.at(0.5, engine.crash)     # in half a virtual second
    world.run()                     # until nothing is left to happen

After every event the laws are checked, see ``tests.simulation.laws``.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdconn.faults.frame_faults import FlowState, FrameFaults, MessageFaults
from pdconn.sidechannel.connection import SideChannelLost
from transport import BackendFailure, PeerId, PeerLost
from transport.testing.inprocess.faults import Failing, Fault, Late, ManualClock, ReadRequest
from transport.testing.inprocess.transport import InProcessNetwork


@dataclass(frozen=True)
class Chances:
    """What befalls a run.  Chances are per read, frame, or request; times in seconds."""

    messages: MessageFaults = field(
        default_factory=lambda: MessageFaults(
            delay=0.05, delay_s=0.4, drop=0.01, duplicate=0.03, reorder=0.03, cut=0.004, stall=0.001
        )
    )
    late_read: float = 0.15
    late_s: float = 0.5
    failing_read: float = 0.03
    hanging_read: float = 0.01
    cancel: float = 0.08
    abort: float = 0.04
    replay: float = 0.05
    crash: float = 0.01
    pause: float = 0.03
    pause_s: float = 1.5
    ttl_s: tuple[float, ...] = (0.05, 0.3, 2.0)
    drift: float = 0.0
    """Clocks run wrong by up to this part, each by its own; a slewed one by another after that."""
    slew: float = 0.0
    reset: float = 0.0
    borrow: float = 0.0
    """Of a request that asks for a prefix that is lent or was, instead of computing."""
    stream: float = 0.0
    """Of a request that decode follows while prefill computes it, in ``chunk_s`` each block."""
    chunk_s: float = 0.02
    preempt: float = 0.0
    """Of a streamed request that goes on in other blocks, but for those that were announced."""
    freeze: float = 0.0
    """As a virtual machine: its clocks stand still, too, for ``pause_s`` on average."""


NO_FAULTS = Chances(
    MessageFaults(),
    late_read=0.0,
    failing_read=0.0,
    hanging_read=0.0,
    cancel=0.0,
    abort=0.0,
    replay=0.0,
    crash=0.0,
    pause=0.0,
    ttl_s=(1.0,),
)  # fmt: skip


class World:
    """Clock, events and randomness of one run."""

    def __init__(self, seed: int, chances: Chances) -> None:
        self.seed = seed
        self.chances = chances
        self.rng = random.Random(seed)
        self.clock = ManualClock(1000.0)
        self.network = InProcessNetwork(clock=self.clock, script=self._fault_of)
        self.counts: Counter[str] = Counter()
        self.readers: dict[PeerId, Callable[[], None]] = {}
        """Whom to wake when a read of theirs lands."""
        self.check: Callable[[], None] = lambda: None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    @property
    def now(self) -> float:
        return self.clock()

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        """Let ``act`` happen ``delay_s`` from now."""
        heapq.heappush(self._events, (self.now + delay_s, next(self._numbers), act))

    def run(self, until: float = math.inf) -> None:
        """Until no event is left, or until a time; the laws are checked after each."""
        while self._events and self._events[0][0] <= until:
            due, _, act = heapq.heappop(self._events)
            self.clock.advance(max(0.0, due - self.now))
            act()
            self.counts["events"] += 1
            self.check()

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def lag(self) -> float:
        """What a message, a thread switch or a step takes: a millisecond or so."""
        return self.rng.expovariate(1000.0)

    def _fault_of(self, read: ReadRequest) -> Fault:
        fault = self._drawn()
        self.at(fault.seconds, self.readers[read.reader])
        return fault

    def _drawn(self) -> Late | Failing:
        chances = self.chances
        if self.chance(chances.failing_read):
            error = self.rng.choice((PeerLost, BackendFailure))("cut")
            return Failing(error, after_bytes=self.rng.randrange(64), seconds=self.lag())
        if self.chance(chances.hanging_read):
            return Late(self.rng.uniform(5.0, 60.0))
        if self.chance(chances.late_read):
            return Late(self.rng.expovariate(1 / chances.late_s))
        return Late(self.lag())


class EngineClock:
    """What one engine takes the time to be: right by a rate of its own, and at times not running.

    Args:
        world: the true time.
        rate: its seconds per true second.
    """

    def __init__(self, world: World, rate: float = 1.0) -> None:
        self._world = world
        self._rate = rate
        self._true, self._read = world.now, world.now

    def __call__(self) -> float:
        return self._read + (self._world.now - self._true) * self._rate

    def run_at(self, rate: float) -> None:
        """Go on at another rate; 0 stops it."""
        self._read, self._true = self(), self._world.now
        self._rate = rate

    def true_seconds(self, until: float) -> float:
        """True seconds until it reads ``until``, if its rate stays; 0 when that is past."""
        return max(0.0, until - self()) / (self._rate or 1.0)


class Machine:
    """What an engine runs on: it can stand still, and its clock can be wrong."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._rate = 1.0 + world.rng.uniform(-1, 1) * world.chances.drift
        self.clock = EngineClock(world, self._rate)
        self._paused_until = 0.0

    @property
    def is_paused(self) -> bool:
        return self.world.now < self._paused_until

    def pause(self, seconds: float) -> None:
        """Stand still, as a process without a core does, which sees that time has passed."""
        self._paused_until = max(self._paused_until, self.world.now + seconds)

    def freeze(self, seconds: float) -> None:
        """Stand still as a virtual machine that its host stops: no time seems to pass."""
        self.world.counts["frozen"] += 1
        self.pause(seconds)
        self.clock.run_at(0.0)
        self.world.at(seconds, lambda: self.clock.run_at(self._rate))

    def slew(self) -> None:
        """Somebody corrects the clock: it runs at another rate from now on."""
        self.world.counts["slewed"] += 1
        self._rate = 1.0 + self.world.rng.uniform(-1, 1) * self.world.chances.drift
        self.clock.run_at(self._rate)

    def when_awake(self, act: Callable[[], None]) -> None:
        """Call ``act`` now, or when the machine goes on."""
        if self.is_paused:
            self.world.at(self._paused_until - self.world.now, lambda: self.when_awake(act))
        else:
            act()


class Clockwork:
    """Calls back a little after a deadline, once per deadline.

    Clocks ring late, so what was read too late may be seen before the alarm is: by the lag of
    any event here, and by ``late_s`` more.
    """

    late_s = 0.0

    def __init__(self, world: World, clock: EngineClock) -> None:
        self._world = world
        self._clock = clock
        self._set_for: float | None = None

    def set(self, deadline: float | None, act: Callable[[], None]) -> None:
        """Call ``act`` at ``deadline`` unless an earlier call is set already."""
        if deadline is None or (self._set_for is not None and self._set_for <= deadline):
            return
        self._set_for = deadline

        def ring() -> None:
            if self._set_for == deadline:
                self._set_for = None
            act()

        late = self._world.lag() + self.late_s
        self._world.at(self._clock.true_seconds(deadline) + late, ring)


@dataclass(eq=False)
class Wire:
    """One end of a simulated connection.  What is sent here arrives at ``other``."""

    world: World
    deliver: Callable[[], None]
    faults: FrameFaults
    other: Wire | None = None
    arrived: list[bytes] = field(default_factory=list)
    is_cut: bool = False
    _due: float = 0.0

    def send_frames(self, bodies: Sequence[bytes]) -> None:
        """As ``pdconn.sidechannel.connection.Connection.send_frames``."""
        for body in bodies:
            if self.is_cut:
                raise SideChannelLost("cut")
            for out in self.faults.pass_frame(body, self.world.now):
                self._carry(out.frame, out.due - self.world.now)
            if self.faults.state is FlowState.CUT:
                self.cut()
                raise SideChannelLost("cut on purpose")
            if self.faults.held_until is not None:
                self.world.at(self.faults.held_until - self.world.now, self._flush)

    def receive_frames(self) -> Sequence[bytes]:
        """As ``pdconn.sidechannel.connection.Connection.receive_frames``."""
        arrived, self.arrived = self.arrived, []
        if not arrived and self.is_cut:
            raise SideChannelLost("closed by the peer")
        return arrived

    def close(self) -> None:
        """As ``pdconn.sidechannel.connection.Connection.close``: the other end learns of it."""
        self.cut()

    def finish(self) -> None:
        """Close once what was sent has arrived, as TCP does with what it took."""
        self.world.at(max(0.0, self._due - self.world.now), self.cut)

    def cut(self) -> None:
        """Both ends learn that the connection is over."""
        for end in (self, self.other):
            if end is not None and not end.is_cut:
                end.is_cut = True
                self.world.at(self.world.lag(), end.deliver)

    def _carry(self, body: bytes, delay_s: float) -> None:
        """Bytes keep their order on the way, as TCP's do."""
        self._due = max(self._due, self.world.now + delay_s + self.world.lag())
        self.world.at(self._due - self.world.now, lambda: self._arrive(body))

    def _arrive(self, body: bytes) -> None:
        if self.other is not None and not self.other.is_cut:
            self.other.arrived.append(body)
            self.other.deliver()

    def _flush(self) -> None:
        for out in self.faults.release_held(self.world.now):
            self._carry(out.frame, out.due - self.world.now)


def connect(
    world: World, ours: Callable[[], None], theirs: Callable[[], None]
) -> tuple[Wire, Wire]:
    """Two ends of a connection; each callable is called when its end has news."""
    messages = world.chances.messages

    def faults() -> FrameFaults:
        return FrameFaults(messages, random.Random(world.rng.random()), world.counts)

    here, there = Wire(world, ours, faults()), Wire(world, theirs, faults())
    here.other, there.other = there, here
    return here, there


__all__ = ["NO_FAULTS", "Chances", "EngineClock", "Machine", "Wire", "World", "connect"]
