"""What a pull costs its threads, counted in frames, jobs and plans instead of milliseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pdconn.planning.plan import Pairing
from pdconn.puller import peers
from pdconn.puller.reads import TransportJobs
from pdconn.puller.verification import Verify
from tests.fakes.pair import Pair

PULLS = 5


def counting(
    monkeypatch: pytest.MonkeyPatch, seen: Counter[str], where: Any, name: str, what: Any = None
) -> None:
    """Count the calls of ``name``, or the length of what it returns."""
    real: Callable[..., Any] = getattr(where, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        made = real(*args, **kwargs)
        seen[name] += 1 if what is None else what(made)
        return made

    monkeypatch.setattr(where, name, counted)


@pytest.mark.parametrize(("verify", "frames"), [(Verify.OFF, 2), (Verify.ALWAYS, 3)])
def test_a_pull_from_a_known_lender_is_two_frames_one_plan_and_one_read(
    verify: Verify, frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim and a confirmation; what is verified is asked for between them, and is counted."""
    seen: Counter[str] = Counter()
    with Pair(ttl_s=600.0, verify=verify, their_verify=verify) as pair:
        pair.pull("first", pair.lend("greeted"))
        assert pair.outcome_of("first") is None
        counting(monkeypatch, seen, peers, "encode_frames", len)
        counting(monkeypatch, seen, Pairing, "plan")
        counting(monkeypatch, seen, TransportJobs, "post_chunk", int)
        for number in range(PULLS):
            pair.pull(f"d{number}", pair.lend(f"r{number}"))
            assert pair.outcome_of(f"d{number}") is None
    assert seen == {"encode_frames": frames * PULLS, "plan": PULLS, "post_chunk": PULLS}
