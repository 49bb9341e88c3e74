"""Warm places that are dead, silent or answer oddly: they hold up no pull, and are tried again."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from pdconn.protocol.errors import MessageError
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    Described,
    Granted,
    RankGeometry,
    Welcome,
    decode_from_lender,
    encode,
    frame,
)
from pdconn.puller.thread import MAX_LOOKUPS
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
from tests.fakes.pair import TRAITS
from tests.puller.warmup.warm_pair import SECONDS, WarmPair
from tests.threads.inside import num_peers, num_warm
from transport import Memory


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
            pair.wait(lambda: num_peers(pair.puller) == len(dead), SECONDS)
            ticket = replace(pair.lend("r"), host="good.example")
            pair.pull("d", ticket)
            pair.wait(lambda: pair.received or pair.failed, SECONDS)
            assert pair.received == ["d"]
    finally:
        silence.set()


def welcome(**changes: Any) -> bytes:
    """What a lender would say of itself to a reader, but for ``changes``."""
    message = Welcome.in_our_version("p", "boot", TRAITS, (RankGeometry(0, 0, b"", one_layer()),))
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
        WarmPair(also_warm=(Place("127.0.0.1", port),), claim_timeout_s=2.0) as pair,
    ):
        pair.wait(lambda: len(accepted) > 2, SECONDS)
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None
        assert num_warm(pair.puller) == 0
        assert num_peers(pair.puller) <= 3


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
        assert num_peers(pair.puller) <= 1


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
