"""Settings of the shelf of objects, and what a root says of its shelf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdconn.store.settings import StoreSettings, read_store_settings
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.shelf.obj.bucket import BucketPlace
from pdconn.store.shelf.open import SHELF_FILE, keep_place, open_shelf, place_of
from pdconn.store.store_errors import FormatError, StoreSettingError
from tests.store.shelves.plain_rows import payload, row_name, save

OBJ = {"root": "/mnt/kv", "capacity": "1GiB", "shelf": "obj", "bucket": "rows/kv"}


def test_a_bucket_is_read_with_its_server() -> None:
    given = {**OBJ, "endpoint": "http://10.0.0.9:9000/", "region": "eu-central-1"}
    settings = read_store_settings(given)
    assert (settings.bucket, settings.endpoint) == ("rows/kv", "http://10.0.0.9:9000")
    place = BucketPlace.from_path("rows/kv", settings.endpoint, settings.region)
    assert place == BucketPlace("rows", "kv/", "http://10.0.0.9:9000", "eu-central-1")
    assert BucketPlace.from_path("rows", None, None) == BucketPlace("rows", "", None, None)


def test_the_shelf_obj_needs_a_bucket() -> None:
    given = {key: value for key, value in OBJ.items() if key != "bucket"}
    with pytest.raises(StoreSettingError, match=r"store\.bucket: expected a value with shelf"):
        read_store_settings(given)


@pytest.mark.parametrize("shelf", [{}, {"shelf": "files"}, {"shelf": "posix"}])
@pytest.mark.parametrize(
    "more", [{"bucket": "rows"}, {"endpoint": "https://s3.example.com"}, {"region": "eu-west-1"}]
)
def test_keys_of_a_bucket_are_refused_with_other_shelves(
    shelf: dict[str, str], more: dict[str, str]
) -> None:
    (key,) = more
    with pytest.raises(StoreSettingError, match=rf"store\.{key}: expected none with shelf"):
        read_store_settings({"root": "/mnt/kv", "capacity": "1GiB", **shelf, **more})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bucket", "ab"), ("bucket", "Rows"), ("bucket", "rows/../x"), ("bucket", "rows/"),
        ("bucket", "rows//x"), ("bucket", "s3://rows"), ("bucket", 7), ("endpoint", "10.0.0.9"),
        ("endpoint", "https://user:secret@host"), ("endpoint", "https://host/path"),
        ("endpoint", "ftp://host"), ("region", "eu west"), ("access_key", "a"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(key: str, value: Any) -> None:
    with pytest.raises(StoreSettingError) as seen:
        read_store_settings({**OBJ, key: value})
    assert key in str(seen.value)


@pytest.mark.parametrize(("given", "is_right"), [(1, 1), (256, 1), (544, 1), (0, 0), (100, 0)])
def test_rows_are_of_a_power_of_two_or_of_a_multiple_of_16_tokens(
    given: int, is_right: bool
) -> None:
    asked = {**OBJ, "block_tokens": given}
    if is_right:
        assert read_store_settings(asked).block_tokens == given
        return
    with pytest.raises(StoreSettingError, match=r"store\.block_tokens: expected"):
        read_store_settings(asked)


def settings(root: Path, **more: Any) -> StoreSettings:
    return read_store_settings({"root": str(root), "capacity": "1GiB", **more})


def test_a_root_remembers_its_shelf(tmp_path: Path) -> None:
    place = BucketPlace("rows", "kv/", "http://10.0.0.9:9000", None)
    keep_place(tmp_path / "obj", place)
    assert place_of(tmp_path / "obj") == place
    assert "key" not in (tmp_path / "obj" / SHELF_FILE).read_text(encoding="utf-8")
    for shelf in ("files", "posix"):
        with pytest.raises(FormatError, match=r"rows of .* are in s3://rows/kv/"):
            open_shelf(settings(tmp_path / "obj", shelf=shelf))
    with pytest.raises(FormatError, match=r"store\.bucket: expected s3://rows/kv/"):
        keep_place(tmp_path / "obj", BucketPlace("others", "", None, None))
    moved = BucketPlace("rows", "kv/", "http://10.0.0.7:9000", None)
    keep_place(tmp_path / "obj", moved)
    assert place_of(tmp_path / "obj") == moved


def test_a_root_of_files_stays_one(tmp_path: Path) -> None:
    with FilesShelf(tmp_path) as shelf:
        save(shelf, row_name(), payload(1))
    with pytest.raises(FormatError, match="has files"):
        open_shelf(settings(tmp_path, shelf="obj", bucket="rows"))
    assert place_of(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{}", '{"shelf": "tape", "bucket": "b"}', "\xff", "[1]"])
def test_a_description_that_is_not_ours_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / SHELF_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(FormatError):
        place_of(tmp_path)


# Sizes and roots


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        ("20GiB", 20 << 30),
        ("1.5 KiB", 1536),
        (4096, 4096),
        ("7.999999TiB", (7_999_999 * (1 << 40) // 10**6)),
        ((1 << 63) - 1, (1 << 63) - 1),
    ],
)
def test_sizes_are_exact(given: object, nbytes: int) -> None:
    made = read_store_settings({"root": "/mnt/kv", "capacity": given})
    assert made.capacity == nbytes


@pytest.mark.parametrize(
    "given",
    ["0.4", 0, -1, "", "20GB", "1e9", True, 2.5, 1 << 63, "8388608TiB", "9" * 400, "١GiB", None],
    ids=repr,
)
def test_sizes_that_are_none_are_named(given: object) -> None:
    """2^64 bytes failed at each save, 400 digits with an OverflowError, 0.4 saved nothing."""
    with pytest.raises(StoreSettingError, match=r"store\.capacity: expected a size of 1 byte"):
        read_store_settings({"root": "/mnt/kv", "capacity": given})


def test_a_root_in_the_users_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/kv")
    assert read_store_settings({"root": "~/rows", "capacity": 1}).root == "/home/kv/rows"
