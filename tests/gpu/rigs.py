"""A lender's process per device, and rigs that read from it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from pdconn.protocol.messages import RankGeometry
from pdconn.protocol.ticket import Ticket
from tests.gpu.bytes_on import ArenaOn
from tests.gpu.cases import TOKENS, Case, Request
from tests.transport.contract.rigs import Lender
from transport import Device, Memory, ReadId, Settled
from transport.nixl.transport import NixlTransport
from transport.testing.contract import ARENA_BYTES, Arena, Rig

LOCALHOST = "127.0.0.1"
TRAITS = {"model": "gpu"}
TTL_S = 120.0
PATIENCE_S = 60.0


def ticket_of(request: Request, port: int, boot: str = "boot") -> Ticket:
    """Names what a lender lends for a request."""
    blocks = request.theirs.tables
    return Ticket("prefill", boot, "r", LOCALHOST, port, TOKENS, "prompt", blocks)


class DeviceLender(Lender):
    """The other process, with its memory on ``device``."""

    def __init__(self, device: Device) -> None:
        self.device = device
        super().__init__()

    def _command(self) -> list[str]:
        return ["tests.gpu.lender_process", self.device.kind]

    def lend(self, case: Case, verify: bool = False) -> tuple[list[RankGeometry], int]:
        """Every rank of a case, with its content; and the port of a lender that lends it."""
        answer = self._ask(do="ranks", case=msgspec.to_builtins(case), verify=verify)
        return _geometry(answer["ranks"]), answer["port"]

    def views(self, order: str, tp: int) -> list[RankGeometry]:
        """Every rank of memory that was written through its layers' views."""
        return _geometry(self._ask(do="views", order=order, tp=tp)["ranks"])

    def flip(self, rank: int, offset: int) -> None:
        """Spoil a byte of a rank."""
        self._ask(do="flip", rank=rank, offset=offset)

    def sleeper(self, case: Case, tls: str) -> tuple[RankGeometry, int]:
        """A lender that can be put to sleep: its rank, and its port."""
        return _boot(self._ask(do="sleeper", case=msgspec.to_builtins(case), tls=tls))

    def sleep(self) -> None:
        """Let it stop lending, and unmap its memory."""
        self._ask(do="sleep")

    def wake(self) -> tuple[RankGeometry, int]:
        """Let it map other pages, whose bytes differ in their last bit, and lend them."""
        return _boot(self._ask(do="wake"))

    def plain(self, nbytes: int) -> tuple[bytes, Memory]:
        """Random bytes (``default_rng(7)``) in one piece."""
        answer = self._ask(do="plain", nbytes=nbytes)
        return bytes.fromhex(answer["address"]), Memory(answer["base"], nbytes, self.device)


def _boot(answer: dict[str, Any]) -> tuple[RankGeometry, int]:
    [rank] = _geometry(answer["ranks"])
    return rank, answer["port"]


def _geometry(ranks: list[str]) -> list[RankGeometry]:
    return [msgspec.msgpack.decode(bytes.fromhex(one), type=RankGeometry) for one in ranks]


@contextmanager
def device_rig(lender: DeviceLender) -> Iterator[Rig]:
    """A reader here and a lender there, both on the lender's device.

    Over CMA the lender can be killed.  On a GPU it cannot: CUDA does not define what happens to
    memory that was opened through its IPC once the owner is gone.  It can be paused on neither,
    as the reader copies by itself.
    """
    device = lender.device
    address, where = lender.open("lender", None, {"huge_pages": False})
    arena = ArenaOn.on(device, Arena.blank())
    reader = NixlTransport("reader", close_wait_s=0.2, huge_pages=False)
    try:
        reader.register([arena.memory])
        yield Rig(
            reader,
            reader.connect(address),
            address,
            arena,
            Memory(where.base, ARENA_BYTES, device),
            kill=lender.kill if device.kind == "cpu" else None,
        )
    finally:
        reader.close()
        lender.close()


def settled_reads(transport: NixlTransport, reads: Sequence[ReadId]) -> list[Settled]:
    """Poll until each read settles; how they ended."""
    found: dict[ReadId, Settled] = {}
    give_up = time.monotonic() + PATIENCE_S
    while len(found) < len(reads):
        assert time.monotonic() < give_up, f"reads not settled after {PATIENCE_S:g} s"
        for read in reads:
            if read not in found and (settled := transport.poll(read)) is not None:
                found[read] = settled
        time.sleep(0)
    return [found[read] for read in reads]
