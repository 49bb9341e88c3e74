"""How many cases a property test draws: fewer in ``make test``, more in the long run.

A law of a machine whose events come in any order stands beside broken machines that it notices.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

ASKED = os.environ.get("PDCONN_EXAMPLES")


def at_least(examples: int) -> int:
    """``examples``, or as many as ``PDCONN_EXAMPLES`` says if that is more."""
    return max(examples, int(ASKED)) if ASKED else examples


def drawn(examples: int) -> Any:
    """Draw that many cases."""
    return settings(
        max_examples=at_least(examples), deadline=None, suppress_health_check=list(HealthCheck)
    )


class LawMachine(RuleBasedStateMachine):
    """One whose laws at the end are asked only where those before have held."""

    def check_end(self) -> None:
        """What comes of itself has come: nothing is left."""

    def close(self) -> None:
        """End what it has of threads."""

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.check_end()
        finally:
            self.close()


Made = type[RuleBasedStateMachine]


def holds(machine: Made, *, examples: int, steps: int) -> None:
    """Run so many orders of events, or as many as ``make property`` asks for.

    The test is marked ``hypothesis``, so that ``make property`` runs it.
    """
    with _quiet():
        run_state_machine_as_test(machine, settings=_settings(at_least(examples), steps))


_TIMES = 10


def notices(machine: Made, *, examples: int, steps: int, what: str | None = None) -> None:
    """The machine breaks a law within some times so many orders of events.

    Or it ends its engine's thread, by a name that its tables do not have.  ``what``: a part of
    what is said then.
    """
    # More examples cost nothing where one is found.
    until_one_fails = settings(
        _settings(_TIMES * examples, steps),
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    with _quiet(), pytest.raises((AssertionError, KeyError), match=what):
        run_state_machine_as_test(machine, settings=until_one_fails)


def _settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of thousands of requests that go wrong on purpose."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
