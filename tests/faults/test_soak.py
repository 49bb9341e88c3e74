"""Thousands of pulls through one pair, with everything going wrong: nothing grows.

``PDCONN_SOAK=10000`` sets how many pulls, ``PDCONN_SEED`` which faults.  Per pull a read is
late or fails, frames are lost, late, doubled or cut, requests are cancelled and leases taken
back, and now and then the lender restarts under another incarnation at its old port.

The first third warms up.  After it and at the end, when all is quiet, memory, threads,
files and every table are compared.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from pdconn.faults.frame_faults import MessageFaults
from pdconn.faults.relay import Relays
from pdconn.lifecycle.lease import FreedLease, LeaseTable
from pdconn.lifecycle.pull import Patience
from pdconn.protocol.ticket import Ticket
from pdconn.puller.commands import CancelPull
from pdconn.puller.peers import PeerTable
from pdconn.puller.pulls import Pulls
from pdconn.tools.lab.ports import free_ports
from tests.fakes.model_free_engines import Decode, Prefill, until
from tests.faults.footprint import MIB, Footprint
from tests.threads.inside import loop_of, num_peers, pulls_of, reads_of, sessions_of
from tests.transport.contract.rigs import nixl_options
from transport import PeerLost
from transport.base import Transport
from transport.faulty import FaultyTransport, ReadFaults
from transport.testing.inprocess.faults import Failing, Fault, Late
from transport.testing.inprocess.transport import InProcessNetwork, InProcessTransport

PULLS = int(os.environ.get("PDCONN_SOAK", "300"))
SEED = int(os.environ.get("PDCONN_SEED", "1"))
AT_ONCE = 32
PATIENCE = Patience(claim_s=0.6, drain_s=0.2)

GROWTH = 3 * MIB
"""What may stay after any number of pulls: a few arenas of the allocator.

Ended leases are remembered by name, 4096 of them; every boot fills them in at once.
"""

FILES_PER_PEER = 4
"""Sockets of a connection in this process: of the puller, the relay twice, the lender."""

FRAMES = MessageFaults(
    delay=0.03, delay_s=0.1, drop=0.01, duplicate=0.02, reorder=0.02, cut=0.003, stall=0.001
)


class Leak(AssertionError):
    """An entry without an owner is left, or something grew."""


class Soak:
    """One pair, and what happens to it."""

    def __init__(
        self, stack: ExitStack, open_transport: Callable[[str], Transport], quiet_s: float = 60.0
    ) -> None:
        self.quiet_s = quiet_s
        self.rng = Random(SEED)
        self.counts: Counter[str] = Counter()
        self._stack = stack
        self._open_transport = open_transport
        self._boots = 0
        self.prefill = self._boot(free_ports(1)[0])  # which it gets again at every boot
        self._relays = stack.enter_context(closing(Relays(FRAMES, SEED)))
        self.decode = stack.enter_context(
            Decode(
                open_transport("decode"),
                pool=3 * AT_ONCE,
                patience=PATIENCE,
                through=self._relays.through,
            )
        )
        self._number = 0
        stack.callback(self._end)

    def run(self, pulls: int, restart_every: int = 150) -> None:
        """Hand ``pulls`` requests over, then wait until all is quiet."""
        give_up = time.monotonic() + self.quiet_s + pulls
        for _ in range(pulls):
            while not self.decode.has_room or not (ticket := self._lend()):
                assert time.monotonic() < give_up, self.state()
                self._step()
            self.decode.pull(self._number, ticket)
            self._befall(ticket)
            if self._number % restart_every == 0:
                self.restart()
            if self._number % 8 == 0:
                self._step()
        until(self._is_quiet, self.quiet_s, self.state)

    def restart(self) -> None:
        """The lender ends and another boots where it was."""
        self.counts["restarts"] += 1
        port = self.prefill.lender.port
        self.prefill.close()
        self.prefill = self._boot(port)

    def _end(self) -> None:
        self.prefill.close()

    def state(self) -> dict[str, int]:
        """What is in every table of either side."""
        lender, pulls = self.prefill.lender, pulls_of(self.decode.puller)
        return {
            "requests": self.decode.num_open,
            "quarantined": len(self.decode.quarantined),
            "pulls": pulls.num_open,
            "alarms": len(pulls._alarms),
            "peers": num_peers(self.decode.puller),
            "unpaired": max(0, len(loop_of(lender)._connections) - num_peers(self.decode.puller)),
            "reads": reads_of(self.decode.puller),
            "lent": sessions_of(lender).num_lent,
            "timers": len(sessions_of(lender)._leases._timers),
            "claims": sum(len(session.claimed) for session in list(loop_of(lender)._connections)),
        }

    def footprint(self) -> Footprint:
        """What the process holds, without the sockets of a lender that is connected."""
        now = Footprint.now()
        return replace(now, files=now.files - FILES_PER_PEER * num_peers(self.decode.puller))

    def check(self) -> None:
        """Nothing is open, and only the lender that lives is known.

        Raises:
            Leak: naming what is left.
        """
        self.decode.collect()
        left = {name: count for name, count in self.state().items() if count}
        if left.pop("peers", 0) > 1 or left:
            raise Leak(f"is left: {self.state()}")
        self.judge()

    def _boot(self, port: int) -> Prefill:
        self._boots += 1
        transport = self._open_transport("prefill")
        prefill = Prefill(
            transport, pool=48, ttl_s=0.5, incarnation=f"boot-{self._boots}", port=port
        )
        for number in range(4096):  # fill the memory of ended leases: it is meant to grow
            prefill.lender.lend(f"before{number}", b"", 60.0)
            prefill.lender.abort_lease(f"before{number}")
        freed: list[FreedLease] = []
        until(lambda: freed.extend(prefill.lender.take_freed()) or len(freed) == 4096)
        return prefill

    def _lend(self) -> Ticket | None:
        ticket = self.prefill.compute(self._number + 1)
        if ticket is not None:
            self._number += 1
        return ticket

    def _befall(self, ticket: Ticket) -> None:
        if self.rng.random() < 0.1:
            self.counts["cancelled"] += 1
            self.decode.puller.post_command(CancelPull(str(self._number)))
        if self.rng.random() < 0.05:
            self.counts["aborted"] += 1
            self.prefill.lender.abort_lease(ticket.request_id)

    def _step(self) -> None:
        self.decode.collect()
        if len(self.decode.tokens) > 100:
            self.judge()
        time.sleep(0.001)

    def judge(self) -> None:
        """Look at the answers, count them and forget them.

        Raises:
            Leak: some are wrong.
        """
        if self.decode.wrong:
            raise Leak(f"wrong: {self.decode.wrong}")
        self.counts["received"] += len(self.decode.received)
        self.counts["failed"] += len(self.decode.rejected)
        self.decode.forget()

    def _is_quiet(self) -> bool:
        self.decode.collect()
        self.prefill.collect()
        self.counts["peak peers"] = max(self.counts["peak peers"], self.state()["peers"])
        return not any(count for name, count in self.state().items() if name != "peers")


def soak(soaked: Soak, pulls: int, growth: int = GROWTH) -> None:
    """Warm up, then pull on and compare.

    What grew is measured once more, over as many pulls again: what others of this process
    allocated meanwhile, as pytest's threads do, does not grow with them.

    Raises:
        Leak: as it says.
    """
    soaked.run(pulls // 3)
    soaked.restart()
    soaked.run(1)
    soaked.check()
    grown = _grown(soaked, pulls - pulls // 3, growth)
    if grown:
        print(f"grew: {', '.join(grown)}")
        grown = _grown(soaked, pulls - pulls // 3, growth)
    if grown:
        raise Leak(f"grew: {', '.join(grown)}")


def _grown(soaked: Soak, pulls: int, growth: int) -> list[str]:
    """What is more after ``pulls`` pulls than before them."""
    before = soaked.footprint()
    soaked.run(pulls)
    soaked.restart()
    soaked.run(1)
    soaked.check()
    after = soaked.footprint()
    give_up = time.monotonic() + 20.0
    # The relay closes its sockets after both ends have closed theirs.
    while after.files > before.files or after.threads > before.threads:
        if time.monotonic() > give_up:
            break
        time.sleep(0.2)
        after = soaked.footprint()
    # the in-process network keeps an empty queue per pair of peers that ever met
    objects = 100 + 8 * soaked.counts["restarts"]
    print(f"{pulls} pulls; {dict(soaked.counts)}; {dict(soaked._relays.counts())}")
    print(f"before {before}, after {after}")
    return after.growth(before, growth, objects)


class Sea:
    """The in-process network, with reads that are late, fail, or both."""

    def __init__(self) -> None:
        self._rng = Random(SEED)
        self._network = InProcessNetwork(script=lambda _: self._drawn())

    def open(self, name: str) -> Transport:
        return InProcessTransport(self._network, name)

    def _drawn(self) -> Fault:
        chance = self._rng.random()
        if chance < 0.05:
            return Failing(PeerLost("cut"), after_bytes=self._rng.randrange(64), seconds=0.01)
        if chance < 0.08:
            return Late(self._rng.uniform(0.4, 0.9))
        return Late(self._rng.expovariate(200.0))


def test_thousands_of_pulls_with_faults_leave_nothing_behind() -> None:
    with ExitStack() as stack:
        soaked = Soak(stack, Sea().open)
        soak(soaked, PULLS)
        assert soaked.counts["received"] > PULLS / 3
        assert soaked.counts["failed"] > PULLS / 20


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
def test_pulls_over_nixl_with_faults_leave_nothing_behind() -> None:
    """Real agents of one process; each boot of the lender is an agent of its own.

    NIXL and UCX keep some memory of every agent that ever was.
    """
    from transport.nixl.transport import NixlTransport

    faults = ReadFaults(delay=0.1, delay_s=0.1, fail=0.03)

    def open_transport(name: str) -> Transport:
        inner = NixlTransport(name, **nixl_options("tcp"))
        return FaultyTransport(inner, faults, Random(SEED)) if name == "decode" else inner

    with ExitStack() as stack:
        soak(Soak(stack, open_transport), max(150, PULLS // 10), growth=16 * MIB)


# Negative controls: a planted leak is noticed.


def _hoarding(heap: list[bytearray], nbytes: int, count: int) -> Callable[..., None]:
    real = Pulls._claim

    def claim(self: Pulls, *args: Any) -> None:
        heap.extend(bytearray(os.urandom(nbytes)) for _ in range(count))
        real(self, *args)

    return claim


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Pulls, "_forget_if_over"), (PeerTable, "forget_peer"), (LeaseTable, "free_expired")],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_a_table_that_never_forgets_is_noticed(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, lambda *_, **__: [] if owner is LeaseTable else None)
    with ExitStack() as stack, pytest.raises(AssertionError, match=r"is left|waited \d"):
        soak(Soak(stack, Sea().open, quiet_s=3.0), 90)


@pytest.mark.parametrize(
    ("nbytes", "count", "noticed"),
    # Many small ones: what other tests of this process left may be freed meanwhile.
    [(64, 64, "grew: objects"), pytest.param(1 << 20, 1, "memory by", marks=pytest.mark.matrix)],
    ids=["objects", "memory"],
)
def test_what_is_kept_per_pull_is_noticed(
    nbytes: int, count: int, noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pulls, "_claim", _hoarding([], nbytes, count))
    with ExitStack() as stack, pytest.raises(Leak, match=noticed):
        soak(Soak(stack, Sea().open), 90)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
