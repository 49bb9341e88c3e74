"""Objects by boto3, where NIXL's back end does not load: the same bytes, the same failures."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import pytest

from pdconn.store.shelf.obj import data as data_module
from pdconn.store.shelf.obj.bucket import BucketPlace, open_bucket
from pdconn.store.shelf.obj.data import Boto3Objects, BucketData
from pdconn.store.store_errors import ShelfFailure
from tests.store.shelves.obj.test_nixl_objects import loads
from tests.store.shelves.plain_rows import MIB, pages, payload
from transport.errors import TransportUnavailable

pytest.importorskip("moto.server", reason="needs moto's server")


@pytest.fixture
def data(place: BucketPlace, monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketData]:
    """A bucket's data on a machine whose NIXL has no OBJ back end."""

    def missing(name: str, options: Mapping[str, str], wait_s: float) -> None:
        raise TransportUnavailable("load nixl's plugin OBJ: nixlNotFoundError")

    monkeypatch.setattr(data_module, "NixlObjects", missing)
    data_module._warn_once.cache_clear()
    opened = BucketData(open_bucket(place))
    yield opened
    opened.close()


def test_what_was_put_in_pieces_is_read_in_ranges(
    data: BucketData, caplog: pytest.LogCaptureFixture
) -> None:
    whole = payload(1, 9 * MIB + 5)
    with caplog.at_level(logging.WARNING):
        data.put_object("a", [pages(whole[:1000]), pages(whole[1000:])])
        data.put_object("b", [pages(b"other")])
    into, other = pages(100), pages(5)
    data.read_objects(
        [("a", 4 * MIB - 50, into), ("b", 0, other), ("b", 2, memoryview(bytearray()))]
    )
    assert into == whole[4 * MIB - 50 : 4 * MIB + 50]
    assert other == b"other"
    assert isinstance(data._objects, Boto3Objects)
    said = [one.getMessage() for one in caplog.records if "boto3" in one.getMessage()]
    assert len(said) == 1
    assert "nixlNotFoundError" in said[0]


def test_an_object_that_is_missing_or_ends_early_is_a_failure_of_its_own(data: BucketData) -> None:
    data.put_object("short", [pages(b"1234")])
    with pytest.raises(ShelfFailure, match="cannot read"):
        data.read_objects([("none", 0, pages(4))])
    with pytest.raises(ShelfFailure, match="expected 8 bytes, got 4"):
        data.read_objects([("short", 0, pages(8))])
    into = pages(4)
    data.read_objects([("short", 0, into)])  # the bucket is not taken for broken
    assert into == b"1234"


@pytest.mark.skipif(not loads(), reason="NIXL's OBJ back end does not load here")
def test_where_nixl_s_back_end_loads_it_moves_the_bytes(place: BucketPlace) -> None:
    """The control: nothing falls back where nothing is missing."""
    opened = BucketData(open_bucket(place))
    try:
        opened.put_object("a", [pages(b"bytes")])
        assert not isinstance(opened._objects, Boto3Objects)
    finally:
        opened.close()
