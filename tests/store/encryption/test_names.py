"""Names of an encrypted store are those of its secret, and tell nobody else what they name."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pdconn.store.format.prompt_rows import Chain
from pdconn.store.format.row import NO_KEY, FormatError, RowKind, RowName
from pdconn.store.format.row_names import RowNames
from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.folders import is_namespace
from pdconn.store.store_errors import StoreError
from tests.store.encryption.engines import MODEL, engine, on_files
from tests.store.encryption.key_files import KEYS, NAMES, key_file
from tests.store.joined.rig import FakeEngine, Shape

PLAIN, OURS, THEIRS = RowNames(), RowNames(NAMES), RowNames(bytes(32))
tokens = st.lists(st.integers(0, 2**17), min_size=64, max_size=200)


@given(tokens)
def test_without_a_secret_a_guess_can_be_tested_and_with_one_it_cannot(ids: list[int]) -> None:
    guess = hashlib.sha256(NO_KEY + b"".join(one.to_bytes(4, "little") for one in ids[:64]))
    assert PLAIN.chain(64).extended(ids).keys[0] == guess.digest()[:16]
    assert OURS.chain(64).extended(ids).keys[0] != guess.digest()[:16]
    found = [names.chain(64).extended(ids).keys for names in (PLAIN, OURS, THEIRS)]
    assert len({key for keys in found for key in keys}) == 3 * len(found[0])


def test_each_key_of_a_chain_is_an_hmac() -> None:
    """Not the first one alone: whoever sees a key could else test the block after it."""
    ids = list(range(128))
    chain = OURS.chain(64).extended(ids)
    secret = hmac.digest(NAMES, b"pdconn store: rows\0", "sha256")
    parent = NO_KEY
    for index in range(2):
        block = b"".join(one.to_bytes(4, "little") for one in ids[64 * index : 64 * index + 64])
        assert chain.keys[index] == hmac.digest(secret, parent + block, "sha256")[:16]
        assert chain.keys[index] != hashlib.sha256(parent + block).digest()[:16]
        parent = chain.keys[index]


@given(tokens, st.integers(0, 200), st.text(min_size=1, max_size=9))
def test_a_chain_is_the_same_however_it_grows(ids: list[int], until: int, salt: str) -> None:
    empty = OURS.chain(16, salt)
    assert empty.extended(ids, until).extended(ids) == empty.extended(ids)


def test_a_namespace_is_named_by_its_secret() -> None:
    found = {names.in_store("ns") for names in (PLAIN, OURS, THEIRS)}
    assert len(found) == 3
    assert "ns" in found
    for names in (OURS, THEIRS):
        name = names.in_store("a" * 64)
        assert is_namespace(name)
        assert re.fullmatch(r"sealed-[0-9a-f]{8}-[0-9a-f]{32}", name)
        assert name.startswith(names.prefix)
        assert name != names.in_store("b" * 64)
    assert OURS.prefix != THEIRS.prefix
    assert PLAIN.prefix == ""


def test_a_tenant_has_a_label_that_is_not_its_salt() -> None:
    salts = ["a", "b", "ab", "é", "a" * 1000]
    labels = [names.tenant(salt) for salt in salts for names in (PLAIN, OURS, THEIRS)]
    assert len(set(labels)) == len(labels)
    assert {len(label) for label in labels} == {8}
    assert OURS.tenant(None) == OURS.tenant("") == b""


@given(st.sampled_from([b"", b"12345678"]), st.integers(0, 10**7))
def test_a_rows_file_names_its_tenant(tenant: bytes, index: int) -> None:
    name = RowName(RowKind.WA, bytes(range(16)), NO_KEY, index, tenant)
    assert RowName.from_file_name(RowKind.WA, name.file_name) == name
    assert Chain(64, (name.key,), tenant).name(RowKind.WA, 0) == structs.replace(name, index=0)


@pytest.mark.parametrize("tenant", [b"1", b"123456789"])
def test_a_label_of_another_length_is_refused(tenant: bytes) -> None:
    with pytest.raises(FormatError, match="tenant: expected none or 8 bytes"):
        RowName(RowKind.FA, bytes(16), NO_KEY, 0, tenant)


def test_a_reset_goes_to_a_namespace_that_is_named_by_the_secret_too(tmp_path: Any) -> None:
    given = on_files(tmp_path / "root", key_file(tmp_path / "keys", KEYS[0]))
    with engine(given, "a") as ours:
        ours.store.clear_rows("e" * 32)
        ours.run(list(range(200)))
        ours.settle()
    names = {path.name for path in (tmp_path / "root" / "rows").iterdir()}
    assert names == {OURS.in_store("e" * 32)}


@pytest.mark.parametrize("scheduler_has_it", [True, False])
def test_ranks_that_differ_from_the_scheduler_neither_save_nor_load(
    tmp_path: Any, scheduler_has_it: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is saved as it is where it was to be encrypted, and no ciphertext is loaded."""
    key = key_file(tmp_path / "keys", KEYS[0])
    root = str(tmp_path / "root")
    ranks = on_files(tmp_path / "root", None if scheduler_has_it else key)
    made = Differing(ranks, key if scheduler_has_it else None)
    try:
        for _ in range(2):
            outcome = made.run(list(range(300)))
            assert (outcome.loaded, outcome.wrong) == (0, 0)
            made.settle()
    finally:
        made.close()
    assert list((tmp_path / "root").glob("rows/*/*a/*/*")) == [], root
    assert "store.key_file: expected" in caplog.text


class Differing(FakeEngine):
    """Ranks with ``settings``, and a scheduler with another key file."""

    def __init__(self, settings: StoreSettings, key_file: str | None) -> None:
        super().__init__(settings, MODEL, Shape())
        self.store.close()
        other = FakeEngine(replace(settings, key_file=key_file), MODEL, Shape(), writer="other")
        for rank in other.rank_stores:
            rank.close()
        self.store = other.store


def test_a_key_file_is_named_where_it_fails_an_engine(tmp_path: Any) -> None:
    with pytest.raises((StoreError, ValueError), match=r"store\.key_file: expected a readable"):
        FakeEngine(on_files(tmp_path / "root", str(tmp_path / "none")), MODEL, Shape())
