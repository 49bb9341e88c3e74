"""Indexes of rows in a bucket: what is written is read, and nothing else is believed."""

from __future__ import annotations

import itertools
import random
import struct
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pdconn.store.shelf.obj.row_index import (
    MOST_OBJECTS,
    Extent,
    Inline,
    PieceFinder,
    RowIndex,
    decode_index,
    encode_index,
)
from pdconn.store.store_errors import RowDamaged, ShelfFailure

NAME = "0123456789abcdef"


def sealed(body: bytes, magic: bytes = b"pdconnO1") -> bytes:
    """Bytes of an index with a right checksum."""
    return magic + struct.pack("<Q", xxhash.xxh3_64_intdigest(body)) + body


def fields(**changed: Any) -> dict[str, Any]:
    """A good index of 100 bytes, and what is changed in it."""
    return {
        "writer": "w", "part": "p", "nbytes": 100, "objects": [NAME],
        "extents": [[0, 60, 0, 5]], "inline": [[60, b"x" * 40]], **changed,
    }  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A row cut into pieces, and its bytes."""

    index: RowIndex
    objects: dict[str, bytes]
    data: bytes


@st.composite
def rows(draw: st.DrawFn) -> Made:
    seed = draw(st.integers(0, 1 << 32))
    rng = random.Random(seed)
    data = rng.randbytes(draw(st.integers(1, 400)))
    cuts = sorted({0, len(data), *(rng.randrange(len(data) + 1) for _ in range(8))})
    spans = list(itertools.pairwise(cuts))
    rng.shuffle(spans)
    names = [f"{number:016x}" for number in range(3)]
    contents = dict.fromkeys(names, b"")
    extents, inline = [], []
    for start, end in spans:
        of = rng.randrange(4)
        if of == 3:
            inline.append(Inline(start, data[start:end]))
            continue
        contents[names[of]] += rng.randbytes(rng.randrange(3))
        extents.append(Extent(start, end - start, of, len(contents[names[of]])))
        contents[names[of]] += data[start:end]
    index = RowIndex("w", "p", len(data), tuple(names), tuple(extents), tuple(inline))
    return Made(index, {f"data/w/p/{name}": held for name, held in contents.items()}, data)


@given(rows(), st.data())
def test_pieces_of_any_range_are_its_bytes(made: Made, data: st.DataObject) -> None:
    index = decode_index(encode_index(made.index))
    assert index == made.index
    start = data.draw(st.integers(0, len(made.data)))
    end = data.draw(st.integers(start, len(made.data)))
    found = b""
    for piece in PieceFinder(index).pieces(start, end - start):
        held = made.objects[piece.key][piece.at :] if piece.data is None else bytes(piece.data)
        assert len(held) >= piece.nbytes
        found += held[: piece.nbytes]
    assert found == made.data[start:end]
    with pytest.raises(RowDamaged):
        PieceFinder(index).pieces(start, len(made.data) - start + 1)


def test_the_fields_that_others_change_are_good_ones() -> None:
    """Negative control of the next law."""
    assert decode_index(sealed(msgspec.msgpack.encode(fields()))).nbytes == 100


HOSTILE: dict[str, dict[str, Any]] = {
    "a path as writer": {"writer": "../rows"},
    "a slash in a part": {"part": "a/b"},
    "no writer": {"writer": ""},
    "another object's name": {"objects": ["../../secret....."]},
    "a long name": {"objects": ["0" * 17]},
    "many objects": {"objects": [f"{n:016x}" for n in range(MOST_OBJECTS + 1)]},
    "an object that is none": {"extents": [[0, 60, 1, 5]]},
    "a number below 0": {"extents": [[0, 60, -1, 5]]},
    "an offset below 0": {"extents": [[-1, 61, 0, 5]]},
    "a place below 0": {"extents": [[0, 60, 0, -5]]},
    "an empty range": {"extents": [[0, 0, 0, 5], [0, 60, 0, 5]]},
    "a range twice": {"extents": [[0, 60, 0, 5], [0, 60, 0, 5]]},
    "a hole": {"extents": [[1, 59, 0, 5]]},
    "a range too long": {"extents": [[0, 61, 0, 5]]},
    "too few bytes": {"inline": [[60, b"x" * 39]]},
    "too many bytes": {"inline": [[60, b"x" * 41]]},
    "no bytes": {"nbytes": 0},
    "endless bytes": {"nbytes": 1 << 60},
    "numbers as text": {"nbytes": "100"},
    "a place that is huge": {"extents": [[0, 60, 0, 1 << 62]]},
    "more fields": {"more": 1},
    "a longer range": {"extents": [[0, 60, 0, 5, 7]]},
}


@pytest.mark.parametrize("changed", HOSTILE.values(), ids=HOSTILE)
def test_an_index_that_is_none_is_a_damaged_row(changed: dict[str, Any]) -> None:
    with pytest.raises(RowDamaged, match="index"):
        decode_index(sealed(msgspec.msgpack.encode(fields(**changed))))


@given(st.binary(max_size=300))
def test_any_bytes_are_an_index_or_a_damaged_row(data: bytes) -> None:
    for given_bytes in (data, sealed(data)):
        with pytest.raises(RowDamaged):
            decode_index(given_bytes)


def test_a_bit_that_flips_anywhere_is_told() -> None:
    good = sealed(msgspec.msgpack.encode(fields()))
    for at in range(len(good)):
        with pytest.raises(RowDamaged):
            decode_index(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])


def test_ranges_that_are_missing_are_not_encoded() -> None:
    index = RowIndex("w", "p", 100, (NAME,), (Extent(0, 99, 0, 0),), ())
    with pytest.raises(ShelfFailure, match="expected 100 bytes, got 99"):
        encode_index(index)
