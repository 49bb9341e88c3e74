"""The laws of the design that hold at every step of a simulation, as code that can fail."""

from __future__ import annotations

from pdconn.lifecycle.pull import PullState
from tests.simulation.engines import Decode, DecodeRank, Prefill
from tests.simulation.world import World
from transport.faults import ReadRequest

BELIEVING = (PullState.HELD, PullState.READING)


class LawBroken(AssertionError):
    """A law does not hold."""


class Laws:
    """Checks laws 3 and 4 and the quarantine after each event, law 5 at the end."""

    def __init__(self, world: World, prefills: list[Prefill], decodes: list[Decode]) -> None:
        self._world = world
        self._prefills = prefills
        self._decodes = decodes
        self._targets: dict[int, tuple[Decode, set[int]]] = {}

    def hold(self) -> None:
        """Check what must hold at every moment.

        Raises:
            LawBroken: naming the law, the request and the time.
        """
        self._nothing_lent_is_free_while_believed()
        self._nothing_free_can_be_written()
        for prefill in self._prefills:
            self._require(not prefill.freed_twice, f"law 3: freed twice: {prefill.freed_twice}")
        for decode in self._decodes:
            self._require(not decode.wrong, f"law 4: {decode.wrong} holds another request's KV")

    def hold_at_the_end(self) -> None:
        """Check that every table is empty and every block is back.

        Raises:
            LawBroken: naming what is left, and where.
        """
        for prefill in self._prefills:
            self._require(prefill.desk.num_lent == 0, f"law 5: {prefill.name} still lends")
            self._require(prefill.desk.num_summed == 0, f"law 5: {prefill.name} keeps checksums")
            self._all_free(prefill.name, prefill.free)
        for decode in self._decodes:
            self._require(not decode.requests, f"law 5: {decode.name} has {decode.requests}")
            self._all_free(decode.name, decode.free)
            for rank in decode.ranks:
                self._require(rank.pulls.num_open == 0, f"law 5: {decode.name} has open pulls")
                idle = all(not peer.pulls and not peer.retired for peer in rank.pulls.connections)
                self._require(idle, f"law 5: {decode.name} keeps peers that nobody uses")
        self._require(not self._world.network.in_flight(), "law 5: a read is in flight")

    def _nothing_lent_is_free_while_believed(self) -> None:
        """Law 3: a pull whose claim is not over finds its lease in the book."""
        now = self._world.now
        alive = {prefill.incarnation: prefill for prefill in self._prefills}
        for _, rank in self._ranks():
            for entry in rank.pulls._entries.values():
                machine = entry.machine
                lender = alive.get(entry.ticket.incarnation)
                if lender is None or machine.state not in BELIEVING or now >= machine.deadline:
                    continue
                self._require(
                    entry.ticket.request_id in lender.lent,
                    f"law 3: {entry.ticket.request_id} is free, and {entry.request} reads it",
                )

    def _nothing_free_can_be_written(self) -> None:
        """A block that the engine may give away is not the target of any read."""
        flights = self._world.network.in_flight()
        for flight in flights:
            if flight.number not in self._targets:
                self._targets[flight.number] = self._target(flight)
            decode, blocks = self._targets[flight.number]
            written = blocks.intersection(decode.free)
            self._require(not written, f"{written} of {decode.name} are free and written")
        if len(self._targets) > 2 * len(flights) + 100:
            self._targets = {f.number: self._targets[f.number] for f in flights}

    def _target(self, flight: ReadRequest) -> tuple[Decode, set[int]]:
        for decode, rank in self._ranks():
            if rank.transport.peer_id == flight.reader:
                raw = rank.memory.raw
                row = raw.nbytes // len(raw)
                return decode, {(at - raw.ctypes.data) // row for at in flight.spans.local.tolist()}
        raise AssertionError(f"nobody is {flight.reader}")

    def _ranks(self) -> list[tuple[Decode, DecodeRank]]:
        return [(decode, rank) for decode in self._decodes for rank in decode.ranks]

    def _all_free(self, name: str, free: list[int]) -> None:
        expected = list(range(1, len(self._decodes[0].ranks[0].memory.cells)))
        self._require(sorted(free) == expected, f"law 5: {name} has free blocks {sorted(free)}")

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise LawBroken(f"seed {self._world.seed}, {self._world.now:.4f} s: {what}")
