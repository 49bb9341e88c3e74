"""The chain of keys: equal keys mean equal prefixes."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.store.format import prompt_rows as prompt_module
from pdconn.store.format.prompt_rows import Chain
from pdconn.store.format.row import KEY_NBYTES, NO_KEY, RowKind, RowName
from pdconn.store.store_errors import FormatError

SIZE = 4
tokens_of = st.lists(st.integers(0, 2**32 - 1), max_size=5 * SIZE + 1)
extras_of = st.lists(st.binary(max_size=3), max_size=6)


def plain_keys(tokens: list[int], extras: list[bytes]) -> list[bytes]:
    """The definition, block by block."""
    keys = []
    parent = bytes(16)
    for index in range(len(tokens) // SIZE):
        text = parent
        for token in tokens[index * SIZE : (index + 1) * SIZE]:
            text += struct.pack("<I", token)
        text += extras[index] if index < len(extras) else b""
        parent = hashlib.sha256(text).digest()[:16]
        keys.append(parent)
    return keys


@given(tokens_of, extras_of)
def test_keys_are_those_of_the_definition(tokens: list[int], extras: list[bytes]) -> None:
    assert list(Chain(SIZE).extended(tokens, extras=extras).keys) == plain_keys(tokens, extras)


@given(tokens_of, extras_of, st.lists(st.integers(0, 5 * SIZE + 1), max_size=4))
def test_a_chain_made_in_steps_is_the_chain_made_at_once(
    tokens: list[int], extras: list[bytes], cuts: list[int]
) -> None:
    chain = Chain(SIZE)
    for cut in sorted(cuts):
        chain = chain.extended(tokens, cut, extras)
    assert chain.extended(tokens, extras=extras) == Chain(SIZE).extended(tokens, extras=extras)


@given(tokens_of, extras_of, st.integers(0, 5 * SIZE), st.integers(1, 2**32 - 1))
def test_a_changed_token_changes_every_key_from_its_block_on(
    tokens: list[int], extras: list[bytes], at: int, change: int
) -> None:
    other = list(tokens)
    if at < len(tokens):
        other[at] ^= change
    ours, theirs = (Chain(SIZE).extended(one, extras=extras).keys for one in (tokens, other))
    for index, (one, two) in enumerate(zip(ours, theirs, strict=True)):
        assert (one == two) == (at >= len(tokens) or index < at // SIZE)


def test_long_prompts_are_hashed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, extras = list(range(11 * SIZE)), [bytes([n]) for n in range(11)]
    monkeypatch.setattr(prompt_module, "_AT_ONCE", 3 * SIZE + 1)
    assert list(Chain(SIZE).extended(tokens, extras=extras).keys) == plain_keys(tokens, extras)


def test_a_changed_extra_changes_every_key_from_its_block_on() -> None:
    tokens = list(range(3 * SIZE))
    plain = Chain(SIZE).extended(tokens).keys
    salted = Chain(SIZE).extended(tokens, extras=[b"", b"salt"]).keys
    assert [one == two for one, two in zip(plain, salted, strict=True)] == [True, False, False]


def test_tokens_of_an_unfinished_block_have_no_key() -> None:
    assert len(Chain(SIZE).extended(range(2 * SIZE - 1)).keys) == 1
    assert Chain(SIZE).extended([]).keys == ()


def test_every_name_tells_its_parent() -> None:
    chain = Chain(SIZE).extended(range(3 * SIZE))
    names = [chain.name(RowKind.FA, index) for index in range(3)]
    assert [name.parent for name in names] == [NO_KEY, *(name.key for name in names[:2])]


keys_of = st.binary(min_size=KEY_NBYTES, max_size=KEY_NBYTES)


@given(st.sampled_from(RowKind), keys_of, keys_of, st.integers(0, 10**8 - 1))
def test_a_file_name_tells_the_name(kind: RowKind, key: bytes, parent: bytes, index: int) -> None:
    name = RowName(kind, key, parent, index)
    assert RowName.from_file_name(kind, name.file_name) == name


@pytest.mark.parametrize(
    "other", ["", "lock", "a.b.1", "0" * 32 + ".5", "G" * 32 + "." + "0" * 32 + ".1"]
)
def test_other_files_have_no_name(other: str) -> None:
    assert RowName.from_file_name(RowKind.FA, other) is None


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("key", (b"short", NO_KEY, 0)),
        ("parent", (NO_KEY, b"", 0)),
        ("index", (NO_KEY, NO_KEY, -1)),
    ],
)
def test_a_wrong_name_is_refused(field: str, values: tuple[bytes, bytes, int]) -> None:
    with pytest.raises(FormatError) as raised:
        RowName(RowKind.FA, *values)
    assert raised.value.field == field
