"""A request is announced if a reader follows it, and not because one followed another of its name.

The lender's thread reports at any time, also while the engine looks::

    reports        ◄── followed r, freed r
    the engine     looks ──────────────── looks, and r comes again
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm")

from pdconn.lender.sessions import Followed as FollowedReport
from pdconn.lender.sessions import LenderReport
from tests.fakes.scripted.lender import InlineLender

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pdconn.vllm.lends import lending as lending_module
    from pdconn.vllm.lends.lending import Lending
    from tests.vllm.lends.announced.followed import CHUNK, Followed
    from tests.vllm.lends.prefilling import CLOCK, TIME

ASKS = {"do_remote_decode": True}
NAME = "r1000"


class BetweenLooks(InlineLender):
    """Its reports come in just after the engine has looked, while ``is_late``."""

    is_late = False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._late: list[LenderReport] = []

    def turn(self) -> None:
        before = self._reports
        self._reports = []
        super().turn()
        fresh, self._reports = self._reports, before
        (self._late if self.is_late else self._reports).extend(fresh)

    def take_reports(self) -> list[LenderReport]:
        reports = super().take_reports()
        self._reports, self._late = self._late, []
        return reports


@pytest.fixture(autouse=True)
def _by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending_module, "Lender", partial(BetweenLooks, clock=CLOCK))
    monkeypatch.setattr(lending_module, "time", TIME)


def asks(stream: str) -> dict[str, Any]:
    return ASKS | {"pdconn": {"stream": stream}}


def announces_what_is_followed(num_looks: int) -> None:
    engine = Followed(is_async=False, caches=False)
    engine.arrive(NAME, 1000, 3 * CHUNK, asks("x" * 16))
    engine.turn()
    lender: Any = engine.lender
    lender.is_late = True
    reader = engine.follow("x" * 16, 1000)
    engine.leave(reader)
    engine.engine.abort(NAME)
    engine.turn()
    assert [type(one).__name__ for one in lender._late] == ["Followed", "FreedLease"]
    for _ in range(num_looks):
        engine.side.unpin_freed()
    engine.arrive(NAME, 2000, 3 * CHUNK, asks("y" * 16))
    is_growing = NAME in engine.side.growing
    assert is_growing or num_looks < 2, "the end of its lease was reported"
    for _ in range(2):
        engine.schedule()
        engine.process()
    assert engine.side.pins.num_blocks == 0, "announced to no reader"
    engine.close()


@pytest.mark.parametrize("num_looks", range(4))
def test_a_reader_of_a_lease_that_has_ended_follows_no_later_request(num_looks: int) -> None:
    announces_what_is_followed(num_looks)


def test_that_law_notices_an_engine_that_takes_the_two_kinds_of_reports_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it was: a look for what is followed, and another one for what has ended."""
    apply = Lending.unpin_freed

    def looks_twice(self: Lending) -> None:
        lender: Any = self._lender
        for is_followed in (True, False):
            reports = lender.take_reports()
            own = [one for one in reports if isinstance(one, FollowedReport) == is_followed]
            others = [one for one in reports if one not in own]
            with monkeypatch.context() as patch:
                patch.setattr(lender, "take_reports", lambda own=own: own)
                apply(self)
            lender._reports = [*others, *lender._reports]

    monkeypatch.setattr(Lending, "unpin_freed", looks_twice)
    with pytest.raises(AssertionError, match="announced to no reader"):
        announces_what_is_followed(0)
