"""The readers of a lender's benchmark: many ranks' connections, in a process of their own."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
import selectors
import sys
import time
from dataclasses import dataclass

import msgspec

from pdconn.lifecycle.pull import RENEWALS_PER_TTL, RENEWS_ALONG_FROM
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
    encode,
)
from pdconn.sidechannel.connection import MAX_REPLIES, Connection, connecting_to, resolve
from pdconn.sidechannel.security import Security
from pdconn.tools.bench.percentile import percentile
from pdconn.tools.lab.ports import LOCALHOST

SECRET = b"a secret of a benchmark on loopback"
TTL_S = 30.0
"""Of each lease."""

LEAD_S = 0.05
"""From lending to the claim; from the claim to the renewal and from that to the end, at least."""

BETWEEN_RENEWALS_S = TTL_S / RENEWALS_PER_TTL * (1 - RENEWS_ALONG_FROM)
"""Of one reader whose pulls renew along: see :mod:`pdconn.lifecycle.pull`."""

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
    ``renew_along``: renewals of a reader are sent together, ``BETWEEN_RENEWALS_S`` apart;
    otherwise each is sent ``LEAD_S`` after its claim.
    """

    engines: int
    ranks: int
    jitter_s: float
    is_secured: bool
    renew_along: bool

    @property
    def pull_s(self) -> float:
        """From the claim of a pull to its end, within which it renews once."""
        return 2 * LEAD_S + (BETWEEN_RENEWALS_S if self.renew_along else 0.0)

    @property
    def security(self) -> Security:
        """Of both sides."""
        return Security(Secret(SECRET)) if self.is_secured else Security()


class Crowd:
    """Simulated readers on one thread: each sends what is due, and reads every answer.

    What a reader has to send at one time is one frame.

    Attributes:
        answers: how many were granted or confirmed, and how many refused.
        claims_s: seconds from sending each claim to reading its grant.
    """

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
        self._renews_at = [self._random.uniform(0, BETWEEN_RENEWALS_S) for _ in self._connections]
        self._outgoing: dict[int, list[FromReader]] = {}
        self._claimed: dict[int, float] = {}
        self.answers = {"granted": 0, "refused": 0}
        self.claims_s: list[float] = []

    def _greeted(self, port: int, number: int, security: Security) -> Connection:
        sock = connecting_to(resolve(LOCALHOST, port))
        policy = security.for_reader(LOCALHOST, f"{LOCALHOST}:{port}")
        connection = Connection(sock, 1 << 24, policy=policy, max_later=MAX_REPLIES)
        connection.watch_socket(self._selector, connection, connecting=True)
        self._selector.select(5.0)
        connection.send_frames([encode([Hello(PROTOCOL_VERSION, f"d{number}", "boot")])])
        while not connection.receive_frames():
            self._selector.select(5.0)
        return connection

    def run(self, first: int, rate: float, seconds: float) -> int:
        """Claim, renew and end requests from ``first`` on; returns how many claims were made."""
        ranks, jitter_s = self._readers.ranks, self._readers.jitter_s
        count = int(rate / ranks * seconds)
        began = time.monotonic() + LEAD_S
        # At a random time of its own slot each: on a grid, claims of one meet the ends of another.
        slot_s = ranks / rate
        asked = [began + (n + self._random.random()) * slot_s for n in range(count)]
        due = [
            (asked[n] + self._random.uniform(0, jitter_s), n, rank, "claim")
            for n in range(count)
            for rank in range(ranks)
        ]
        heapq.heapify(due)
        while due:
            self._hear(0.0)
            time.sleep(max(POLL_S, due[0][0] - time.monotonic()))
            while due and due[0][0] <= time.monotonic():
                at, number, rank, what = heapq.heappop(due)
                reader = number % self._readers.engines * ranks + rank
                self._do(reader, first + number, rank, what)
                if what == "claim":
                    heapq.heappush(due, (self._renewal(reader, at), number, rank, "renew"))
                    heapq.heappush(due, (at + self._readers.pull_s, number, rank, "done"))
            self._send()
        give_up = time.monotonic() + 5
        while sum(self.answers.values()) < 3 * count * ranks and time.monotonic() < give_up:
            self._hear(0.1)
        return count * ranks

    def _renewal(self, reader: int, claimed: float) -> float:
        """When a reader renews what it claimed at ``claimed``."""
        soonest = claimed + LEAD_S
        if not self._readers.renew_along:
            return soonest
        phase = self._renews_at[reader]
        periods = math.ceil((soonest - phase) / BETWEEN_RENEWALS_S)
        return phase + periods * BETWEEN_RENEWALS_S

    def _do(self, reader: int, number: int, rank: int, what: str) -> None:
        request, who = f"r{number}", Reader(f"p{number}", rank, self._readers.ranks)
        seq = next(self._seq)
        message: FromReader
        if what == "claim":
            message = Claim(seq, request, who, digest(number))
        elif what == "renew":
            message = Renew(seq, request, who)
        else:
            message = Confirm(seq, request, who, digest(number))
        self._outgoing.setdefault(reader, []).append(message)

    def _send(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        for reader, messages in outgoing.items():
            now = time.monotonic()
            for message in messages:
                if isinstance(message, Claim):
                    self._claimed[message.seq] = now
            self._connections[reader].send_frames([encode(messages)])

    def _hear(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            bodies, now = key.data.receive_frames(), time.monotonic()
            for body in bodies:
                for message in _answers.decode(body):
                    self.answers["refused" if isinstance(message, Refused) else "granted"] += 1
                    claimed = self._claimed.pop(message.seq, None)
                    if claimed is not None:
                        self.claims_s.append(now - claimed)


_answers = msgspec.msgpack.Decoder(list[Granted | Confirmed | Refused])


def crowd(port: int, of: Readers) -> None:
    """Run the commands on standard input, one a line."""
    readers = Crowd(port, of)
    print("ready", flush=True)
    for line in sys.stdin:
        first, rate, seconds = line.split()
        readers.answers, readers.claims_s = {"granted": 0, "refused": 0}, []
        count = readers.run(int(first), float(rate), float(seconds))
        report: dict[str, float] = {"count": count, **readers.answers}
        if claims_ms := sorted(1e3 * each for each in readers.claims_s):
            report["claim_p50_ms"] = percentile(claims_ms, 0.5)
            report["claim_p99_ms"] = percentile(claims_ms, 0.99)
        print(json.dumps(report), flush=True)
