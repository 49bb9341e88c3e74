"""Memory that ``registration`` allocated and pinned on a device is pulled through its views."""

from __future__ import annotations

import numpy as np
import pytest

from pdconn.planning.plan import Need, Pairing
from pdconn.protocol.ticket import BlockList
from registration import RegisteredKVMemory
from registration.allocation import HeadMajor
from tests.gpu.allocated import HEADS, NUM_BLOCKS, NUM_LAYERS, content_of, held, rank_memory
from tests.gpu.cases import BLOCK_TOKENS
from tests.gpu.rigs import DeviceLender, settled_reads
from transport import Device
from transport.nixl.transport import NixlTransport

THEIRS, OURS = (5, 2, 9, 3), (1, 8, 4, 11)
"""Block ids of the four blocks that are pulled."""


@pytest.mark.parametrize(("their_tp", "our_tp"), [(2, 1), (1, 2), (1, 1)])
@pytest.mark.parametrize("order", [HeadMajor.NEVER, HeadMajor.REQUIRE], ids=["rows", "head-major"])
def test_views_hold_what_the_lenders_views_held(
    order: HeadMajor, their_tp: int, our_tp: int, lender: DeviceLender, device: Device
) -> None:
    ranks = lender.views(order.value, their_tp)
    for rank in range(our_tp):
        made = rank_memory(order, our_tp, rank, device)
        transport = NixlTransport("gpu-decode", huge_pages=False)
        with RegisteredKVMemory(transport, made.references, made.owners) as memory:
            assert {one.device for one in memory.memories} == {device}
            pairing = Pairing.between(made.references, [one.references for one in ranks], rank)
            need = Need.for_range(0, len(OURS) * BLOCK_TOKENS, (BlockList(0, OURS),))
            plan = pairing.plan(need, (BlockList(0, THEIRS),))
            reads = [
                transport.read(transport.connect(ranks[number].address), spans)
                for number, spans in plan.reads
            ]
            assert all(settled.ok for settled in settled_reads(transport, reads))
            for number in range(NUM_LAYERS):
                expected = np.zeros((NUM_BLOCKS, HEADS, BLOCK_TOKENS, 64), dtype=np.uint8)
                expected[list(OURS)] = content_of(number, 1, 0)[list(THEIRS)]
                share = HEADS // our_tp
                mine = expected[:, rank * share : (rank + 1) * share]
                assert (held(made, number) == mine).all()


def test_no_two_bytes_nearby_are_alike_by_rule() -> None:
    """Negative control: a slip by one head, token, block or layer changes most bytes."""
    layer = content_of(0, 1, 0)
    assert layer.min() > 0
    for axis in range(4):
        assert (layer != np.roll(layer, 1, axis)).mean() > 0.95
    assert (layer != content_of(1, 1, 0)).mean() > 0.95
    assert (content_of(0, 2, 1) == layer[:, 2:]).all()
