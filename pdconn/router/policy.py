"""Which engine serves a request.  Pure: it is given names and returns names.

The proxy asks once per request and role, tries the engines in the order given,
and asks nobody twice.  An engine that is known to be down is not offered.  A
router that knows which engine holds which prefix replaces ``RoundRobin`` and
nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from pdconn.router.requests import GenerateRequest


class Role(Enum):
    """What an engine is asked to do."""

    PREFILL = "prefill"
    DECODE = "decode"


class Policy(Protocol):
    """Orders the engines of a role for one request."""

    def order(self, role: Role, engines: Sequence[str], request: GenerateRequest) -> Sequence[str]:
        """The engines to try, best first: a permutation of those given.

        ``engines`` are the names (base URLs) of those that are up, in the order
        of the command line, and may be empty.
        """
        ...


class RoundRobin:
    """Each engine in turn, whatever the request is."""

    def __init__(self) -> None:
        self._turns = dict.fromkeys(Role, 0)

    def order(self, role: Role, engines: Sequence[str], request: GenerateRequest) -> Sequence[str]:
        """The engines rotated by one more than last time."""
        del request  # every request is alike to this policy
        if not engines:
            return ()
        first = self._turns[role] % len(engines)
        self._turns[role] += 1
        return (*engines[first:], *engines[:first])
