"""Any bytes may arrive at a lender's side channel: it lives, stays small and serves on.

Replies to readers are corrupted in :mod:`tests.faults.test_liars`.

``PDCONN_FUZZ=200000`` sets how many inputs are sent, ``PDCONN_SEED`` which (``make fuzz``).
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from random import Random
from typing import Any

import pytest

from pdconn.protocol.auth import ReaderAuth, Secret
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    ChecksumRequest,
    Claim,
    Confirm,
    Describe,
    Done,
    FromReader,
    Hello,
    Reader,
    Renew,
    encode,
    frame,
)
from pdconn.protocol.proof import ChecksumQuery, PieceRange
from pdconn.sidechannel.security import Security
from tests.fakes.model_free_engines import until
from tests.faults.child import Child
from tests.faults.footprint import MIB, Footprint
from tests.faults.garbage import BODY, KINDS
from tests.faults.raw_clients import RawReader, crowd

INPUTS = int(os.environ.get("PDCONN_FUZZ", "5000"))
SEED = int(os.environ.get("PDCONN_SEED", "1"))
SECRET = "correct horse battery"
AT_ONCE = 64

GROWTH = 6 * MIB
"""What a lender may keep after any number of inputs.

The allocator holds on to a few arenas of the largest input, a frame of 1 MiB and the
messages in it; a thing of 2 KiB kept per input would be more after 5000 of them.
"""

PEAK = 2 * AT_ONCE * MIB
"""What a lender may hold at once: the longest frame and its messages, of every connection."""


class LenderHurt(AssertionError):
    """The lender died, swelled, or no longer serves."""


class Fuzzed:
    """A lender in a process of its own, with leases that garbage must not end."""

    def __init__(self, secret: str | None = None, mutant: str | None = None) -> None:
        self._child = Child("tests.faults.lender_process")
        self.port: int = self._child.ask(do="open", secret=secret, mutant=mutant)
        self.security = Security(None if secret is None else Secret(secret.encode()))
        self.num_readers = 0
        for number in range(8):
            self._child.ask(do="lend", request=f"victim{number}", digest="55" * 16, ttl_s=3600.0)

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = self._child.ask(do="report")
        if not report["alive"]:
            raise LenderHurt("its thread has ended")
        return report

    def measure(self) -> tuple[Footprint, int]:
        """What it holds, and the most bytes that it ever held."""
        measured = self._child.ask(do="measure")
        return Footprint(**measured["now"]), measured["peak_nbytes"]

    def serve_a_reader(self) -> None:
        """A reader with a ticket claims, renews, and ends its lease."""
        self.num_readers += 1
        request, digest = f"reader{self.num_readers}", os.urandom(16)
        self._child.ask(do="lend", request=request, digest=digest.hex(), ttl_s=60.0)
        try:
            with RawReader(self.port, self.security) as reader:
                reader.claim(request, digest, request)
                reader.done(request, digest, request)
                until(lambda: request in self.report()["freed"], shown=lambda: request)
        except OSError as error:
            raise LenderHurt(f"a reader is not served: {error}") from error

    def is_quiet(self) -> bool:
        connections: int = self.report()["connections"]
        return connections == 0

    def close(self) -> None:
        self._child.close()


def body(rng: Random) -> bytes:
    """Valid messages of a reader without a ticket, that knows the names of what is lent."""
    request, ticket = f"victim{rng.randrange(9)}", rng.randbytes(16)
    reader = Reader(f"unknown/{rng.randrange(9)}", rng.randrange(2), 2)
    messages: list[FromReader] = [
        Hello(PROTOCOL_VERSION, "unknown", "boot-1"),
        Hello(PROTOCOL_VERSION, "unknown", "boot-0"),
        Describe(PROTOCOL_VERSION),
        Claim(1, request, reader, ticket),
        Renew(2, request, reader),
        Confirm(3, request, reader, ticket),
        Done(request, reader, ticket),
        ChecksumRequest(
            3, request, reader, ChecksumQuery(0, False, (PieceRange(0, 0, 2, 0, 2, 0, 3),))
        ),
    ]
    return encode([rng.choice(messages)] * rng.choice((1, 1, 3)))


def to_open_lender(rng: Random) -> bytes:
    """Garbage at once, or after a greeting."""
    hello = frame(encode([Hello(PROTOCOL_VERSION, "unknown", "boot-1")]))
    return rng.choice((b"", hello)) + rng.choice(KINDS)(rng, body(rng))


def to_guarded_lender(rng: Random) -> bytes:
    """Garbage instead of a handshake, amid one, or as one."""
    [hello] = ReaderAuth(Secret(SECRET.encode()), rng.randbytes(32)).opening_frames()
    if rng.random() < 0.4:
        corrupted: bytes = rng.choice(KINDS[:-5])(rng, hello)
        return rng.choice((b"", frame(hello))) + corrupted
    proof = frame(hello[:-33] + b"\x03" + rng.randbytes(32))
    return rng.choice((b"", frame(hello), frame(hello) + proof)) + rng.choice(KINDS)(rng, body(rng))


def fuzz(
    fuzzed: Fuzzed,
    inputs: int,
    draw: Callable[[Random], bytes],
    check: Callable[[bytes], None],
) -> dict[str, Any]:
    """Send ``inputs`` inputs, with a well-behaved reader now and then; return the lender's report.

    Args:
        draw: makes an input of a generator.
        check: is given every reply.

    Raises:
        LenderHurt: as it says.
    """
    rng = Random(SEED)
    before: Footprint | None = None
    for sent in range(0, inputs, AT_ONCE):
        for answer in crowd(fuzzed.port, [draw(rng) for _ in range(AT_ONCE)], rng):
            check(answer)
        if sent // AT_ONCE % 8 == 0:
            fuzzed.serve_a_reader()
        if before is None and sent >= inputs // 5:
            until(fuzzed.is_quiet, shown=fuzzed.report)
            before, _ = fuzzed.measure()
    fuzzed.serve_a_reader()
    until(fuzzed.is_quiet, shown=fuzzed.report)
    assert before is not None
    now, peak_nbytes = fuzzed.measure()
    grown = now.growth(before, GROWTH, objects=100 + 20 * fuzzed.num_readers)  # each is remembered
    if peak_nbytes - now.rss_nbytes > PEAK:
        grown.append(f"memory for a while: {(peak_nbytes - now.rss_nbytes) / MIB:.0f} MiB")
    if grown:
        raise LenderHurt(f"grew: {', '.join(grown)}")
    more, peak = now.rss_nbytes - before.rss_nbytes, peak_nbytes - now.rss_nbytes
    print(f"{inputs} inputs: {more / MIB:.1f} MiB more in the end, {peak / MIB:.1f} at the peak")
    return fuzzed.report()


def check_untouched(report: dict[str, Any]) -> None:
    """Only well-behaved readers were granted anything, and only their leases have ended."""
    assert report["lent"] == 8
    assert not [request for request in report["freed"] if request.startswith("victim")]
    print(report["counts"])


def test_an_open_lender_survives_any_bytes() -> None:
    def check(answer: bytes) -> None:
        assert b"granted" not in answer

    with closing(Fuzzed()) as fuzzed:
        report = fuzz(fuzzed, INPUTS * 3 // 5, to_open_lender, check)
        check_untouched(report)
        assert report["counts"]["bad_messages"] > INPUTS / 10
        assert report["counts"]["claims"] > 0


def test_a_lender_with_a_secret_survives_any_bytes_and_sends_nothing() -> None:
    nonces = []

    def check(answer: bytes) -> None:
        for word in (b"granted", b"welcome", b"refused", b"rejected", b"boot-1"):
            assert word not in answer
        assert len(answer) <= 8 + 11 + 2 + 32, "more than a challenge"
        nonces.append(answer)

    with closing(Fuzzed(SECRET)) as fuzzed:
        report = fuzz(fuzzed, INPUTS * 2 // 5, to_guarded_lender, check)
        check_untouched(report)
        assert report["counts"]["connections_unauthenticated"] > INPUTS / 10
        challenges = [nonce for nonce in nonces if nonce]
        assert len(set(challenges)) == len(challenges) > INPUTS / 100


def test_a_lender_survives_garbage_from_a_reader_with_the_secret() -> None:
    rng = Random(SEED)
    with closing(Fuzzed(SECRET)) as fuzzed:
        for _ in range(INPUTS // 20):
            with RawReader(fuzzed.port, fuzzed.security) as mad:
                whole = rng.choice(BODY)(rng, body(rng))
                mad.send(whole[8:])
        fuzzed.serve_a_reader()
        until(fuzzed.is_quiet, shown=fuzzed.report)
        report = fuzzed.report()
        check_untouched(report)
        assert report["counts"]["bad_messages"] > INPUTS / 50


def test_inputs_are_drawn_from_the_seed() -> None:
    def digest(seed: int) -> str:
        rng = Random(seed)
        drawn = [to_open_lender(rng) + to_guarded_lender(rng) for _ in range(50)]
        return hashlib.sha256(b"".join(drawn)).hexdigest()

    assert digest(3) == digest(3) != digest(4)


# Negative controls: the checks above can fail.


@pytest.mark.parametrize(
    ("mutant", "noticed"),
    [("fragile", "thread has ended|not served|does not close"), ("hoarder", "memory by")],
)
def test_a_broken_lender_is_noticed(mutant: str, noticed: str) -> None:
    with closing(Fuzzed(mutant=mutant)) as fuzzed, pytest.raises(AssertionError, match=noticed):
        fuzz(fuzzed, 2000, to_open_lender, lambda _answer: None)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
