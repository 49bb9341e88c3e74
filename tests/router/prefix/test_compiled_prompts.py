"""Token ids and block hashes of prompts: the compiled functions say what Python says.

What Python says is compared with vLLM in ``test_hashing.py``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import re
import statistics
from array import array
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdconn.router.prefix.chains import Chains
from pdconn.router.prefix.compiled import extension
from pdconn.router.prefix.hashing import (
    MOST_COMPILED_TOKENS,
    BadPrompt,
    BlockKeys,
    Extras,
    HashScheme,
    MultimodalItem,
    as_array,
    chain,
    extend,
    external,
)
from tests.router.prefix.conftest import COMPILED

pytestmark = pytest.mark.skipif(COMPILED is None, reason="not built")

CRYPTOGRAPHIC = ("sha256", "sha256_cbor")
EDGES = [0, 1, 23, 24, 255, 256, 65_535, 65_536, 2**31 - 1]
"""Tokens around which their encoding changes its length."""
NO_KEYS = BlockKeys(None, {})
TOKENS = st.lists(st.sampled_from(EDGES) | st.integers(0, 2**31 - 1), max_size=200)


BOTH = pytest.mark.parametrize(
    "portable",
    [
        pytest.param(
            False,
            id="by the processor",
            marks=pytest.mark.skipif(not getattr(COMPILED, "HAS_SHA", 0), reason="no instructions"),
        ),
        pytest.param(True, id="portably"),
    ],
)


def test_a_processor_with_instructions_is_known() -> None:
    """Else the tests by the processor would be of portable code."""
    words = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
    flags = {"sha_ni", "ssse3", "sse4_1"}
    assert bool(COMPILED.HAS_SHA) == (platform.machine() == "x86_64" and flags <= {*words})  # type: ignore[union-attr]


def in_python(work: Callable[[], Any]) -> Any:
    """What ``work`` returns without the extension."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, "module", None)
        return work()


def hashed(scheme: HashScheme, tokens: NDArray[np.int32], *, portable: bool) -> bytes:
    is_cbor = scheme.algorithm == "sha256_cbor"
    found: bytes = extension.module.hash_blocks(  # type: ignore[union-attr]
        is_cbor, scheme.root, tokens, scheme.block_tokens, portable
    )
    return found


@BOTH
@pytest.mark.parametrize("algorithm", CRYPTOGRAPHIC)
@given(TOKENS, st.integers(1, 70))
def test_blocks_are_hashed_to_the_same(
    algorithm: str, portable: bool, tokens: list[int], block_tokens: int
) -> None:
    scheme = HashScheme(algorithm, block_tokens)
    expected = in_python(lambda: b"".join(chain(scheme, tokens)))
    assert hashed(scheme, as_array(tokens), portable=portable) == expected


@BOTH
@pytest.mark.parametrize("algorithm", CRYPTOGRAPHIC)
@pytest.mark.parametrize("block_tokens", [255, 256, 257, 1000, MOST_COMPILED_TOKENS])
def test_long_blocks_are_hashed_to_the_same(
    algorithm: str, portable: bool, block_tokens: int
) -> None:
    scheme = HashScheme(algorithm, block_tokens)
    tokens = as_array([EDGES[n % len(EDGES)] for n in range(2 * block_tokens + 1)])
    expected = in_python(lambda: b"".join(chain(scheme, tokens)))
    assert len(expected) == 64
    assert hashed(scheme, tokens, portable=portable) == expected


@pytest.mark.parametrize("algorithm", CRYPTOGRAPHIC)
def test_what_is_too_long_for_it_is_left_to_python(algorithm: str) -> None:
    scheme = HashScheme(algorithm, MOST_COMPILED_TOKENS + 1)
    tokens = as_array([7] * scheme.block_tokens)
    assert chain(scheme, tokens) == in_python(lambda: chain(scheme, tokens))
    with pytest.raises(ValueError, match="block_tokens: expected 1 to 8192"):
        hashed(scheme, tokens, portable=False)


ITEMS = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 30)), max_size=3).map(
    lambda spans: tuple(MultimodalItem(str(n), *span) for n, span in enumerate(sorted(spans)))
)
EXTRAS = st.builds(Extras, st.none() | st.just(("name", "path")), st.none() | st.just("s"), ITEMS)


@pytest.mark.parametrize("algorithm", CRYPTOGRAPHIC)
@given(TOKENS, st.integers(1, 20), EXTRAS, st.data())
def test_extras_are_hashed_to_the_same(
    algorithm: str, tokens: list[int], block_tokens: int, extras: Extras, data: st.DataObject
) -> None:
    """Blocks with keys of their own, in between, at the beginning and behind what is known."""
    scheme = HashScheme(algorithm, block_tokens)
    expected = in_python(lambda: chain(scheme, tokens, extras))
    known = expected[: data.draw(st.integers(0, len(expected)))]
    assert chain(scheme, tokens, extras, known) == expected


def test_a_wrong_hash_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: one that forgets the parent."""

    class Forgetting:
        @staticmethod
        def hash_blocks(*sent: Any) -> bytes:
            is_cbor, parent, rows, size, portable = sent
            blocks = [rows[at : at + size] for at in range(0, len(rows), size)]
            alone = [COMPILED.hash_blocks(is_cbor, parent, one, size, portable) for one in blocks]  # type: ignore[union-attr]
            return b"".join(alone)

    scheme, tokens = HashScheme("sha256", 4), [*range(8)]
    expected = in_python(lambda: chain(scheme, tokens))
    assert chain(scheme, tokens) == expected
    monkeypatch.setattr(extension, "module", Forgetting)
    assert chain(scheme, tokens)[0] == expected[0]
    assert chain(scheme, tokens)[1] != expected[1]


@pytest.mark.parametrize("nbytes", [55, 56, 63, 64, 65])
def test_messages_around_a_block_of_sha256_have_its_padding(nbytes: int) -> None:
    """CBOR of tokens below 24, of a byte each, and 37 bytes (38 from 24 tokens on) around them."""
    block_tokens = nbytes - 37 if nbytes - 37 < 24 else nbytes - 38
    message = b"\x83\x58\x20" + bytes(32)
    message += bytes([0x80 | block_tokens] if block_tokens < 24 else [0x98, block_tokens])
    message += bytes([5] * block_tokens) + b"\xf6"
    assert len(message) == nbytes
    rows = np.full(block_tokens, 5, np.int32)
    for portable in (False, True):
        found = extension.module.hash_blocks(True, bytes(32), rows, block_tokens, portable)  # type: ignore[union-attr]
        assert found == hashlib.sha256(message).digest()


ROWS = np.zeros(4, np.int32)


@pytest.mark.parametrize(
    ("error", "sent"),
    [
        (ValueError, (True, bytes(31), ROWS, 4, False)),
        (ValueError, (True, bytes(32), ROWS, 0, False)),
        (OverflowError, (True, bytes(32), ROWS, -1, False)),
        (TypeError, (True, bytes(32), ROWS.astype(np.int64), 4, False)),
        (TypeError, (True, bytes(32), ROWS.astype(np.float32), 4, False)),
        (TypeError, (True, bytes(32), [0, 0, 0, 0], 4, False)),
        ((BufferError, ValueError), (True, bytes(32), np.zeros(8, np.int32)[::2], 4, False)),
        (TypeError, (True, "parent", ROWS, 4, False)),
        (TypeError, (True, bytes(32), ROWS, 4)),
    ],
)
def test_wrong_arguments_are_refused(error: Any, sent: tuple[Any, ...]) -> None:
    with pytest.raises(error):
        extension.module.hash_blocks(*sent)  # type: ignore[union-attr]


def strided() -> NDArray[np.int32]:
    return np.arange(128, dtype=np.int32)[::2]


def unaligned() -> NDArray[np.int32]:
    return np.frombuffer(b"-" + np.arange(64, dtype=np.int32).tobytes(), np.int32, offset=1)


def of_a_field() -> NDArray[np.int32]:
    pairs = np.zeros(64, [("number", np.int32), ("other", np.int8)])
    pairs["number"] = np.arange(64)
    return pairs["number"]


def read_only() -> NDArray[np.int32]:
    vector = np.arange(64, dtype=np.int32)
    vector.flags.writeable = False
    return vector


@pytest.mark.parametrize("make", [strided, unaligned, of_a_field, read_only])
@pytest.mark.parametrize("algorithm", CRYPTOGRAPHIC)
def test_a_vector_of_any_form_is_hashed_to_the_same(
    algorithm: str, make: Callable[[], NDArray[np.int32]]
) -> None:
    scheme, vector = HashScheme(algorithm, 4), make()
    expected = in_python(lambda: chain(scheme, vector.tolist()))
    assert chain(scheme, vector) == expected
    assert Chains(scheme, max_tokens=1000).hashes_of(vector) == [*map(external, expected)]


@pytest.mark.parametrize("compiled", [False, True], ids=["python", "compiled"])
@pytest.mark.parametrize(
    ("tokens", "known", "shown"),
    [
        (np.zeros((2, 4), np.int32), [], "a vector"),
        (array("i", [1, -2, 3, 4]), [], "-2"),
        ([1, 2, 3, 4], [b"short"], "hashes of 32 bytes"),
        ([1, 2, 3, 4], [bytearray(32)], "hashes of 32 bytes"),
    ],
)
def test_what_cannot_be_hashed_is_refused_in_the_same_words(
    compiled: bool, tokens: Any, known: Any, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(extension, "module", None)
    with pytest.raises(BadPrompt, match=shown):
        chain(HashScheme("sha256", 4), tokens, known=known)


def test_a_file_of_an_earlier_build_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions are others; pip leaves it where a build fails."""
    monkeypatch.setattr(COMPILED, "INTERFACE", extension.INTERFACE - 1)
    fresh = importlib.util.module_from_spec(extension.__spec__)  # type: ignore[arg-type]
    extension.__spec__.loader.exec_module(fresh)  # type: ignore[union-attr]
    assert fresh.module is None
    assert "other sources" in fresh.why_not


# Token ids


def ids_in(text: str | bytes) -> list[int] | None:
    data = text.encode() if isinstance(text, str) else text
    found = extension.module.token_ids(data)  # type: ignore[union-attr]
    assert found is None or (type(found) is array and found.typecode == "i")
    return None if found is None else list(found)


SPACES = st.text(" \t\r\n", max_size=2)


@given(TOKENS, st.lists(SPACES, min_size=4, max_size=4))
def test_token_ids_are_read(tokens: list[int], spaces: list[str]) -> None:
    comma = f"{spaces[0]},{spaces[1]}"
    assert ids_in(f"{spaces[2]}[{comma.join(map(str, tokens))}]{spaces[3]}") == tokens


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.integers(-5, 2**33),
        lambda inner: st.lists(inner, max_size=4),
    )
)
def test_what_else_may_be_there_is_left_to_python(value: Any) -> None:
    is_ids = isinstance(value, list) and all(type(one) is int and 0 <= one < 2**31 for one in value)
    assert ids_in(msgspec.json.encode(value)) == (value if is_ids else None)


ATOMS = ["0", "1", "-0", "01", "7", "2147483647", "2147483648", "1.0", "1e0", "null", '"1"', ""]


@given(st.lists(st.sampled_from(ATOMS), max_size=4), SPACES, st.data())
def test_what_is_read_is_what_a_json_parser_reads(
    atoms: list[str], spaces: str, data: st.DataObject
) -> None:
    text = f"{spaces}[{f',{spaces}'.join(atoms)}]"
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.sampled_from("[],0 -.e")) + text[at + 1 :]
    found = ids_in(text)
    if found is not None:
        assert found == msgspec.json.decode(text, type=list[int])
    elif re.fullmatch(r"\s*\[\s*(?:[0-9]\s*(?:,\s*[0-9]\s*)*)?\]\s*", text):
        raise AssertionError(f"not read: {text!r}")


@pytest.mark.parametrize("text", ["", "[", "[1", "[1,", "[1,]", "[,1]", "[1]]", "[1 2]", "[01]",
                                  "[-1]", "[1.0]", "[2147483648]", "[99999999999999999999]",
                                  "[4294967297]", "[18446744073709551616]",
                                  "[18446744073709551617]",
                                  "[1]\0", "\ufeff[1]"])  # fmt: skip
def test_what_is_not_json_or_no_token_is_not_read(text: str) -> None:
    assert ids_in(text) is None


@pytest.mark.parametrize("tokens", [[-1], [2**31]])
def test_a_token_out_of_range_is_named_as_ever(tokens: list[int]) -> None:
    with pytest.raises(BadPrompt, match=str(tokens[0])):
        chain(HashScheme("sha256", 1), tokens)


# Speed


@pytest.mark.parametrize("algorithm", CRYPTOGRAPHIC)
def test_it_is_worth_it(algorithm: str) -> None:
    """Measured: ten times as fast as Python, with instructions; it is kept for three times."""
    scheme, tokens = HashScheme(algorithm, 16), as_array([*range(64_000)])

    def seconds() -> float:
        began = process_time()
        extend(scheme, scheme.root, tokens, NO_KEYS, 0)
        return process_time() - began

    pairs = [(in_python(seconds), seconds()) for _ in range(9)]
    python_s, compiled_s = (statistics.median(side) for side in zip(*pairs, strict=True))
    assert python_s / compiled_s > (3.0 if COMPILED.HAS_SHA else 1.5)  # type: ignore[union-attr]
