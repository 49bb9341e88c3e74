"""The shelf of objects while its server fails, and buckets that cannot be used."""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from pdconn.store.format.row import RowName
from pdconn.store.shelf.obj import bucket as bucket_module
from pdconn.store.shelf.obj import data as data_module
from pdconn.store.shelf.obj.bucket import BucketPlace, open_bucket
from pdconn.store.shelf.obj.shelf import ObjShelf
from pdconn.store.store_errors import ShelfFailure, StoreError
from tests.store.shelves.obj.s3_server import Relay, S3Server
from tests.store.shelves.plain_rows import PAGE, load, pages, payload, row_name, save

pytest.importorskip("nixl", reason="the shelf obj needs nixl")
pytest.importorskip("boto3", reason="the shelf obj needs boto3")
pytest.importorskip("moto.server", reason="the shelf obj is tested against moto's server")

BIG = 64 * PAGE
T = TypeVar("T")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def fault() -> str:
    """What the server does; tests with parameters of this name say it themselves."""
    return "none"


@pytest.fixture
def relay(server: S3Server, monkeypatch: pytest.MonkeyPatch, fault: str) -> Iterator[Relay]:
    monkeypatch.setattr(bucket_module, "_PAUSE_S", 0.2)
    if fault == "slow":
        monkeypatch.setattr(bucket_module, "_ANSWER_S", 1)
        monkeypatch.setattr(data_module, "_TRANSFER_S", 1)
    with Relay(server.endpoint) as made:
        yield made


def _through(relay: Relay, place: BucketPlace) -> BucketPlace:
    return BucketPlace(place.bucket, place.prefix, relay.endpoint, place.region)


def in_the_end(act: Callable[[], T]) -> T:
    """What a call returns once the server answers in time again, which a busy machine puts off."""
    until_s = time.monotonic() + 30.0
    while True:
        try:
            return act()
        except ShelfFailure:
            assert time.monotonic() < until_s
            time.sleep(0.1)


CALLS = {
    "has": lambda shelf: shelf.has("ns", row_name(9)),
    "read": lambda shelf: load(shelf, row_name(), BIG),
    "write": lambda shelf: shelf.write("writer", "q", [(0, pages(BIG))]),
    "commit": lambda shelf: shelf.commit("writer", "done", "ns", row_name(2)),
    "discard": lambda shelf: shelf.discard("writer", "done"),
    "remove": lambda shelf: shelf.remove_row("ns", row_name()),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fault", ["500", "403", "slow"])
def test_a_server_that_fails_is_a_failure_of_the_shelf_and_the_shelf_goes_on(
    root: Path, place: BucketPlace, relay: Relay, call: str, fault: str
) -> None:
    def save_anew(name: RowName, data: bytes) -> None:
        save(shelf, name, data, part=f"part{next(numbers)}")

    def write_anew(part: str, data: bytes) -> None:
        shelf.discard("writer", part)
        shelf.begin("writer", part, BIG)
        shelf.write("writer", part, [(0, pages(data))])

    numbers = itertools.count()
    with ObjShelf(root, _through(relay, place)) as shelf:
        in_the_end(lambda: save_anew(row_name(), payload(1, BIG)))
        in_the_end(lambda: write_anew("done", payload(2, BIG)))
        in_the_end(lambda: shelf.begin("writer", "q", BIG))
        if fault == "slow":
            relay.delay_s = 5.0
        else:
            relay.answers = {"*": int(fault)}
        began = time.monotonic()
        with pytest.raises(ShelfFailure) as seen:
            CALLS[call](shelf)
        assert time.monotonic() - began < 30.0
        assert f"{place}" in str(seen.value), "the key is named"
        assert "secret-of-tests" not in str(seen.value)
        relay.answers, relay.delay_s = {}, 0.0
        if call != "discard":
            in_the_end(lambda: shelf.discard("writer", "q"))
            is_new = in_the_end(lambda: shelf.commit("writer", "done", "ns", row_name(2)))
            assert (call == "commit") <= is_new
            assert in_the_end(lambda: load(shelf, row_name(2), BIG)) == payload(2, BIG)
        if call == "remove":
            assert in_the_end(lambda: shelf.remove_row("ns", row_name())) == BIG
        in_the_end(lambda: save_anew(row_name(5), payload(5, BIG)))
        assert in_the_end(lambda: load(shelf, row_name(5), BIG)) == payload(5, BIG)


def test_while_a_server_is_down_calls_fail_at_once(
    root: Path, place: BucketPlace, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "_PAUSE_S", 60.0)
    with ObjShelf(root, _through(relay, place)) as shelf:
        shelf.begin("writer", "p", BIG)
        relay.answers = {"*": 503}
        with pytest.raises(ShelfFailure):
            shelf.has("ns", row_name())
        num_seen = len(relay.seen)
        for _ in range(50):
            with pytest.raises(ShelfFailure, match="next try in"):
                shelf.has("ns", row_name())
            with pytest.raises(ShelfFailure, match="next try in"):
                shelf.write("writer", "p", [(0, pages(BIG))])
        assert len(relay.seen) == num_seen


def test_a_server_that_answers_again_is_found_by_calls_that_never_pause(
    root: Path, place: BucketPlace, relay: Relay
) -> None:
    """Calls that are refused before the next try do not put that try off."""
    with ObjShelf(root, _through(relay, place)) as shelf:
        shelf.begin("writer", "p", BIG)
        relay.answers = {"*": 503}
        with pytest.raises(ShelfFailure):
            shelf.write("writer", "p", [(0, pages(BIG))])
        relay.answers = {}
        with pytest.raises(ShelfFailure, match="next try in"):
            shelf.write("writer", "p", [(0, pages(BIG))])
        until, written = time.monotonic() + 20 * bucket_module._PAUSE_S, False
        while not written and time.monotonic() < until:
            with contextlib.suppress(ShelfFailure):
                shelf.write("writer", "p", [(0, pages(BIG))])
                written = True
        assert written


def test_a_commit_whose_answer_was_lost_is_a_commit(
    root: Path, server: S3Server, place: BucketPlace, relay: Relay
) -> None:
    with ObjShelf(root, _through(relay, place)) as shelf:
        shelf.begin("writer", "p", BIG)
        shelf.write("writer", "p", [(0, pages(payload(1, BIG)))])
        relay.loses = ["PUT"]
        assert shelf.commit("writer", "p", "ns", row_name())
        assert relay.loses == []
        assert load(shelf, row_name(), BIG) == payload(1, BIG)


def test_a_commit_that_may_have_been_done_is_undone_with_its_part(
    root: Path, server: S3Server, place: BucketPlace, relay: Relay
) -> None:
    with ObjShelf(root, _through(relay, place)) as shelf:
        shelf.begin("writer", "p", BIG)
        shelf.write("writer", "p", [(0, pages(payload(1, BIG)))])
        relay.loses = ["PUT", "PUT"]
        with pytest.raises(ShelfFailure):
            shelf.commit("writer", "p", "ns", row_name())
        assert server.index_keys(place)
        in_the_end(lambda: shelf.discard("writer", "p"))
        assert server.keys(place) == []


def test_a_bucket_that_cannot_be_used_is_an_error_at_the_start(
    root: Path, place: BucketPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = BucketPlace("no-such-bucket", "", place.endpoint, place.region)
    with pytest.raises(StoreError, match="no such bucket"):
        ObjShelf(root, none)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    other = BucketPlace(place.bucket, "x/", place.endpoint, place.region)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    with pytest.raises(StoreError, match="no credentials"):
        ObjShelf(root, other)
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(StoreError, match=r"pip install '.\[s3\]'"):
        ObjShelf(root, BucketPlace(place.bucket, "y/", place.endpoint, place.region))


def test_new_credentials_are_used_by_the_next_transfer(
    root: Path, place: BucketPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ObjShelf(root, place) as shelf:
        save(shelf, row_name(), payload(1, BIG))
        first = shelf._data._objects
        load(shelf, row_name(), BIG)
        assert shelf._data._objects is first
        changed = {**open_bucket(place).nixl_options(), "session_token": "another"}
        monkeypatch.setattr(shelf._bucket, "nixl_options", lambda: changed)
        assert load(shelf, row_name(), BIG) == payload(1, BIG)
        assert shelf._data._objects is not first


def test_a_server_that_was_down_at_the_start_is_not_asked_by_every_thread(
    root: Path, place: BucketPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "_ANSWER_S", 1)
    monkeypatch.setattr(bucket_module, "_PAUSE_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # accepts, and never answers
        endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        silent = BucketPlace(place.bucket, place.prefix, endpoint, place.region)
        took = []
        for _ in range(10):
            began = time.monotonic()
            with pytest.raises(ShelfFailure):
                ObjShelf(root, silent)
            took.append(time.monotonic() - began)
        assert max(took[1:]) < took[0] / 10
