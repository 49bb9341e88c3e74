"""Laws of warming, over real sockets and threads: it helps, and it harms no pull."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
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
    Welcome,
    decode_from_lender,
    encode,
)
from pdconn.puller.dialer import MAX_LOOKUPS
from pdconn.puller.warmup import MAX_PROBED, probe_page
from pdconn.puller.warmup_state import Pauses, Place
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
from tests.fakes.pair import TRAITS, Pair
from transport import HOST, BackendFailure, Device, Memory, PeerLost, TransportError
from transport.inprocess.faults import Failing, Held, ReadRequest
from transport.inprocess.network import InProcessNetwork

SECONDS = 30.0


WarmPair = partial(Pair, pauses=Pauses(first_s=0.05, longest_s=0.2))
"""Pauses are counted, not waited for."""


def until_warm(pair: Pair, num: int = 1) -> None:
    pair.wait(lambda: pair.puller.num_warm == num, SECONDS)


def test_a_lender_is_warm_before_any_request_and_is_then_claimed_from_at_once() -> None:
    with WarmPair(warms=True) as pair:
        until_warm(pair)
        assert pair.puller.num_open == 0
        counts = pair.lender.counts
        assert (counts["greeted"], counts["claims"]) == (1, 0)
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        assert pair.puller.num_peers == 1
        assert pair.ours.row(7) == pair.theirs.row(3)
        assert counts["greeted"] == 1, "the pull greeted anew"


def test_without_places_no_lender_is_warmed() -> None:
    """Negative control."""
    with WarmPair() as pair:
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        assert pair.puller.num_warm == 0


def test_a_probe_read_reads_one_page_and_changes_no_byte_of_our_kv() -> None:
    seen: list[int] = []

    def note(request: ReadRequest) -> None:
        seen.append(request.spans.total_bytes)

    with WarmPair(warms=True, network=InProcessNetwork(script=note)) as pair:
        until_warm(pair)
        assert seen == [min(PAGE_NBYTES, pair.theirs.bytes.size)]
        assert not pair.ours.bytes.any()
        assert pair.scratch.tensor.any(), "it went nowhere"


def test_peers_never_learn_of_the_page() -> None:
    with WarmPair() as pair:
        address = pair.their_transport.address()
        scratch = Scratch.on(HOST)
        pair.their_transport.register([scratch.memory])
        assert pair.their_transport.address() != address  # so one that was taken before lacks it


def test_a_lender_that_is_only_connected_is_not_read_from() -> None:
    with WarmPair(warms=True, probes=False) as pair:
        until_warm(pair)
        assert not pair.scratch.tensor.any()


def test_a_lender_that_comes_up_later_is_warmed_then() -> None:
    [port] = free_ports(1)
    with WarmPair(also_warm=(Place("127.0.0.1", port),)) as pair:
        time.sleep(0.3)  # some tries fail
        assert pair.puller.num_warm == 0
        with closing(Lender(pair.welcome(), "127.0.0.1", port)):
            until_warm(pair)


def test_a_restarted_lender_is_warmed_anew_under_its_new_boot() -> None:
    with WarmPair(warms=True) as pair:
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
    with WarmPair(warms=True) as pair:
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        until_warm(pair)
        assert pair.puller.num_peers == 1


@pytest.mark.parametrize("theirs", ["boot-1", "other"])
def test_the_secret_is_proven_by_a_warm_up_too(theirs: str) -> None:
    shared = Security(Secret(b"a secret of all engines"))
    with WarmPair(warms=True, security=shared) as pair:
        until_warm(pair)
        port = pair.lender.port
        pair.lender.close()
        pair.wait(lambda: pair.puller.num_warm == 0, SECONDS)
        other = Security(Secret(b"a secret of others"))
        pair.security = shared if theirs == "boot-1" else other
        pair.lender = pair.open_lender(port)
        if theirs == "boot-1":
            until_warm(pair)
        else:
            pair.wait(lambda: pair.lender.counts["connections_unauthenticated"] > 1, SECONDS)
            assert pair.puller.num_warm == 0
            assert pair.lender.counts["greeted"] == 0


def test_certificates_are_shown_by_a_warm_up_too(tmp_path: Path) -> None:
    files = Authority(tmp_path).sign("engine", "127.0.0.1")
    with WarmPair(warms=True, security=Security(tls=files)) as pair:
        until_warm(pair)


def test_a_failed_probe_read_fails_no_request_and_is_tried_again() -> None:
    network = InProcessNetwork(script=lambda request: Failing(PeerLost("cut")))
    with WarmPair(warms=True, network=network) as pair:
        pair.wait(lambda: pair.lender.counts["greeted"] > 2, SECONDS)
        assert pair.puller.num_warm == 0
        network.script = None
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        until_warm(pair)


def test_a_peer_whose_probe_read_failed_is_left() -> None:
    """Or one that names a new boot at every greeting would fill the table of peers."""
    network = InProcessNetwork(script=lambda request: Failing(BackendFailure("no")))
    with WarmPair(warms=True, network=network) as pair:
        pair.wait(lambda: pair.lender.counts["greeted"] > 2, SECONDS)
        pair.wait(lambda: pair.puller.num_peers == 0, SECONDS)


def test_dead_names_of_warm_places_hold_up_no_pull() -> None:
    """Twice as many as there are places for look-ups, of a name server that is silent."""
    silence = threading.Event()

    def resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
        if host.startswith("dead"):
            silence.wait(60.0)
            raise OSError("no such host")
        return socket.AF_INET, ("127.0.0.1", port)

    dead = tuple(Place(f"dead{n}.example", 5600) for n in range(2 * MAX_LOOKUPS))
    try:
        insecure = Security(insecure=True)
        with WarmPair(
            also_warm=dead, claim_timeout_s=10.0, security=insecure, resolve=resolve
        ) as pair:
            pair.wait(lambda: pair.puller.num_peers == len(dead), SECONDS)
            ticket = replace(pair.lend("r"), host="good.example")
            pair.pull("d", ticket)
            pair.wait(lambda: pair.received or pair.failed, SECONDS)
            assert pair.received == ["d"]
    finally:
        silence.set()


@pytest.mark.parametrize("error", [PeerLost("cut"), BackendFailure("no")], ids=repr)
def test_a_request_that_holds_a_lease_survives_a_failed_probe_read(error: TransportError) -> None:
    tries: list[ReadRequest] = []

    def fail(request: ReadRequest) -> Failing | None:
        if not is_probe(request):
            return None
        tries.append(request)
        return Failing(error)

    network = InProcessNetwork(script=fail)
    with WarmPair(warms=True, network=network, ttl_s=60.0, claim_timeout_s=20.0) as pair:
        pair.claim("d", pair.lend("r"))
        pair.wait(lambda: pair.lender.counts["claims"], SECONDS)
        before = len(tries)
        pair.wait(lambda: len(tries) > before + 1, SECONDS)
        pair.start_read("d")
        assert pair.outcome_of("d") is None


def test_a_probe_read_that_hangs_is_one_and_holds_no_pull_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="pdconn")
    network = InProcessNetwork(script=lambda request: Held() if is_probe(request) else None)
    with WarmPair(warms=True, network=network) as pair:
        pair.wait(network.in_flight, SECONDS)
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        pair.lender.close()  # its connection ends, and its probe read does not
        pair.lender = pair.open_lender(pair.lender.port)
        pair.wait(lambda: caplog.text.count("an earlier probe read is not over") > 2, SECONDS)
        assert pair.lender.counts["greeted"] == 1
        assert len(network.in_flight()) == 1
        assert pair.puller.num_warm == 0
        network.script = None
        network.release()
        until_warm(pair)


def test_an_engine_does_not_warm_itself() -> None:
    with WarmPair(warms=True, our_name="prefill") as pair:
        pair.wait(lambda: pair.lender.counts["greeted"], SECONDS)
        pair.wait(lambda: pair.puller.num_peers == 0, SECONDS)
        time.sleep(0.5)  # some pauses
        assert pair.lender.counts["greeted"] == 1
        assert pair.puller.num_warm == 0


def test_a_warm_up_makes_no_room_for_itself_and_gives_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="pdconn")
    [port] = free_ports(1)
    with WarmPair(warms=True, also_warm=(Place("127.0.0.1", port),), max_peers=1) as pair:
        until_warm(pair)
        with closing(Lender(pair.welcome(), "127.0.0.1", port)) as other:
            tries = caplog.text.count("1 lenders are known")
            pair.wait(lambda: caplog.text.count("1 lenders are known") > tries + 4, SECONDS)
            assert other.counts["greeted"] == 0
            assert (pair.puller.num_warm, pair.lender.counts["greeted"]) == (1, 1)
            ticket = replace(pair.lend("r"), port=port)
            other.lend("r", ticket.digest(), 5.0)
            pair.pull("d", ticket)
            assert pair.outcome_of("d") is None
            assert pair.lender.counts["greeted"] == 1, "the warm-up took the room back"
        pair.wait(lambda: pair.lender.counts["greeted"] > 1, SECONDS)


def welcome(**changes: Any) -> bytes:
    """What a lender would say of itself to a reader, but for ``changes``."""
    message = Welcome.of("p", "boot", TRAITS, (RankGeometry(0, 0, b"", one_layer()),))
    return encode([msgspec.structs.replace(message, **changes)])


def described(**changes: Any) -> bytes:
    """What a lender would say of itself to a tool, but for ``changes``."""
    message = Described(PROTOCOL_VERSION, "p", "boot", {}, (RankGeometry(0, 0, b"", one_layer()),))
    return encode([msgspec.structs.replace(message, **changes)])


def one_layer() -> KVCacheReferences:
    memory = [LayerMemory("a", Memory(4096, 640), 0, 64, 10, (AttentionChunk(1, 64, 64, 8, 8),))]
    return build_kv_cache_references([GroupMemory(AttentionKind.FULL, None, 8, memory)])


@pytest.mark.parametrize(
    "body",
    [
        encode([Granted(1, "r", "d/1", 1000)]),
        described(),
        welcome(engine_id=""),
        welcome(incarnation="x" * 10_000),
        welcome(ranks=()),
        welcome(version=PROTOCOL_VERSION + 1),
        welcome(digest="another"),
        b"\xc1",
        welcome(),  # of other KV, at an address where no transport is
    ],
    ids=[
        "another answer", "an answer to a tool", "no name", "a long boot", "no rank",
        "another version", "another digest", "noise", "another engine",
    ],
)  # fmt: skip
def test_a_lender_that_answers_oddly_is_greeted_again_and_pulls_go_on(body: bytes) -> None:
    with (
        answering(body) as (port, accepted),
        WarmPair(also_warm=(Place("127.0.0.1", port),), claim_timeout_s=0.5) as pair,
    ):
        pair.wait(lambda: len(accepted) > 2, SECONDS)
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        assert pair.puller.num_warm == 0
        assert pair.puller.num_peers <= 3


def test_only_a_lender_that_a_request_wanted_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="pdconn")
    with (
        answering(welcome()) as (port, accepted),
        WarmPair(also_warm=(Place("127.0.0.1", port),), claim_timeout_s=0.2) as pair,
    ):
        pair.wait(lambda: len(accepted) > 4, SECONDS)  # greeted without success, and greeted again
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
    for answer, to_tool in ((welcome, False), (described, True)):
        decode_from_lender(answer(), to_tool)
        with pytest.raises(MessageError, match=changed):
            decode_from_lender(answer(**{changed: name}), to_tool)


def test_a_silent_lender_is_left_in_time() -> None:
    with (
        answering() as (port, accepted),
        WarmPair(also_warm=(Place("127.0.0.1", port),), claim_timeout_s=0.3) as pair,
    ):
        pair.wait(lambda: len(accepted) > 2, SECONDS)
        assert pair.puller.num_peers <= 1


def test_a_probe_read_reaches_every_region_and_stays_inside_its_page() -> None:
    scratch = Memory(1 << 20, PAGE_NBYTES)
    for num in (1, 3, MAX_PROBED, 2 * MAX_PROBED):
        memories = [Memory((1 << 30) + i * 100_000, 64_000) for i in range(num)]
        spans = probe_page(scratch, one_layer_each(memories))
        assert spans.remote.tolist() == [memory.base for memory in memories][:MAX_PROBED]
        assert spans.local[0] == scratch.base
        assert (spans.local[1:] >= spans.local[:-1] + spans.nbytes[:-1]).all()
        assert int(spans.local[-1] + spans.nbytes[-1]) <= scratch.end


def test_a_probe_read_reads_no_more_than_a_region_has_and_from_one_device() -> None:
    scratch, gpu = Memory(1 << 20, PAGE_NBYTES), Device("cuda", 1)
    memories = [Memory(1 << 30, 640, gpu), Memory(1 << 31, 64_000), Memory(1 << 32, 6400, gpu)]
    spans = probe_page(scratch, one_layer_each(memories))
    assert spans.nbytes.tolist() == [640, PAGE_NBYTES // 2]
    assert (spans.local_device, spans.remote_device) == (HOST, gpu)


def is_probe(request: ReadRequest) -> bool:
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
    """A server that says ``bodies`` on each connection, and then nothing; its connections."""
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                accepted.append(connection)
                connection.sendall(b"".join(frame(body) for body in bodies))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1], accepted
        server.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    for connection in accepted:
        connection.close()
