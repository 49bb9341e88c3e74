"""One need in several plans, while the lender announces its blocks.

Blocks of full attention are announced once they are written, and are read then.  Windows and states
are of use only as they are in the end, so they are read with the rest::

    announced      ├──────────────┤────────────┤──────────────── complete
    full           │ increment    │ increment  │ rest
    window, state                                rest

An increment ends with a whole sub-block of every template of a group, so that each is read once,
and after it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

from pdconn.planning.plan import Moved, Need, Pairing, Plan
from pdconn.protocol.ticket import BlockList
from registration.references import AttentionKind


def announced_tokens(pairing: Pairing, lent: Sequence[BlockList]) -> int:
    """Tokens up to which every full-attention group can be read from these blocks."""
    ends = [
        (lent[template.their_group].first + len(lent[template.their_group].ids))
        * template.theirs.block_tokens
        for template in pairing.templates
        if pairing.ours.groups[template.our_group].kind is AttentionKind.FULL
    ]
    return min(ends, default=0)


def nbytes_per_token(pairing: Pairing) -> float:
    """Bytes of full attention that are read for a token."""
    return sum(
        template.sub_block_nbytes / template.sub_block_tokens
        for template in pairing.templates
        if pairing.ours.groups[template.our_group].kind is AttentionKind.FULL
    )


class Increments:
    """The plans of one need.

    Args:
        pairing: with the lender.
        need: what is read in the end, in all plans together.
    """

    def __init__(self, pairing: Pairing, need: Need) -> None:
        self._pairing, self._need = pairing, need
        self._done = [tokens.start for tokens in need.tokens]
        self._full = 0
        self._steps: dict[int, int] = {}
        for template in pairing.templates:
            if pairing.ours.groups[template.our_group].kind is AttentionKind.FULL:
                before = self._steps.get(template.our_group, 1)
                self._steps[template.our_group] = lcm(before, template.sub_block_tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of the plans of what was announced."""
        return self._full

    def plan_announced(self, lent: Sequence[BlockList]) -> Plan | None:
        """The reads of what was announced since the last plan; None if there are none.

        Args:
            lent: announced blocks, one list per group of the lender.

        Raises:
            PlanningError: as :meth:`pdconn.planning.plan.Pairing.plan`.
        """
        until = self._announced(lent)
        ranges = []
        for group, done in enumerate(self._done):
            ranges.append(range(done, max(done, until.get(group, done))))
        if not any(ranges):
            return None
        plan = self._pairing.plan(Need(tuple(ranges), self._need.blocks), lent)
        self._done = [tokens.stop for tokens in ranges]
        self._full += plan.moved.full
        return replace(plan, moved=Moved(full=plan.moved.full))

    def plan_rest(self, lent: Sequence[BlockList]) -> Plan:
        """The reads of everything that no plan has read; ``moved`` is of all plans together.

        Args:
            lent: all blocks, one list per group of the lender.

        Raises:
            PlanningError: as :meth:`pdconn.planning.plan.Pairing.plan`.
        """
        tokens = tuple(
            range(done, wanted.stop)
            for done, wanted in zip(self._done, self._need.tokens, strict=True)
        )
        plan = self._pairing.plan(Need(tokens, self._need.blocks), lent)
        # To the last plan, what the others have read is held already.
        before = plan.moved
        moved = replace(
            before, full=before.full + self._full, saved_by_hits=before.saved_by_hits - self._full
        )
        return replace(plan, moved=moved)

    def _announced(self, lent: Sequence[BlockList]) -> dict[int, int]:
        """Of each full-attention group of ours, the token up to which it can be read."""
        ends: dict[int, int] = {}
        for template in self._pairing.templates:
            group = template.our_group
            if group not in self._steps:
                continue
            theirs = lent[template.their_group]
            end = (theirs.first + len(theirs.ids)) * template.theirs.block_tokens
            ends[group] = min(end, ends.get(group, self._need.tokens[group].stop))
        return {
            group: end // self._steps[group] * self._steps[group] for group, end in ends.items()
        }
