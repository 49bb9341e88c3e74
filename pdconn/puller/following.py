"""What a pull knows of a request that its lender is still computing.

A lender announces blocks by position, in order.  Nothing of it is believed: the ticket at the end
has the digest that the lender compares when the pull is confirmed, and the ticket's blocks must be
those that were announced.  A message that comes again is ignored if it says the same; what a lost
message has announced is read when all is announced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdconn.lifecycle.pace import LenderRates, StreamPace
from pdconn.planning.increments import Increments, announced_tokens, nbytes_per_token
from pdconn.planning.plan import Need, Pairing, Plan
from pdconn.protocol.early import EarlyTicket
from pdconn.protocol.errors import MessageError
from pdconn.protocol.messages import Completed, Grown, Opened
from pdconn.protocol.ticket import BlockList, Ticket, check_block_count, max_blocks_for


class FollowedStream:
    """A stream, as its lender has announced it so far.

    Args:
        early: the ticket that names it.

    Attributes:
        ticket: of its request, once that is known; without blocks until it is complete.
        pace: of its request, once that is known.
    """

    def __init__(self, early: EarlyTicket, rates: LenderRates) -> None:
        self.early = early
        self._rates = rates
        self.pace: StreamPace | None = None
        self.ticket: Ticket | None = None
        self._lists: dict[int, list[int]] = {}
        self._count = 0
        self._is_complete = False
        self._increments: Increments | None = None

    def open_stream(self, message: Opened) -> Ticket:
        """The lender has named the request; returns its ticket, without blocks.

        Raises:
            MessageError: it has named another one before, or of another stream.
            TicketError: a value that no ticket has.
        """
        early = self.early
        if message.stream != early.stream:
            raise MessageError("opened.stream", early.stream, message.stream)
        opened = Ticket(
            early.engine_id,
            early.incarnation,
            message.request,
            early.host,
            early.port,
            message.num_tokens,
            message.prompt,
            (),
            adapter=message.adapter,
        )
        if self.ticket is not None:
            if replace(self.ticket, blocks=()) != opened:
                raise MessageError("opened", "what it was before", message.request)
            return self.ticket
        self.ticket = opened
        self.pace = StreamPace(self._rates, message.num_tokens)
        return self.ticket

    def grow(self, message: Grown, pairing: Pairing, now: float) -> bool:
        """The lender has announced more blocks; the first time, none if nothing was cached.

        Returns:
            Whether that is news: a lender may not keep us waiting by messages that say nothing.

        Raises:
            MessageError: of a stream that is not open, or other blocks than were announced before.
            TicketError: more blocks than a prompt of as many tokens can have.
        """
        if self.ticket is None or self.pace is None:
            raise MessageError("grown", "an open stream", "none")
        if self._is_complete:
            return False
        count, has_begun = self._count, self.pace.known is not None
        for each in message.blocks:
            known = self._lists.setdefault(each.group, [])
            again = known[each.first : each.first + len(each.ids)]
            if again != list(each.ids[: len(again)]):
                raise MessageError(f"grown.ids of group {each.group}", "those announced", "others")
            if each.first <= len(known):
                known += each.ids[len(again) :]
                self._count += len(each.ids) - len(again)
        check_block_count(self._count, max_blocks_for(self.ticket.num_tokens))
        if has_begun and self._count == count:
            return False
        tokens = announced_tokens(pairing, self._announced(len(pairing.lent_num_blocks)))
        self.pace.note_announced(min(tokens, self.ticket.num_tokens), now)
        return True

    def complete(self, message: Completed, now: float) -> Ticket:
        """The lender has announced all blocks; returns the ticket with them.

        Raises:
            MessageError: of a stream that is not open, or blocks that are not those announced.
            TicketError: more blocks than a prompt of as many tokens can have.
        """
        if self.ticket is None:
            raise MessageError("completed", "an open stream", "none")
        blocks = tuple(BlockList(first, ids) for first, ids in message.blocks)
        if self._is_complete:
            if blocks != self.ticket.blocks:
                raise MessageError("completed.blocks", "the ticket's blocks", "others")
            return self.ticket
        count = sum(len(ids) for _, ids in message.blocks)
        check_block_count(count, max_blocks_for(self.ticket.num_tokens))
        for group, known in self._lists.items():
            first, ids = message.blocks[group] if group < len(message.blocks) else (0, ())
            if first != 0 or list(ids[: len(known)]) != known:
                raise MessageError(
                    f"completed.blocks of group {group}", "the announced blocks", "others"
                )
        self._is_complete = True
        self._lists.clear()
        if self.pace is not None:
            self.pace.note_completed(now)
        self.ticket = replace(self.ticket, blocks=blocks)
        return self.ticket

    @property
    def nbytes_read(self) -> int:
        """Bytes of the plans made so far."""
        return 0 if self._increments is None else self._increments.nbytes

    def blocks_due_at(self, pairing: Pairing, now: float) -> float | None:
        """When to ask the engine for blocks; None until the lender has begun to compute."""
        if self._is_complete or self.pace is None:
            return now
        return self.pace.blocks_due_at(self.pace.num_tokens * nbytes_per_token(pairing), now)

    def next_plan(self, pairing: Pairing, need: Need) -> Plan | None:
        """The reads of what no plan has read; None if nothing was announced.

        Raises:
            PlanningError: as :meth:`pdconn.planning.plan.Pairing.plan`.
        """
        if self._increments is None:
            self._increments = Increments(pairing, need)
        if self._is_complete:
            assert self.ticket is not None
            return self._increments.plan_rest(self.ticket.blocks)
        return self._increments.plan_announced(self._announced(len(pairing.lent_num_blocks)))

    def _announced(self, num_groups: int) -> Sequence[BlockList]:
        return [BlockList(0, tuple(self._lists.get(group, ()))) for group in range(num_groups)]
