"""The shelf of objects, against a real server."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pdconn.store.budget.accounts import Accounts
from pdconn.store.shelf.interface import StoredPart, StoredRow
from pdconn.store.shelf.obj.bucket import BucketPlace
from pdconn.store.store_errors import RowDamaged, RowMissing, ShelfFailure
from tests.store.shelves.contract import ShelfContract
from tests.store.shelves.obj.s3_server import PATIENCE_S, S3Server
from tests.store.shelves.obj.test_nixl_objects import loads
from tests.store.shelves.plain_rows import (
    PAGE,
    OpenShelf,
    at_once,
    load,
    names_of,
    pages,
    parts_of,
    payload,
    row_name,
    save,
)

pytest.importorskip("nixl", reason="the shelf obj needs nixl")
pytest.importorskip("boto3", reason="the shelf obj needs boto3")
pytest.importorskip("moto.server", reason="the shelf obj is tested against moto's server")

from pdconn.store.shelf.obj.shelf import ObjShelf

BIG = 64 * PAGE
"""More than an index takes."""


@pytest.fixture(params=[0, 32 << 10], ids=["objects", "inline"])
def open_shelf(request: Any, tmp_path: Path, place: BucketPlace) -> OpenShelf:
    return lambda: ObjShelf(tmp_path / "root", place, request.param)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


class TestObjShelf(ShelfContract):
    """The contract, with rows as objects of their own and within their indexes."""


# Several roots


def test_roots_see_each_others_rows_and_list_their_own(tmp_path: Path, place: BucketPlace) -> None:
    with ObjShelf(tmp_path / "a", place) as ours, ObjShelf(tmp_path / "b", place) as theirs:
        assert not theirs.has("ns", row_name(1))
        save(ours, row_name(1), payload(1, BIG))
        save(theirs, row_name(2), payload(2, BIG))
        for shelf, name, seed in ((theirs, row_name(1), 1), (ours, row_name(2), 2)):
            assert shelf.has("ns", name)
            assert load(shelf, name, BIG) == payload(seed, BIG)
        assert names_of(ours) == [("ns", row_name(1))]
        assert names_of(theirs) == [("ns", row_name(2))]
        assert theirs.used_at("ns", row_name(1)) is None
        assert not save(theirs, row_name(1), payload(3, BIG)), "the first commit wins"
        assert load(theirs, row_name(1), BIG) == payload(1, BIG)
        assert names_of(theirs) == [("ns", row_name(2))]


def test_prefixes_of_a_bucket_are_apart(tmp_path: Path, place: BucketPlace) -> None:
    other = BucketPlace(place.bucket, "other/", place.endpoint, place.region)
    with ObjShelf(tmp_path / "a", place) as ours, ObjShelf(tmp_path / "b", other) as theirs:
        save(ours, row_name(), payload(1))
        assert not theirs.has("ns", row_name())


def test_each_root_accounts_for_its_own_rows(tmp_path: Path, place: BucketPlace) -> None:
    shelves = [ObjShelf(tmp_path / name, place) for name in "ab"]
    accounts = [Accounts(tmp_path / name, f"w{name}", 1 << 30) for name in "ab"]
    for number, (shelf, of) in enumerate(zip(shelves, accounts, strict=True)):
        of.recount(shelf)
        assert of.reserve(BIG) == BIG
        shelf.begin(f"w{'ab'[number]}", "p", BIG)
        shelf.write(f"w{'ab'[number]}", "p", [(0, pages(payload(number, BIG)))])
        row = StoredRow("ns", row_name(number), BIG, time.time())
        assert of.commit_row(shelf, StoredPart(f"w{'ab'[number]}", "p", BIG), row)
    for shelf, of in zip(shelves, accounts, strict=True):
        of.recount(shelf)
        assert (of.usage().committed, of.usage().reserved) == (BIG, 0)
    assert accounts[0].remove_row(shelves[0], "ns", row_name(0)) == BIG
    assert [of.usage().committed for of in accounts] == [0, BIG]
    assert not shelves[1].has("ns", row_name(0))
    assert load(shelves[0], row_name(1), BIG) == payload(1, BIG)
    for one in (*shelves, *accounts):
        one.close()


def test_a_removed_row_leaves_no_object(root: Path, server: S3Server, place: BucketPlace) -> None:
    with ObjShelf(root, place) as shelf:
        save(shelf, row_name(), payload(1, BIG))
        assert (len(server.data_keys(place)), len(server.index_keys(place))) == (1, 1)
        assert not save(shelf, row_name(), payload(2, BIG))
        assert len(server.data_keys(place)) == 1, "what lost is removed"
        (entry,) = (one for one in (root / "rows").rglob("*") if one.is_file())
        assert entry.stat().st_size == BIG
        assert 512 * entry.stat().st_blocks <= 2 * PAGE, "it takes no room on this machine"
        assert shelf.remove_row("ns", row_name()) == BIG
    assert server.keys(place) == []


def test_another_roots_row_is_removed_without_its_bytes_and_may_be_saved_again(
    tmp_path: Path, server: S3Server, place: BucketPlace
) -> None:
    with ObjShelf(tmp_path / "a", place) as ours, ObjShelf(tmp_path / "b", place) as theirs:
        save(ours, row_name(), payload(1, BIG))
        assert theirs.remove_row("ns", row_name()) == 0
        assert server.keys(place) == []
        assert save(theirs, row_name(), payload(2, BIG))
        assert ours.remove_row("ns", row_name()) == BIG, "the entry of the row that is gone"
        assert load(theirs, row_name(), BIG) == payload(2, BIG), "theirs is still there"
        save(ours, row_name(3), payload(3, BIG))
        theirs.remove_row("ns", row_name(3))
        assert save(ours, row_name(3), payload(4, BIG)), "an entry without a row is replaced"
        assert load(ours, row_name(3), BIG) == payload(4, BIG)
        assert len(server.data_keys(place)) == 2
        assert ours.remove_row("ns", row_name(3)) == BIG, "the new entry names what was saved"
        assert not theirs.has("ns", row_name(3))
        assert len(server.data_keys(place)) == 1


# Writers


def test_ranks_write_an_object_each_and_the_footer_goes_into_the_index(
    root: Path, server: S3Server, place: BucketPlace
) -> None:
    data, half = payload(1, 2 * BIG + PAGE), BIG
    with ObjShelf(root, place) as shelf:
        shelf.begin("writer", "p", len(data))

        def write(rank: int) -> None:
            with ObjShelf(root, place) as own:
                views = [
                    (rank * half + at, pages(data[rank * half + at : rank * half + at + half // 2]))
                    for at in (half // 2, 0)
                ]
                own.write("writer", "p", views)

        at_once(lambda rank=rank: write(rank) for rank in range(2))
        shelf.write("writer", "p", [(2 * BIG, pages(data[2 * BIG :]))])
        assert shelf.commit("writer", "p", "ns", row_name())
        assert load(shelf, row_name(), len(data)) == data
    assert len(server.data_keys(place)) == 2


def test_a_row_that_was_not_written_whole_is_not_committed(root: Path, place: BucketPlace) -> None:
    with ObjShelf(root, place) as shelf:
        shelf.begin("writer", "p", BIG)
        shelf.write("writer", "p", [(PAGE, pages(BIG - PAGE))])
        with pytest.raises(ShelfFailure, match="from 0 on"):
            shelf.commit("writer", "p", "ns", row_name())
        shelf.write("writer", "p", [(0, pages(2 * PAGE))])
        with pytest.raises(ShelfFailure, match="ranges"):
            shelf.commit("writer", "p", "ns", row_name())
        assert not shelf.has("ns", row_name())


CHILD = """
import os, signal, sys
from pdconn.store.budget.accounts import Accounts
from pdconn.store.shelf.obj.bucket import BucketPlace
from pdconn.store.shelf.obj.shelf import ObjShelf
from tests.store.shelves.plain_rows import pages, payload, row_name
root, bucket, endpoint, step = sys.argv[1:]
accounts = Accounts(root, "dead", 1 << 30)
shelf = ObjShelf(root, BucketPlace(bucket, "kv/", endpoint, "us-east-1"))
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if step == "put":
    shelf._data.put_object = die
if step == "made":
    put = shelf._data.put_object
    shelf._data.put_object = lambda *given: (put(*given), die())
shelf.begin("dead", "p", 262144)
shelf.write("dead", "p", [(0, pages(payload(1, 262144)))])
if step == "written":
    die()
if step == "index":
    shelf._bucket.put_new = die
if step == "entry":
    shelf._link = die
if step == "clear":
    shelf._clear = die
shelf.commit("dead", "p", "ns", row_name())
"""


@pytest.mark.parametrize("step", ["put", "made", "written", "index", "entry", "clear"])
def test_what_a_killed_writer_left_is_discarded_by_the_next_recount(
    root: Path, server: S3Server, place: BucketPlace, step: str
) -> None:
    command = [sys.executable, "-c", CHILD, str(root), place.bucket, str(place.endpoint), step]
    killed = subprocess.run(command, timeout=PATIENCE_S, check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    with ObjShelf(root, place) as shelf, contextlib.closing(Accounts(root, "w", 1 << 30)) as ours:
        assert parts_of(shelf) == {("dead", "p")}
        assert bool(server.data_keys(place)) == (step != "put")
        assert ours.recount(shelf).forgotten == ["dead"]
        assert parts_of(shelf) == set()
        if step == "clear":  # it was a row already
            assert ours.usage().committed == BIG
            assert load(shelf, row_name(), BIG) == payload(1, BIG)
        else:
            assert ours.usage().committed == 0
            assert server.keys(place) == []
            assert not shelf.has("ns", row_name())


def test_objects_of_parts_are_found_by_their_records_alone(
    root: Path, server: S3Server, place: BucketPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without records a discarded part leaves its object."""
    with ObjShelf(root, place) as shelf:
        shelf.begin("writer", "p", BIG)
        shelf.write("writer", "p", [(0, pages(BIG))])
        monkeypatch.setattr(shelf, "_objects_of", lambda *_: {})
        shelf.discard("writer", "p")
    assert len(server.data_keys(place)) == 1


# Damage


def _indexes(server: S3Server, place: BucketPlace) -> str:
    (key,) = server.index_keys(place)
    return key


def test_an_index_that_is_cut_or_flipped_is_a_damaged_row_and_can_be_removed(
    root: Path, server: S3Server, place: BucketPlace
) -> None:
    with ObjShelf(root, place) as shelf:
        save(shelf, row_name(), payload(1, BIG))
        key = _indexes(server, place)
        good = server.client.get_object(Bucket=place.bucket, Key=key)["Body"].read()
        flipped = [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in (0, 9, 30)]
        for bad in (b"", good[:7], good[:12], good[:-1], good + b"x", *flipped):
            server.client.put_object(Bucket=place.bucket, Key=key, Body=bad)
            with pytest.raises(RowDamaged):
                load(shelf, row_name(), BIG)
        assert shelf.remove_row("ns", row_name()) == BIG
        assert server.keys(place) == []
        assert save(shelf, row_name(), payload(2, BIG))
        assert load(shelf, row_name(), BIG) == payload(2, BIG)


def test_a_row_whose_objects_are_gone_is_missing_and_may_be_saved_again(
    root: Path, server: S3Server, place: BucketPlace
) -> None:
    with ObjShelf(root, place) as shelf:
        save(shelf, row_name(), payload(1, BIG))
        (key,) = server.data_keys(place)
        server.client.delete_object(Bucket=place.bucket, Key=key)
        with pytest.raises(RowMissing, match="objects are gone"):
            load(shelf, row_name(), BIG)
        assert save(shelf, row_name(), payload(2, BIG))
        assert load(shelf, row_name(), BIG) == payload(2, BIG)


def test_what_an_object_lacks_is_never_bytes_of_another_row(
    root: Path, server: S3Server, place: BucketPlace
) -> None:
    with ObjShelf(root, place) as shelf:
        save(shelf, row_name(1), b"\xaa" * BIG)
        assert load(shelf, row_name(1), BIG) == b"\xaa" * BIG
        save(shelf, row_name(2), b"\xbb" * BIG)
        key = next(key for key in server.data_keys(place) if _is_of(server, place, key, 0xBB))
        server.client.put_object(Bucket=place.bucket, Key=key, Body=b"\xbb" * PAGE)
        if loads():
            assert load(shelf, row_name(2), BIG) == b"\xbb" * PAGE + bytes(BIG - PAGE)
        else:  # boto3 says how long the answer is
            with pytest.raises(ShelfFailure, match=f"expected {BIG} bytes, got {PAGE}"):
                load(shelf, row_name(2), BIG)
        assert load(shelf, row_name(1), BIG) == b"\xaa" * BIG


def _is_of(server: S3Server, place: BucketPlace, key: str, first: int) -> bool:
    got = server.client.get_object(Bucket=place.bucket, Key=key, Range="bytes=0-0")
    return bool(got["Body"].read() == bytes([first]))
