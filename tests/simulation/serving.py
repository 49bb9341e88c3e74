"""A lender's sessions on simulated wires: what its thread does between two waits."""

from __future__ import annotations

import math
from collections.abc import Callable

from pdconn.lender.sessions import LenderSessions, Session
from pdconn.lifecycle.lease import FreedLease
from pdconn.protocol.errors import ProtocolError
from pdconn.protocol.messages import decode_from_reader
from pdconn.sidechannel.connection import SideChannelLost
from tests.simulation.world import Clockwork, Machine, Wire, World, connect


class Serving:
    """One boot of a lender.

    Args:
        world, machine: where it runs.
        sessions: leases and sessions.
        freed: is told each lease that ended.
    """

    def __init__(
        self,
        world: World,
        machine: Machine,
        sessions: LenderSessions,
        freed: Callable[[FreedLease], None],
        followed: Callable[[str], None] = lambda request: None,
    ) -> None:
        self._world = world
        self._machine = machine
        self._sessions = sessions
        self._freed, self._followed = freed, followed
        self._wires: dict[Session, Wire] = {}
        self._alarm = Clockwork(world, machine.clock)
        self._is_over = False

    def open(self, arrived: Callable[[], None]) -> Wire:
        """A reader dials; return its end of the wire."""
        session = Session("reader")
        serve = lambda: self._machine.when_awake(lambda: self._serve(session))  # noqa: E731
        theirs, ours = connect(self._world, arrived, serve)
        self._wires[session] = ours
        return theirs

    def end(self) -> None:
        """The process ends: every wire is cut, and nothing is served any more."""
        self._is_over = True
        wires, self._wires = self._wires, {}
        for wire in wires.values():
            wire.cut()

    def turn(self) -> None:
        """Free what is over, and set the clock for what will be, once the machine is awake."""
        self._machine.when_awake(self.turn_now)

    def turn_now(self) -> None:
        """As :meth:`turn`, on a machine that is awake."""
        if self._is_over:
            return
        now = self._machine.clock()
        turn = self._sessions.turn(now)
        pending = turn.pending
        while turn.wake_at <= now:
            turn = self._sessions.turn(now)
            pending += turn.pending
        for report in self._sessions.reports:
            if isinstance(report, FreedLease):
                self._freed(report)
            else:
                self._followed(report.request)
        self._sessions.reports.clear()
        for session in pending:
            self._say(session)
        self._alarm.set(None if turn.wake_at == math.inf else turn.wake_at, self.turn)

    def _serve(self, session: Session) -> None:
        wire = self._wires.get(session)
        if wire is None:
            return
        try:
            for body in wire.receive_frames():
                self._sessions.handle_messages(
                    session, decode_from_reader(body), self._machine.clock()
                )
        except ProtocolError as error:
            self._sessions.reject(session, error)
        except SideChannelLost:
            del self._wires[session]
            return
        self.turn_now()
        self._say(session)

    def _say(self, session: Session) -> None:
        wire = self._wires.get(session)
        if wire is None:
            return
        try:
            wire.send_frames(self._sessions.take_frames(session))
        except SideChannelLost:
            del self._wires[session]
            return
        if session.leaving:
            self._wires.pop(session).finish()
