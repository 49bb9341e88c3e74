"""From the command of a read to the order of posting: a tenant's one pull beside another's many."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from pdconn.planning.plan import Need
from pdconn.protocol.ticket import BlockList
from pdconn.puller.commands import ReadBlocks
from pdconn.puller.read_queue import ChunkSizer, PeerReadQueue
from tests.fakes.pair import NUM_BLOCKS, Pair
from transport.testing.inprocess.faults import Fault, Held, ReadRequest

#: Local blocks of each pull.
BLOCKS = {
    "a0": (1, 2, 3), "a1": (4, 5, 6), "a2": (7, 8, 9), "a3": (10, 11, 12), "b": (13, 14, 15),
}  # fmt: skip


def posted(tenants: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order in which pulls begin to be read, all of which wait for the first one's chunks."""
    order: list[str] = []
    queued: list[object] = []
    add_read = PeerReadQueue.add_read

    def noted(queue: PeerReadQueue, *args: Any, **kwargs: Any) -> None:
        add_read(queue, *args, **kwargs)
        queued.append(args)

    monkeypatch.setattr(PeerReadQueue, "add_read", noted)
    monkeypatch.setattr("pdconn.puller.reads.ChunkSizer", partial(ChunkSizer, 1, 1))
    with Pair() as pair:
        row = pair.ours.bytes.size // NUM_BLOCKS
        first = pair.ours.bytes.ctypes.data

        def script(read: ReadRequest) -> Fault | None:
            block = (int(read.spans.local[0]) - first) // row
            order.append(next(name for name, ids in BLOCKS.items() if block in ids))
            return Held() if len(order) <= 2 else None

        pair.network.script = script
        for number, (name, ids) in enumerate(BLOCKS.items()):
            pair.claim(name, pair.lend(f"lease {number}"))
            need = Need.for_range(0, 12, (BlockList(0, ids),))
            pair.puller.post_command(ReadBlocks(name, need, tenant=tenants[name]))
            pair.wait(partial(_has, queued, number + 1))
        assert order == ["a0", "a0"], "two chunks are in flight"
        pair.network.release_held()
        pair.wait(lambda: len(pair.received) == len(BLOCKS))
        assert not pair.failed
    return list(dict.fromkeys(order))


def _has(things: list[object], count: int) -> bool:
    return len(things) == count


def test_the_only_pull_of_a_tenant_goes_before_the_second_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = posted({name: name[:1].encode() for name in BLOCKS}, monkeypatch)
    assert order == ["a0", "b", "a1", "a2", "a3"]


@pytest.mark.parametrize("tenant", [b"", b"one"])
def test_pulls_of_one_tenant_keep_their_order(
    tenant: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: nothing else puts the last one first."""
    assert posted(dict.fromkeys(BLOCKS, tenant), monkeypatch) == ["a0", "a1", "a2", "a3", "b"]
