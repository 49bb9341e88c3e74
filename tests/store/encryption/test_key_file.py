"""A key file holds one secret for names and keys; whatever else is refused and not shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers import aead

from pdconn.store.store_errors import StoreError, StoreSettingError
from pdconn.store.store_keys import MOST_KEYS, load_keys
from pdconn.vllm.config import ConfigError, read_settings
from tests.store.encryption.key_files import KEYS, NAMES, key_file

A, B = KEYS[:2]


def test_a_store_without_a_key_file_has_no_keys() -> None:
    found = load_keys(None)
    assert (found.names.secret, found.rows) == (b"", None)


def test_the_keys_of_a_file_are_in_its_order(tmp_path: Path) -> None:
    one = load_keys(key_file(tmp_path / "one", A)).rows
    both = load_keys(key_file(tmp_path / "both", B, A))
    assert one is not None
    assert both.rows is not None
    assert both.names.secret == NAMES
    assert both.rows.ids[1:] == one.ids
    assert len(set(both.rows.ids)) == 2


def test_a_secret_is_in_no_text_of_what_holds_it(tmp_path: Path) -> None:
    found = load_keys(key_file(tmp_path / "keys", A))
    chain = found.names.chain(64, "salt").extended(range(64))
    for shown in (repr(found), repr(found.names), repr(found.rows), repr(chain)):
        assert A.hex() not in shown
        assert "secret" not in shown
        assert repr(NAMES)[2:-1] not in shown


BAD = {
    "no names": f"key {A.hex()}",
    "two names": f"names {NAMES.hex()}\nnames {A.hex()}\nkey {B.hex()}",
    "no key": f"names {NAMES.hex()}",
    "too many": f"names {NAMES.hex()}\n" + "\n".join(f"key {n:064x}" for n in range(MOST_KEYS + 1)),
    "short": f"names {NAMES.hex()}\nkey {A.hex()[:-2]}",
    "long": f"names {NAMES.hex()}\nkey {A.hex()}00",
    "no hex": f"names {NAMES.hex()}\nkey {'g' * 64}",
    "another word": f"names {NAMES.hex()}\nkeys {A.hex()}",
    "one twice": f"names {NAMES.hex()}\nkey {A.hex()}\nkey {A.hex().upper()}",
    "names as a key": f"names {NAMES.hex()}\nkey {NAMES.hex()}",
    "empty": "",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_file_of_other_content_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(StoreSettingError, match=r"store\.key_file: expected") as caught:
        load_keys(str(path))
    assert str(path) in str(caught.value)
    assert not any(digits.hex()[:8] in str(caught.value) for digits in (A, B, NAMES))


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o602])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path / "keys", A)
    Path(path).chmod(mode)
    with pytest.raises(StoreSettingError, match=f"mode {mode:04o}"):
        load_keys(path)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StoreSettingError, match=r"--key-file: expected a readable file"):
        load_keys(str(tmp_path / "none"), "--key-file")


def test_without_the_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = key_file(tmp_path / "keys", A)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(StoreError, match=r"pip install '.\[encryption\]'"):
        load_keys(path)


def test_an_older_package_is_named_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks for cryptography 3.4; without this each thread that reads rows would fail."""
    monkeypatch.setattr(aead, "AESGCM", object)
    with pytest.raises(StoreError, match=r"expected .* of version 47 or later"):
        load_keys(key_file(tmp_path / "keys", A))


def test_a_wrong_key_file_ends_an_engine_before_its_model_is_loaded(tmp_path: Path) -> None:
    store = {"root": "/mnt/kv", "capacity": "1GiB", "key_file": str(tmp_path / "none")}
    with pytest.raises(ConfigError, match=r"store\.key_file: expected a readable file"):
        read_settings({"store": store}, "localhost", 5600, 0, {})
    store["key_file"] = key_file(tmp_path / "keys", A)
    found = read_settings({"store": store}, "localhost", 5600, 0, {}).store
    assert found is not None
    assert found.key_file == store["key_file"]
