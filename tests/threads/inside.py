"""What a thread of ours owns, for tests that must look: the product has no way to."""

from __future__ import annotations

from typing import Any

from pdconn.lender.server import Lender
from pdconn.lender.sessions import LenderSessions
from pdconn.puller.pulls import Pulls
from pdconn.puller.thread import Puller
from pdconn.threads import Worker


def loop_of(owner: Any) -> Any:
    """What the thread of a puller, a lender or a reader owns; read only what one read gives."""
    worker: Worker[Any] = owner._worker
    return worker._work.__self__  # type: ignore[attr-defined]


def pulls_of(puller: Puller) -> Pulls:
    """The pulls of a puller's thread."""
    found: Pulls = loop_of(puller)._pulls
    return found


def sessions_of(lender: Lender) -> LenderSessions:
    """The sessions of a lender's thread."""
    found: LenderSessions = loop_of(lender)._sessions
    return found


def num_open(puller: Puller) -> int:
    """Requests in some table of the puller."""
    return pulls_of(puller).num_open


def num_peers(puller: Puller) -> int:
    """Lenders that the puller knows."""
    return len(pulls_of(puller).peers)


def num_warm(puller: Puller) -> int:
    """Lenders of the warm-up that are warm."""
    return len(pulls_of(puller).warmup.warm)


def reads_of(puller: Puller) -> int:
    """Chunks of reads that can still write."""
    reader = loop_of(puller)._reader
    holders = (reader._held, loop_of(reader)._held)
    return sum(len(held.jobs) for held in holders if held is not None)
