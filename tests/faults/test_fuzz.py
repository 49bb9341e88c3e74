"""Whatever arrives at a lender's side channel, it lives, stays small and serves on.

What readers hear is spoiled in :mod:`tests.faults.test_liars`.

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
from pdconn.protocol.framing import frame
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    ChecksumRequest,
    Claim,
    Describe,
    Done,
    FromReader,
    Hello,
    Reader,
    Renew,
    encode,
)
from pdconn.protocol.proof import ChecksumQuery, PieceRange
from pdconn.sidechannel.security import Security
from tests.faults.child import Child
from tests.faults.engines import until
from tests.faults.footprint import MIB, Footprint
from tests.faults.garbage import BODY, KINDS
from tests.faults.guests import Guest, crowd

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
"""What a lender may hold at once: the longest frame and its messages, of everybody."""


class LenderHurt(AssertionError):
    """The lender died, swelled, or no longer serves."""


class Fuzzed:
    """A lender in a process of its own, with leases that garbage must not end."""

    def __init__(self, secret: str | None = None, mutant: str | None = None) -> None:
        self._child = Child("tests.faults.lender_process")
        self.port: int = self._child.ask(do="open", secret=secret, mutant=mutant)
        self.security = Security(None if secret is None else Secret(secret.encode()))
        self.guests = 0
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

    def serve_a_guest(self) -> None:
        """Somebody with a ticket claims, renews, and ends its lease."""
        self.guests += 1
        request, digest = f"guest{self.guests}", os.urandom(16)
        self._child.ask(do="lend", request=request, digest=digest.hex(), ttl_s=60.0)
        try:
            with Guest(self.port, self.security) as guest:
                guest.claim(request, digest, request)
                guest.done(request, digest, request)
                until(lambda: request in self.report()["freed"], shown=lambda: request)
        except OSError as error:
            raise LenderHurt(f"a guest is not served: {error}") from error

    def is_quiet(self) -> bool:
        visitors: int = self.report()["visitors"]
        return visitors == 0

    def close(self) -> None:
        self._child.close()


def body(rng: Random) -> bytes:
    """Valid messages of somebody without a ticket, who knows the names of what is lent."""
    request, ticket = f"victim{rng.randrange(9)}", rng.randbytes(16)
    reader = Reader(f"stranger/{rng.randrange(9)}", rng.randrange(2), 2)
    said: list[FromReader] = [
        Hello(PROTOCOL_VERSION, "stranger", "boot-1"),
        Hello(PROTOCOL_VERSION, "stranger", "boot-0"),
        Describe(PROTOCOL_VERSION),
        Claim(1, request, reader, ticket),
        Renew(2, request, reader),
        Done(request, reader, ticket, True),
        ChecksumRequest(
            3, request, reader, ChecksumQuery(0, False, (PieceRange(0, 0, 2, 0, 2, 0, 3),))
        ),
    ]
    return encode([rng.choice(said)] * rng.choice((1, 1, 3)))


def to_open_lender(rng: Random) -> bytes:
    """Garbage at once, or after a greeting."""
    hello = frame(encode([Hello(PROTOCOL_VERSION, "stranger", "boot-1")]))
    return rng.choice((b"", hello)) + rng.choice(KINDS)(rng, body(rng))


def to_guarded_lender(rng: Random) -> bytes:
    """Garbage instead of a handshake, amid one, or as one."""
    [hello] = ReaderAuth(Secret(SECRET.encode()), rng.randbytes(32)).start()
    if rng.random() < 0.4:
        spoiled: bytes = rng.choice(KINDS[:-5])(rng, hello)
        return rng.choice((b"", frame(hello))) + spoiled
    proof = frame(hello[:-33] + b"\x03" + rng.randbytes(32))
    return rng.choice((b"", frame(hello), frame(hello) + proof)) + rng.choice(KINDS)(rng, body(rng))


def fuzz(
    fuzzed: Fuzzed,
    inputs: int,
    draw: Callable[[Random], bytes],
    hears: Callable[[bytes], None],
) -> dict[str, Any]:
    """Send ``inputs`` inputs, with a guest now and then; return the lender's report.

    Args:
        draw: makes an input of a generator.
        hears: is given every answer.

    Raises:
        LenderHurt: as it says.
    """
    rng = Random(SEED)
    before: Footprint | None = None
    for sent in range(0, inputs, AT_ONCE):
        for answer in crowd(fuzzed.port, [draw(rng) for _ in range(AT_ONCE)], rng):
            hears(answer)
        if sent // AT_ONCE % 8 == 0:
            fuzzed.serve_a_guest()
        if before is None and sent >= inputs // 5:
            until(fuzzed.is_quiet, shown=fuzzed.report)
            before, _ = fuzzed.measure()
    fuzzed.serve_a_guest()
    until(fuzzed.is_quiet, shown=fuzzed.report)
    assert before is not None
    now, peak_nbytes = fuzzed.measure()
    grown = now.growth(before, GROWTH, objects=100 + 20 * fuzzed.guests)  # each is remembered
    if peak_nbytes - now.rss_nbytes > PEAK:
        grown.append(f"memory for a while: {(peak_nbytes - now.rss_nbytes) / MIB:.0f} MiB")
    if grown:
        raise LenderHurt(f"grew: {', '.join(grown)}")
    more, peak = now.rss_nbytes - before.rss_nbytes, peak_nbytes - now.rss_nbytes
    print(f"{inputs} inputs: {more / MIB:.1f} MiB more in the end, {peak / MIB:.1f} at the peak")
    return fuzzed.report()


def check_untouched(report: dict[str, Any]) -> None:
    """Nothing was granted but to guests, and no lease has ended but theirs."""
    assert report["lent"] == 8
    assert not [request for request in report["freed"] if request.startswith("victim")]
    print(report["counts"])


def test_an_open_lender_bears_anything() -> None:
    def hears(answer: bytes) -> None:
        assert b"granted" not in answer

    with closing(Fuzzed()) as fuzzed:
        report = fuzz(fuzzed, INPUTS * 3 // 5, to_open_lender, hears)
        check_untouched(report)
        assert report["counts"]["bad_messages"] > INPUTS / 10
        assert report["counts"]["claims"] > 0


def test_a_guarded_lender_bears_anything_and_tells_nothing() -> None:
    nonces = []

    def hears(answer: bytes) -> None:
        for word in (b"granted", b"welcome", b"refused", b"rejected", b"boot-1"):
            assert word not in answer
        assert len(answer) <= 8 + 11 + 2 + 32, "more than a challenge"
        nonces.append(answer)

    with closing(Fuzzed(SECRET)) as fuzzed:
        report = fuzz(fuzzed, INPUTS * 2 // 5, to_guarded_lender, hears)
        check_untouched(report)
        assert report["counts"]["unauthenticated"] > INPUTS / 10
        challenges = [nonce for nonce in nonces if nonce]
        assert len(set(challenges)) == len(challenges) > INPUTS / 100


def test_a_guarded_lender_bears_garbage_of_somebody_who_has_the_secret() -> None:
    rng = Random(SEED)
    with closing(Fuzzed(SECRET)) as fuzzed:
        for _ in range(INPUTS // 20):
            with Guest(fuzzed.port, fuzzed.security) as mad:
                whole = rng.choice(BODY)(rng, body(rng))
                mad.send(whole[8:])
        fuzzed.serve_a_guest()
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
    [("fragile", "thread has ended|not served|does not hang up"), ("hoarder", "memory by")],
)
def test_a_broken_lender_is_noticed(mutant: str, noticed: str) -> None:
    with closing(Fuzzed(mutant=mutant)) as fuzzed, pytest.raises(AssertionError, match=noticed):
        fuzz(fuzzed, 2000, to_open_lender, lambda _answer: None)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
