"""Laws of warming, over real sockets and threads: it helps, and it harms nobody."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdconn.lab.ports import free_ports
from pdconn.lender.server import Lender
from pdconn.protocol.auth import Secret
from pdconn.protocol.errors import MessageError
from pdconn.protocol.framing import frame
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    Described,
    Granted,
    RankGeometry,
    decode_from_lender,
    encode,
)
from pdconn.puller import connections
from pdconn.puller import dialer as dialing
from pdconn.puller import warmup as warmth
from pdconn.puller.warming import MAX_TOUCHED, probe_page
from pdconn.puller.warmup import Place
from pdconn.sidechannel.security import Security
from registration.references import (
    AttentionChunk,
    AttentionKind,
    GroupMemory,
    KVCacheReferences,
    LayerMemory,
    build_kv_cache_references,
)
from registration.scratch import PAGE_NBYTES, Scratch
from tests.fakes.credentials import Authority
from tests.fakes.pair import Pair
from transport import HOST, BackendFailure, Device, Memory, PeerLost, TransportError
from transport.inprocess.faults import Failing, Held, ReadRequest
from transport.inprocess.network import InProcessNetwork

SECONDS = 30.0


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are counted, not waited for."""
    monkeypatch.setattr(warmth, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(warmth, "LONGEST_PAUSE_S", 0.2)


def until_warm(pair: Pair, num: int = 1) -> None:
    pair.wait(lambda: pair.puller.num_warm == num, SECONDS)


def test_a_lender_is_warm_before_anybody_asks_and_then_claims_at_once() -> None:
    with Pair(warms=True) as pair:
        until_warm(pair)
        assert pair.puller.num_open == 0
        counts = pair.lender.counts
        assert (counts["described"], counts["claims"]) == (1, 0)
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        assert pair.puller.num_peers == 1
        assert pair.ours.row(7) == pair.theirs.row(3)


def test_without_being_told_nobody_is_warmed() -> None:
    """Negative control."""
    with Pair() as pair:
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        assert pair.puller.num_warm == 0
        assert pair.lender.counts["described"] == 0


def test_a_touch_reads_one_page_and_changes_no_byte_of_our_kv() -> None:
    seen: list[int] = []

    def note(request: ReadRequest) -> None:
        seen.append(request.spans.total_bytes)

    with Pair(warms=True, network=InProcessNetwork(script=note)) as pair:
        until_warm(pair)
        assert seen == [min(PAGE_NBYTES, pair.theirs.bytes.size)]
        assert not pair.ours.bytes.any()
        assert pair.scratch.tensor.any(), "it went nowhere"


def test_peers_never_learn_of_the_page() -> None:
    with Pair() as pair:
        address = pair.their_transport.address()
        scratch = Scratch.on(HOST)
        pair.their_transport.register([scratch.memory])
        assert pair.their_transport.address() != address  # so one that was taken before lacks it


def test_a_lender_that_is_only_connected_is_not_read_from() -> None:
    with Pair(warms=True, touches=False) as pair:
        until_warm(pair)
        assert not pair.scratch.tensor.any()


def test_a_lender_that_comes_up_later_is_warmed_then() -> None:
    [port] = free_ports(1)
    with Pair(also_warm=(Place("127.0.0.1", port),)) as pair:
        time.sleep(0.3)  # some tries in vain
        assert pair.puller.num_warm == 0
        with closing(Lender(pair.welcome(), "127.0.0.1", port)):
            until_warm(pair)


def test_a_restarted_lender_is_warmed_anew_under_its_new_boot() -> None:
    with Pair(warms=True) as pair:
        until_warm(pair)
        port = pair.lender.port
        pair.lender.close()
        pair.wait(lambda: pair.puller.num_warm == 0, SECONDS)
        pair.incarnation = "boot-2"
        pair.lender = pair.open_lender(port)
        until_warm(pair)
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        assert pair.puller.num_peers == 1


def test_a_request_that_comes_meanwhile_joins_and_is_served() -> None:
    with Pair(warms=True) as pair:
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        until_warm(pair)
        assert pair.puller.num_peers == 1


@pytest.mark.parametrize("theirs", ["boot-1", "other"])
def test_the_secret_is_proven_by_a_warm_up_too(theirs: str) -> None:
    shared = Security(Secret(b"a secret of all engines"))
    with Pair(warms=True, security=shared) as pair:
        until_warm(pair)
        port = pair.lender.port
        pair.lender.close()
        pair.wait(lambda: pair.puller.num_warm == 0, SECONDS)
        stranger = Security(Secret(b"a secret of strangers"))
        pair.security = shared if theirs == "boot-1" else stranger
        pair.lender = pair.open_lender(port)
        if theirs == "boot-1":
            until_warm(pair)
        else:
            pair.wait(lambda: pair.lender.counts["connections_unauthenticated"] > 1, SECONDS)
            assert pair.puller.num_warm == 0
            assert pair.lender.counts["described"] == 0


def test_certificates_are_shown_by_a_warm_up_too(tmp_path: Path) -> None:
    files = Authority(tmp_path).sign("engine", "127.0.0.1")
    with Pair(warms=True, security=Security(tls=files)) as pair:
        until_warm(pair)


def test_a_failed_touch_fails_no_request_and_is_tried_again() -> None:
    network = InProcessNetwork(script=lambda request: Failing(PeerLost("cut")))
    with Pair(warms=True, network=network) as pair:
        pair.wait(lambda: pair.lender.counts["described"] > 2, SECONDS)
        assert pair.puller.num_warm == 0
        network.script = None
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        until_warm(pair)


def test_a_peer_whose_touch_failed_is_left() -> None:
    """Or one that names a new boot whenever it is asked would fill the table of peers."""
    network = InProcessNetwork(script=lambda request: Failing(BackendFailure("no")))
    with Pair(warms=True, network=network) as pair:
        pair.wait(lambda: pair.lender.counts["described"] > 2, SECONDS)
        pair.wait(lambda: pair.puller.num_peers == 0, SECONDS)


def test_dead_names_of_warm_places_hold_up_no_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many as there are places for look-ups, of a name server that is silent."""
    silence = threading.Event()

    def resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
        if host.startswith("dead"):
            silence.wait(60.0)
            raise OSError("no such host")
        return socket.AF_INET, ("127.0.0.1", port)

    monkeypatch.setattr(dialing, "resolve", resolve)
    dead = tuple(Place(f"dead{n}.example", 5600) for n in range(2 * dialing.MAX_LOOKUPS))
    try:
        with Pair(also_warm=dead, claim_timeout_s=10.0, security=Security(insecure=True)) as pair:
            pair.wait(lambda: pair.puller.num_peers == len(dead), SECONDS)
            ticket = replace(pair.lend("r"), host="good.example")
            pair.pull("d", ticket)
            pair.wait(lambda: pair.received or pair.failed, SECONDS)
            assert pair.received == ["d"]
    finally:
        silence.set()


@pytest.mark.parametrize("error", [PeerLost("cut"), BackendFailure("no")], ids=repr)
def test_a_request_that_holds_a_lease_survives_a_failed_touch(error: TransportError) -> None:
    network = InProcessNetwork(script=lambda request: Failing(error) if is_touch(request) else None)
    with Pair(warms=True, network=network, ttl_s=60.0, claim_timeout_s=20.0) as pair:
        pair.hold("d", pair.lend("r"))
        pair.wait(lambda: pair.lender.counts["claims"], SECONDS)
        before = pair.lender.counts["described"]
        pair.wait(lambda: pair.lender.counts["described"] > before + 1, SECONDS)
        pair.want("d")
        assert pair.outcome_of("d") is None


def test_a_touch_that_hangs_is_one_and_holds_nobody_up() -> None:
    network = InProcessNetwork(script=lambda request: Held() if is_touch(request) else None)
    with Pair(warms=True, network=network) as pair:
        pair.wait(network.in_flight, SECONDS)
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        pair.lender.close()  # its connection ends, and its touch does not
        pair.lender = pair.open_lender(pair.lender.port)
        pair.wait(lambda: pair.lender.counts["described"] > 1, SECONDS)
        assert len(network.in_flight()) == 1
        assert pair.puller.num_warm == 0
        network.script = None
        network.release()
        until_warm(pair)


def test_an_engine_does_not_warm_itself() -> None:
    with Pair(warms=True, our_name="prefill") as pair:
        pair.wait(lambda: pair.lender.counts["described"], SECONDS)
        pair.wait(lambda: pair.puller.num_peers == 0, SECONDS)
        time.sleep(0.5)  # some pauses
        assert pair.lender.counts["described"] == 1
        assert pair.puller.num_warm == 0


def test_a_warm_up_makes_no_room_for_itself_and_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_PEERS", 1)
    [port] = free_ports(1)
    with Pair(warms=True, also_warm=(Place("127.0.0.1", port),)) as pair:
        until_warm(pair)
        with closing(Lender(pair.welcome(), "127.0.0.1", port)) as other:
            pair.wait(lambda: other.counts["described"] > 2, SECONDS)
            assert (pair.puller.num_warm, pair.lender.counts["described"]) == (1, 1)
            ticket = replace(pair.lend("r"), port=port)
            other.lend("r", ticket.digest(), 5.0)
            pair.pull("d", ticket)
            assert pair.outcome_of("d") is None
            pair.wait(lambda: pair.lender.counts["described"] > 1, SECONDS)


def described(**changes: Any) -> bytes:
    """What a lender would say of itself, but for ``changes``."""
    memory = [LayerMemory("a", Memory(4096, 640), 0, 64, 10, (AttentionChunk(1, 64, 64, 8, 8),))]
    references = build_kv_cache_references([GroupMemory(AttentionKind.FULL, None, 8, memory)])
    said = Described(PROTOCOL_VERSION, "p", "boot", {}, (RankGeometry(0, 0, b"", references),))
    return encode([msgspec.structs.replace(said, **changes)])


@pytest.mark.parametrize(
    "body",
    [
        encode([Granted(1, "r", "d/1", 1000)]),
        described(engine_id=""),
        described(incarnation="x" * 10_000),
        described(ranks=()),
        b"\xc1",
        described(),  # and then it neither greets nor says more
    ],
    ids=["another answer", "no name", "a long boot", "no rank", "noise", "an honest answer"],
)
def test_who_answers_oddly_is_asked_again_and_nobody_else_minds(body: bytes) -> None:
    with (
        answering(body) as (port, guests),
        Pair(also_warm=(Place("127.0.0.1", port),), claim_timeout_s=0.5) as pair,
    ):
        pair.wait(lambda: len(guests) > 2, SECONDS)
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        assert pair.puller.num_warm == 0
        assert pair.puller.num_peers <= 3


def test_only_a_lender_that_a_request_wanted_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="pdconn")
    with (
        answering(described()) as (port, guests),
        Pair(also_warm=(Place("127.0.0.1", port),), claim_timeout_s=0.2) as pair,
    ):
        pair.wait(lambda: len(guests) > 4, SECONDS)  # asked, greeted in vain, asked again
        assert "no longer reading" in caplog.text
        assert not _warned(caplog)
        ticket = pair.lend("r")
        pair.lender.close()
        pair.pull("d", ticket)
        assert pair.outcome_of("d") is not None
        assert _warned(caplog)


def _warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    return [text for text in texts if "no longer reading" in text]


@pytest.mark.parametrize("changed", ["engine_id", "incarnation"])
@pytest.mark.parametrize("name", ["", "x" * 10_000, "a\nb"], ids=["none", "long", "two lines"])
def test_a_name_that_is_none_is_refused_when_it_is_heard(changed: str, name: str) -> None:
    decode_from_lender(described())
    with pytest.raises(MessageError, match=changed):
        decode_from_lender(described(**{changed: name}))


def test_who_says_nothing_is_left_in_time() -> None:
    with (
        answering() as (port, guests),
        Pair(also_warm=(Place("127.0.0.1", port),), claim_timeout_s=0.3) as pair,
    ):
        pair.wait(lambda: len(guests) > 2, SECONDS)
        assert pair.puller.num_peers <= 1


def test_a_touch_reaches_every_region_and_stays_inside_its_page() -> None:
    scratch = Memory(1 << 20, PAGE_NBYTES)
    for num in (1, 3, MAX_TOUCHED, 2 * MAX_TOUCHED):
        memories = [Memory((1 << 30) + i * 100_000, 64_000) for i in range(num)]
        spans = probe_page(scratch, one_layer_each(memories))
        assert spans.remote.tolist() == [memory.base for memory in memories][:MAX_TOUCHED]
        assert spans.local[0] == scratch.base
        assert (spans.local[1:] >= spans.local[:-1] + spans.nbytes[:-1]).all()
        assert int(spans.local[-1] + spans.nbytes[-1]) <= scratch.end


def test_a_touch_reads_no_more_than_a_region_has_and_from_one_device() -> None:
    scratch, gpu = Memory(1 << 20, PAGE_NBYTES), Device("cuda", 1)
    memories = [Memory(1 << 30, 640, gpu), Memory(1 << 31, 64_000), Memory(1 << 32, 6400, gpu)]
    spans = probe_page(scratch, one_layer_each(memories))
    assert spans.nbytes.tolist() == [640, PAGE_NBYTES // 2]
    assert (spans.local_device, spans.remote_device) == (HOST, gpu)


def is_touch(request: ReadRequest) -> bool:
    return request.spans.total_bytes > 1000


def one_layer_each(memories: list[Memory]) -> KVCacheReferences:
    chunk = AttentionChunk(1, 64, 64, 8, 8)
    layers = [
        LayerMemory(str(number), memory, 0, 64, memory.nbytes // 64, (chunk,))
        for number, memory in enumerate(memories)
    ]
    return build_kv_cache_references([GroupMemory(AttentionKind.FULL, None, 8, layers)])


@contextmanager
def answering(*bodies: bytes) -> Iterator[tuple[int, list[socket.socket]]]:
    """Somebody at a port who says ``bodies`` to whoever comes, and then nothing; its guests."""
    guests: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    guest, _ = server.accept()
                except OSError:
                    return
                guests.append(guest)
                guest.sendall(b"".join(frame(body) for body in bodies))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1], guests
        server.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    for guest in guests:
        guest.close()
