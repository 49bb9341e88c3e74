"""Whoever stands in the doorway, guests come in; whatever hangs, others go on.

The pieces of the fault table that concern the listener, and what waits for it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace

import pytest

from pdconn.lender import admission as door
from pdconn.lender import server as lender
from pdconn.protocol.framing import Frames, frame
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    Claim,
    Granted,
    Hello,
    Reader,
    RefusalReason,
    Refused,
    Renew,
    decode_from_lender,
    encode,
)
from pdconn.sidechannel.connection import Unauthenticated
from pdconn.sidechannel.dial import Address, resolve
from pdconn.sidechannel.security import Security
from pdconn.sidechannel.wire import PolledConnection
from tests.fakes.guards import FOREIGN, SHARED
from tests.fakes.pair import Pair
from tests.faults.child import Child
from tests.faults.engines import until
from tests.faults.guests import Guest
from transport.inprocess.faults import Held

PATIENCE_S = 30.0
BLOCKS = b"\x55" * 16
HELLO = frame(encode([Hello(PROTOCOL_VERSION, "stranger", "boot-1")]))


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair() as made:
        yield made


@contextmanager
def strangers(pair: Pair, count: int, data: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that have sent ``data`` and wait."""
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            sock = socket.create_connection(("127.0.0.1", pair.lender.port), 5.0)
            made.append(stack.enter_context(closing(sock)))
            with suppress(OSError):
                sock.sendall(data)
        yield made


def is_hung_up(sock: socket.socket) -> bool:
    """Whether the lender has closed; what it said before is thrown away."""
    sock.setblocking(False)
    try:
        while sock.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def serves(pair: Pair, request: str = "guest") -> bool:
    """Whether a good request goes through."""
    pair.pull(request, pair.lend(f"lent-{request}"))
    return pair.outcome_of(request) is None


# Loiterers


@pytest.mark.parametrize(
    "data", [b"", HELLO[:1], HELLO[:-1], HELLO + HELLO[:9]], ids=["mute", "byte", "half", "greeted"]
)
def test_who_does_not_finish_what_it_says_is_shown_out(
    pair: Pair, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "LOITER_S", 0.3)
    began = time.monotonic()
    with strangers(pair, 3, data) as waiting:
        until(lambda: all(map(is_hung_up, waiting)))
        assert time.monotonic() - began > 0.2
        until(lambda: pair.lender.counts["loiterers"] == 3)
        monkeypatch.undo()  # whoever pulls now may be slow
        assert serves(pair)


def test_a_byte_at_a_time_does_not_prolong_a_visit(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slowloris: each byte is a sign of life, and buys no time."""
    monkeypatch.setattr(door, "LOITER_S", 0.4)
    with strangers(pair, 1) as [slow]:
        unsent = HELLO
        while unsent and not is_hung_up(slow):
            with suppress(ConnectionError):
                slow.send(unsent[:1])
            unsent = unsent[1:]
            time.sleep(0.02)
        assert unsent
        assert pair.lender.counts["loiterers"] == 1
        monkeypatch.undo()
        assert serves(pair)


def test_a_guest_with_nothing_to_say_may_stay(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: it is not time alone that shows visitors out."""
    monkeypatch.setattr(door, "LOITER_S", 2.5)
    pair.lender.lend("r", BLOCKS, 60.0)
    with Guest(pair.lender.port) as guest:
        time.sleep(4.0)
        guest.claim("r", BLOCKS, "guest/1")
        assert pair.lender.counts["loiterers"] == 0


def test_a_crowd_of_strangers_crowds_out_strangers_and_no_guest(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MAX_LOITERERS", 4)
    pair.lender.lend("r", BLOCKS, 60.0)
    with Guest(pair.lender.port) as before, strangers(pair, 20) as crowd:
        assert serves(pair)
        until(lambda: sum(map(is_hung_up, crowd)) >= 16)
        before.claim("r", BLOCKS, "guest/1")
        assert not is_hung_up(crowd[-1])
        assert len(pair.lender._door) <= 4 + 2


# Places


def test_one_host_cannot_take_all_places(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MAX_VISITORS_OF_HOST", 4)
    with strangers(pair, 9, HELLO) as crowd:
        until(lambda: sum(map(is_hung_up, crowd)) == 5)
        until(lambda: pair.lender.counts["connections_refused"] == 5)
        with closing(socket.socket()) as other:
            other.bind(("127.0.0.2", 0))
            other.settimeout(5.0)
            other.connect(("127.0.0.1", pair.lender.port))
            other.sendall(HELLO)
            assert b"welcome" in other.recv(1 << 16)
    until(lambda: len(pair.lender._door) == 0)
    assert serves(pair)


def test_without_a_file_to_spare_the_lender_pauses_and_serves_on() -> None:
    """It does not spin, those inside are served, and the next are once there is room."""
    with closing(Child("tests.faults.lender_process")) as child, ExitStack() as stack:
        port = child.ask(do="open", secret=None, mutant=None)
        child.ask(do="lend", request="r", digest=BLOCKS.hex(), ttl_s=60.0)
        inside = stack.enter_context(Guest(port))
        child.ask(do="limit_files", spare=2)
        for _ in range(12):
            stack.enter_context(closing(socket.create_connection(("127.0.0.1", port), 5.0)))
        until(lambda: _failed_accepts(child) > 0)
        began = time.monotonic()
        before = child.ask(do="report")
        time.sleep(1.5)
        until(lambda: _failed_accepts(child) > before["counts"]["accept_failed"])
        inside.claim("r", BLOCKS, "guest/1")
        after = child.ask(do="report")
        took_s = time.monotonic() - began
        assert after["alive"]
        failed = after["counts"]["accept_failed"] - before["counts"]["accept_failed"]
        assert failed <= 1 + took_s / lender.ACCEPT_PAUSE_S
        assert (after["cpu_s"] - before["cpu_s"]) / took_s < 1 / 3, "it spins"
        child.ask(do="limit_files", spare=None)
        child.ask(do="lend", request="s", digest=BLOCKS.hex(), ttl_s=60.0)
        with Guest(port) as guest:
            guest.claim("s", BLOCKS, "guest/2")


def _failed_accepts(child: Child) -> int:
    counts: dict[str, int] = child.ask(do="report")["counts"]
    return counts.get("accept_failed", 0)


# Those who ask and do not listen


LONG_ASK = frame(encode([Renew(1, "x" * 500, Reader("y" * 500, 0, 1))] * 500))
"""Half a MiB; so is the answer."""


@contextmanager
def deaf(pair: Pair) -> Iterator[socket.socket]:
    """Somebody who greets and never reads."""
    with closing(socket.socket()) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", pair.lender.port))
        sock.settimeout(0.05)
        sock.sendall(HELLO)
        yield sock


def ask(sock: socket.socket, asks: int) -> None:
    """Ask so often, or until the lender hangs up."""
    unsent, give_up = LONG_ASK * asks, time.monotonic() + 30.0
    with suppress(ConnectionError):
        while unsent:
            assert time.monotonic() < give_up, "the lender does not listen"
            with suppress(TimeoutError):
                unsent = unsent[sock.send(unsent[: 1 << 20]) :]


def test_who_does_not_read_is_not_heard_until_it_does(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its questions wait in its own system, instead of our answers in our memory."""
    monkeypatch.setattr(door, "LOITER_S", 60.0)
    with deaf(pair) as sock:
        asks = LONG_ASK * 64
        sent = _say_until_stuck(sock, asks)
        assert sent < len(asks), "all of it was heard"
        [wire] = pair.lender._wires.values()
        assert len(wire._channel._layers.out) < 2 * len(LONG_ASK)
        assert serves(pair)
        # Then it reads, finishes what it was saying, and nothing was lost.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        frames = -(-sent // len(LONG_ASK))
        finishing = threading.Thread(
            target=sock.sendall, args=(asks[sent : frames * len(LONG_ASK)],)
        )
        sock.settimeout(PATIENCE_S)
        finishing.start()
        assert _refused(sock, frames * 500) == frames * 500
        finishing.join()
    assert pair.lender.counts["loiterers"] == 0


def _say_until_stuck(sock: socket.socket, data: bytes) -> int:
    """Bytes that the system took before it took none for a second."""
    sock.settimeout(1.0)
    sent = 0
    with suppress(TimeoutError):
        while sent < len(data):
            sent += sock.send(data[sent : sent + (1 << 20)])
    return sent


def _refused(sock: socket.socket, count: int) -> int:
    """How many refusals come, up to ``count``."""
    frames, heard = Frames(1 << 24), 0
    while heard < count and (data := sock.recv(1 << 20)):
        for body in frames.feed(data):
            heard += sum(isinstance(said, Refused) for said in decode_from_lender(body))
    return heard


def test_who_has_asked_and_does_not_read_is_shown_out_in_time(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "LOITER_S", 0.4)
    with deaf(pair) as sock:
        ask(sock, 20)
        until(lambda: len(pair.lender._door) == 0)
    assert pair.lender.counts["loiterers"] == 1
    monkeypatch.undo()
    assert serves(pair)


def test_to_ask_on_does_not_prolong_the_visit_of_who_never_reads(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each connection may hold MAX_UNSENT for ever, and a host 2048 times as much."""
    monkeypatch.setattr(door, "LOITER_S", 0.4)
    small = frame(encode([Renew(1, "r", Reader("d", 0, 1))]))
    with deaf(pair) as sock:
        ask(sock, 20)
        sock.settimeout(20.0)
        until(lambda: _is_refused(sock, small))


def _is_refused(sock: socket.socket, data: bytes) -> bool:
    """Whether it is shown out, said a little later than asked."""
    time.sleep(0.05)
    try:
        sock.sendall(data)
    except ConnectionError:
        return True
    return False


# Strangers where a secret is needed


@pytest.mark.parametrize("how", ["no secret", "another secret"])
def test_who_has_no_secret_is_named_counted_and_told_nothing(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with Pair(security=SHARED) as pair, closing(socket.socket()) as sock:
        if how == "another secret":
            with pytest.raises(Unauthenticated, match="is its secret another"):
                Guest(pair.lender.port, FOREIGN)
        else:
            sock.settimeout(5.0)
            sock.connect(("127.0.0.1", pair.lender.port))
            sock.sendall(HELLO)
            assert not b"".join(iter(lambda: sock.recv(1 << 16), b""))
        until(lambda: pair.lender.counts["unauthenticated"] == 1)
        [line] = [record.getMessage() for record in caplog.records if "turned away" in record.msg]
        assert "side channel: 127.0.0.1:" in line
        assert serves(pair)


# Those who wait for others


def test_a_slow_name_server_does_not_keep_other_pulls_from_renewing() -> None:
    asked, go_on = threading.Event(), threading.Event()

    def slow(host: str, port: int) -> Address:
        if host != "slow.example":
            return resolve(host, port)
        asked.set()
        go_on.wait(60.0)
        return resolve("127.0.0.1", port)

    insecure = Security(insecure=True)
    with Pair(ttl_s=3.0, claim_timeout_s=60.0, security=insecure, resolve=slow) as pair:
        try:
            pair.network.script = lambda read: Held() if read.number == 0 else None
            pair.pull("d", pair.lend("r"))
            until(pair.network.in_flight)
            pair.ttl_s = 60.0
            pair.pull("slow", replace(pair.lend("s"), host="slow.example"), (1, 2, 3))
            assert asked.wait(20.0)
            renewals, since = pair.lender.counts["renewals"], time.monotonic()
            until(lambda: time.monotonic() - since > 4.0)  # longer than the lease
            pair.network.release()
            assert pair.outcome_of("d") is None
            assert pair.lender.counts["renewals"] >= renewals + 2
            assert pair.received == ["d"]
        finally:
            go_on.set()
        assert pair.outcome_of("slow") is None


def test_a_read_that_hangs_is_reported_in_time_and_its_blocks_stay_out_of_use() -> None:
    with Pair(drain_s=0.3) as pair:
        pair.network.script = lambda _: Held()
        pair.pull("d", pair.lend("r"))
        pair.wait(pair.network.in_flight)
        began = time.monotonic()
        pair.cancel("d")
        assert pair.outcome_of("d") == "cancelled"
        assert time.monotonic() - began > 0.25
        time.sleep(0.3)
        pair.collect()
        assert pair.released == []
        assert pair.puller.num_open > 0
        assert pair.lender.collect() == []  # what may still be read is still lent
        pair.network.script = None
        assert serves(pair)
        pair.network.release()
        pair.wait(lambda: pair.released == ["d"])
        assert pair.puller.num_open == 0


# Peers


def test_an_idle_peer_makes_room_and_a_busy_one_does_not() -> None:
    with Pair(max_peers=2, through=lambda _, port: ("127.0.0.1", port)) as pair:
        for number in range(2, 6):
            _serves_at(pair, f"127.0.0.{number}", f"idle{number}")
            assert pair.puller.num_peers <= 2
        pair.network.script = lambda _: Held()
        for number in (2, 3):
            _pull_at(pair, f"127.0.0.{number}", f"busy{number}")
        until(lambda: len(pair.network.in_flight()) == 2)
        _pull_at(pair, "127.0.0.4", "refused")
        assert "2 lenders are in use" in str(pair.outcome_of("refused"))
        pair.network.script = None
        pair.network.release()
        assert pair.outcome_of("busy2") is None
        assert pair.outcome_of("busy3") is None
        _serves_at(pair, "127.0.0.4", "after")


def _pull_at(pair: Pair, host: str, request: str) -> None:
    """Pull from the lender, under another name."""
    pair.pull(request, replace(pair.lend(f"lent-{request}"), host=host))


def _serves_at(pair: Pair, host: str, request: str) -> None:
    _pull_at(pair, host, request)
    assert pair.outcome_of(request) is None


# Claims of a visitor


def test_a_claim_does_not_overtake_its_lease(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lent while the lender is about to read is in the book before its claim is heard."""
    reading, go = threading.Event(), threading.Event()
    real = PolledConnection.receive

    def receive(wire: PolledConnection) -> list[bytes]:
        reading.set()
        go.wait(20.0)
        return real(wire)

    reader = Reader("guest/1", 0, 1)
    with Guest(pair.lender.port) as guest:
        monkeypatch.setattr(PolledConnection, "receive", receive)
        guest.say(Renew(1, "other", reader))
        assert reading.wait(20.0)  # the mailbox was emptied, and the socket was not read
        pair.lender.lend("r", BLOCKS, 60.0)
        guest.say(Claim(2, "r", reader, BLOCKS))
        time.sleep(0.05)
        go.set()
        guest.hear(Refused)
        guest.hear(Granted)


def test_a_claim_that_ran_out_is_forgotten(pair: Pair) -> None:
    """Law 5.  A visitor may hold MAX_CLAIMS claims; those that are over must not count."""
    with Guest(pair.lender.port) as guest:
        pair.lender.lend("r", BLOCKS, 2.5)
        guest.claim("r", BLOCKS, "guest/1")
        assert pair.freed() == "expired"
        [visitor] = pair.lender._wires
        until(lambda: not visitor.claimed)


def test_only_who_claimed_may_renew_a_claim(pair: Pair) -> None:
    """As with Done and Prove: who learns a reader's name could keep blocks lent for ever."""
    pair.lender.lend("r", BLOCKS, 5.0)
    with Guest(pair.lender.port) as guest, Guest(pair.lender.port) as stranger:
        reader = Reader("guest/1", 0, 1)
        guest.say(Claim(1, "r", reader, BLOCKS))
        guest.hear(Granted)
        stranger.say(Renew(1, "r", reader))
        stranger.hear(Refused)


def test_a_visitor_holds_so_many_claims_and_no_more(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers count, not requests: one ticket is enough for thousands of them."""
    monkeypatch.setattr("pdconn.lender.sessions.MAX_CLAIMS", 3)
    pair.lender.lend("r", BLOCKS, 5.0)
    with Guest(pair.lender.port) as guest:
        for number in range(3):
            guest.claim("r", BLOCKS, f"guest/{number}")
        guest.say(Claim(4, "r", Reader("guest/4", 0, 1), BLOCKS))
        assert guest.hear(Refused).why is RefusalReason.TOO_MANY
