"""A sealed row is opened by its keys as its own alone, and no nonce is used twice with a key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import aead
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from pdconn.store.format import seals as seals_module
from pdconn.store.format.row import RowKind
from pdconn.store.format.seals import SEAL_NBYTES, RowKeys, row_context
from pdconn.store.rank.sealed_shares import seal_slabs
from pdconn.store.store_errors import RowDamaged, RowLocked
from tests.store.encryption.key_files import KEYS
from tests.store.encryption.sealed_rows import (
    NAME,
    NAMESPACE,
    SealedRow,
    opened,
    plaintext,
    row_keys,
    sealed_row,
    share_of,
)

OURS = row_keys()
ROW = sealed_row(OURS)
ENCODED = ROW.encoded()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_was_sealed_is_opened(rank: int) -> None:
    assert opened(ENCODED, OURS, rank) == plaintext(rank)


def test_nothing_of_the_kv_is_in_the_row() -> None:
    for rank in range(2):
        kv = plaintext(rank)
        for slab in share_of(rank).slabs:
            for at in range(slab.offset, slab.offset + slab.nbytes - 8, 8):
                assert kv[at : at + 8] not in ENCODED


def accepted(encoded: bytes, keys: RowKeys = OURS) -> list[int]:
    """Ranks that open a row without complaint."""
    found = []
    for rank in range(2):
        try:
            opened(encoded, keys, rank)
        except (RowDamaged, RowLocked):
            continue
        found.append(rank)
    return found


def test_a_flip_of_any_byte_is_refused_by_the_ranks_that_it_concerns() -> None:
    slabs = {
        byte: rank
        for rank in range(2)
        for slab in share_of(rank).slabs
        for byte in range(slab.row_offset, slab.row_offset + slab.nbytes)
    }
    data_nbytes = len(ROW.data)
    for at in [*range(0, data_nbytes, 61), *slabs, *range(data_nbytes, len(ENCODED))]:
        flipped = bytearray(ENCODED)
        flipped[at] ^= 1 << at % 8
        for rank in range(2):
            if at < data_nbytes and slabs.get(at) != rank:
                # Another rank's slab, or the zeros after one, which nobody loads.
                assert opened(bytes(flipped), OURS, rank) == plaintext(rank)
                continue
            with pytest.raises(RowDamaged):
                opened(bytes(flipped), OURS, rank)


def forged(row: SealedRow, change: Callable[[SealedRow], None]) -> bytes:
    """A row whose footer has sound checksums, as an attacker makes it."""
    footer = replace(row.footer, seals=np.array(row.footer.seals), checksums=row.footer.checksums)
    made = SealedRow(bytearray(row.data), footer)
    change(made)
    return made.encoded()


def test_a_seal_with_any_byte_changed_is_refused_with_a_sound_checksum() -> None:
    def change(at: int, row: SealedRow) -> None:
        assert row.footer.seals is not None
        row.footer.seals[0, at] ^= 1

    for at in range(SEAL_NBYTES):
        assert 0 not in accepted(forged(ROW, lambda row, at=at: change(at, row))), at  # type: ignore[misc]


OTHERS = {
    "row": (NAMESPACE, structs.replace(NAME, key=bytes(16))),
    "parent": (NAMESPACE, structs.replace(NAME, parent=bytes(15) + b"1")),
    "place": (NAMESPACE, structs.replace(NAME, index=1)),
    "kind": (NAMESPACE, structs.replace(NAME, kind=RowKind.WA)),
    "tenant": (NAMESPACE, structs.replace(NAME, tenant=b"tenant-2")),
    "no tenant": (NAMESPACE, structs.replace(NAME, tenant=b"")),
    "namespace": (f"{NAMESPACE}4", NAME),
}


def as_our_row(namespace: str, name: Any) -> bytes:
    """Another row in place of ours, with a footer that calls it ours."""
    other = sealed_row(OURS, namespace, name, seed=1)
    other.footer = replace(other.footer, namespace=NAMESPACE, name=NAME, tokens=ROW.footer.tokens)
    return other.encoded()


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_rows_bytes_are_refused_whatever_the_footer_says(other: Any) -> None:
    assert not accepted(as_our_row(*other))


def test_they_would_be_taken_without_what_is_authenticated_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control: key, parent, place and kind are in the associated data alone."""
    monkeypatch.setattr(seals_module, "row_context", lambda namespace, name: b"")
    for what in ("row", "parent", "place", "kind"):
        assert accepted(as_our_row(*OTHERS[what])) == [0, 1], what
    for what in ("tenant", "namespace"):  # these have other keys besides
        assert not accepted(as_our_row(*OTHERS[what])), what


def test_no_two_rows_have_one_context() -> None:
    found = {row_context(*other) for other in OTHERS.values()} | {row_context(NAMESPACE, NAME)}
    assert len(found) == len(OTHERS) + 1
    assert row_context("ab", NAME) != row_context(
        "a", structs.replace(NAME, key=b"b" + NAME.key[1:])
    )


def test_slabs_of_one_row_are_not_exchanged() -> None:
    """Between heads, layers and ranks, each with its own seal and checksum."""
    whole = share_of(0).whole
    for first in range(len(whole.slabs)):
        for second in range(first):
            one, two = whole.slabs[first], whole.slabs[second]

            def change(row: SealedRow, one: Any = one, two: Any = two) -> None:
                a, b = (row.data[s.offset : s.offset + s.nbytes] for s in (one, two))
                row.data[two.offset : two.offset + two.nbytes] = a
                row.data[one.offset : one.offset + one.nbytes] = b
                numbers = [whole.slabs.index(two), whole.slabs.index(one)]
                assert row.footer.seals is not None
                row.footer.seals[numbers] = row.footer.seals[numbers[::-1]]

            assert len(accepted(forged(ROW, change))) < 2


def test_parts_of_ranks_from_two_saves_of_one_row_make_the_row() -> None:
    """What an attacker can put back is the same row's KV, and its seal names its own salt."""
    again = sealed_row(OURS)

    def change(row: SealedRow) -> None:
        assert row.footer.seals is not None
        assert again.footer.seals is not None
        for slab in share_of(1).slabs:
            at = slice(slab.row_offset, slab.row_offset + slab.nbytes)
            row.data[at] = again.data[at]
            row.footer.seals[slab.number] = again.footer.seals[slab.number]

    mixed = forged(ROW, change)
    assert [opened(mixed, OURS, rank) for rank in range(2)] == [plaintext(0), plaintext(1)]


def test_a_row_that_is_cut_or_moved_is_refused() -> None:
    for nbytes in range(0, len(ENCODED), 509):
        assert not accepted(ENCODED[:nbytes])
    assert not accepted(ENCODED[4096:] + bytes(4096))


def test_the_first_key_seals_and_all_open() -> None:
    old, new = KEYS[:2]
    rotated = row_keys(new, old)
    assert accepted(ENCODED, rotated) == [0, 1]
    written = sealed_row(rotated).encoded()
    assert accepted(written, row_keys(new)) == [0, 1]
    assert not accepted(written, row_keys(old))


def test_a_row_of_another_key_is_locked_and_not_damaged() -> None:
    """A damaged row is removed: another engine's key must not do that."""
    with pytest.raises(RowLocked, match="encrypted with key"):
        opened(ENCODED, row_keys(KEYS[2]), 0)


def test_an_encrypted_row_is_not_served_where_there_are_no_keys() -> None:
    """Its checksums are sound, so they alone would let ciphertext through."""
    share = share_of(0)
    data = memoryview(bytearray(share.nbytes))
    for at, start, nbytes in share.runs:
        data[start : start + nbytes] = ENCODED[at : at + nbytes]
    footer = memoryview(bytearray(ENCODED[share.whole.data_nbytes :]))
    with pytest.raises(RowLocked):
        share.verify_row(data, footer, NAMESPACE, NAME)


# Nonces


class Recorded:
    """An AESGCM that notes each key and nonce that it encrypts with."""

    used: list[tuple[bytes, bytes]]
    real = aead.AESGCM

    def __init__(self, key: bytes) -> None:
        self._key, self._aead = key, self.real(key)

    def encrypt_into(self, nonce: bytes, *rest: Any) -> int:
        self.used.append((self._key, nonce))
        return self._aead.encrypt_into(nonce, *rest)

    def decrypt_into(self, *arguments: Any) -> int:
        return self._aead.decrypt_into(*arguments)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[bytes, bytes]]]:
    Recorded.used = []
    monkeypatch.setattr(aead, "AESGCM", Recorded)
    return Recorded.used


saves = st.lists(
    st.tuples(
        st.sampled_from([NAME, *(name for _, name in OTHERS.values())]),
        st.sampled_from([NAMESPACE, f"{NAMESPACE}4"]),
        st.integers(0, 1),  # the engine
        st.integers(0, 1),  # the rank
        st.integers(0, 4),  # slabs until it is killed
    ),
    min_size=2,
    max_size=40,
)


def seal_all(plan: Any, engines: list[RowKeys]) -> None:
    """Seal as the engines do, each row anew, and stop in the middle where one is killed."""
    for name, namespace, engine, rank, killed in plan:
        share = share_of(rank)
        into = memoryview(bytearray(share.nbytes + 4096))
        sealer = engines[engine].new_sealer(namespace, name)
        seal_slabs(share.slabs[:killed], memoryview(plaintext(rank)), sealer, into)


@pytest.mark.usefixtures("used")
@settings(max_examples=60, deadline=None)
@given(saves)
def test_no_nonce_is_used_twice_over_saves_crashes_and_engines(plan: Any) -> None:
    Recorded.used.clear()
    seal_all(plan, [row_keys(), row_keys()])
    assert len(Recorded.used) == len(set(Recorded.used))
    assert len(Recorded.used) == sum(killed for *_, killed in plan)


def test_writers_at_one_time_use_other_nonces(used: list[tuple[bytes, bytes]]) -> None:
    plan = [(NAME, NAMESPACE, 0, rank, 4) for rank in (0, 1)] * 25
    engines = [row_keys()]
    threads = [threading.Thread(target=seal_all, args=(plan, engines)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(used) == len(set(used)) == 4 * 50 * 4


def test_a_key_per_row_alone_would_use_them_twice(used: list[tuple[bytes, bytes]]) -> None:
    """The control: without a salt of its own, each save of a row has the same key."""
    engines = [row_keys(new_salt=lambda: bytes(32)) for _ in range(2)]
    seal_all([(NAME, NAMESPACE, engine, 0, 2) for engine in (0, 1)], engines)
    assert len(set(used)) < len(used)


def test_a_sealer_refuses_to_seal_a_slab_again() -> None:
    share, into = share_of(0), memoryview(bytearray(1 << 16))
    sealer = OURS.new_sealer(NAMESPACE, NAME)
    seal_slabs(share.slabs[:2], memoryview(plaintext(0)), sealer, into)
    with pytest.raises(ValueError, match="expected one above"):
        seal_slabs(share.slabs[1:], memoryview(plaintext(0)), sealer, into)
