"""A process that lends memory of a device over NIXL, driven by lines of JSON.

    {"do": "open", "name": …, "boot": …, "options": …}   an arena, for the transport contract
    {"do": "ranks", "case": …, "verify": …}              every rank of a case, and a lender
    {"do": "views", "order": …, "tp": …}                 every rank of memory as an engine has it
    {"do": "plain", "nbytes": …}                         random bytes in one piece
    {"do": "flip", "rank": …, "offset": …}               flip a byte of a rank
    {"do": "sleeper", "case": …, "tls": …}               one rank of a case in pages of its own
    {"do": "sleep"}                                      … stops, and unmaps them
    {"do": "wake"}                                       … and is another boot, with other bytes
    {"do": "close"}

The device is this program's argument.  What was open before is closed first.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, closing
from typing import Any

import msgspec
import numpy as np

from pdconn.integrity.lent import lent_sums
from pdconn.integrity.memory import AnyMemory
from pdconn.integrity.sums import Terms
from pdconn.lender.server import Lender
from pdconn.protocol.messages import RankGeometry, Welcome
from registration import RegisteredKVMemory
from registration.allocation import HeadMajor
from tests.gpu.allocated import fill, rank_memory
from tests.gpu.bytes_on import ArenaOn, BytesOn
from tests.gpu.cases import TOKENS, Case, Request, allocated, placed
from tests.gpu.pages import Pages
from tests.gpu.rigs import LOCALHOST, TRAITS, TTL_S, ticket_of
from transport import Device
from transport.nixl.transport import NixlTransport, load_library
from transport.testing.contract import Arena

_OPEN = ("flip", "sleep", "wake")
"""What leaves open what was open before."""


class Sleeper:
    """A lender of one rank: awake from its construction on, with another boot each time."""

    def __init__(self, case: Case, tls: str, device: Device) -> None:
        self._request, self._tls = Request.of(case), tls
        self._boots, self._port = 0, 0
        self._pages = Pages(self._request.lent(0), device)
        self._awake = ExitStack()
        self.answer = self._wake()

    def sleep(self) -> None:
        self._awake.close()
        self._pages.unmap()

    def wake(self) -> dict[str, Any]:
        self._pages.map(self._request.lent(0) ^ 1)
        return self._wake()

    def close(self) -> None:
        self._awake.close()

    def _wake(self) -> dict[str, Any]:
        self._boots += 1
        options = {"UCX": {"engine_config": f"TLS={self._tls}"}}
        transport = self._awake.enter_context(
            NixlTransport("gpu-sleeper", huge_pages=False, backend_options=options)
        )
        transport.register([self._pages.memory])
        [made_up] = self._request.theirs.ranks
        geometry = RankGeometry(0, 0, transport.address(), placed(made_up, self._pages.memory))
        welcome = Welcome.in_our_version("prefill", f"boot-{self._boots}", TRAITS, (geometry,))
        lender = Lender(welcome, LOCALHOST, self._port)
        self._awake.callback(lender.close)
        self._port = lender.port
        ticket = ticket_of(self._request, lender.port, welcome.incarnation)
        lender.lend(ticket.request_id, ticket.digest(), TTL_S)
        encoded = msgspec.msgpack.encode(geometry).hex()
        return {"ranks": [encoded], "port": lender.port}


class Lending:
    """The transports and memory that are open."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stack = ExitStack()
        self._ranks: list[BytesOn] = []
        self._sleeper: Sleeper | None = None

    def close(self) -> None:
        self._stack.close()
        self._ranks.clear()

    def open(self, name: str, boot: str | None, options: dict[str, Any]) -> dict[str, Any]:
        arena = ArenaOn.on(self._device, Arena.patterned())
        transport = self._stack.enter_context(NixlTransport(name, boot=boot, **options))
        transport.register([arena.memory])
        return {"address": transport.address().hex(), "base": arena.memory.base}

    def plain(self, nbytes: int) -> dict[str, Any]:
        content = np.random.default_rng(7).integers(0, 255, nbytes, dtype=np.uint8)
        self._ranks = [BytesOn(content, self._device)]
        return {"address": self._pinned(self._ranks[0]).hex(), "base": self._ranks[0].memory.base}

    def ranks(self, case: dict[str, Any], verify: bool) -> dict[str, Any]:
        request = Request.of(msgspec.convert(case, Case))
        geometry = []
        for rank in range(len(request.theirs.ranks)):
            held = BytesOn(request.lent(rank), self._device)
            self._ranks.append(held)
            references = allocated(request.theirs, rank, held)
            geometry.append(RankGeometry(0, rank, self._pinned(held), references))
        lender = Lender(
            Welcome.in_our_version("prefill", "boot", TRAITS, tuple(geometry)),
            LOCALHOST,
            0,
            is_summing=verify,
        )
        self._stack.enter_context(closing(lender))
        ticket = ticket_of(request, lender.port)
        lender.lend(ticket.request_id, ticket.digest(), TTL_S)
        for rank, one in enumerate(geometry if verify else ()):
            terms = Terms(ticket.request_id, TOKENS, sampled=False)
            sums = lent_sums(AnyMemory(), one.references, request.theirs.tables, terms)
            lender.add_sums(ticket.request_id, rank, sums)
        encoded = [msgspec.msgpack.encode(one).hex() for one in geometry]
        return {"ranks": encoded, "port": lender.port}

    def views(self, order: str, tp: int) -> dict[str, Any]:
        encoded = []
        for rank in range(tp):
            made = rank_memory(HeadMajor(order), tp, rank, self._device)
            fill(made, tp, rank)
            transport = NixlTransport("gpu-prefill", huge_pages=False)
            memory = RegisteredKVMemory(transport, made.references, made.owners)
            self._stack.enter_context(memory)
            geometry = RankGeometry(0, rank, memory.address, made.references)
            encoded.append(msgspec.msgpack.encode(geometry).hex())
        return {"ranks": encoded}

    def flip(self, rank: int, offset: int) -> dict[str, Any]:
        self._ranks[rank].flip(offset)
        return {}

    def sleeper(self, case: dict[str, Any], tls: str) -> dict[str, Any]:
        self._sleeper = Sleeper(msgspec.convert(case, Case), tls, self._device)
        self._stack.callback(self._sleeper.close)
        return self._sleeper.answer

    def sleep(self) -> dict[str, Any]:
        assert self._sleeper is not None
        self._sleeper.sleep()
        return {}

    def wake(self) -> dict[str, Any]:
        assert self._sleeper is not None
        return self._sleeper.wake()

    def _pinned(self, held: BytesOn) -> bytes:
        transport = self._stack.enter_context(NixlTransport("gpu-prefill", huge_pages=False))
        transport.register([held.memory])
        return transport.address()


def main() -> None:
    """Serve until standard input ends."""
    load_library()
    lending = Lending(Device("cuda" if sys.argv[1] == "cuda" else "cpu"))
    print("@" + json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        do = order.pop("do")
        if do not in _OPEN:
            lending.close()
        answer = {} if do == "close" else getattr(lending, do)(**order)
        print("@" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
