"""A lender that lies: a pull fails with a reason or is right, and other pulls go on.

Each pull that is lied to has a connection of its own, through a relay that changes the
lender's replies; honest pulls of the same engine go straight to the lender meanwhile.

A relay that sends any frame with a valid CRC can also claim another geometry, and send other
bytes: secrets and TLS prevent that.  Without them only the pull's own blocks are written.

``PDCONN_FUZZ=200000`` lets 4000 pulls of each test be lied to, ``PDCONN_SEED`` draws other
lies (``make fuzz``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from random import Random

import msgspec
import numpy as np
import pytest

from pdconn.faults.frame_faults import DelayedFrame, FrameFaults, MessageFaults
from pdconn.faults.relay import Relay
from pdconn.lifecycle.pull import Patience
from pdconn.protocol.errors import MessageError
from pdconn.protocol.messages import decode_from_lender, frame
from pdconn.puller import peers
from tests.fakes.model_free_engines import PER_REQUEST, Decode, Prefill
from tests.faults.garbage import BODY, STREAM, alter, flipped, repeated, truncated
from tests.threads.inside import num_open
from transport.testing.inprocess.transport import InProcessNetwork, InProcessTransport

LIES = max(200, int(os.environ.get("PDCONN_FUZZ", "0")) // 50)
SEED = int(os.environ.get("PDCONN_SEED", "1"))
AT_ONCE = 200
_HEAD = len(frame(b""))

Lie = Callable[[Random, bytes], bytes]


def any_of(*lies: Lie) -> Lie:
    return lambda rng, body: rng.choice(lies)(rng, body)


def answers_only(lie: Lie) -> Lie:
    """Lie about what is granted and refused, and welcome as one should."""
    return lambda rng, body: frame(body) if b"welcome" in body else lie(rng, body)


def other_geometry(rng: Random, body: bytes) -> bytes:
    """A welcome that parses and describes other memory; what is no welcome stays.

    The transport's address stays too: in-process bytes are moved from wherever it says.
    """
    for _ in range(300):
        messages = msgspec.msgpack.decode(body)
        ranks = [rank for message in messages for rank in message.get("ranks", ())]
        if not ranks:
            break
        for rank in ranks:
            rank["references"] = alter(rng, rank["references"])
        lied = msgspec.msgpack.encode(messages)
        with contextlib.suppress(MessageError):
            decode_from_lender(lied)
            return frame(lied)
    return frame(body)


class _Lying(FrameFaults):
    """Spoils half of what passes."""

    def __init__(self, lie: Lie, rng: Random, counts: Counter[str]) -> None:
        super().__init__(MessageFaults(), rng, counts)
        self._lie = lie

    def pass_frame(self, frame_: bytes, now: float) -> list[DelayedFrame]:
        self.counts["welcomes"] += 1
        if self._rng.random() < 0.5:
            return [DelayedFrame(now, frame_)]
        self.counts["lies"] += 1
        return [DelayedFrame(now, self._lie(self._rng, frame_[_HEAD:]))]


class LyingRelay(Relay):
    """Changes what the lender sends, and passes what it receives."""

    def __init__(self, port: int, lie: Lie) -> None:
        self._lie = lie
        super().__init__("127.0.0.1", port, MessageFaults(), SEED)

    def _faults_of(self, connection: int, direction: str) -> FrameFaults:
        rng = Random(f"{SEED}/{connection}/{direction}")
        if direction == "there":
            return FrameFaults(MessageFaults(), rng, self.counts)
        return _Lying(self._lie, rng, self.counts)


def deceive(lie: Lie, believes: bool = False) -> Decode:
    """Every second pull is lied to; see the module for the laws, all checked here.

    ``believes``: whether a lie may be believed, so that a wrong token is no surprise.
    """
    network = InProcessNetwork()
    with ExitStack() as stack:
        lending = InProcessTransport(network, "prefill")
        prefill = stack.enter_context(Prefill(lending, pool=3000, ttl_s=20.0))
        relay = stack.enter_context(closing(LyingRelay(prefill.lender.port, lie)))

        def through(host: str, port: int) -> tuple[str, int]:
            return (host, port) if host == "127.0.0.1" else (relay.host, relay.port)

        decode = Decode(
            InProcessTransport(network, "decode"),
            pool=AT_ONCE * PER_REQUEST + 3,
            patience=Patience(claim_s=2.5, drain_s=0.3),
            through=through,
        )
        stack.enter_context(decode)
        canary = decode.free.pop(), decode.free.pop(), decode.free.pop()
        decode.cache.rows[list(canary)] = 0xEE
        for first in range(0, LIES * 2, AT_ONCE):
            for number in range(first, first + AT_ONCE):
                ticket = prefill.compute(number)
                assert ticket is not None
                liar = f"127.0.1.{number // 2 % 250 + 1}"
                decode.pull(number, ticket if number % 2 else replace(ticket, host=liar))
            before = prefill.cache.rows.copy()
            give_up = time.monotonic() + 60.0
            while decode.num_open:
                assert time.monotonic() < give_up, f"{decode.num_open} pulls are not reported"
                decode.collect()
                time.sleep(0.001)
            assert (before == prefill.cache.rows).all()
        assert (decode.cache.rows[list(canary)] == 0xEE).all(), "others' blocks were written"
        assert num_open(decode.puller) == 0
        honest = set(range(1, LIES * 2, 2))
        alarms = {n: why for n, why in decode.rejected.items() if n in honest}
        assert honest <= decode.received, alarms
        assert all(decode.rejected.values())
        assert relay._worker.is_alive
        assert relay.counts["lies"] > LIES / 4
        lied_to = {n for n in decode.received if n % 2 == 0}
        print(f"{LIES} pulls were lied to: {len(lied_to)} received, {len(decode.wrong)} wrong;")
        print(Counter(map(_reason_only, decode.rejected.values())).most_common(12))
    assert believes or decode.wrong == []
    return decode


def _reason_only(reason: str) -> str:
    """A reason without the liar's address."""
    return (reason.partition("127.0.1.")[2].partition(": ")[2] or reason)[:60]


def test_what_is_corrupted_on_the_way_is_noticed() -> None:
    deceive(any_of(flipped, truncated, repeated))


def test_noise_instead_of_an_answer_fails_the_pull() -> None:
    deceive(any_of(*STREAM, *BODY[:6]))


def test_wrong_answers_to_claims_are_never_believed() -> None:
    decode = deceive(answers_only(any_of(*BODY)))
    assert {number for number in decode.received if number % 2 == 0}


def test_a_wrong_geometry_costs_the_pulls_that_believe_it_and_no_other() -> None:
    deceive(other_geometry, believes=True)


# Negative control


def test_a_welcome_that_is_not_checked_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the edge that catches, one lie stops the puller."""
    monkeypatch.setattr(peers, "ProtocolError", KeyError)
    with pytest.raises(RuntimeError, match=r"MessageError|PeerMismatch"):
        deceive(any_of(*BODY[:6]))


def test_bytes_that_are_written_elsewhere_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Decode.pull

    def clumsy(self: Decode, number: int, ticket: object) -> None:
        real(self, number, ticket)  # type: ignore[arg-type]
        self.cache.rows[-1] = np.uint8(number % 7)

    monkeypatch.setattr(Decode, "pull", clumsy)
    with pytest.raises(AssertionError, match="others' blocks were written"):
        deceive(any_of(flipped))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
