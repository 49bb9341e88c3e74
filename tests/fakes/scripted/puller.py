"""A rank's puller that does as a test says: what it is asked, and what it reports of each pull.

::

    Pulling ─► PdWorker ── post ──► ScriptedPuller ── reports, as the test says ──► PdWorker

It keeps the promises that :class:`~pdconn.puller.thread.Puller` keeps to an engine, and insists on
what that one relies on; ``test_puller.py`` beside it gives both the same commands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pdconn.planning import cover
from pdconn.planning.plan import Moved, Need
from pdconn.protocol.early import EarlyTicket
from pdconn.protocol.ticket import Ticket
from pdconn.puller.commands import (
    CANCELLED,
    AbandonPull,
    CancelPull,
    ClaimOutcome,
    ClaimTicket,
    Command,
    CompareAnew,
    EndBeside,
    ExpectedPull,
    FailedPull,
    FailPull,
    PullRecord,
    ReadBlocks,
    Released,
    Report,
)
from pdconn.puller.thread import NO_RESULTS, PullResults
from transport.streams import StreamPoint


@dataclass(slots=True)
class ScriptedPull:
    """One pull of this rank.

    Attributes:
        need: what is to be read; None while there are no blocks.
        is_granted: whether the lender has granted the claim.
        is_complete: whether the lender has computed all, which a ticket says.
        failed: why it will fail; it is reported once nothing writes any more, or as quarantined.
        is_cancelled: the engine has given it up.
        beside: what a store loads of its blocks; None without one, or once it has ended.
        is_read: its read has settled; ``has_ended``: it has failed, and nothing is read.
    """

    claim: ClaimTicket
    need: Need | None = None
    is_granted: bool = False
    is_complete: bool = False
    failed: str | None = None
    is_cancelled: bool = False
    beside: Need | None = None
    is_read: bool = False
    has_ended: bool = False

    @property
    def request(self) -> str:
        """The request that it is for."""
        return self.claim.request


class ScriptedPuller:
    """Pulls of one rank.

    Args:
        rank: which.
        write: what a read writes, once it has settled.
        ticket_of: the ticket that a lender makes in the end for an early one.

    Attributes:
        pulls: that have not ended, by request.
        writing: reads of pulls that were reported as quarantined.
        asked: every command, in order.
    """

    def __init__(
        self,
        rank: int,
        write: Callable[[ScriptedPull], None],
        ticket_of: Callable[[EarlyTicket], Ticket] | None = None,
    ) -> None:
        self._rank, self._write, self._ticket_of = rank, write, ticket_of
        self.pulls: dict[str, ScriptedPull] = {}
        self.writing: list[ScriptedPull] = []
        self.asked: list[Command] = []
        self._reports: list[Report] = []

    # What a worker calls

    def post_command(self, command: Command, after: StreamPoint | None = None) -> None:
        """As the puller's own, and at once."""
        self.asked.append(command)
        match command:
            case ClaimTicket(request=request):
                assert request not in self.pulls, f"{request} claims, and its claim has not ended"
                is_complete = isinstance(command.ticket, Ticket)
                self.pulls[request] = ScriptedPull(command, is_complete=is_complete)
            case ReadBlocks(request=request, need=need):
                pull = self.pulls.get(request)
                assert pull is not None, f"{request} reads, and has claimed nothing"
                assert pull.need is None, f"{request} reads twice"
                is_early = pull.claim.is_awaited and not pull.is_granted
                assert not is_early, f"{request} reads, and its claim was not granted here"
                pull.need, pull.beside = need, command.beside
                if pull.failed is not None:  # the claim was refused, or lost, before
                    self._fail(pull, pull.failed)
            case EndBeside(request=request, loaded=loaded):
                self._end_beside(request, loaded)
            case FailPull(request=request, reason=reason):
                assert request not in self.pulls, f"{request} fails, and its claim has not ended"
                self._reports.append(FailedPull(request, reason))
            case CancelPull(request=request):
                self._cancel(request)
            case AbandonPull(request=request):
                pull = self.pulls.get(request)
                if pull is not None and pull.need is not None:
                    self.leave_behind(request, "it took too long")
            case CompareAnew():
                pass

    def take_results(self) -> PullResults:
        """What has happened since the last call."""
        if not self._reports:
            return NO_RESULTS
        reports, self._reports = self._reports, []
        return PullResults.from_reports(reports)

    def wait_for_report(self, timeout_s: float) -> None:
        """Nothing comes by itself."""

    def take_pull_counts(self) -> dict[str, int]:
        """Nothing is counted."""
        return {}

    # What a test calls

    def grant(self, request: str) -> None:
        """The lender grants the claim."""
        pull = self.pulls[request]
        if not pull.is_granted and pull.failed is None:
            pull.is_granted = True
            self._tell(pull)

    def expect(self, request: str, in_s: float) -> None:
        """Nothing will come of a pull for so many seconds."""
        self._reports.append(
            ExpectedPull(request, self.pulls[request].claim.pull, self._rank, in_s)
        )

    def complete(self, request: str) -> None:
        """The lender has computed all that an early ticket is for."""
        pull = self.pulls[request]
        if not pull.is_complete:
            pull.is_complete = True
            if pull.is_granted and pull.failed is None:
                self._tell(pull)

    def lose(self, request: str, why: str = "the lender is gone") -> None:
        """The claim is refused, or lost; what was read by then does not count."""
        pull = self.pulls[request]
        if pull.need is not None:
            self._fail(pull, pull.failed or why)
        elif pull.failed is None:
            pull.failed = why
            self._tell(pull, why)

    def receive(self, request: str) -> None:
        """All is announced, and the read settles, in time; one that was given up fails for that."""
        pull = self.pulls[request]
        pull.is_complete = True
        assert pull.need is not None
        if not (pull.is_read or pull.has_ended):
            self._write(pull)
        pull.is_read = True
        if pull.failed is not None:
            self._fail(pull, pull.failed)
        elif pull.beside is None:
            del self.pulls[request]
            self._reports.append(_record(request))

    def leave_behind(self, request: str, why: str = "the read hangs") -> None:
        """The pull is reported as failed, and its read can still write."""
        pull = self.pulls.pop(request)
        assert pull.need is not None
        self.writing.append(pull)
        self._reports.append(FailedPull(request, pull.failed or why, quarantined=True))

    def settle(self, number: int) -> None:
        """A read that hung has settled: it has written, and writes no more."""
        pull = self.writing[number]
        if not pull.is_read:
            self._write(pull)
        pull.is_read = True
        if pull.beside is None:
            self.writing.remove(pull)
            self._reports.append(Released(pull.request))

    def forget_all(self) -> None:
        """The engine has slept: no pull is known any more, and nothing is reported of any."""
        assert not self.writing
        self.pulls.clear()
        self._reports.clear()

    def _end_beside(self, request: str, loaded: Need) -> None:
        """The store writes no more: what it has left of its part is read, too, and at once."""
        behind = [pull for pull in self.writing if pull.request == request and pull.beside]
        known = self.pulls.get(request)
        pull = behind[0] if behind else known
        assert pull is not None, f"{request} ends what it has not begun"
        assert pull.beside is not None, f"{request} ends what it has not begun"
        left = cover.left_of(pull.beside, loaded)
        pull.beside = None
        if behind:
            if pull.is_read:
                self.settle(self.writing.index(pull))
            return
        if pull.failed is None and any(left.tokens):
            assert pull.need is not None
            rest, pull.need = pull.need, left
            self._write(pull)
            pull.need = cover.with_left(left, rest)
        if pull.is_read or pull.has_ended:
            self.receive(request)

    def _cancel(self, request: str) -> None:
        pull = self.pulls.get(request)
        if pull is None:
            return
        assert not pull.is_cancelled, f"{request} is given up twice"
        pull.is_cancelled = True
        if pull.need is None:
            del self.pulls[request]
        else:
            pull.failed = pull.failed or CANCELLED

    def _fail(self, pull: ScriptedPull, why: str) -> None:
        if pull.beside is not None:
            pull.failed, pull.has_ended = why, True
            return
        del self.pulls[pull.request]
        self._reports.append(FailedPull(pull.request, why))

    def _tell(self, pull: ScriptedPull, problem: str | None = None) -> None:
        if pull.claim.is_awaited and pull.need is None:
            outcome = ClaimOutcome(pull.request, pull.claim.pull, self._rank, problem)
            self._reports.append(replace(outcome, ticket=self._known(pull)))

    def _known(self, pull: ScriptedPull) -> Ticket | None:
        """What is known of the ticket that an early one stands for."""
        early = pull.claim.ticket
        if not isinstance(early, EarlyTicket) or not pull.is_granted:
            return None
        assert self._ticket_of is not None
        made = self._ticket_of(early)
        return made if pull.is_complete else replace(made, blocks=())


_TIMES = (
    "claim_s", "plan_s", "plan_wait_s", "post_s", "transfer_s", "total_s", "age_s", "visible_s",
)  # fmt: skip


def _record(request: str) -> PullRecord:
    times = dict.fromkeys(_TIMES, 0.0)
    return PullRecord(request=request, moved=Moved(), num_descriptors=0, **times)
