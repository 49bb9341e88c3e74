"""Reads of prefetches are posted when no request waits for a read that is still to be posted."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from pdconn.lifecycle.turns import MOST_WAIT_S, ClassOrder, Urgency
from pdconn.planning.plan import NO_GAPS
from pdconn.puller.read_queue import ChunkSizer
from pdconn.puller.reads import Read, TransportJobs
from tests.puller.reads.test_read_queue import SLICE, Rig, spans_of
from transport import Memory, PeerId, Spans
from transport.testing.inprocess.faults import Held
from transport.testing.inprocess.transport import InProcessTransport


class Tapped(Rig):
    """A rig with a clock, that notes whose chunks are posted."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.posted: list[object] = []
        self.reading = TransportJobs(
            self.reader, self._hear, clock=lambda: self.now, sizer=ChunkSizer(SLICE)
        )
        self.tags: dict[int, object] = {}
        read = self.reader.read

        def noted(peer: PeerId, spans: Spans) -> object:
            where = int(spans.local[0]) - self.ours.ctypes.data
            self.posted.append(self.tags[max(at for at in self.tags if at <= where)])
            return read(peer, spans)

        self.reader.read = noted  # type: ignore[method-assign, assignment]

    def read_for(self, tag: str, at: int, count: int, urgency: Urgency, peer: PeerId) -> None:
        self.tags[at * SLICE] = tag
        run = (self.ours.ctypes.data + at * SLICE, self.theirs.ctypes.data, count * SLICE)
        self.reading.do_job(Read(tag, peer, spans_of(run), NO_GAPS, urgency))

    def other_peer(self) -> PeerId:
        other = InProcessTransport(self.network, "other")
        other.register([Memory(self.theirs.ctypes.data, self.theirs.nbytes)])
        return self.reader.connect(other.address())


def posted(*, same_peer: bool) -> list[object]:
    rig = Tapped()
    second = rig.peer if same_peer else rig.other_peer()
    rig.read_for("prefetch", 0, 6, Urgency.PREFETCH, rig.peer)
    rig.reading.post_chunk()
    rig.read_for("long", 20, 6, Urgency.PULL, second)
    rig.read_for("short", 40, 1, Urgency.PULL, second)
    assert sorted(map(str, rig.finish())) == ["long", "prefetch", "short"]
    assert not any(news.num_overdue for news in rig.settled_reads)
    return rig.posted


@pytest.mark.parametrize("same_peer", [True, False])
def test_no_chunk_of_a_prefetch_is_posted_while_a_pull_has_one_to_post(same_peer: bool) -> None:
    order = posted(same_peer=same_peer)
    first, *rest = order
    assert first == "prefetch", "it was alone"
    waited = [place for place, tag in enumerate(rest) if tag != "prefetch"]
    assert max(waited) < rest.index("prefetch")


class Unordered(ClassOrder):
    """The control: all are served as one class."""

    def choose(
        self, waiting: Collection[Urgency], now: float, elsewhere: Urgency | None = None
    ) -> Urgency | None:
        return max(waiting, default=None)


def test_that_law_notices_a_reader_without_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr("pdconn.puller.reads.ClassOrder", Unordered)
    with pytest.raises(AssertionError):
        test_no_chunk_of_a_prefetch_is_posted_while_a_pull_has_one_to_post(same_peer=True)


def test_a_pull_that_hangs_does_not_starve_prefetches() -> None:
    """A chunk of them is posted as often as the class may be kept waiting, and counted."""
    rig = Tapped()
    rig.network.inject(rig.reader.peer_id, rig.peer, *[Held()] * 9)
    rig.read_for("hanging", 20, 8, Urgency.PULL, rig.peer)
    while rig.reading.post_chunk():
        pass
    rig.read_for("prefetch", 0, 4, Urgency.PREFETCH, rig.other_peer())
    assert rig.finish() == []
    for chunks in (1, 2, 3):  # the last two slices of a read are one chunk
        rig.now += MOST_WAIT_S[Urgency.PREFETCH] * 1.01
        assert rig.reading.is_ready
        done = rig.finish()
        assert rig.posted.count("prefetch") == chunks
        assert done == (["prefetch"] if chunks == 3 else [])
    assert [news.num_overdue for news in rig.settled_reads] == [3]
