"""What an encrypted store leaves in its root tells nothing, and is served to its keys alone."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.shelf.interface import Buffer
from pdconn.store.shelf.obj.bucket import BucketPlace
from pdconn.store.store_errors import FormatError
from tests.fakes.memory_shelf import MemoryRows, MemoryShelf
from tests.store.encryption.engines import (
    LOADED,
    MODEL,
    NAMESPACE,
    SALT,
    TOKENS,
    engine,
    everything,
    found,
    leaked,
    on_files,
    rows_of,
    saved,
    secrets_of,
)
from tests.store.encryption.key_files import KEYS, key_file
from tests.store.joined.rig import FakeEngine, Model, Shape, until_ready
from tests.store.joined.test_joined import MODELS, SETTINGS, prompt
from tests.store.shelves.obj.s3_server import S3Server

Opened = Callable[[str, str | None], StoreSettings]
"""Settings of an engine of a machine (its root) with a key file."""


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return key_file(tmp_path / "keys", KEYS[0])


@pytest.fixture(params=["files", "posix", "obj"])
def shelf(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Opened, Callable[[], bytes]]]:
    """Opens settings on each shelf, and reads all that lies there."""
    top = tmp_path / "roots"
    if request.param != "files":
        pytest.importorskip("nixl", reason="the shelf needs nixl")
    if request.param != "obj":

        def on(machine: str, key: str | None) -> StoreSettings:
            return replace(on_files(top / "shared", key), shelf=request.param)

        yield on, lambda: everything(top)
        return
    pytest.importorskip("moto.server", reason="the shelf obj is tested against moto's server")
    server: S3Server = request.getfixturevalue("server")
    place: BucketPlace = request.getfixturevalue("place")

    def in_bucket(machine: str, key: str | None) -> StoreSettings:
        bucket = f"{place.bucket}/{place.prefix}".rstrip("/")
        return replace(
            on_files(top / machine, key), shelf="obj", bucket=bucket, endpoint=place.endpoint,
            region=place.region,
        )  # fmt: skip

    def all_bytes() -> bytes:
        objects = [
            key.encode() + server.client.get_object(Bucket=place.bucket, Key=key)["Body"].read()
            for key in server.keys(place)
        ]
        return everything(top) + b"\n".join(objects)

    yield in_bucket, all_bytes


def test_what_one_engine_saved_another_loads_and_nobody_else_can_read(
    shelf: tuple[Opened, Callable[[], bytes]], keys: str
) -> None:
    on, all_bytes = shelf
    with engine(on("a", keys), "a") as ours:
        assert ours.run(TOKENS, salt=SALT).loaded == 0
        ours.settle()
        secrets = secrets_of(ours)
        assert leaked(all_bytes(), secrets) == set()
        again = ours.run(TOKENS, salt=SALT)
        assert (again.loaded, again.wrong) == (LOADED, 0)
    assert found(on("b", keys), shape=Shape(layout="BHLNC", tp=4)) == LOADED
    assert leaked(all_bytes(), secrets) == set()
    written = all_bytes()
    for secret in (*KEYS[:1], bytes(range(1, 33))):
        assert secret not in written
        assert secret.hex().encode() not in written


def test_a_plain_store_shows_all_of_it(shelf: tuple[Opened, Callable[[], bytes]]) -> None:
    """The control of the search above: names and KV are found where nothing is encrypted."""
    on, all_bytes = shelf
    with engine(on("a", None), "a") as ours:
        ours.run(TOKENS, salt=SALT)
        ours.settle()
        seen = leaked(all_bytes(), secrets_of(ours))
    assert seen == {"row keys", "tenant", "namespace", "KV"}


class Tapped(FilesShelf):
    """Keeps all that is written, also what is gone once a row is committed."""

    seen: list[bytes]

    def write(self, writer: str, part: str, ranges: Sequence[tuple[int, Buffer]]) -> None:
        self.seen += [part.encode(), *(bytes(buffer) for _, buffer in ranges)]
        super().write(writer, part, ranges)

    def put_note(self, writer: str, part: str, rank: int, note: bytes) -> None:
        self.seen.append(note)
        super().put_note(writer, part, rank, note)


@pytest.mark.parametrize("encrypts", [True, False])
def test_parts_and_notes_tell_nothing_while_they_are_there(
    tmp_path: Path, keys: str, encrypts: bool
) -> None:
    """And without encryption they tell the KV: the control."""
    given = on_files(tmp_path / "root", keys if encrypts else None)
    Tapped.seen = []
    made = FakeEngine(given, MODEL, Shape(tp=2), NAMESPACE, shelf=lambda: Tapped(given.root))
    try:
        made.run(TOKENS, salt=SALT)
        made.settle()
        seen = leaked(b"\n".join(Tapped.seen), secrets_of(made))
        assert ("KV" in seen) != encrypts
        assert not encrypts or seen == set()
    finally:
        made.close()


def test_a_wrong_key_is_a_miss_and_removes_nothing(
    shelf: tuple[Opened, Callable[[], bytes]],
    keys: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    on, _ = shelf
    saved(on("a", keys))
    other = key_file(tmp_path / "other", KEYS[1])
    with caplog.at_level(logging.WARNING):
        assert found(on("b", other)) == 0
    assert "cannot be decrypted" in caplog.text
    assert KEYS[0].hex() not in caplog.text
    assert found(on("a", keys), "c") == LOADED


def test_rows_of_an_old_key_are_found_after_a_rotation_and_new_ones_need_the_new_key(
    shelf: tuple[Opened, Callable[[], bytes]], keys: str, tmp_path: Path
) -> None:
    on, _ = shelf
    saved(on("a", keys))
    both = key_file(tmp_path / "both", KEYS[1], KEYS[0])
    new = key_file(tmp_path / "new", KEYS[1])
    more = prompt(42, 300)
    with engine(on("a", both), "b") as ours:
        assert ours.run(TOKENS, salt=SALT).loaded == LOADED
        ours.run(more)
        ours.settle()
    with engine(on("a", new), "c") as ours:
        assert ours.run(TOKENS, salt=SALT).loaded == 0  # of the old key alone
        outcome = ours.run(more)
        assert (outcome.loaded, outcome.wrong) == (LOADED, 0)


@pytest.mark.parametrize("first", ["plain", "encrypted"])
def test_plain_and_encrypted_engines_miss_each_others_rows_and_say_so(
    tmp_path: Path, keys: str, first: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    plain, sealed = on_files(root, None), on_files(root, keys)
    before, after = (plain, sealed) if first == "plain" else (sealed, plain)
    saved(before)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert found(after) == 0
    expected = "not encrypted" if first == "plain" else "an engine without key_file"
    assert len([one for one in caplog.messages if expected in one]) == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert found(before, "c") == LOADED  # each has its own by now
        assert found(after, "d") == LOADED


def test_an_engine_of_other_names_misses_and_says_so(
    tmp_path: Path, keys: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    saved(on_files(root, keys))
    other = key_file(tmp_path / "other", KEYS[0], names=bytes(32))
    with caplog.at_level(logging.WARNING):
        assert found(on_files(root, other)) == 0
    assert "of another names" in caplog.text


def test_tenants_miss_each_others_rows(tmp_path: Path, keys: str) -> None:
    given = on_files(tmp_path / "root", keys)
    saved(given)
    assert found(given, "b", salt="another tenant") == 0
    assert found(given, "c", salt=None) == 0
    assert found(given, "d") == LOADED
    labels = {tuple(path.name.split(".")[3:]) for path in rows_of(tmp_path / "root")}
    assert len(labels) == 3
    assert () in labels, "a prompt without a salt has no tenant"


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_encrypted_rows_are_shared_by_engines_of_other_sizes_and_layouts(
    model: Model, keys: str
) -> None:
    """Windows, chunks, compressors; heads that ranks share; saved by one, two and four ranks."""
    rows, tokens = MemoryRows(), prompt(1, 400)
    shapes = [
        Shape(tp=2, layout="BHLNC"), Shape(), Shape(tp=4, layout="BLHNC", block_tokens=32),
        Shape(layout="BLHNC", block_tokens=8, num_blocks=320),
    ]  # fmt: skip
    given = replace(SETTINGS, key_file=keys)
    for number, shape in enumerate(shapes):
        made = FakeEngine(given, model, shape, writer=f"w{number}", shelf=lambda: MemoryShelf(rows))
        try:
            outcome = made.run(tokens, salt=SALT)
            assert (outcome.loaded, outcome.wrong) == (384 if number else 0, 0)
            made.settle()
            if number % 2:
                continue
            mine = prompt(50 + number, 200)  # saved by engines of several ranks, too
            made.run(mine)
            made.settle()
            assert made.run(mine).loaded == 192
        finally:
            made.close()


# Damage


def damages_of(root: Path, random_: random.Random) -> Iterator[tuple[str, Callable[[], None]]]:
    """Ways to damage the file of one row, each on its own."""

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[random_.randrange(96 * 64)] ^= 1 << random_.randrange(8)  # in the first slab
        path.write_bytes(data)

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: random_.randrange(1 << 14)])

    def exchange(path: Path) -> None:
        kind = path.parent.parent.name
        rows = [one for one in rows_of(root) if one != path and one.parent.parent.name == kind]
        shutil.copy(random_.choice(rows), path)

    for damage in (flip, cut, exchange):
        for path in rows_of(root):
            yield f"{damage.__name__} {path.name}", partial(damage, path)


def test_rows_that_are_flipped_cut_or_exchanged_are_refused(tmp_path: Path, keys: str) -> None:
    """Rows of two tenants and two namespaces; all that is loaded is right, and less than before."""
    root, kept = tmp_path / "root", tmp_path / "kept"
    given, salts = on_files(root, keys), (SALT, "another tenant")
    for number, salt in enumerate(salts):
        saved(given, f"w{number}", salt=salt)
    with engine(given, "other", namespace="f" * 32) as ours:
        ours.run(TOKENS, salt=SALT)
        ours.settle()
    shutil.copytree(root, kept)
    random_ = random.Random(7)
    damages = list(damages_of(root, random_))
    assert len(damages) >= 36
    refused = 0
    for number, (what, damage) in enumerate(random_.sample(damages, 18)):
        shutil.rmtree(root)
        shutil.copytree(kept, root)
        damage()
        loaded = [found(given, f"r{number}", salt=salt) for salt in salts]
        assert LOADED in loaded, what  # the other tenant's rows are as they were
        refused += loaded != [LOADED, LOADED]
    assert refused >= 8, "most of the damages were of rows that are not loaded"


def test_flips_in_files_that_are_no_rows_change_no_answer(tmp_path: Path, keys: str) -> None:
    """Accounts, the layout and the root's version: an error that names the file, or as before."""
    root, kept = tmp_path / "root", tmp_path / "kept"
    given = on_files(root, keys)
    saved(given)
    shutil.copytree(root, kept)
    rows = {path.relative_to(root) for path in rows_of(root)}
    files = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    others = [path for path in files if path not in rows]
    assert {"layout.json", "format", "ledger"} <= {path.name for path in others}
    for number, path in enumerate(others):
        shutil.rmtree(root)
        shutil.copytree(kept, root)
        data = bytearray((root / path).read_bytes())
        if not data:
            continue
        data[len(data) // 2] ^= 1
        (root / path).write_bytes(data)
        refused = path.name == "format"
        with pytest.raises(FormatError, match="format") if refused else nullcontext():
            assert found(given, f"r{number}") == LOADED


def test_objects_of_a_bucket_that_are_flipped_are_refused(
    tmp_path: Path, keys: str, server: S3Server, place: BucketPlace
) -> None:
    bucket = f"{place.bucket}/{place.prefix}".rstrip("/")
    given = replace(
        on_files(tmp_path / "root", keys), shelf="obj", bucket=bucket, endpoint=place.endpoint,
        region=place.region,
    )  # fmt: skip
    saved(given)
    objects = {
        key: server.client.get_object(Bucket=place.bucket, Key=key)["Body"].read()
        for key in server.keys(place)
    }
    reader, refused = replace(given, root=str(tmp_path / "reader"), read_only=True), 0
    for key, data in objects.items():
        flipped = bytearray(data)
        flipped[len(data) // 3] ^= 4
        server.client.put_object(Bucket=place.bucket, Key=key, Body=bytes(flipped))
        made = FakeEngine(reader, MODEL, Shape(), NAMESPACE, budget=None)
        try:
            outcome = made.run(TOKENS, salt=SALT)
        finally:
            made.close()
        assert outcome.wrong == 0
        refused += outcome.loaded < LOADED
        server.client.put_object(Bucket=place.bucket, Key=key, Body=data)
    assert refused >= len(objects) // 2


# Eviction


def test_rows_are_evicted_within_the_budget_by_an_engine_that_cannot_read_them(
    tmp_path: Path, keys: str
) -> None:
    root = tmp_path / "root"
    saved(on_files(root, keys))
    nbytes = sum(path.stat().st_size for path in rows_of(root))
    sealed = {path.name for path in rows_of(root)}
    small = on_files(root, None, capacity=2 * nbytes)
    with engine(small, "plain") as ours:
        for seed in range(50, 62):
            ours.run(prompt(seed, 300))
            ours.settle()
            until_ready(ours)
    there = rows_of(root)
    assert sum(path.stat().st_size for path in there) <= 2 * nbytes
    left = [path for path in there if path.name in sealed]
    assert len(left) < len(sealed)
    keys_there = {path.name.split(".")[0] for path in there}
    for path in left:  # no row has lost the one before it
        _, parent, index, *_ = path.name.split(".")
        assert index == "0" or parent in keys_there
