"""An engine's scheme is found from an event that was hashed without our code."""

import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import cbor2
import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from pdconn.router.prefix.detect import MOST_PARTS, detect
from pdconn.router.prefix.hashing import HashScheme
from pdconn.router.prefix.kv_events import Stored

# What a block's hash is, written once more and plainly.
HASHES: dict[str, Callable[[Any], bytes]] = {
    "sha256": lambda value: hashlib.sha256(pickle.dumps(value, 5)).digest(),
    "sha256_cbor": lambda value: hashlib.sha256(cbor2.dumps(value, canonical=True)).digest(),
    "xxhash": lambda value: xxhash.xxh3_128_digest(pickle.dumps(value, 5)),
    "xxhash_cbor": lambda value: xxhash.xxh3_128_digest(cbor2.dumps(value, canonical=True)),
}
PROMPT = list(range(1000, 1192))


def packed(value: object) -> Raw:
    return Raw(msgspec.msgpack.encode(value))


def event(scheme: HashScheme, block_tokens: int, tokens: list[int] = PROMPT) -> Stored:
    """What an engine of this scheme says of a group with blocks of ``block_tokens``."""
    digest = HASHES[scheme.algorithm]
    parent = digest("vllm-none-hash" if scheme.seed is None else scheme.seed)
    fine = []
    for begin in range(0, len(tokens), scheme.block_tokens):
        parent = digest((parent, tuple(tokens[begin : begin + scheme.block_tokens]), None))
        fine.append(int.from_bytes(parent, "big") % 2**64)
    per_block = block_tokens // scheme.block_tokens
    return Stored(
        hashes=fine[per_block - 1 :: per_block],
        group=0,
        medium="gpu",
        block_tokens=block_tokens,
        token_ids=packed(tokens),
    )


SAID = event(HashScheme("sha256_cbor", 16), 16)


@pytest.mark.parametrize("algorithm", HASHES)
@pytest.mark.parametrize(
    ("hashed", "group"), [(16, 16), (8, 16), (16, 64), (1, 32), (16, 48), (4, 96)]
)
def test_an_engines_scheme_is_found(algorithm: str, hashed: int, group: int) -> None:
    scheme = HashScheme(algorithm, hashed, "77")
    assert detect(event(scheme, group), "77") == scheme
    assert detect(event(scheme, group), "78") is None


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_without_a_seed_the_default_one_is_tried(algorithm: str) -> None:
    scheme = HashScheme(algorithm, 16)
    assert detect(event(scheme, 32), None) == scheme
    assert detect(event(scheme, 32), "") is None


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_without_a_seed_what_is_not_cryptographic_is_not_found(algorithm: str) -> None:
    stored = event(HashScheme(algorithm, 16, "vllm-none-hash"), 16)
    assert detect(stored, None) is None
    assert detect(stored, "vllm-none-hash") is not None


@given(
    algorithm=st.sampled_from(tuple(HASHES)),
    hashed=st.integers(1, 9),
    per_block=st.integers(1, 6),
    tokens=st.lists(st.integers(0, 2**31 - 1), min_size=54, max_size=120),
)
def test_any_scheme_is_found(
    algorithm: str, hashed: int, per_block: int, tokens: list[int]
) -> None:
    scheme, block_tokens = HashScheme(algorithm, hashed, "1"), hashed * per_block
    whole = tokens[: len(tokens) - len(tokens) % block_tokens]
    assert detect(event(scheme, block_tokens, whole), "1") == scheme


@pytest.mark.parametrize("at", range(len(SAID.hashes)))
def test_every_block_has_to_agree(at: int) -> None:
    hashes = list(SAID.hashes)
    hashes[at] ^= 1
    assert detect(replace(SAID, hashes=hashes), None) is None


@pytest.mark.parametrize(
    "change",
    [
        {"parent": 5},
        {"lora": "sql"},
        {"token_ids": None},
        {"token_ids": packed("text")},
        {"token_ids": packed([1.5] * 192)},
        {"token_ids": packed([2**40] * 192)},
        {"token_ids": packed([])},
        {"token_ids": packed(PROMPT[:-1])},
        {"extra_keys": packed([["salt"]] + [None] * 11)},
        {"extra_keys": packed("salt")},
        {"hashes": SAID.hashes[-2:]},
        {"hashes": [*SAID.hashes, 1]},
        {"hashes": []},
        {"block_tokens": 0},
        {"block_tokens": -16},
    ],
)
def test_events_that_cannot_tell_tell_nothing(change: dict[str, Any]) -> None:
    assert detect(SAID, None) == HashScheme("sha256_cbor", 16)
    assert detect(replace(SAID, **change), None) is None


def test_no_tokens_and_no_hashes_tell_nothing() -> None:
    assert detect(replace(SAID, hashes=[], token_ids=packed([])), None) is None


@pytest.mark.parametrize("keys", [None, packed(None), packed([None] * 12), packed([])])
def test_keys_that_are_none_do_not_matter(keys: Raw | None) -> None:
    assert detect(replace(SAID, extra_keys=keys), None) == HashScheme("sha256_cbor", 16)


def test_hashed_blocks_are_not_sought_without_end() -> None:
    tokens = [1] * (2 * MOST_PARTS)
    found, too_fine = HashScheme("sha256", 2), HashScheme("sha256", 1)
    assert detect(event(found, len(tokens), tokens), None) == found
    assert detect(event(too_fine, len(tokens), tokens), None) is None
