"""Slabs that only holders of a key can read, and no others can make: AES-256-GCM.

::

    key of the file ──HKDF(namespace, tenant)──► tenant's key ──HKDF(salt)──► part's key
    slab            ──AES-GCM(part's key, nonce: its number, with: row and range)──► slab, tag

A slab is what is sealed at once, since ranks of any tensor and pipeline parallelism read whole
slabs: those of a rank are one range of the row, encrypted or not, and lie where they lay.  What
opens one, its *seal*, is in the footer::

    | tag, 16 bytes | id of the key, 8 | salt, 32 |

**No nonce is used twice with one key.**  Each rank draws a salt for each part that it writes, and
seals each slab at most once with it: a row that is saved again, by this engine or by another one,
after a crash or beside it, has other salts and so other keys.  Two of 2^64 parts have one salt with
a chance of 2^-128.

What is authenticated beside the bytes (namespace, kind, keys, place in the prompt, tenant, offset
and length in the row, and of packed rows whether a head goes on in a spill) keeps a slab from being
served as another one's.  What remains possible for someone who can write to the folder is to remove
rows, and to put back an earlier save of the same row, which has the same KV.

HKDF: RFC 5869, with SHA-256.  AES-GCM: NIST SP 800-38D.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from pdconn.store.format.row import RowName
from pdconn.store.store_errors import RowDamaged, RowLocked, StoreError

MASTER_NBYTES = 32
SALT_NBYTES = 32
TAG_NBYTES = 16
KEY_ID_NBYTES = 8
SEAL_NBYTES = TAG_NBYTES + KEY_ID_NBYTES + SALT_NBYTES

_RANGE = struct.Struct("<QQQ")
_LEAST_VERSION = 47
"""Of cryptography: the first that decrypts into a buffer."""
_MOST_DERIVED = 4096
"""Keys of tenants that are remembered."""


class SlabSealer:
    """Seals slabs of one part, as one rank writes it.

    Args:
        aead: the part's key; no other sealer has the same.
        context: what identifies the row.
        origin: what the seals say of the key: its id and the salt.
    """

    def __init__(self, aead: Any, context: bytes, origin: bytes) -> None:
        self._aead, self._context, self._origin = aead, context, origin
        self._last = -1

    def seal_slab(
        self,
        number: int,
        offset: int,
        data: memoryview,
        into: memoryview,
        *,
        has_spill: bool = False,
    ) -> bytes:
        """Encrypt a slab, and return its seal.

        Args:
            number: of the slab in the row; above those sealed before.
            offset: of the slab in the row.
            data: its bytes.
            into: room for as many bytes and ``TAG_NBYTES`` more, which are zeros afterwards.
            has_spill: it is not packed, and goes on in another slab.

        Raises:
            ValueError: a number that is not above the last one: its nonce may have been used.
        """
        if number <= self._last:
            raise ValueError(f"slab: expected one above {self._last}, got {number}")
        self._last = number
        nbytes = len(data)
        with_what = _associated(self._context, number, offset, nbytes, has_spill=has_spill)
        self._aead.encrypt_into(_nonce(number), data, with_what, into)
        tag = bytes(into[nbytes : nbytes + TAG_NBYTES])
        into[nbytes : nbytes + TAG_NBYTES] = bytes(TAG_NBYTES)
        return tag + self._origin


class SlabOpener:
    """Opens slabs of one row, which several ranks may have written."""

    def __init__(self, keys: RowKeys, namespace: str, name: RowName) -> None:
        self._keys, self._namespace, self._name = keys, namespace, name
        self._context = row_context(namespace, name)
        self._opened: dict[bytes, Any] = {}

    def open_slab(
        self,
        number: int,
        offset: int,
        sealed: memoryview,
        seal: bytes,
        into: memoryview,
        *,
        has_spill: bool = False,
    ) -> None:
        """Decrypt and verify a slab.

        Args:
            number, offset: of the slab in the row.
            sealed: its bytes and ``TAG_NBYTES`` more, which are overwritten.
            seal: from the footer.
            into: room for its bytes, which are undefined after an error.
            has_spill: as it was sealed; the footer says so, and is no proof of it.

        Raises:
            RowLocked: no key of ours has sealed it.
            RowDamaged: its bytes, its seal, or its place are not those that were sealed.
        """
        from cryptography.exceptions import InvalidTag

        tag, origin = seal[:TAG_NBYTES], seal[TAG_NBYTES:]
        aead = self._opened.get(origin)
        if aead is None:
            aead = self._opened[origin] = self._keys.part_key(origin, self._namespace, self._name)
        nbytes = len(into)
        # AES-GCM takes the tag right after the bytes.
        sealed[nbytes : nbytes + TAG_NBYTES] = tag
        with_what = _associated(self._context, number, offset, nbytes, has_spill=has_spill)
        try:
            aead.decrypt_into(_nonce(number), sealed[: nbytes + TAG_NBYTES], with_what, into)
        except InvalidTag:
            raise RowDamaged(f"slab {number}: its seal does not fit its bytes") from None


class RowKeys:
    """Keys that rows are encrypted with: the first one encrypts, all of them decrypt.  Any thread.

    Args:
        masters: of 32 bytes each, at least one.
        new_salt: draws 32 random bytes.

    Raises:
        StoreError: the package cryptography is missing, or too old.
    """

    def __init__(self, masters: Sequence[bytes], new_salt: Callable[[], bytes]) -> None:
        _check_package()  # now, and not on a thread that reads rows
        self._masters = {_key_id(master): master for master in masters}
        self._first, self._new_salt = _key_id(masters[0]), new_salt

    @property
    def ids(self) -> tuple[bytes, ...]:
        """What seals name the keys by, in order."""
        return tuple(self._masters)

    def new_sealer(self, namespace: str, name: RowName) -> SlabSealer:
        """What seals our slabs of one part, with a key that no other part has."""
        origin = self._first + self._new_salt()
        aead = self.part_key(origin, namespace, name)
        return SlabSealer(aead, row_context(namespace, name), origin)

    def part_key(self, origin: bytes, namespace: str, name: RowName) -> Any:
        """The key of a part, by the id of a key and a salt.

        Raises:
            RowLocked: the key is not among ours.
        """
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        key_id, salt = origin[:KEY_ID_NBYTES], origin[KEY_ID_NBYTES:]
        master = self._masters.get(key_id)
        if master is None:
            known = ", ".join(one.hex() for one in self._masters)
            raise RowLocked(f"encrypted with key {key_id.hex()}, store.key_file has {known}")
        tenant = _tenant_key(master, namespace, name.tenant)
        return AESGCM(_hkdf(tenant, salt, b"pdconn store: part"))


def row_context(namespace: str, name: RowName) -> bytes:
    """What identifies a row, different for any two rows."""
    # Each field has a fixed length or says how long it is.
    fields = (namespace.encode(), name.kind.encode(), name.key, name.parent, name.tenant)
    packed = b"".join(struct.pack("<I", len(one)) + one for one in fields)
    return packed + struct.pack("<Q", name.index)


def _associated(context: bytes, number: int, offset: int, nbytes: int, *, has_spill: bool) -> bytes:
    # Without it, a head that is stored as it is could be served as one that is packed.
    return context + _RANGE.pack(number, offset, nbytes) + (b"spilled" if has_spill else b"")


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


@lru_cache(_MOST_DERIVED)
def _tenant_key(master: bytes, namespace: str, tenant: bytes) -> bytes:
    name = namespace.encode()
    info = b"pdconn store: tenant" + struct.pack("<I", len(name)) + name + tenant
    return _hkdf(master, None, info)


def _key_id(master: bytes) -> bytes:
    return _hkdf(master, None, b"pdconn store: id")[:KEY_ID_NBYTES]


def _check_package() -> None:
    remedy = "pip install '.[encryption]'"
    try:
        from cryptography import __version__
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise StoreError(
            f"store.key_file: the package cryptography is missing: {remedy}"
        ) from error
    if not hasattr(AESGCM, "decrypt_into"):  # vLLM is content with older ones
        raise StoreError(
            f"store.key_file: expected the package cryptography of version {_LEAST_VERSION} or "
            f"later, got {__version__}: {remedy}"
        )


def _hkdf(secret: bytes, salt: bytes | None, info: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), MASTER_NBYTES, salt, info).derive(secret)
