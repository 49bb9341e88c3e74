"""The readers of a lender's benchmark: many ranks' connections, in a process of their own."""

from __future__ import annotations

import heapq
import itertools
import json
import random
import selectors
import sys
import time
from dataclasses import dataclass

import msgspec

from pdconn.lab.ports import LOCALHOST
from pdconn.protocol.auth import Secret
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    Claim,
    Confirm,
    Confirmed,
    FromReader,
    Granted,
    Hello,
    Reader,
    Refused,
    Renew,
)
from pdconn.sidechannel.connection import Connection
from pdconn.sidechannel.dial import MAX_REPLIES, connecting_to, resolve
from pdconn.sidechannel.security import Security

SECRET = b"a secret of a benchmark on loopback"
LEAD_S = 0.05
"""From lending to the claim, from the claim to the renewal, from that to the end."""

POLL_S = 0.001
"""Between two looks of the readers: a send to a thread that waits for it would wake that up, and
the sender pays for that. Engines on other hosts cost a lender no wake-up."""


def digest(number: int) -> bytes:
    """A stand-in for the ticket digest of request ``number``."""
    return number.to_bytes(16, "big")


@dataclass(frozen=True)
class Readers:
    """How many decode engines of how many ranks, and how they connect and send.

    ``jitter_s``: the ranks of an engine send the same message within so long.
    """

    engines: int
    ranks: int
    jitter_s: float
    is_secured: bool

    @property
    def security(self) -> Security:
        """Of both sides."""
        return Security(Secret(SECRET)) if self.is_secured else Security()


class Crowd:
    """Simulated readers on one thread: each sends what is due, and reads every answer."""

    def __init__(self, port: int, readers: Readers) -> None:
        self._readers = readers
        self._selector = selectors.DefaultSelector()
        security = readers.security
        self._connections = [
            self._greeted(port, number, security)
            for number in range(readers.engines * readers.ranks)
        ]
        self._seq = itertools.count(1)
        self._random = random.Random(7)
        self.answers = {"granted": 0, "refused": 0}

    def _greeted(self, port: int, number: int, security: Security) -> Connection:
        sock = connecting_to(resolve(LOCALHOST, port))
        policy = security.for_reader(LOCALHOST, f"{LOCALHOST}:{port}")
        connection = Connection(sock, 1 << 24, policy=policy, max_later=MAX_REPLIES)
        connection.watch(self._selector, connection, connecting=True)
        self._selector.select(5.0)
        connection.send([_encoded(Hello(PROTOCOL_VERSION, f"d{number}", "boot"))])
        while not connection.receive():
            self._selector.select(5.0)
        return connection

    def run(self, first: int, rate: float, seconds: float) -> int:
        """Claim, renew and end requests from ``first`` on; returns how many claims were made."""
        ranks, jitter_s = self._readers.ranks, self._readers.jitter_s
        count = int(rate / ranks * seconds)
        began = time.monotonic() + LEAD_S
        due = [
            (began + n * ranks / rate + self._random.uniform(0, jitter_s), n, rank, "claim")
            for n in range(count)
            for rank in range(ranks)
        ]
        heapq.heapify(due)
        while due:
            self._hear(0.0)
            time.sleep(max(POLL_S, due[0][0] - time.monotonic()))
            while due and due[0][0] <= time.monotonic():
                at, number, rank, what = heapq.heappop(due)
                self._do(first + number, rank, what)
                if what != "done":
                    then = "renew" if what == "claim" else "done"
                    heapq.heappush(due, (at + LEAD_S, number, rank, then))
        give_up = time.monotonic() + 5
        while sum(self.answers.values()) < 3 * count * ranks and time.monotonic() < give_up:
            self._hear(0.1)
        return count * ranks

    def _do(self, number: int, rank: int, what: str) -> None:
        readers = self._readers
        connection = self._connections[number % readers.engines * readers.ranks + rank]
        request, reader = f"r{number}", Reader(f"p{number}", rank, readers.ranks)
        message: FromReader
        if what == "claim":
            message = Claim(next(self._seq), request, reader, digest(number))
        elif what == "renew":
            message = Renew(next(self._seq), request, reader)
        else:
            message = Confirm(next(self._seq), request, reader, digest(number))
        connection.send([_encoded(message)])

    def _hear(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            for body in key.data.receive():
                for message in _answers.decode(body):
                    self.answers["refused" if isinstance(message, Refused) else "granted"] += 1


_answers = msgspec.msgpack.Decoder(list[Granted | Confirmed | Refused])


def _encoded(message: FromReader) -> bytes:
    return msgspec.msgpack.encode([message])


def crowd(port: int, of: Readers) -> None:
    """Run the commands on standard input, one a line."""
    readers = Crowd(port, of)
    print("ready", flush=True)
    for line in sys.stdin:
        first, rate, seconds = line.split()
        readers.answers = {"granted": 0, "refused": 0}
        count = readers.run(int(first), float(rate), float(seconds))
        print(json.dumps({"count": count, **readers.answers}), flush=True)
