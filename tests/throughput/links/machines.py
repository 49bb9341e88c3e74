"""A holder and a puller on a machine each: pdconn's lender and puller, and KV over the cable.

    main ──"pull this"──► puller          namespace ``puller``
      └───"lend this"──► holder           namespace ``holder``
    puller ◄── claim over TCP, KV over NIXL and UCX's TCP ── holder

Both are processes that get a JSON object a line and answer with one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import cache

from pdconn.lender.server import Lender
from pdconn.planning.plan import Need
from pdconn.protocol.messages import RankGeometry, Welcome
from pdconn.protocol.ticket import Ticket
from pdconn.puller.commands import ClaimTicket, ReadBlocks
from pdconn.puller.peers import Rank
from pdconn.puller.thread import Puller
from pdconn.sidechannel.security import Security
from pdconn.tools.bench.transfer.arena import BenchMemory
from pdconn.tools.bench.transfer.paths import PATHS
from pdconn.tools.bench.transfer.workload import Workload, extent, placed
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.model_shape import ModelShape, sorts_of
from registration.references import AttentionKind
from tests.multinode.namespaces import Machine, Network

ADDRESSES = {"holder": 1, "puller": 2}
TRAITS = {"model": "links"}
PATIENCE_S = 120.0
LAYERS, HEADS, WINDOW, BLOCK = 36, 8, 128, 16
"""Of gpt-oss-120b: every second layer has the window."""
TOKEN_BYTES = 36_864
STEP = LAYERS // 2 * HEADS * 4
"""Bytes of a token come in steps of so many."""


class SideDied(RuntimeError):
    """The holder's or the puller's process has ended before its time."""


@dataclass(frozen=True, slots=True)
class Order:
    """Tokens ``held`` to ``there`` of a prompt: the holder lends all ``there``."""

    name: str
    held: int
    there: int


@cache
def shape(token_bytes: int) -> EngineShape:
    """An engine whose layers without a window keep ``token_bytes`` of each token."""
    kinds = [AttentionKind.FULL, AttentionKind.SLIDING_WINDOW] * (LAYERS // 2)
    sorts = sorts_of(kinds, WINDOW, HEADS, token_bytes // (STEP // 4))
    return EngineShape(ModelShape("links", sorts), "BLHNC", block_tokens=BLOCK)


def workload(token_bytes: int, there: int) -> Workload:
    """What is lent of ``there`` tokens."""
    engine = shape(token_bytes)
    return Workload(engine, engine, there + 1, "random")


# The holder's process


def hold(token_bytes: int, most: int, address: str) -> None:
    """Tell the port; lend what each line orders, and answer with the ticket's digest in hex."""
    [described] = workload(token_bytes, most).theirs()
    with (
        BenchMemory(extent(described), huge_pages=PATHS["tcp"].huge_pages) as arena,
        PATHS["tcp"].open_transport("links-holder") as transport,
    ):
        transport.register([arena.memory])
        rank = RankGeometry(0, 0, transport.address(), placed(described, arena.memory))
        welcome = Welcome.in_our_version("holder", "boot", TRAITS, (rank,))
        with closing(Lender(welcome, address, 0, security=Security(insecure=True))) as lender:
            _say(lender.port)
            for line in sys.stdin:
                order = Order(**json.loads(line))
                ticket = _ticket(token_bytes, order, address, lender.port)
                lender.lend(order.name, ticket.digest(), PATIENCE_S)
                lender.take_freed()
                _say(order.name)


def _ticket(token_bytes: int, order: Order, address: str, port: int) -> Ticket:
    lists = workload(token_bytes, order.there).lent[0].lists
    return Ticket("holder", "boot", order.name, address, port, order.there + 1, "prompt", lists)


# The puller's process


def pull(token_bytes: int, most: int, address: str, port: int) -> None:
    """Pull what each line orders; answer with the seconds and the bytes."""
    ours = workload(token_bytes, most).ours()
    with BenchMemory(extent(ours), huge_pages=PATHS["tcp"].huge_pages) as arena:
        transport = PATHS["tcp"].open_transport("links-puller")
        transport.register([arena.memory])
        me = Rank("puller", 0, 1, 0, placed(ours, arena.memory), TRAITS)
        with closing(Puller(me, transport, security=Security(insecure=True))) as puller:
            _say("ready")
            for line in sys.stdin:
                order = Order(**json.loads(line))
                ticket = _ticket(token_bytes, order, address, port)
                lists = workload(token_bytes, order.there).taken[0].lists
                _say(_pull(puller, ticket, Need.for_range(order.held, order.there, lists)))


def _pull(puller: Puller, ticket: Ticket, need: Need) -> tuple[float, int]:
    request, began = ticket.request_id, time.monotonic()
    puller.post_command(ClaimTicket(request, f"here/{request}", ticket))
    puller.post_command(ReadBlocks(request, need))
    while not (outcome := puller.take_results()).records:
        if outcome.failed or time.monotonic() - began > PATIENCE_S:
            raise RuntimeError(f"{request} was not pulled: {outcome.failed}")
        puller.wait_for_report(0.05)
    return time.monotonic() - began, outcome.records[0].moved.nbytes


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


# Who starts them


class Sides:
    """Both processes; :meth:`pull` has one lend and the other pull."""

    def __init__(self, holder: subprocess.Popen[str], puller: subprocess.Popen[str]) -> None:
        self._holder, self._puller = holder, puller
        self._count = 0

    def pull(self, held: int, there: int) -> tuple[float, int]:
        """Seconds and bytes of a pull of tokens ``held`` to ``there``.

        Raises:
            SideDied: see the process's own words.
        """
        self._count += 1
        order = Order(f"r{self._count}", held, there)
        _ask(self._holder, order)
        seconds, nbytes = _ask(self._puller, order)
        return float(seconds), int(nbytes)


def _ask(side: subprocess.Popen[str], order: Order) -> list[float]:
    assert side.stdin is not None
    try:
        print(json.dumps(asdict(order)), file=side.stdin, flush=True)
    except BrokenPipeError as error:
        raise SideDied(f"{side.args!r} has ended with {side.wait()}") from error
    return _hear(side)


def _hear(side: subprocess.Popen[str]) -> list[float]:
    assert side.stdout is not None
    line = side.stdout.readline()
    if not line:
        raise SideDied(f"{side.args!r} has ended with {side.wait()}")
    heard: list[float] = json.loads(line)
    return heard


@contextmanager
def joined(gbit_s: float, token_bytes: int, most: int) -> Iterator[Sides]:
    """Both, joined by a cable of that many Gbit/s each way, until this closes.

    Raises:
        NetworkFailed, SideDied: nothing is left running then.
    """
    with ExitStack() as stack:
        network = stack.enter_context(Network(ADDRESSES))
        for name in ADDRESSES:
            network.narrow(name, round(gbit_s * 1e9 / 8), **_buffers(gbit_s))
        words = ["--token-bytes", str(token_bytes), "--most", str(most)]
        words += ["--address", network["holder"].address]
        holder = stack.enter_context(_started(network["holder"], ["hold", *words]))
        port = str(_hear(holder))
        puller = stack.enter_context(_started(network["puller"], ["pull", *words, "--port", port]))
        _hear(puller)
        yield Sides(holder, puller)


def _buffers(gbit_s: float) -> Mapping[str, int]:
    """As switches have them: a burst of 1 ms, a queue of 10 ms; never less than a segment."""
    ms_nbytes = round(gbit_s * 1e6 / 8)
    return {
        "burst_nbytes": max(128 << 10, ms_nbytes),
        "queue_nbytes": max(512 << 10, 10 * ms_nbytes),
    }


@contextmanager
def _started(machine: Machine, words: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    command = [*machine.within, sys.executable, "-m", "tests.throughput.links.machines", *words]
    env = {**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as side:
        try:
            yield side
        finally:
            side.kill()


def main(arguments: Sequence[str] | None = None) -> None:
    """One side, on the machine where it was started."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("side", choices=("hold", "pull"))
    for name in ("token-bytes", "most", "port"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--address", required=True)
    options = parser.parse_args(arguments)
    if options.side == "hold":
        hold(options.token_bytes, options.most, options.address)
    else:
        pull(options.token_bytes, options.most, options.address, options.port)


if __name__ == "__main__":
    main()
