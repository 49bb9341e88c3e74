"""Objects through NIXL: what its agent leaves to us."""

from __future__ import annotations

import os
import time

import pytest

from pdconn.store.shelf.obj.bucket import BucketPlace, open_bucket
from tests.store.shelves.obj.s3_server import Relay, S3Server
from tests.store.shelves.plain_rows import MIB, pages, payload
from transport.errors import BackendFailure, TransportUnavailable
from transport.nixl import objects
from transport.nixl.objects import NixlObjects

pytest.importorskip("nixl", reason="needs nixl")
pytest.importorskip("moto.server", reason="needs moto's server")


def loads() -> bool:
    """Whether NIXL's back end does: that of nixl-cu13 needs a library that no wheel has."""
    try:
        NixlObjects("loads", {"bucket": "none", "access_key": "a", "secret_key": "b"}).close()
    except TransportUnavailable:
        return False
    return True


pytestmark = pytest.mark.skipif(not loads(), reason="NIXL's OBJ back end does not load here")


def opened(place: BucketPlace) -> NixlObjects:
    return NixlObjects("objects-of-tests", open_bucket(place).nixl_options(), 20.0)


def test_an_object_of_several_pieces_is_read_in_ranges_of_any_size(place: BucketPlace) -> None:
    data = payload(1, 9 * MIB + 5)
    agent = opened(place)
    agent.put_object("a", [pages(data[:1000]), pages(data[1000 : 5 * MIB]), pages(data[5 * MIB :])])
    agent.put_object("b", [pages(b"other")])
    whole, part, other = pages(len(data)), pages(100), pages(5)
    agent.read_ranges([("a", 0, whole), ("a", 4 * MIB - 50, part), ("b", 0, other)])
    assert whole == data
    assert part == data[4 * MIB - 50 : 4 * MIB + 50]
    assert other == b"other"
    agent.close()
    agent.close()


def test_neighbours_are_read_by_one_request(place: BucketPlace, server: S3Server) -> None:
    data = payload(1, 64 << 10)
    with Relay(server.endpoint) as relay:
        agent = opened(BucketPlace(place.bucket, "", relay.endpoint, place.region))
        agent.put_object("a", [pages(data)])
        relay.seen.clear()
        into = [pages(1024) for _ in range(64)]
        agent.read_ranges([("a", 1024 * number, view) for number, view in enumerate(into)])
        assert b"".join(into) == data
        assert [method for method, _ in relay.seen] == ["GET"]
        agent.close()


def test_a_read_that_was_given_up_never_writes_to_its_callers_memory(
    place: BucketPlace, server: S3Server
) -> None:
    with Relay(server.endpoint) as relay:
        agent = opened(BucketPlace(place.bucket, "", relay.endpoint, place.region))
        agent.put_object("a", [pages(b"A" * 4096)])
        agent.put_object("b", [pages(b"B" * 4096)])
        patience_s, agent._wait_s, relay.delay_s = agent._wait_s, 0.3, 1.5
        into = pages(b"." * 4096)
        began = time.monotonic()
        with pytest.raises(BackendFailure, match="no answer"):
            agent.read_ranges([("a", 0, into)])
        assert time.monotonic() - began < 1.5
        (given_up,) = agent._stuck
        assert agent._memory is not given_up.memory, "what it still writes to is its own"
        agent._wait_s, relay.delay_s = patience_s, 0.0
        next_read = pages(4096)
        agent.read_ranges([("b", 0, next_read)])
        assert next_read == b"B" * 4096
        until = time.monotonic() + 20
        while bytes(given_up.memory[:4096]) != b"A" * 4096:  # it does arrive, late
            assert time.monotonic() < until
            time.sleep(0.05)
        assert into == b"." * 4096
        agent.read_ranges([("b", 0, next_read)])
        assert not agent._stuck
        agent.close()


def test_what_is_missing_and_what_is_short(place: BucketPlace) -> None:
    agent = opened(place)
    agent.put_object("a", [pages(b"A" * 100)])
    into = pages(b"." * 200)
    with pytest.raises(BackendFailure):
        agent.read_ranges([("none", 0, into)])
    assert into == b"." * 200
    agent.read_ranges([("a", 50, into)])
    assert into == b"A" * 50 + bytes(150)
    agent.close()
    with pytest.raises(BackendFailure, match="closed"):
        agent.read_ranges([("a", 0, into)])


def test_the_environment_is_as_before(place: BucketPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "7")
    monkeypatch.delenv("AWS_RETRY_MODE", raising=False)
    with objects._few_tries():
        assert os.environ["AWS_MAX_ATTEMPTS"] == "7", "the user's own comes first"
        assert os.environ["AWS_RETRY_MODE"] == "standard"
    before = dict(os.environ)
    opened(place).close()
    assert dict(os.environ) == before
