"""vLLM's hashes of a prompt's blocks, computed from its tokens.  Pure.

::

    seed ─► root ─┐
    tokens 0..15 ─┼─► hash 0 ─┐
    extra keys 0 ─┘           ├─► hash 1 ─► …      hash n = H((hash n-1, tokens n, keys n))
    tokens 16..31, keys 1  ───┘

A hash identifies its block and all blocks before it, so equal hashes mean equal prefixes.  Only
full blocks have one.  The other inputs of a block's KV cache are its extra keys: the adapter in
every block, an image in each block that it overlaps, the salt in the first.

Source: ``hash_block_tokens``, ``generate_block_hash_extra_keys`` and ``init_none_hash`` of
vLLM's ``v1/core/kv_cache_utils.py``, and ``utils/hashing.py``; 0.32.
"""

from __future__ import annotations

import hashlib
import pickle
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import ClassVar, TypeAlias

import cbor2
import msgspec
import numpy as np
import xxhash
from msgspec import Raw
from numpy.typing import NDArray

from pdconn.router.prefix.compiled import extension
from transport.errors import FieldError

DEFAULT_SEED = "vllm-none-hash"
"""Seed of the cryptographic algorithms if the engines have no ``PYTHONHASHSEED``."""

MOST_COMPILED_TOKENS = 8192
"""Tokens of a block above which Python hashes it: pickle cuts what is longer into frames."""
_COMPILED_PROTOCOL = 5
"""Of pickle; engines use the highest one of their Python."""

Tokens: TypeAlias = "Sequence[int] | NDArray[np.int32]"
Keys: TypeAlias = tuple[tuple[str | int, ...], ...] | None


class BadInput(FieldError, ValueError):
    """The input cannot be hashed."""

    show: ClassVar[Callable[[object], str]] = repr


class BadScheme(BadInput):
    """No engine hashes in this way, or its root is secret."""


class BadPrompt(BadInput):
    """A prompt that engines would not hash."""


def _sha256(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _cbor(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A row of ``ALGORITHMS``: the encoding of a value, and the hash of the bytes.

    ``secret_root``: vLLM draws the root at random unless ``PYTHONHASHSEED`` is set, since a known
    root allows building prompts whose hashes collide.
    """

    encode: Callable[[object], bytes]
    digest: Callable[[bytes], bytes]
    secret_root: bool


ALGORITHMS = {
    "sha256": Algorithm(_pickled, _sha256, secret_root=False),
    "sha256_cbor": Algorithm(_cbor, _sha256, secret_root=False),
    "xxhash": Algorithm(_pickled, xxhash.xxh3_128_digest, secret_root=True),
    "xxhash_cbor": Algorithm(_cbor, xxhash.xxh3_128_digest, secret_root=True),
}
"""Algorithms by the names of vLLM's ``--prefix-caching-hash-algo``."""


@dataclass(frozen=True, slots=True)
class HashScheme:
    """How an engine hashes its blocks.

    Attributes:
        algorithm: a key of ``ALGORITHMS``.
        block_tokens: tokens of one hashed block, vLLM's ``hash_block_size``.
        seed: ``PYTHONHASHSEED`` of the engine; None if unset.

    Raises:
        BadScheme: a field is invalid; a non-cryptographic algorithm needs a seed.
    """

    algorithm: str
    block_tokens: int
    seed: str | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise BadScheme("algorithm", f"one of {', '.join(ALGORITHMS)}", self.algorithm)
        if type(self.block_tokens) is not int or self.block_tokens < 1:
            raise BadScheme("block_tokens", "an integer of at least 1", self.block_tokens)
        if self.seed is None and self.steps.secret_root:
            why = f"without it {self.algorithm} starts from a root that only the engine has"
            raise BadScheme("seed", f"PYTHONHASHSEED of the engines ({why})", self.seed)
        if self.seed is not None and not isinstance(self.seed, str):
            raise BadScheme("seed", "a string or None", self.seed)

    @property
    def steps(self) -> Algorithm:
        """The algorithm's row of the table."""
        return ALGORITHMS[self.algorithm]

    @property
    def is_compiled(self) -> bool:
        """Whether the compiled extension hashes blocks without extra keys in this way."""
        is_known = self.steps.digest is _sha256 and pickle.HIGHEST_PROTOCOL == _COMPILED_PROTOCOL
        return is_known and self.block_tokens <= MOST_COMPILED_TOKENS

    @property
    def root(self) -> bytes:
        """The parent hash of the first block (vLLM's ``NONE_HASH``)."""
        seed = DEFAULT_SEED if self.seed is None else self.seed
        return self.steps.digest(self.steps.encode(seed))

    @property
    def hash_nbytes(self) -> int:
        """Bytes of one full hash."""
        return len(self.root)


def _own(text: str) -> str:
    """An equal string that is another object.

    Pickle writes a repeated object as a reference, and an engine decodes the strings of a request
    one by one.
    """
    try:
        return text.encode().decode()
    except UnicodeEncodeError as error:
        raise BadPrompt("extras", "text that can be encoded as UTF-8", text) from error


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image, sound or video: vLLM's identifier, and the offset and number of its tokens."""

    identifier: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """Offset of the first token after the item."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Extras:
    """The inputs of a request's block hashes beside its tokens.

    Attributes:
        lora: name and path of the adapter; the path as passed to the engine.
        cache_salt: the request's ``cache_salt``; an empty one counts as none, as in vLLM.
        items: sorted by offset.  They may overlap, as sound in a video does.

    Raises:
        BadPrompt: items are not sorted, or text is not Unicode.
    """

    lora: tuple[str, str] | None = None
    cache_salt: str | None = None
    items: tuple[MultimodalItem, ...] = ()

    def __post_init__(self) -> None:
        for text in (
            *(self.lora or ()),
            self.cache_salt or "",
            *(i.identifier for i in self.items),
        ):
            _own(text)
        if any(item.offset < 0 or item.length < 0 for item in self.items):
            raise BadPrompt("items", "offsets and lengths of at least 0", self.items)
        offsets = [item.offset for item in self.items]
        if offsets != sorted(offsets):
            raise BadPrompt("items", "an order by offset", offsets)


NOTHING = Extras()


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """Extra keys of a prompt's blocks: ``special`` of some blocks, ``usual`` of all others."""

    usual: Keys
    special: dict[int, Keys]

    def keys_of(self, block: int) -> Keys:
        """The extra keys of a block; None without any."""
        return self.special.get(block, self.usual)


def block_keys(extras: Extras, block_tokens: int, num_blocks: int) -> BlockKeys:
    """Extra keys of the first ``num_blocks`` blocks, as vLLM orders them: LoRA, items, salt."""
    usual = () if extras.lora is None else (("lora", *map(_own, extras.lora)),)
    special: dict[int, tuple[tuple[str | int, ...], ...]] = {}
    # vLLM walks blocks and items together.  An item that ends in a later block hides the items
    # after it until then, and blocks after the last item's end get none.
    reach = max((item.end for item in extras.items[-1:]), default=0)
    reached = min(-(-reach // block_tokens), num_blocks)
    at = 0
    for item in extras.items:
        begin, end = max(item.offset // block_tokens, at), -(-item.end // block_tokens)
        identifier = _own(item.identifier)
        for block in range(begin, min(end, reached)):
            key = ("mm", identifier, item.offset - block * block_tokens)
            special[block] = (*special.get(block, usual), key)
        at = max(at, end - 1)
    if extras.cache_salt:
        special[0] = (*special.get(0, usual), ("cache_salt", _own(extras.cache_salt)))
    return BlockKeys(usual or None, dict(special))


def read_token_ids(json: bytes | Raw) -> Sequence[int]:
    """The integers of a JSON array.

    Raises:
        msgspec.DecodeError: it is anything else.
    """
    if extension.module is not None:
        found: array[int] | None = extension.module.token_ids(json)
        if found is not None:
            return found
    return msgspec.json.decode(json, type=list[int])


_FIT = "integers of 0 to 2**31 - 1"


def as_array(tokens: Tokens) -> NDArray[np.int32]:
    """Tokens as a vector in a row; returns one that is unchanged.

    Raises:
        BadPrompt: a value is not an integer from 0 to 2**31 - 1.
    """
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32:
        vector = np.require(tokens, np.int32, ("C", "A"))  # a view of another array may be neither
        if vector.ndim != 1:
            raise BadPrompt("tokens", "a vector", f"{vector.ndim} dimensions")
    elif isinstance(tokens, array) and tokens.typecode == "i":
        vector = np.frombuffer(tokens, dtype=np.int32)
    else:
        try:
            # Unsigned: CPython fills such an array in less than half the time.
            vector = np.frombuffer(array("I", tokens), dtype=np.int32)
        except (OverflowError, TypeError) as error:
            raise BadPrompt("tokens", _FIT, _first_unfit(tokens)) from error
    if vector.size and vector.min() < 0:
        raise BadPrompt("tokens", _FIT, _first_unfit(tokens))
    return vector


def _first_unfit(tokens: Tokens) -> object:
    return next(
        one for one in tokens if not (isinstance(one, int | np.integer) and 0 <= one < 2**31)
    )


def chain(
    scheme: HashScheme, tokens: Tokens, extras: Extras = NOTHING, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Full hashes of every full block of a prompt.

    Args:
        scheme: the hash scheme.
        tokens: the whole prompt.
        extras: of the whole prompt.
        known: hashes of its first blocks, which are reused.

    Raises:
        BadPrompt: a token is out of range, or more hashes are known than the prompt has blocks.
    """
    vector = as_array(tokens)
    num_blocks, nbytes = vector.size // scheme.block_tokens, scheme.hash_nbytes
    if len(known) > num_blocks:
        raise BadPrompt("known", f"at most {num_blocks} hashes, one per full block", len(known))
    if any(type(one) is not bytes or len(one) != nbytes for one in known):
        raise BadPrompt("known", f"hashes of {nbytes} bytes", known)
    keys = block_keys(extras, scheme.block_tokens, num_blocks)
    parent = known[-1] if known else scheme.root
    joined = extend(scheme, parent, vector, keys, len(known))
    starts = range(0, len(joined), nbytes)
    return [*known, *(joined[start : start + nbytes] for start in starts)]


def extend(
    scheme: HashScheme, parent: bytes, tokens: NDArray[np.int32], keys: BlockKeys, first: int
) -> bytes:
    """Joined hashes of the full blocks from ``first`` on; ``parent`` is that of the one before."""
    size, compiled, pieces = scheme.block_tokens, extension.module, []
    last = tokens.size // size
    stretches: Iterable[tuple[int, int, bool]] = [(first, last, False)]
    if compiled is not None and scheme.is_compiled and keys.usual is None:
        stretches = _stretches(keys, first, last)
    for begin, end, is_compiled in stretches:
        if begin >= end:
            continue
        rows = tokens[begin * size : end * size]
        if compiled is not None and is_compiled:
            is_cbor = scheme.steps.encode is _cbor
            pieces.append(compiled.hash_blocks(is_cbor, parent, rows, size, False))
        else:
            pieces.append(_extend_in_python(scheme, parent, rows, keys, begin))
        parent = pieces[-1][-len(parent) :]
    return b"".join(pieces)


def _stretches(keys: BlockKeys, first: int, last: int) -> Iterator[tuple[int, int, bool]]:
    """Blocks in a row that have no extra keys (True), or that have some."""
    special = sorted(block for block in keys.special if first <= block < last)
    for _, run in groupby(enumerate(special), lambda pair: pair[1] - pair[0]):
        blocks = [block for _, block in run]
        yield first, blocks[0], True
        first = blocks[-1] + 1
        yield blocks[0], first, False
    yield first, last, True


def _extend_in_python(
    scheme: HashScheme, parent: bytes, tail: NDArray[np.int32], keys: BlockKeys, first: int
) -> bytes:
    """Joined hashes of the blocks of ``tail``, of which ``first`` is the number of the first."""
    follow = _extend_cbor if scheme.steps.encode is _cbor else _extend_pickled
    return b"".join(follow(scheme, parent, tail, keys, first))


def external(full: bytes) -> int:
    """The part of a full hash in events: its last 64 bits, as an unsigned integer."""
    return int.from_bytes(full[-8:], "big")


def _extend_pickled(
    scheme: HashScheme, parent: bytes, tail: NDArray[np.int32], keys: BlockKeys, first: int
) -> list[bytes]:
    digest, hashes = scheme.steps.digest, []
    flat = iter(tail.tolist())
    blocks = zip(*[flat] * scheme.block_tokens, strict=True)
    for number, block in enumerate(blocks, first):
        parent = digest(_pickled((parent, block, keys.keys_of(number))))
        hashes.append(parent)
    return hashes


def _extend_cbor(
    scheme: HashScheme, parent: bytes, tail: NDArray[np.int32], keys: BlockKeys, first: int
) -> list[bytes]:
    """Hashes ``_cbor((parent, block, keys))``, with all tokens encoded at once.

    Calling cbor2 once per block would take three times as long as everything else.
    """
    size, digest, hashes = scheme.block_tokens, scheme.steps.digest, []
    before = b"\x83" + _cbor(parent)[: -len(parent)]
    between = _cbor((0,) * size)[:-size]
    usual, special = _cbor(keys.usual), keys.special
    body, ends = _cbor_tokens(tail)
    for number, (begin, end) in enumerate(pairwise([0, *ends[size - 1 :: size].tolist()]), first):
        after = _cbor(special[number]) if number in special else usual
        parent = digest(b"".join((before, parent, between, body[begin:end], after)))
        hashes.append(parent)
    return hashes


def _cbor_tokens(tokens: NDArray[np.int32]) -> tuple[bytes, NDArray[np.int64]]:
    """CBOR of each token, joined, and where each one ends.

    An integer below 24 is one byte; else a head byte announces 1, 2 or 4 bytes.
    """
    num_bytes = 1 + (tokens >= 24) + (tokens >= 2**8) + 2 * (tokens >= 2**16)
    wide = np.zeros((tokens.size, 5), np.uint8)
    wide[:, 1:] = tokens.astype(">u4").view(np.uint8).reshape(-1, 4)
    for column, length, head in ((3, 2, 0x18), (2, 3, 0x19), (0, 5, 0x1A)):
        wide[num_bytes == length, column] = head
    body = wide[np.arange(5) >= 5 - num_bytes[:, None]].tobytes()
    return body, np.cumsum(num_bytes)
