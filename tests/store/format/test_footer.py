"""Footers and notes: what they say comes back, and no change of a bit goes unseen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.store.format import footer as footer_module
from pdconn.store.format.footer import (
    TAIL_NBYTES,
    Footer,
    Note,
    decode_footer,
    decode_note,
    encode_footer,
    encode_note,
    failed_note,
    footer_nbytes,
    footer_nbytes_of,
    joined,
)
from pdconn.store.format.row import ALIGNMENT, KEY_NBYTES, RowKind, RowName
from pdconn.store.store_errors import RowDamaged

U64_MAX = 2**64 - 1
keys = st.binary(min_size=KEY_NBYTES, max_size=KEY_NBYTES)
names = st.builds(RowName, st.sampled_from(RowKind), keys, keys, st.integers(0, 2**31))
sums_of = st.lists(st.integers(0, U64_MAX), max_size=600).map(
    lambda v: np.array(v, dtype=np.uint64)
)
footers = st.builds(
    Footer,
    st.text(max_size=64),
    names,
    st.integers(0, 2**40).flatmap(lambda a: st.integers(0, 512).map(lambda n: range(a, a + n))),
    st.integers(0, 2**50),
    sums_of,
)
ONE = Footer(
    "model-1",
    RowName(RowKind.WA, bytes(range(16)), bytes(16), 3),
    range(768, 1024),
    1 << 20,
    np.arange(5, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15),
)


def same(one: Footer, two: Footer) -> bool:
    return (one.namespace, one.name, one.tokens, one.data_nbytes, one.checksums.tolist()) == (
        two.namespace,
        two.name,
        two.tokens,
        two.data_nbytes,
        two.checksums.tolist(),
    )


@given(footers, st.binary(max_size=50))
def test_a_footer_comes_back_wherever_the_bytes_before_it_begin(
    footer: Footer, before: bytes
) -> None:
    data = encode_footer(footer)
    assert len(data) == footer_nbytes(len(footer.checksums), is_sealed=False)
    assert len(data) % ALIGNMENT == 0
    assert same(decode_footer(before + data), footer)
    assert footer_nbytes_of(data[-TAIL_NBYTES:]) == len(data)


def undetected(data: bytes, mask: int) -> list[int]:
    """Bytes that can be flipped without an error, and leave another footer."""
    found = []
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= mask
        try:
            decode_footer(bytes(flipped))
        except RowDamaged:
            continue
        found.append(at)
    return found


@pytest.mark.parametrize("mask", [1, 0x80, 0xFF])
def test_every_flip_is_seen(mask: int) -> None:
    assert undetected(encode_footer(ONE), mask) == []


def test_flips_would_pass_without_the_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footer_module, "checksum", lambda data: 0)
    assert undetected(encode_footer(ONE), 1)


def test_every_truncation_is_seen() -> None:
    data = encode_footer(ONE)
    for nbytes in range(0, len(data), 7):
        for cut in (data[:nbytes], data[nbytes + 1 :]):
            with pytest.raises(RowDamaged):
                decode_footer(cut)


def test_zeros_are_no_footer() -> None:
    with pytest.raises(RowDamaged):
        decode_footer(bytes(ALIGNMENT))
    with pytest.raises(RowDamaged):
        footer_nbytes_of(bytes(TAIL_NBYTES))


def test_a_footer_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footer_module, "FORMAT_VERSION", 2)
    data = encode_footer(ONE)
    monkeypatch.undo()
    with pytest.raises(RowDamaged, match="expected version 1, got 2"):
        decode_footer(data)


@given(st.dictionaries(st.integers(0, 10**6), st.integers(0, U64_MAX), max_size=50))
def test_a_note_comes_back(sums: dict[int, int]) -> None:
    assert decode_note(encode_note(sums)) == Note(sums, {})


def test_every_flip_and_truncation_of_a_note_is_seen() -> None:
    note = encode_note({3: 7, 4: U64_MAX})
    damaged = [note[:nbytes] for nbytes in range(len(note))]
    damaged += [note[:at] + bytes([note[at] ^ 1]) + note[at + 1 :] for at in range(len(note))]
    for one in damaged:
        with pytest.raises(RowDamaged):
            decode_note(one)


def test_a_rank_that_failed_says_why() -> None:
    with pytest.raises(RowDamaged, match="no space left"):
        decode_note(failed_note("no space left"))


@given(st.lists(st.dictionaries(st.integers(0, 7), st.integers(0, U64_MAX)), max_size=4))
def test_notes_join_once_every_slab_is_in_one(notes: list[dict[int, int]]) -> None:
    together: dict[int, int] = {}
    for note in notes:
        together |= note
    found = joined(notes, 6)
    if max(together, default=0) >= 6 or together.keys() < set(range(6)):
        assert found is None
    else:
        assert found is not None
        assert found.tolist() == [together[slab] for slab in range(6)]


@pytest.mark.parametrize("number", [6, 1 << 63, (1 << 64) - 1])
def test_a_note_of_a_slab_that_there_is_not_is_no_note(number: int) -> None:
    """Above 2^63 it raised, and the row stayed on its way for ever."""
    assert joined([dict.fromkeys(range(6), 1)], 6) is not None
    assert joined([{**dict.fromkeys(range(6), 1), number: 1}], 6) is None
