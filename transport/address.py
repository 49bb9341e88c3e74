"""The envelope around a backend's address, checked before the backend sees it.

An address comes from the network, and a truncated copy of a known peer's metadata makes NIXL forget
that peer, even while it is in use.  So an address names the backend and version that made it, and
has a checksum; an address that does not match is refused here.  The checksum detects accidents, not
attacks: authenticating the sender of an address is the protocol's task.

    [ backend, version, name of the peer, payload of the backend, crc32 ]
"""

from __future__ import annotations

import zlib

import msgspec

from transport.errors import BadAddress

VERSION = 1
MAX_ADDRESS_BYTES = 4 << 20
"""NIXL needs about 330 bytes and 44 more per region, so this is some 90 000 regions."""

MAX_NAME_CHARS = 256


class Envelope(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A decoded address: ``payload`` is the backend's own."""

    backend: str
    version: int
    name: str
    payload: bytes
    checksum: int


_ENVELOPES = msgspec.msgpack.Decoder(Envelope)


def pack(backend: str, name: str, payload: bytes) -> bytes:
    """The address of the peer named ``name``.

    Raises:
        BadAddress: name or payload are larger than ``unpack`` would accept.
    """
    checksum = _checksum(backend, name, payload)
    address = msgspec.msgpack.encode(Envelope(backend, VERSION, name, payload, checksum))
    if len(address) > MAX_ADDRESS_BYTES or not 0 < len(name) <= MAX_NAME_CHARS:
        raise BadAddress(
            f"address of {len(address)} bytes for a name of {len(name)} characters: "
            f"at most {MAX_ADDRESS_BYTES} and 1 to {MAX_NAME_CHARS}"
        )
    return address


def named_in(address: bytes) -> str:
    """The peer's name in an address of any backend; nothing else is checked.

    Raises:
        BadAddress: it is not an address.
    """
    return _decoded(address).name


def unpack(backend: str, address: bytes) -> Envelope:
    """Decode what ``pack`` made for the same backend.

    Raises:
        BadAddress: it is none; the message has what was expected.
    """
    envelope = _decoded(address)
    if envelope.backend != backend:
        raise BadAddress(f"address of backend {envelope.backend[:40]!r}, ours is {backend!r}")
    if envelope.version != VERSION:
        raise BadAddress(f"address version: theirs {envelope.version}, ours {VERSION}")
    if not 0 < len(envelope.name) <= MAX_NAME_CHARS:
        raise BadAddress(f"peer name of {len(envelope.name)} characters, 1 to {MAX_NAME_CHARS}")
    if envelope.checksum != _checksum(backend, envelope.name, envelope.payload):
        raise BadAddress(f"address of {envelope.name!r} is damaged: its checksum differs")
    # MessagePack has several encodings of the same value.
    if msgspec.msgpack.encode(envelope) != address:
        raise BadAddress(f"address of {envelope.name!r} is damaged: it is not encoded as by pack")
    return envelope


def _decoded(address: bytes) -> Envelope:
    if len(address) > MAX_ADDRESS_BYTES:
        raise BadAddress(f"address has {len(address)} bytes, at most {MAX_ADDRESS_BYTES} expected")
    try:
        return _ENVELOPES.decode(address)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadAddress(f"{len(address)} bytes are not an address: {error}") from error


def _checksum(backend: str, name: str, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(f"{backend}\0{name}\0".encode()))
