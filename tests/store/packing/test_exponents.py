"""Any bytes come back from packing, and no bytes make unpacking do harm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdconn.store.format import exponents
from pdconn.store.format.exponents import ROOM, HeadPacking, head_packing
from pdconn.store.store_errors import RowDamaged

PAGE = 4096
U8 = NDArray[np.uint8]

SPECIAL = np.array(
    [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FFF, 0xFFFF, 0x7F81, 0x0001, 0x807F, 0x7F7F],
    np.uint16,
)
"""Zeros, infinities, NaNs with several payloads, subnormals, the largest number."""


@dataclass(frozen=True)
class Head:
    """Slabs of a head: bytes of each; they begin at pages."""

    slabs: tuple[int, ...]

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Where each begins, and its bytes."""
        starts = np.cumsum([0, *(-(-n // PAGE) * PAGE for n in self.slabs)])
        return tuple(zip(starts.tolist(), self.slabs, strict=False))

    @property
    def packing(self) -> HeadPacking:
        """Of such heads."""
        start, nbytes = self.places[-1]
        made = head_packing(self.places, start + -(-nbytes // PAGE) * PAGE)
        assert made is not None
        return made

    def filled(self, numbers: NDArray[np.uint16]) -> U8:
        """A head of these numbers, over and over, and zeros between the slabs."""
        head = np.zeros(self.packing.nbytes, np.uint8)
        for start, nbytes in self.places:
            head[start : start + nbytes] = np.resize(numbers, nbytes // 2).view(np.uint8)
        return head


heads = st.lists(
    st.one_of(
        st.integers(1, 40).map(lambda n: 128 * n),
        st.sampled_from([PAGE, 4 * PAGE, 16 * PAGE, 32 * PAGE + 4 * PAGE, 64 * PAGE]),
    ),
    min_size=1,
    max_size=5,
).map(lambda slabs: Head(tuple(slabs)))


@st.composite
def bfloat16s(draw: st.DrawFn) -> NDArray[np.uint16]:
    """Numbers of 16 exponents, and others among them."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    least = draw(st.integers(0, 255))
    numbers = random.integers(0, 1 << 16, 1 << 17, dtype=np.uint16)
    kept = (random.integers(0, 16, len(numbers)) + least) % 256
    numbers = (numbers & 0x807F) | (kept << 7).astype(np.uint16)
    others = random.random(len(numbers)) < draw(st.sampled_from([0, 1e-4, 1e-2, 0.02, 1]))
    what = draw(st.sampled_from(["special", "any"]))
    any_of = SPECIAL if what == "special" else np.arange(1 << 16, dtype=np.uint16)
    numbers[others] = random.choice(any_of, int(others.sum()))
    return numbers


GUARD = 64


def guarded(nbytes: int) -> U8:
    """Room for bytes between guards."""
    return np.full(nbytes + 2 * GUARD, 0xAB, np.uint8)


def check_guards(room: U8) -> None:
    """Raises AssertionError if a byte outside of the room was written."""
    assert (np.concatenate([room[:GUARD], room[-GUARD:]]) == 0xAB).all(), "written outside"


def comes_back(head: Head, numbers: NDArray[np.uint16]) -> bool:
    """Pack and unpack, and compare; returns whether it fitted.

    Raises:
        AssertionError: a byte came back changed, or one was written outside.
    """
    packing, given = head.packing, head.filled(numbers)
    room, before = guarded(packing.packed_nbytes), given.copy()
    fits = packing.pack_head(memoryview(given), memoryview(room)[GUARD:-GUARD])
    assert (given == before).all(), "the head itself was changed"
    check_guards(room)
    if fits:
        back = guarded(packing.nbytes)
        packing.unpack_head(memoryview(room)[GUARD:-GUARD], memoryview(back)[GUARD:-GUARD])
        check_guards(back)
        assert (back[GUARD:-GUARD] == given).all(), "came back changed"
    return fits


@given(head=heads, numbers=bfloat16s())
@example(head=Head((16 * PAGE,) * 6), numbers=SPECIAL)
@example(head=Head((64 * PAGE,)), numbers=np.arange(1 << 16, dtype=np.uint16))
def test_all_that_fits_comes_back_to_the_bit(head: Head, numbers: NDArray[np.uint16]) -> None:
    comes_back(head, numbers)


@given(head=heads, data=st.binary(min_size=2, max_size=512))
def test_bytes_that_are_no_numbers_come_back_too(head: Head, data: bytes) -> None:
    comes_back(head, np.frombuffer(data[: len(data) // 2 * 2], np.uint16))


@given(head=heads, least=st.integers(0, 240), seed=st.integers(0, 1 << 32))
def test_numbers_of_sixteen_neighbouring_exponents_fit(head: Head, least: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    numbers = random.integers(0, 1 << 16, 1 << 16, dtype=np.uint16) & 0x807F
    numbers |= (least + np.arange(len(numbers)) % 16 << 7).astype(np.uint16)
    assert comes_back(head, numbers)


@pytest.mark.parametrize("slabs", [(16 * PAGE,) * 3, (64 * PAGE,), (4 * PAGE, 640, 16 * PAGE)])
def test_escapes_of_all_layers_share_the_room_and_one_more_does_not_fit(
    slabs: tuple[int, ...],
) -> None:
    head = Head(slabs)
    given = head.filled(np.array([0x3F80], np.uint16)).view(np.uint16)
    start, nbytes = max(head.places, key=lambda place: place[1])
    room = sum(slabs) // 2 // ROOM
    layer = given[start // 2 : (start + nbytes) // 2]
    assert room < len(layer) // 2, "the room of all layers is used by one"
    layer[1 : 2 * room : 2] = 0x0001
    packed = memoryview(bytearray(head.packing.packed_nbytes))
    assert head.packing.pack_head(memoryview(given.view(np.uint8)), packed)
    layer[2 * room + 1] = 0x0001
    assert not head.packing.pack_head(memoryview(given.view(np.uint8)), packed)


@given(head=heads, seed=st.integers(0, 1 << 32), share=st.sampled_from([1e-4, 0.01, 1]))
def test_packed_bytes_that_were_changed_never_write_outside(
    head: Head, seed: int, share: float
) -> None:
    """Checksums keep such bytes from being unpacked; this is for whoever can make checksums."""
    packing, random = head.packing, np.random.default_rng(seed)
    packed = np.zeros(packing.packed_nbytes, np.uint8)
    packing.pack_head(memoryview(head.filled(SPECIAL[:1])), memoryview(packed))
    changed = random.random(len(packed)) < share
    packed[changed] = random.integers(0, 256, int(changed.sum()), dtype=np.uint8)
    back = guarded(packing.nbytes)
    with contextlib.suppress(RowDamaged):
        packing.unpack_head(memoryview(packed), memoryview(back)[GUARD:-GUARD])
    check_guards(back)


def test_more_escapes_than_there_is_room_for_and_places_outside_are_damage() -> None:
    packing = Head((4 * PAGE,)).packing
    packed = np.zeros(packing.packed_nbytes, np.uint8)
    tables = packing._tables(packed)
    tables.counts[0] = len(tables.places) + 1
    with pytest.raises(RowDamaged, match="escapes: expected at most 128, got 129"):
        packing.unpack_head(memoryview(packed), memoryview(bytearray(packing.nbytes)))
    tables.counts[0], tables.places[0], tables.zeros[0] = 1, 8192, 1 << 31
    with pytest.raises(RowDamaged, match="escapes: expected places below 8192"):
        packing.unpack_head(memoryview(packed), memoryview(bytearray(packing.nbytes)))


@pytest.mark.parametrize("nbytes", [64, 130, 4096 + 2])
def test_slabs_that_are_no_multiple_of_64_numbers_are_not_packed(nbytes: int) -> None:
    assert head_packing(((0, nbytes),), 2 * PAGE) is None


def test_the_size_is_25_of_32_of_the_bytes_and_10_bytes_a_piece() -> None:
    head = Head((16 * PAGE,) * 30)
    assert head.packing.packed_nbytes == head.packing.nbytes * 25 // 32 + 10 * 30


@given(head=heads, share=st.floats(0, 1), seed=st.integers(0, 1 << 32))
def test_zeros_before_the_tokens_that_a_window_reaches_take_no_room(
    head: Head, share: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    given, packing = head.filled(np.arange(0x3800, 0x4000, dtype=np.uint16)), head.packing
    for start, nbytes in head.places:
        slab = given[start : start + nbytes].view(np.uint16)
        slab[: int(share * len(slab))] = 0
        slab[random.integers(0, len(slab))] = 0x3F80
    packed, back = bytearray(packing.packed_nbytes), bytearray(packing.nbytes)
    fits = packing.pack_head(memoryview(given), memoryview(packed))
    # One number among the zeros makes escapes of those after it.
    if fits:
        packing.unpack_head(memoryview(packed), memoryview(back))
        assert bytes(back) == given.tobytes()
    for start, nbytes in head.places:
        slab = given[start : start + nbytes].view(np.uint16)
        slab[: int(share * len(slab))] = 0
    assert packing.pack_head(memoryview(given), memoryview(packed))
    packing.unpack_head(memoryview(packed), memoryview(back))
    assert bytes(back) == given.tobytes()


# Wrong packers, which the check above must catch.


def _drops_an_escape(patch: pytest.MonkeyPatch) -> None:
    found = exponents._escapes
    patch.setattr(exponents, "_escapes", lambda flat: found(flat)[:-1])


def _swaps_words(patch: pytest.MonkeyPatch) -> None:
    unpack = exponents._unpack
    patch.setattr(exponents, "_unpack", lambda words, flat: unpack(words[[1, 0, 2]], flat))


def _swaps_nibbles(patch: pytest.MonkeyPatch) -> None:
    pack = exponents._pack

    def swapped(reduced: NDArray[np.uint16], words: NDArray[np.uint16]) -> None:
        pack(reduced, words)
        fill = (words[0] & 0x7800) ^ (words[1] & 0x7800)
        words[0] ^= fill
        words[1] ^= fill

    patch.setattr(exponents, "_pack", swapped)


def _forgets_the_sign(patch: pytest.MonkeyPatch) -> None:
    unpack = exponents._unpack

    def forgets(words: NDArray[np.uint16], flat: NDArray[np.uint16]) -> None:
        unpack(words, flat)
        flat[words.size :] &= 0x7FFF

    patch.setattr(exponents, "_unpack", forgets)


@pytest.mark.parametrize(
    "wrong", [_drops_an_escape, _swaps_words, _swaps_nibbles, _forgets_the_sign]
)
def test_a_wrong_packer_is_caught(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[pytest.MonkeyPatch], None]
) -> None:
    random = np.random.default_rng(7)
    numbers = random.integers(0, 1 << 16, 1 << 15, dtype=np.uint16)
    numbers = (numbers & 0x87FF) | 0x3800
    numbers[5::1000] = 0x0001
    head = Head((16 * PAGE, 16 * PAGE))
    assert comes_back(head, numbers)
    wrong(monkeypatch)
    with pytest.raises(AssertionError, match="came back changed"):
        comes_back(head, numbers)


def test_a_base_of_another_piece_makes_escapes_and_changes_no_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = Head((4 * PAGE, 64 * PAGE))
    numbers = np.full(8192, 0x3F80, np.uint16)
    given = head.filled(numbers)
    given[: 4 * PAGE] = 0
    packing, bases = head.packing, exponents._bases
    assert packing.pack_head(memoryview(given), memoryview(bytearray(packing.packed_nbytes)))
    monkeypatch.setattr(exponents, "_bases", lambda numbers: bases(numbers) + np.uint16(0x4000))
    assert not comes_back(head, given[-64 * PAGE :].view(np.uint16))
    few = np.full(1 << 16, 0x3F80, np.uint16)
    few[::100] = 0x7F80
    monkeypatch.setattr(exponents, "_bases", lambda numbers: 0 * bases(numbers) + np.uint16(0x3C00))
    assert comes_back(head, few)
