"""Engines' whole stores over a bucket: one machine saves, another one loads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.obj import bucket as bucket_module
from pdconn.store.shelf.obj import data as data_module
from pdconn.store.shelf.obj.bucket import BucketPlace
from pdconn.tools.cli.main import main
from tests.store.joined.rig import FakeEngine, Model, Shape, until_ready
from tests.store.joined.test_joined import SETTINGS, prompt
from tests.store.shelves.obj.s3_server import Relay, S3Server

pytest.importorskip("nixl", reason="the shelf obj needs nixl")
pytest.importorskip("moto.server", reason="the shelf obj is tested against moto's server")

BIG = Model(token_nbytes=512)
"""A rank's share of a row is more than an index takes."""


def settings(root: Path, place: BucketPlace, endpoint: str | None = None) -> StoreSettings:
    bucket = f"{place.bucket}/{place.prefix}".rstrip("/")
    return replace(
        SETTINGS, root=str(root), shelf="obj", bucket=bucket,
        endpoint=endpoint or place.endpoint, region=place.region,
    )  # fmt: skip


@contextmanager
def engine(given: StoreSettings, shape: Shape, writer: str) -> Iterator[FakeEngine]:
    made = FakeEngine(given, BIG, shape, writer=writer, budget=None)
    try:
        if not given.read_only:
            until_ready(made)
        yield made
    finally:
        made.close()


def test_what_one_machine_saved_another_loads_and_an_operator_sees(
    tmp_path: Path, server: S3Server, place: BucketPlace, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = prompt(1, 300)
    with engine(settings(tmp_path / "a", place), Shape(tp=2), "a") as ours:
        assert ours.run(tokens).loaded == 0
        ours.settle()
        again = ours.run(tokens)
        assert (again.loaded, again.wrong) == (256, 0)
    num_rows = len(server.index_keys(place))
    assert num_rows >= 5
    assert len(server.data_keys(place)) == 2 * num_rows, "one object for each rank"
    with engine(settings(tmp_path / "b", place), Shape(layout="BHLNC"), "b") as theirs:
        outcome = theirs.run(tokens)
        assert (outcome.loaded, outcome.wrong) == (256, 0)
        theirs.settle()
    assert len(server.index_keys(place)) == num_rows

    root = str(tmp_path / "a")
    assert main(["store", "ls", root]) == 0
    assert main(["store", "stat", root]) == 0
    assert main(["store", "verify", root]) == 0
    assert f"{num_rows} " in capsys.readouterr().out
    key = server.data_keys(place)[0]
    data = bytearray(server.client.get_object(Bucket=place.bucket, Key=key)["Body"].read())
    data[7] ^= 1
    server.client.put_object(Bucket=place.bucket, Key=key, Body=bytes(data))
    assert main(["store", "verify", root, "--drop-bad"]) == 1
    assert len(server.index_keys(place)) == num_rows - 1
    assert main(["store", "drop", root, "--all", "--yes"]) == 0
    assert server.keys(place) == []


@pytest.mark.parametrize("fault", ["503", "slow"])
def test_a_server_that_fails_costs_no_request_and_the_store_goes_on(
    tmp_path: Path,
    server: S3Server,
    place: BucketPlace,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_CONNECT_S", "_ANSWER_S", "_PAUSE_S"):
        monkeypatch.setattr(bucket_module, name, 1)
    monkeypatch.setattr(data_module, "_TRANSFER_S", 1)
    with Relay(server.endpoint) as relay:
        given = settings(tmp_path / "a", place, relay.endpoint)
        with engine(given, Shape(tp=2), "a") as ours:
            ours.run(prompt(1, 300))
            ours.settle()
            if fault == "slow":
                relay.delay_s = 5.0
            else:
                relay.answers = {"*": 503}
            for seed in (1, 2, 3):
                began = time.monotonic()
                tokens = prompt(seed, 300)
                outcome = ours.run(tokens)
                assert outcome.wrong == 0
                assert outcome.loaded + outcome.computed == len(tokens)
                assert outcome.loaded == 0
                assert time.monotonic() - began < 30
            ours.settle()
            relay.answers, relay.delay_s = {}, 0.0
            loaded, until = 0, time.monotonic() + 60
            while loaded < 256 and time.monotonic() < until:  # rows are saved again one by one
                outcome = ours.run(prompt(4, 300))
                assert outcome.wrong == 0
                loaded = outcome.loaded
                ours.settle()
            assert loaded == 256
